"""The prepared network of notebook 09: right repairs pass, each wrong one gets its own hint."""

from pathlib import Path

import made
import pytest
import torch
from programs import experiment_file

from dlojz import cli, course
from dlojz.chapters.n09_repair import job as repair
from dlojz.check import check, exercise, judge
from dlojz.course import UserError, progress
from dlojz.launch import SubmitError, submit

REPOSITORY = Path(__file__).parent.parent
BROKEN = (experiment_file("repair.py")).read_text()
REPAIRED = (REPOSITORY / "solutions/repair.py").read_text()

# The lines of the repaired network that the answers replace.
PRINT = """        if not torch.compiler.is_compiling():
            print("a batch of", len(x))
"""
PLAIN = '        print("a batch of", len(x))\n'
BUFFER = '        self.register_buffer("calls", torch.zeros(()))\n'
BRANCH = "        x = torch.where(x.mean() > 0.5, x - x.mean(), x)\n"
COUNT = "        self.calls = self.calls + 1  # a new tensor: the backward pass needs the old one\n"
LAST = "x * torch.clamp(self.calls / 10, max=1)"
CLASS = "class Net(nn.Module):\n"
FORWARD = "    def forward(self, x):\n"

RIGHT = {
    "the solution": {},
    "torch.cond": {
        BRANCH: """        large = x.mean() > 0.5
        x = torch.cond(large, lambda x: x - x.mean(), lambda x: x.clone(), (x,))
"""
    },
    "a mask, and a tensor that is no buffer": {
        BRANCH: "        x = x - x.mean() * (x.mean() > 0.5)\n",
        BUFFER: "        self.calls = torch.zeros(())\n",
    },
    "an integer buffer, and the smaller of two numbers": {
        BUFFER: '        self.register_buffer("calls", torch.tensor(0), persistent=False)\n',
        LAST: "x * (self.calls / 10).clamp_max(1.0)",
        BRANCH: "        x = torch.lerp(x, x - x.mean(), (x.mean() > 0.5).float())\n",
    },
    "layers in another order": {"self.first, self.last = ": "self.last, self.first = "},
    "printed after the graph": {
        PRINT: PLAIN,
        CLASS: f"torch._dynamo.config.reorderable_logging_functions.add(print)\n\n\n{CLASS}",
    },
}
OPERATORS = """
@torch.library.custom_op("mine::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean() if x.mean() > 0.5 else x.clone()


@torch.library.custom_op("mine::backward", mutates_args=())
def backward(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g - g.mean() if x.mean() > 0.5 else g.clone()


centred.register_fake(lambda x: torch.empty_like(x))
backward.register_fake(lambda x, g: torch.empty_like(g))
centred.register_autograd(
    lambda ctx, g: backward(*ctx.saved_tensors, g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
"""
DISABLED = "    @torch.compiler.disable\n"
WRONG = {  # by hint, then by name: what is replaced in the repaired file
    "branch": {
        "the branch is deleted": {BRANCH: ""},
        "always the one side": {BRANCH: "        x = x - x.mean()\n"},
        "the side of the first call": {
            BRANCH: """        if not hasattr(self, "large"):
            self.large = bool(x.mean() > 0.5)
        x = x - x.mean() if self.large else x
"""
        },
        "each row by itself": {
            BRANCH: "        x = torch.where(x.mean(1, True) > 0.5, x - x.mean(1, True), x)\n"
        },
        "the largest number decides": {BRANCH: BRANCH.replace("x.mean() >", "x.max() >")},
        "it decides elsewhere": {BRANCH: BRANCH.replace("> 0.5", "> 0.6")},
    },
    "gradients": {
        "the mean has no gradient": {
            BRANCH: "        x = torch.where(x.mean() > 0.5, x - x.mean().detach(), x)\n"
        },
    },
    "counter": {
        "the counter is deleted": {BUFFER: "", COUNT: "", LAST: "x"},
        "the counter is a tensor that stays": {COUNT: "        self.calls + 1\n"},
        "counted without a compiler only": {
            COUNT: f"        if not torch.compiler.is_compiling():\n    {COUNT}"
        },
        "a counter of two numbers": {
            BUFFER: BUFFER.replace("zeros(())", "zeros(2)"),
            LAST: "x * torch.clamp(self.calls[0] / 10, max=1)",
        },
    },
    "in-place": {
        "counted in place": {COUNT: "        self.calls += 1\n"},
    },
    "ramp": {
        "it counts, and the values do not grow": {LAST: "x"},
        "counted afterwards": {
            COUNT: "        before, self.calls = self.calls, self.calls + 1\n",
            LAST: "x * torch.clamp(before / 10, max=1)",
        },
    },
    "message": {
        "the print is deleted": {PRINT: ""},
        "it prints without end": {PRINT: '        print(("y" * 200 + "\\n") * 200)\n'},
    },
    "breaks": {
        "the print stays": {PRINT: PLAIN},
        "the print in a function that is not compiled": {
            PRINT: "        self.tell(x)\n",
            FORWARD: f"{DISABLED}    def tell(self, x):\n{PLAIN}\n{FORWARD}",
        },
        "a value for Python": {BRANCH: "        x = x - x.mean() * float(x.mean().item() > 0.5)\n"},
        "the branch stays": {BRANCH: "        if x.mean() > 0.5:\n            x = x - x.mean()\n"},
    },
    "fullgraph": {
        "the print before everything else": {PRINT: "", FORWARD: f"{FORWARD}{PLAIN}"},
    },
    "again": {
        "the counter stays": {
            BUFFER: "        self.calls = 0\n",
            LAST: "x * min(1, self.calls / 10)",
        },
    },
    "opaque": {
        "a value for Python, in the graph": {
            CLASS: f"torch._dynamo.config.capture_scalar_outputs = True\n\n\n{CLASS}",
            BRANCH: "        x = x - x.mean() * float(x.mean().item() > 0.5)\n",
        },
        "the branch in an operator of its own": {
            CLASS: f"{OPERATORS}\n\n{CLASS}",
            BRANCH: "        x = centred(x)\n",
        },
    },
    "nothing": {
        "nothing is compiled": {FORWARD: DISABLED + FORWARD},
        "forced eager": {CLASS: f'torch.compiler.set_stance("force_eager")\n\n\n{CLASS}'},
    },
    "eager": {
        "an error in compiled calls only": {
            BRANCH: f"{BRANCH}        if torch.compiler.is_compiling():\n            x.stops()\n"
        },
        "eager after a few calls, without an error": {
            BUFFER: f"""{BUFFER}        self.passes = 0
        self.last.weight.register_post_accumulate_grad_hook(self.after)
""",
            FORWARD: f"""    def after(self, weight):
        self.passes += 1
        torch.compiler.set_stance("default" if self.passes < 3 else "force_eager")

{FORWARD}""",
        },
    },
    "values": {
        "not a number in one row": {
            BRANCH: f"{BRANCH}        x = torch.cat([x[:1] * float('nan'), x[1:]])\n"
        },
        "the growth does not end": {LAST: "x * self.calls / 10"},
        "a layer with another name": {
            "self.first, self.last = ": "self.one, self.last = ",
            "self.first(x)": "self.one(x)",
        },
    },
    "suppressed": {
        "errors are hidden from the first call on": {
            PRINT: f"{PRINT}            torch._dynamo.config.suppress_errors = True\n"
        },
        "errors are hidden": {
            CLASS: f"torch._dynamo.config.suppress_errors = True\n\n\n{CLASS}",
            PRINT: PLAIN,
        },
    },
    "itself": {
        "a function that is compiled already": {
            CLASS: f"""@torch.compile(backend="eager")
def centred(x):
    return torch.where(x.mean() > 0.5, x - x.mean(), x)


{CLASS}""",
            BRANCH: "        x = centred(x)\n",
        },
        "backend eager": {BUFFER: f'{BUFFER}        self.compile(backend="eager")\n'},
        "a forward pass that is compiled already": {
            FORWARD: f'    @torch.compile(backend="eager")\n{FORWARD}'
        },
    },
}


@pytest.fixture(autouse=True)
def _as_it_was():
    """What a file has set for the whole process ends with its test."""
    yield
    torch.compiler.reset()
    torch.compiler.set_stance("default")
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.capture_scalar_outputs = False
    torch._dynamo.config.reorderable_logging_functions.clear()


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The verdict on the repaired file with these changes, examined in this process."""

    def call(changes):
        module = made.repaired(made.replaced(REPAIRED, changes), tmp_path, monkeypatch)
        repair.examine(module.Net)
        return judge.repaired(exercise.find("09_repair"), tmp_path / "run", "")

    return call


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_repair_passes(verdict, name):
    found = verdict(RIGHT[name])
    assert found.passed, found


@pytest.mark.parametrize(("hint", "name"), [(h, name) for h in WRONG for name in WRONG[h]])
def test_a_wrong_repair_gets_its_hint(verdict, hint, name):
    found = verdict(WRONG[hint][name])
    assert found.hint_key == hint, found


def test_the_solution_differs_in_the_network_only():
    """So that the last hint shows nothing but the answer."""
    ends = {
        (s.partition("class Net")[0], s.partition("if __name__")[2]) for s in (BROKEN, REPAIRED)
    }
    assert len(ends) == 1


def test_each_hint_is_that_of_a_wrong_repair_or_of_a_job_that_failed():
    assert {*exercise.find("09_repair").hints} == {*WRONG, "failed"}


@pytest.mark.parametrize("seed", range(5))
def test_inputs_lie_on_both_sides_of_the_condition_and_some_are_near(seed):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(repair.WIDTH, repair.WIDTH)
    calls = repair.drawn(seed, layer)
    means = [torch.relu(layer(x)).mean().item() for _, x in calls]
    assert [mean > 0.5 for mean in means] == [large for large, _ in calls]
    late = {round(mean, 4) for mean in means[10:]}
    assert late == {0.2, 0.45, 0.55, 2.0}


# From the trainee's copy to the verdict ----------------------------------------------------------


def test_a_copy_is_made_once_and_never_overwritten(course_folder):
    assert course.own("09_repair") == "repair.py"
    assert (course_folder / "repair.py").read_text() == BROKEN
    (course_folder / "repair.py").write_text("mine")
    assert course.own("09_repair") == "repair.py"
    assert (course_folder / "repair.py").read_text() == "mine"


def test_a_job_is_judged_and_its_verdict_kept(course_folder):
    file = course.own("09_repair")
    job = submit(file, name="repair")
    job.wait()
    found = check("09_repair", job)
    assert found.hint_key == "breaks"
    assert "if x.mean() > 0.5" in repr(found)
    assert found.parts == ("same values", "one graph")
    assert "faster" not in repr(found), "nothing is timed"
    assert found.part("same values") == exercise.State.PASSED
    assert progress.last("verdicts", "09_repair")["parts"]["one graph"] == "failed"
    assert cli.main(["check", "09_repair", job.id]) == 1
    (course_folder / file).write_text(REPAIRED)
    assert "repair.py has changed since" in repr(check("09_repair", job))
    for _ in range(3):
        advice = found.hint()
    assert "+        x = torch.where(" in str(advice.diff)


def test_the_name_of_a_copy_that_is_missing_is_not_that_of_the_solution(course_folder):
    with pytest.raises(SubmitError, match=r'no repair\.py yet: course\.own\("09_repair"\) makes'):
        submit("repair.py")


OWN_LOG = """    import argparse

    from dlojz.runs import log

    job.examine(Net)
    log.open_run(argparse.Namespace()).case("eager")"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("torch.relu(", "torch.rule("), "AttributeError"),
        (("    job.examine(Net)", "    pass"), "it logged nothing to compare"),
        (("    job.examine(Net)", OWN_LOG), "its log was written by something else, too"),
    ],
)
def test_a_file_that_does_not_run_has_its_hint(course_folder, change, told):
    file = course.own("09_repair")
    (course_folder / file).write_text(BROKEN.replace(*change))
    job = submit(file)
    job.wait()
    found = check("09_repair", job)
    assert found.hint_key == "failed"
    assert told in repr(found)


def test_a_job_of_another_file_says_what_to_submit(course_folder):
    (course_folder / "other.py").write_text("")
    job = submit("other.py")
    job.wait()
    with pytest.raises(UserError, match=r"ran other\.py, expected your copy of repair\.py"):
        check("09_repair", job)
