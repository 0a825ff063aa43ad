"""The divided model of notebook 12: right answers pass, each wrong one gets its own hint."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import made
import pytest
import steps
import torch.distributed as dist
from programs import REPOSITORY, experiment_file

from dlojz import course, idr_torch
from dlojz.chapters.n12_model_parallel import eight, job
from dlojz.chapters.n12_model_parallel.exercise import HAND, PLAN, RING, STAGES, WAYS
from dlojz.check import check, judge
from dlojz.check import exercise as exercises
from dlojz.check.exercise import State
from dlojz.course import UserError
from dlojz.launch import submit
from dlojz.runs import log

BROKEN = (experiment_file("parallel.py")).read_text()
SOLVED = (REPOSITORY / "solutions/parallel.py").read_text()
PATIENCE_S = 1.5  # of answers in which a process waits in vain

COPIED = """        total = gradient.clone()
        dist.all_reduce(total)
        return total
"""
SUMMED = COPIED.replace("gradient", "x")
COLUMN = "share(whole.weight, 0), share(whole.bias, 0)"
ROW = "share(whole.weight, 1), nn.Parameter"
PRODUCT = "        return Sum.apply(functional.linear(x, self.weight)) + self.bias\n"
LINEAR = "        return functional.linear(Copy.apply(x), self.weight, self.bias)\n"
SQUARES = "    dist.all_reduce(squares)\n"
ATTENTION = (
    '        "attention": PrepareModuleInput(input_layouts=Shard(1), '
    "desired_input_layouts=Replicate()),\n"
)
FIRST_NORM = '"attention_norm": SequenceParallel()'
COLUMNS = '        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},\n'
LARGEST = (
    "        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))\n"
)
ONLINE = (
    LARGEST
    + """        weights, scale = (scores - largest).exp(), (before - largest).exp()
        total = total * scale + weights.sum(-1, keepdim=True)
        out = out * scale + weights @ v
"""
)
SHIFT = "        k, v = Shift.apply(k), Shift.apply(v)\n"
MASK = """        if causal:
            later = (number + tokens * source) > (number + tokens * rank)[:, None]
            scores = scores.masked_fill(later, -torch.inf)
"""
SCORES = "        scores = q @ k.mT / q.shape[-1] ** 0.5\n"
SLICE = "model.blocks[rank * each : (rank + 1) * each]"
SCHEDULE = "Schedule1F1B(own, MICRO_BATCHES, loss_fn=loss)"

WRONG = {  # by hint: name, way, and what to replace
    "cut": {
        "columns and rows are swapped": (
            HAND,
            {ROW: ROW.replace("1", "0"), COLUMN: COLUMN.replace("0)", "1)", 1)},
        ),
        "no parameters, which no optimizer finds": (
            HAND,
            {COLUMN: "share(whole.weight, 0).detach(), share(whole.bias, 0)"},
        ),
        "another name": (
            HAND,
            {
                COLUMN: "None, share(whole.bias, 0)\n        self.w = share(whole.weight, 0)",
                LINEAR: LINEAR.replace("self.weight", "self.w"),
            },
        ),
        "the row layer's bias is cut": (
            HAND,
            {"nn.Parameter(whole.bias.detach().clone())": "share(whole.bias, 0)"},
        ),
    },
    "bias": {
        "each rank adds the bias": (
            HAND,
            {PRODUCT: "        return Sum.apply(functional.linear(x, self.weight, self.bias))\n"},
        ),
        "each rank adds its part of the bias": (
            HAND,
            {
                PRODUCT: (
                    "        bias = self.bias / dist.get_world_size()\n"
                    "        return Sum.apply(functional.linear(x, self.weight, bias))\n"
                )
            },
        ),
    },
    "reduce": {
        "no all-reduce": (HAND, {SUMMED: "        return x.clone()\n"}),
        "the sum on one rank only": (
            HAND,
            {SUMMED: SUMMED.replace("all_reduce(total)", "reduce(total, 0)")},
        ),
        "f adds, too": (HAND, {"        return x.view_as(x)\n": SUMMED}),
    },
    "copy": {
        "no all-reduce in the backward pass": (HAND, {COPIED: "        return gradient\n"}),
        "f was left out": (HAND, {"Copy.apply(x)": "x"}),
    },
    "doubled": {
        "g adds in its backward pass": (HAND, {"        return gradient\n": COPIED}),
        "torch's all_reduce with a gradient": (
            HAND,
            {
                PRODUCT: PRODUCT.replace("Sum.apply", "dist.nn.functional.all_reduce"),
                "import torch\n": "import torch\nimport torch.distributed.nn\n",
            },
        ),
    },
    "alike": {"one seed": (HAND, {"seed + dist.get_rank()": "seed"})},
    "clipped": {
        "the local norm": (HAND, {SQUARES: ""}),
        "whole gradients twice": (
            HAND,
            {
                "in divided)\n": "in divided + whole)\n",
                "(squares + sum(gradient.square().sum() for gradient in whole))": "squares",
            },
        ),
        "a sum of norms": (
            HAND,
            {
                SQUARES: (
                    "    squares = squares.sqrt()\n"
                    "    dist.all_reduce(squares)\n"
                    "    squares = squares.square()\n"
                )
            },
        ),
    },
    "mesh": {
        "its dimensions in the wrong order": (
            PLAN,
            {"shape = (copies, dist.get_world_size() // copies)": "shape = (2, 1)"},
        ),
        "without names": (PLAN, {', mesh_dim_names=("data", "tensor")': ""}),
    },
    "norms": {
        "norms without a style": (
            PLAN,
            {
                '        "attention_norm": SequenceParallel(),\n': "",
                '        "mlp_norm": SequenceParallel(),\n': "",
                ATTENTION: ATTENTION,
            },
        )
    },
    "placements": {
        "rows, then columns": (
            PLAN,
            {
                "ColwiseParallel() for": "RowwiseParallel() for",
                '"attention.o": RowwiseParallel(': '"attention.o": ColwiseParallel(',
            },
        ),
        "k was forgotten": (PLAN, {'in "qkv"': 'in "qv"'}),
        "up and down only": (
            PLAN,
            {
                ATTENTION: "",
                COLUMNS: "",
                '        "attention.o": RowwiseParallel(output_layouts=Shard(1)),\n': "",
            },
        ),
    },
    "sequence": {
        "all tokens after down": (
            PLAN,
            {'"down": RowwiseParallel(output_layouts=Shard(1))': '"down": RowwiseParallel()'},
        ),
        "tokens are not gathered": (
            PLAN,
            {
                ATTENTION: "",
                FIRST_NORM: FIRST_NORM.replace("()", "(use_local_output=True)"),
            },
        ),
    },
    "hops": {"keys and values stay": (RING, {SHIFT: ""})},
    "gathered": {
        "all keys at once": (
            RING,
            {
                "    for step in range(size):\n": (
                    "    k, v = (torch.cat(dist.nn.functional.all_gather(x), 2) for x in (k, v))\n"
                    "    keys = torch.arange(k.shape[2])\n"
                    "    last = (number + tokens * rank)[:, None]\n"
                    "    hidden = keys > last if causal else keys > last + len(keys)\n"
                    "    return functional.scaled_dot_product_attention(q, k, v, ~hidden)\n"
                    "    for step in range(size):\n"
                ),
                "import torch\n": "import torch\nimport torch.distributed.nn\n",
            },
        )
    },
    "rescale": {
        "a softmax of each part": (
            RING,
            {ONLINE: "        out = out + scores.softmax(-1) @ v\n        total = total + 1\n"},
        ),
        "earlier weights keep their size": (RING, {"out * scale": "out"}),
        "one hop too few for the values": (RING, {", Shift.apply(v)": ", v"}),
    },
    "mask": {
        "the local index": (
            RING,
            {
                "(number + tokens * source)": "number",
                "(number + tokens * rank)[:, None]": "number[:, None]",
            },
        ),
        "no mask": (RING, {MASK: ""}),
        "own token is hidden": (RING, {") > (number": ") >= (number"}),
    },
    "maximum": {
        "exp of large scores": (
            RING,
            {
                ONLINE: (
                    "        weights = scores.exp()\n"
                    "        total = total + weights.sum(-1, keepdim=True)\n"
                    "        out = out + weights @ v\n"
                )
            },
        )
    },
    "waited": {
        "later tokens are skipped": (
            RING,
            {
                SCORES: (
                    "        if causal and source > rank:\n"
                    "            k, v = Shift.apply(k), Shift.apply(v)\n"
                    "            continue\n"
                )
                + SCORES
            },
        ),
        "a reduction on one rank": (
            HAND,
            {SQUARES: "    if dist.get_rank() == 0:\n        dist.all_reduce(squares)\n"},
        ),
    },
    "pieces": {
        "the norm is in no stage": (STAGES, {"[model.norm, model.last]": "[model.last]"}),
        "copies": (
            STAGES,
            {
                f"[*{SLICE}]": f"copy.deepcopy({SLICE})",
                "import torch\n": "import copy\n\nimport torch\n",
            },
        ),
    },
    "balance": {"three blocks and one": (STAGES, {SLICE: "model.blocks[3 * rank : 3 + rank]"})},
    "unequal": {
        "micro-batches that do not divide": (STAGES, {"MICRO_BATCHES = 4": "MICRO_BATCHES = 3"})
    },
    "averaged": {
        "divided twice": (
            STAGES,
            {"loss_fn=loss": "loss_fn=lambda *both: loss(*both) / MICRO_BATCHES"},
        ),
        "not divided": (STAGES, {"loss_fn=loss": "loss_fn=loss, scale_grads=False"}),
    },
    "order": {
        "GPipe": (
            STAGES,
            {
                "    return Schedule1F1B": "    return ScheduleGPipe",
                "PipelineStage, Schedule1F1B\n": "PipelineStage, ScheduleGPipe\n",
            },
        )
    },
    "raised": {
        "an error on one rank": (RING, {SCORES: "        assert rank == 0\n" + SCORES}),
        "a list of modules, which cannot be called": (
            STAGES,
            {"nn.Sequential(": "(lambda *layers: nn.ModuleList(layers))("},
        ),
    },
    "gradients": {
        "the largest number without its gradient, kept by the rest": (
            RING,
            {"out = out * scale + weights @ v": "out = out * scale + weights.detach() @ v"},
        )
    },
    "output": {
        "a scale of one's own": (
            HAND,
            {LINEAR: LINEAR.replace("self.weight,", "1.1 * self.weight,")},
        )
    },
}
RIGHT = {  # by name: way, and what to replace
    "the solution by hand": (HAND, {}),
    "a hook": (
        HAND,
        {
            "Copy.apply(x)": "hooked(x)",
            "class Column(": (
                "def hooked(x):\n"
                "    x = x.view_as(x)\n"
                "    x.register_hook(lambda gradient: Copy.backward(None, gradient))\n"
                "    return x\n"
                "\n"
                "\n"
                "class Column("
            ),
        },
    ),
    "one f for q, k and v": (
        HAND,
        {
            "Copy.apply(x)": "x",
            "    attention.o = Row(attention.o)\n": (
                "    attention.o = Row(attention.o)\n"
                "    for layer in (attention, block.up):\n"
                "        layer.register_forward_pre_hook(lambda _, x: (Copy.apply(*x),))\n"
            ),
            "    block.up, block.down = Column(block.up), Row(block.down)\n": "",
            "    attention = block.attention\n": (
                "    attention = block.attention\n"
                "    block.up, block.down = Column(block.up), Row(block.down)\n"
            ),
        },
    ),
    "functional collectives": (
        HAND,
        {
            COPIED: COPIED.replace(
                "dist.all_reduce(total)",
                "total = funcol.all_reduce(total, 'sum', dist.group.WORLD)",
            ),
            SUMMED: "        return funcol.all_reduce(x, 'sum', dist.group.WORLD)\n",
            "import torch\n": (
                "import torch\nimport torch.distributed._functional_collectives as funcol\n"
            ),
        },
    ),
    "products, and torch's norm": (
        HAND,
        {
            LINEAR: "        return Copy.apply(x) @ self.weight.T + self.bias\n",
            "sum(gradient.square().sum() for gradient in divided)": "get_total_norm(divided) ** 2",
            "from torch.nn import functional\n": "from torch.nn import functional\n"
            "from torch.nn.utils import get_total_norm\n",
            "seed + dist": "1000 * seed - dist",
        },
    ),
    "the plan": (PLAN, {}),
    "q, k and v gather on their own": (
        PLAN,
        {ATTENTION: "", "ColwiseParallel() for": "ColwiseParallel(input_layouts=Shard(1)) for"},
    ),
    "local tensors after norms": (
        PLAN,
        {
            FIRST_NORM: FIRST_NORM.replace("()", "(use_local_output=True)"),
            '"mlp_norm": SequenceParallel()': '"mlp_norm": SequenceParallel(use_local_output=True)',
        },
    ),
    "a mesh of numbers": (
        PLAN,
        {
            "    return init_device_mesh(device_type, shape, ": (
                "    ranks = torch.arange(dist.get_world_size()).view(shape)\n"
                "    return DeviceMesh(device_type, ranks, "
            ),
            "import init_device_mesh": "import DeviceMesh",
        },
    ),
    "the ring": (RING, {}),
    "k and v in one message, the last one left out": (
        RING,
        {
            SHIFT: (
                "        if step + 1 < size:\n            k, v = Shift.apply(torch.stack((k, v)))\n"
            )
        },
    ),
    "the logarithm of sums": (
        RING,
        {
            ONLINE: (
                "        lse = scores.logsumexp(-1, keepdim=True)\n"
                "        new = torch.logaddexp(largest, lse)\n"
                "        out = out * (largest - new).exp() + (scores - new).exp() @ v\n"
                "        largest, total = new, torch.ones_like(total)\n"
            )
        },
    ),
    "a mask that is added": (
        RING,
        {"scores.masked_fill(later, -torch.inf)": "scores - 1e9 * later"},
    ),
    "stages": (STAGES, {}),
    "layers that do nothing": (
        STAGES,
        {
            "    first = [model.first] if rank == 0 else []\n": (
                "    model.blocks = nn.ModuleList(layers)\n"
                "    model.first = model.first if rank == 0 else nn.Identity()\n"
                "    if rank < size - 1:\n"
                "        model.norm = model.last = nn.Identity()\n"
                "    return model\n"
            ),
            "(*first, *layers, *([model.norm, model.last] * (rank == size - 1)))": "()",
        },
    ),
    "eight micro-batches, divided by the loss": (
        STAGES,
        {
            "MICRO_BATCHES = 4": "MICRO_BATCHES = 8",
            "loss_fn=loss": "loss_fn=lambda *both: loss(*both) / MICRO_BATCHES, scale_grads=False",
        },
    ),
}
UNWRITTEN = "as it is handed out"
ANSWERS = RIGHT | {name: answer for answers in WRONG.values() for name, answer in answers.items()}


def examine_all(folder):
    """Examine all answers of a folder, one after the other, in each process of one job."""
    store, rank, size = next(dist.rendezvous("env://", idr_torch.rank, idr_torch.size))
    for name, ways in {**{n: [a[0]] for n, a in ANSWERS.items()}, UNWRITTEN: WAYS}.items():
        file = str(folder / name / "parallel.py")
        met = dist.PrefixStore(name, store), rank, size
        waits = name in (*WRONG["waited"], *WRONG["raised"], *WRONG["unequal"])
        words = ["--seed", "1", "--ways", *ways, *["--patience", str(PATIENCE_S)] * waits]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "rendezvous", lambda *_, met=met: iter([met]))
            patch.setattr("sys.argv", [file, *words])
            patch.setattr("sys.excepthook", None)
            patch.setenv("DLOJZ_RUN", str(folder / name))
            job.examine(file)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The folders of all answers, with their logs: one job of two processes examines them all."""
    folder = tmp_path_factory.mktemp("answers")
    sources = {name: made.replaced(SOLVED, changes) for name, (_, changes) in ANSWERS.items()}
    for name, source in {**sources, UNWRITTEN: BROKEN}.items():
        (folder / name).mkdir()
        (folder / name / "parallel.py").write_text(source)
    torchrun = "torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
    argv = [sys.executable, "-m", *torchrun.split(), __file__, str(folder)]
    paths = os.pathsep.join([str(REPOSITORY / "tools"), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def verdict(logged):
    """The verdict on an answer; the other ways are the solution's."""
    solved = {}
    for name, (_, changes) in RIGHT.items():
        if not changes:
            solved |= log.read(logged / name).cases
    found = exercises.find("12_parallel")
    reads = replace(found, read=lambda folder: solved | log.read(folder).cases)
    return lambda name: judge.repaired(reads, logged / name, "")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(verdict, name):
    found = verdict(name)
    assert found.passed, found


@pytest.mark.parametrize(("hint", "name"), [(h, name) for h in WRONG for name in WRONG[h]])
def test_a_wrong_answer_gets_its_hint(verdict, hint, name):
    found = verdict(name)
    assert found.hint_key == hint, found
    assert {f.part for f in found.failing} == {ANSWERS[name][0]}, found


def test_each_hint_is_that_of_a_wrong_answer_or_of_a_file_that_did_not_run():
    assert {*exercises.find("12_parallel").hints} == {*WRONG, "unwritten", "failed"}


def test_an_error_on_one_rank_is_told_from_the_wait_of_the_other(verdict):
    text = repr(verdict("an error on one rank"))
    assert re.search(r"process 1: line \d+: AssertionError", text)
    assert "process 0 waited for it in vain" in text


def test_an_error_is_told_although_the_other_process_waits_for_ever(monkeypatch):
    # So it does on a GPU, in an all-reduce: no timeout of NCCL ends that.
    monkeypatch.setattr(job, "LEAST_S", 0.2)
    monkeypatch.setattr(idr_torch, "size", 2)
    with pytest.raises(UserError, match=r"in a ring: process 0: line 7: ValueError: no.*in vain"):
        job.exchanged(dist.HashStore(), "in a ring", {"raised": "line 7: ValueError: no"}, 0.1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no all-reduce in the backward pass", "messages, backward: none"),
        ("each rank adds its part of the bias", "4 of 34: all 0.5 times as large"),
        ("no parameters, which no optimizer finds", "q.weight: no parameter, and 3 more"),
        ("norms without a style", "attention_norm.weight: whole [32], and 3 more"),
        ("not divided", "all 4 times as large"),
        (
            "g adds in its backward pass",
            "messages, backward: 6 all-reduces\n        expected: 2 to 4 all-r",
        ),
        ("GPipe", "live micro-batches in stage 0: 4: F0 F1 F2 F3 B0 B1 B2 B3"),
        ("rows, then columns", "attention.q.weight: Shard(1) [32, 16], and 7 more"),
    ],
)
def test_a_mistake_is_shown_by_its_evidence(verdict, name, text):
    assert text in repr(verdict(name))


def test_a_pipeline_keeps_one_micro_batch_less_in_each_stage(logged):
    ranks = log.read(logged / "stages").cases[STAGES]["ranks"]
    assert [" ".join(seen["actions"]) for seen in ranks] == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_the_file_that_is_handed_out_has_lines_to_write_and_an_optional_part(logged):
    found = judge.repaired(exercises.find("12_parallel"), logged / UNWRITTEN, "")
    assert found.hint_key == "unwritten"
    assert re.search(r"line \d+: still to be written", repr(found))
    assert [found.part(way) for way in WAYS] == [*[State.FAILED] * 3, State.NOT_ASKED]


def test_the_last_hint_shows_the_parts_that_failed(tmp_path):
    mine = tmp_path / "parallel.py"
    mine.write_text(SOLVED.replace("gradient.clone()", "2 * gradient").replace("scale + w", "w"))
    assert "2 * gradient" in course.diff(mine, "12_parallel", {HAND})
    assert "2 * gradient" not in course.diff(mine, "12_parallel", {RING})
    both = course.diff(mine, "12_parallel", {HAND, RING})
    assert both == course.diff(mine, "12_parallel")
    mine.write_text(mine.read_text().replace("# 12a, by hand", "# mine"))
    assert course.diff(mine, "12_parallel", {RING}) == course.diff(mine, "12_parallel")


def test_eight_ranks_hold_an_eighth_and_have_the_gradients_of_one_process():
    rows = {name: cells for name, *cells in eight.eight_ranks("solutions/parallel.py").rows}
    assert rows["up.weight"][:3] == ["Shard(0)", "[256, 64]", "[32, 64]"]
    assert rows["down.weight"][:3] == ["Shard(1)", "[64, 256]", "[64, 32]"]
    assert rows["mlp_norm.weight"][:3] == ["Replicate", "[64]", "[64]"]
    assert max(float(away) for *_, away in rows.values()) < 1e-5
    with pytest.raises(NotImplementedError):
        eight.eight_ranks(course.prepared("12_parallel"))


def test_only_the_paragraphs_of_the_trainee_are_prepared():
    assert steps.problems(BROKEN, SOLVED, "12") == []
    assert BROKEN.count("# TODO 12") == BROKEN.count("raise NotImplementedError") == 14
    assert "TODO" not in SOLVED


# From the trainee's copy to the verdict ----------------------------------------------------------


def test_a_rank_that_makes_another_call_ends_the_job_at_once(course_folder):
    file = course_folder / course.own("12_parallel")
    one = SUMMED.replace("dist.all", "if dist.get_rank() == 0:\n            dist.all")
    file.write_text(made.replaced(SOLVED, {SUMMED: one}))
    mine = submit(file.name, name="parallel", n_gpu=2)
    begin = time.monotonic()
    mine.wait()
    assert time.monotonic() - begin < 40
    found = check("12_parallel", mine)
    assert found.hint_key == "failed"
    assert "collective mismatch" in repr(found)
    assert found.part(HAND) == State.FAILED


if __name__ == "__main__":
    examine_all(Path(sys.argv[1]))
