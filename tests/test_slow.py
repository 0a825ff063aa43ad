"""The slow program of notebook 04c: right repairs pass, each fault and each trick gets its hint."""

import ast
from pathlib import Path
from types import SimpleNamespace

import made
import matplotlib.pyplot as plt
import pytest
import torch
from programs import experiment_file

from dlojz import course
from dlojz.chapters.n04c_slow import cases as facts
from dlojz.chapters.n04c_slow import exercise as judged
from dlojz.chapters.n04c_slow import figures
from dlojz.chapters.n04c_slow import job as slow
from dlojz.check import check, exercise, judge
from dlojz.check.exercise import State
from dlojz.launch import submit
from dlojz.runs import log
from dlojz.training import imports

REPOSITORY = Path(__file__).parent.parent
BROKEN = (experiment_file("slow.py")).read_text()
REPAIRED = (REPOSITORY / "solutions/slow.py").read_text()
SMALL = "-b 32 --steps 3 --batches 4 --seed 1"


def function(source, name):
    """Return the text of a function, with its decorators."""
    tree = ast.parse(source)
    [node] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "\n"


FAULTS = {
    "augmented": "images",
    "normalised": "arrays",
    "balanced_loss": "classes",
    "clip": "norm",
    "train_step": "passes",
    "evaluate": "graph",
}

# Lines of the repaired program that the answers replace.
NUMPY = {"import torch\nfrom": "import numpy as np\nimport torch\nfrom"}
WHERE = "    return torch.where(flip, batch.images.flip(-1), batch.images) * light\n"
CONSTANTS = "    mean, std = constants(images.device)\n    return (images - mean) / std\n"
COUNT = "    images = torch.zeros_like(logits[0]).index_add(0, labels, torch.ones_like(losses))\n"
MEAN = "    return (losses / images[labels]).sum() / (images > 0).sum()\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)\n"
STEP = "    optimizer.step()\n"
RETURNED = "    return loss.detach(), (logits.argmax(1) == labels).sum()\n"
SGD = "torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)"
EPOCH = "train_step(model, optimizer, batch) for batch in data"
EVALUATE = "@torch.no_grad()\ndef evaluate(model, data):\n"
LOGITS = "        logits = model(normalised(batch.images.float()))\n"
VALIDATED = "    return total / len(data), right\n"
DRAWN = "        return Batch(*(t.to(device) for t in (images, labels, flip, light)))\n"

RIGHT = {
    "the solution": {},
    "light first, and a flip by an index": {
        WHERE: """    columns = torch.arange(batch.images.shape[-1], device=flip.device)
    columns = torch.where(flip, columns.flip(0), columns)
    return (batch.images * light).gather(3, columns.expand_as(batch.images))
"""
    },
    "one hot, and a product": {
        COUNT: "    images = nn.functional.one_hot(labels, CLASSES).float().sum(0)\n",
    },
    "the mean of each class by a product": {
        COUNT: """    hot = nn.functional.one_hot(labels, CLASSES).float()
    images = hot.sum(0)
""",
        MEAN: "    return (losses @ hot / images.clamp(min=1)).sum() / (images > 0).sum()\n",
    },
    "foreach, and fused": {
        CLIP: CLIP.replace("LIMIT)", "LIMIT, foreach=True)"),
        SGD: SGD.replace("0.9)", "0.9, fused=True)"),
    },
    "a norm of norms": {
        CLIP: """    gradients = [weight.grad for weight in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (LIMIT / (norm + 1e-6)).clamp(max=1.0))
""",
    },
    "inference mode": {"@torch.no_grad()": "@torch.inference_mode()"},
    "a with statement around the validation": {
        "@torch.no_grad()\n": "",
        LOGITS: """        with torch.no_grad():
            logits = model(normalised(batch.images.float()))
""",
    },
}
WRONG = {  # by hint, then by name: what is replaced in the repaired program
    "values": {
        "NumPy, once for the batch": NUMPY
        | {
            CONSTANTS: """    pixels = (images.numpy() - np.array(MEAN).reshape(-1, 1, 1)) / 70
    return torch.from_numpy(pixels).float()
"""
        },
        "a batch twice in place of another": {
            EPOCH: EPOCH.replace("data", "[*data[:-1], data[0]]")
        },
        "autocast": {
            "    logits = model(images)\n": """    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images).float()
"""
        },
        "nothing is clipped": {CLIP: "    return\n"},
        "nothing is updated": {STEP: ""},
        "0 / 0 for a class that is not there": {
            COUNT: "    hot = nn.functional.one_hot(labels, CLASSES).float()\n",
            MEAN: "    return (losses @ hot / hot.sum(0)).mean()\n",
        },
        "another loss": {COUNT: "", MEAN: "    return losses.mean()\n"},
    },
    "arrays": {
        "NumPy, once for the batch, and right": NUMPY
        | {
            CONSTANTS: """    mean, std = (np.array(v).reshape(-1, 1, 1) for v in (MEAN, STD))
    return torch.from_numpy((images.cpu().numpy() - mean) / std).float()
"""
        },
    },
    "constants": {
        "constants made for each batch": {"@functools.cache\n": ""},
        "constants in float64": {
            "torch.tensor(values, device=device)": "torch.tensor(values, dtype=torch.float64)",
            "    return (images - mean) / std\n": "    return ((images - mean) / std).float()\n",
        },
    },
    "images": {
        "image by image without a question": {
            WHERE: """    pairs = zip(batch.images, batch.flip, batch.light, strict=True)
    return torch.stack([torch.where(f, i.flip(-1), i) * li for i, f, li in pairs])
"""
        },
    },
    "classes": {
        "classes counted by a loop": {
            COUNT: "    images = torch.stack([(labels == k).sum() for k in range(CLASSES)])\n"
        },
        "bincount, which waits": {
            COUNT: "    images = torch.bincount(labels, minlength=CLASSES)\n"
        },
    },
    "norm": {
        "the norm is asked for": {CLIP: CLIP.replace("LIMIT)", "LIMIT, error_if_nonfinite=True)")},
    },
    "counts": {
        "the second pass moves into the loop": {
            EPOCH: "(train_step(model, optimizer, batch)[0], "
            "(model(normalised(augmented(batch))).argmax(1) == batch.labels).sum()) "
            "for batch in data"
        },
        "counted after the step": {RETURNED: f"    logits = model(images)\n{RETURNED}"},
        "the wrong answers are counted": {RETURNED: RETURNED.replace("==", "!=")},
    },
    "passes": {
        "a second pass that nobody needs": {
            STEP: "    with torch.no_grad():\n        model(images)\n    optimizer.step()\n"
        },
    },
    "elsewhere": {
        "the loss is read in each step": {RETURNED: f"    loss.item()\n{RETURNED}"},
        "the loop over the images moves elsewhere": {
            "images, labels = normalised(augmented(batch)), batch.labels": (
                "each = (Batch(*(t[i : i + 1] for t in batch)) for i in range(len(batch[0])))\n"
                "    parts = [augmented(one) for one in each]\n"
                "    images, labels = normalised(torch.cat(parts)), batch.labels"
            )
        },
    },
    "batches": {
        "fewer batches": {EPOCH: EPOCH.replace("data", "data[:-1]")},
        "half of each batch": {EPOCH: EPOCH.replace("batch)", "Batch(*(t[::2] for t in batch)))")},
    },
    "model": {
        "a smaller model": {"(16, 32, 64, 64)": "(16, 32, 64)"},
        "a model in 16 bits": {
            "model = model.to(device)": "model = model.to(device, torch.bfloat16)"
        },
    },
    "validation": {
        "half of the validation": {EVALUATE: f"{EVALUATE}    data = data[::2]\n"},
        "no validation": {EVALUATE: f"{EVALUATE}    return 3.5, len(data)\n"},
        "another mean of the validation": {VALIDATED: "    return total, right\n"},
    },
    "cached": {
        "the first validation is kept": {
            EVALUATE: f"KEPT = []\n\n\n{EVALUATE}    if KEPT:\n        return KEPT[0]\n",
            VALIDATED: "    KEPT.append((total / len(data), right))\n    return KEPT[0]\n",
        },
        "the first losses are kept": {
            "    model.train()\n": "    model.train()\n    first = not LOSSES\n",
            "def train_epoch": "LOSSES = []\n\n\ndef train_epoch",
            "    return torch.stack(losses), torch.stack(right)\n": """    if first:
        LOSSES.append((torch.stack(losses), torch.stack(right)))
    return LOSSES[0]
""",
        },
    },
    "outside": {
        "augmented where no clock runs": {
            DRAWN: f"        images = images * light.view(-1, 1, 1, 1)\n{DRAWN}"
        },
        "work that goes on": {
            "import functools\n": "import functools\nimport threading\n",
            VALIDATED: "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            + VALIDATED,
        },
    },
}


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The verdict on a program, run in this process; two pairs are too few for a time."""

    def call(source):
        file = tmp_path / "trainer.py"
        file.write_text(source)
        monkeypatch.setattr("sys.argv", [str(file), *SMALL.split(), "--pairs", "2"])
        monkeypatch.setattr("sys.excepthook", None)
        monkeypatch.setenv("DLOJZ_RUN", str(tmp_path / "run"))
        slow.examine(file)
        return judge.repaired(exercise.find("04_slow"), tmp_path / "run", "")

    return call


def changed(changes):
    return made.replaced(REPAIRED, changes)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_repair_passes(verdict, name):
    found = verdict(changed(RIGHT[name]))
    assert found.hint_key == "unmeasured", found
    assert [found.part(part) for part in judged.EXERCISE.parts[1:]] == [
        State.PASSED,
        State.UNMEASURED,
    ]
    assert "2 pairs" in repr(found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_left_gets_its_hint_and_is_the_only_one(verdict, name):
    fault, whole = (function(source, name) for source in (BROKEN, REPAIRED))
    found = verdict(changed({whole: fault} | (NUMPY if "np." in fault else {})))
    assert found.hint_key == FAULTS[name], found
    failed = [f for f in found.findings if f.state == State.FAILED]
    assert [f.hint for f in failed] == [FAULTS[name]], found


@pytest.mark.parametrize(("hint", "name"), [(h, name) for h in WRONG for name in WRONG[h]])
def test_a_wrong_repair_gets_its_hint(verdict, hint, name):
    found = verdict(changed(WRONG[hint][name]))
    assert found.hint_key == hint, found


def test_the_program_as_it_is_handed_out_has_all_six_faults_and_does_the_same_work(verdict):
    found = verdict(BROKEN)
    assert found.part("same work") == State.PASSED, found
    assert {f.hint for f in found.findings if f.state == State.FAILED} == {*FAULTS.values()}


def test_the_solution_differs_in_the_six_functions_only():
    """So that the last hint shows nothing but the answers."""
    rest = []
    for source in (BROKEN, REPAIRED):
        for name in (*FAULTS, *(["constants"] if source is REPAIRED else [])):
            source = source.replace(function(source, name), "")
        lines = [line for line in source.splitlines() if line]
        rest.append([x for x in lines if x not in ("import numpy as np", "import functools")])
    assert rest[0] == [line for line in rest[1] if line]
    assert tuple(FAULTS) == facts.FUNCTIONS


# The time ----------------------------------------------------------------------------------------


def timed(monkeypatch, verdict, mine, clean):
    """The verdict on the solution, had it taken these seconds."""
    pairs = {"clean_s": clean, "mine_s": mine, "differ": [{"losses": 0.0}] * len(mine)}
    monkeypatch.setattr(slow, "timed", lambda *_: pairs)
    return verdict(REPAIRED)


@pytest.mark.parametrize(
    ("mine", "hint"),
    [
        ([1.0, 1.01, 0.99, 1.0, 1.01, 0.99], None),
        ([0.5, 0.5, 0.51, 0.5, 0.5, 0.49], None),
        ([1.08, 1.09, 1.07, 1.08, 1.09, 1.08], "time"),
        ([1.0, 1.4, 0.7, 1.0, 1.3, 0.9], "unmeasured"),
        ([1.0, 1.0], "unmeasured"),
        ([], "unmeasured"),
    ],
)
def test_the_interval_of_the_pairs_decides(monkeypatch, verdict, mine, hint):
    found = timed(monkeypatch, verdict, mine, [1.0] * len(mine))
    assert found.hint_key == hint, found
    assert found.passed == (hint is None)
    assert ("not measured; " in repr(found)) == (hint == "unmeasured" and len(mine) > 2)


def test_pairs_end_as_soon_as_they_decide(monkeypatch):
    args = SimpleNamespace(seed=1, pairs=24)
    clock = {"clean": 1.0, "mine": 2.0}

    class Job:
        def __init__(self, module, *_):
            self.module = module

        def run(self):
            return clock[self.module]

        def results(self):
            return {name: torch.ones(2) for name in facts.RESULTS}

    monkeypatch.setattr(slow, "Job", Job)
    assert len(slow.timed("mine", "clean", args)["mine_s"]) == facts.LOOK
    spread = iter([1.0, 1.5] * 100)
    monkeypatch.setattr(Job, "run", lambda self: next(spread))
    assert len(slow.timed("mine", "clean", args)["mine_s"]) == 24


# From the trainee's copy to the verdict ----------------------------------------------------------


def test_a_job_is_judged_and_its_trace_read(course_folder):
    file = course.own("04_slow")
    job = submit(f"{file} {SMALL} --pairs 6", name="slow")
    job.wait()
    found = check("04_slow", job)
    assert found.hint_key == "arrays", found
    assert found.part("same work") == State.PASSED
    assert found.part("as fast") in (State.FAILED, State.UNMEASURED), "it may be too busy to tell"
    shown = figures.operators(job)
    assert [row[0] for row in shown.rows] == ["data", "forward", "backward", "update", "validation"]
    assert "aten::is_nonzero" in repr(shown)
    (course_folder / file).write_text(REPAIRED)
    for _ in range(3):
        advice = found.hint()
    assert "+    return torch.where(" in str(advice.diff)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("def clip(", "def clipped("), "no function clip in your file"),
        (
            ("    return total / len(data), right", "    return right"),
            "iteration over a 0-d tensor",
        ),
        (("    job.examine(__file__)", "    pass"), "it logged nothing to compare"),
    ],
)
def test_a_file_that_does_not_run_has_its_hint(course_folder, change, told):
    (course_folder / course.own("04_slow")).write_text(REPAIRED.replace(*change))
    job = submit(f"slow.py {SMALL} --pairs 0")
    job.wait()
    found = check("04_slow", job)
    assert found.hint_key == "failed"
    assert told in repr(found)


def test_each_hint_is_that_of_a_test():
    known = {*exercise.find("04_slow").hints}
    assert known - {*FAULTS.values(), *WRONG} == {"failed", "time", "unmeasured"}


# The costs ---------------------------------------------------------------------------------------


def test_what_each_fault_costs_is_measured_and_drawn(course_folder):
    job = submit(f"{course.own('04_slow')} {SMALL} --costs 3")
    job.wait()
    cases = log.read(job.directory).cases
    assert len(cases) == 7 + 6
    before, *_, after = figures.ladder(job)
    assert before.ms > 1.3 * after.ms
    assert after.what == "all six repaired"
    run, alone = figures.plot_costs(job)
    assert [len(ax.patches) for ax in (run, alone)] == [7, 6]
    assert run.figure.get_suptitle().startswith("All six repaired: ")
    plt.close("all")


def test_a_program_with_one_fault_has_that_one():
    mixed = slow.mixed(["normalised"])
    clean = imports.from_file(course.solution("04_slow"), "clean")
    theirs = {name: getattr(mixed, name).__code__ for name in facts.FUNCTIONS}
    differ = [n for n, code in theirs.items() if code != getattr(clean, n).__code__]
    assert differ == ["normalised"]
    # The functions of both files see it: a fault calls the repaired ones, and is called by them.
    assert mixed.train_step.__globals__["normalised"] is mixed.normalised
    assert mixed.normalised.__globals__["clip"] is mixed.clip
