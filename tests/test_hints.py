"""The hints in TOML beside their exercises: every one that is named exists, and is named."""

import ast
import inspect
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import wrong

from dlojz import course
from dlojz.check import common
from dlojz.check import exercise as exercises
from dlojz.watch import solved

KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# The hint is this argument.
FINDERS = {"Finding": 7, "like": 7, "_at_most": 5, "_finding": 5, "finding": 4, "flag": 5}


def strings(node):
    """Yield the string constants that the value of this expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*strings(node.body), *strings(node.orelse))
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        for value in node.value.values:
            yield from strings(value)


def arguments(call):
    """Return the positional arguments of a call, `*(a, b)` written out."""
    found = []
    for argument in call.args:
        unpacked = isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
        found += argument.value.elts if unpacked else [argument]
    return found


def named(module):
    """Return the hints that the source of a module names, wherever it names one."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        values = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in FINDERS:
            given = arguments(node)
            if len(given) == FINDERS[node.func.id]:
                values.append(given[-1])
            values += [k.value for k in node.keywords if k.arg == "hint"]
        elif isinstance(node, ast.Tuple) and len(node.elts) >= 3:  # a row of a table of looks
            values = [node.elts[-1]]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "hint":
            values = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name == "_why":
            values = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
        found |= {s for value in values for s in strings(value) if KEY.fullmatch(s)}
    return found


@pytest.mark.parametrize("step", exercises.STEPS)
def test_every_hint_that_is_named_exists(step):
    exercise = exercises.find(step)
    own = named(import_module(f"dlojz.chapters.{course.chapter(step)}.exercise"))
    errors = {hint for _, hint in exercise.errors}
    answers = {answer.expect for answer in wrong.every() if answer.step == step}
    assert own, "the test would pass if it found no name at all"
    known = {*exercise.hints, exercises.SAME, exercises.FASTER, exercises.MECHANISM}
    assert own | errors | answers | {*exercise.hint_of.values(), *named(common)} <= known


@pytest.mark.parametrize("step", exercises.STEPS)
def test_every_hint_of_an_exercise_is_named_by_it(step):
    source = inspect.getsource(import_module(f"dlojz.chapters.{course.chapter(step)}.exercise"))
    assert [key for key in exercises.read_hints(step) if f'"{key}"' not in source] == []


@pytest.mark.parametrize("step", ["common", *course.PREPARED, *exercises.STEPS])
def test_a_hint_is_whole(step):
    for key, hint in exercises.read_hints(step).items():
        assert KEY.fullmatch(key)
        assert hint.link.startswith("https://"), key
        assert hint.nudge != hint.api, key
        for text in (hint.nudge, hint.api):
            assert text == " ".join(text.split()), f"{key}: a break or a blank too many"
            assert text[-1] in ".?)", key


def test_what_an_exercise_is_about_comes_between_the_same_work_and_what_slows_it_down():
    order = list(exercises.find("02_amp").hints)
    work = exercises.WORK_FIRST
    assert order[: len(work)] == [*work]
    assert work[-1] == "flag"
    assert order[-4:] == ["unmeasured", "failed", "run-failed", "busy"]
    # What the audit has found says less of the cause than what slows a step down.
    assert order.index("item") < order.index("weights") < order.index("pixels")
    assert order.index("batch-norm") < order.index("audit") < order.index("losses")
    assert next(iter(exercises.find("06_ddp").hints)) == "share"
    assert next(iter(exercises.find("05_dataloader").hints)) == "files"


def _steps_twice():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)


def _steps_unscaled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    torch.amp.GradScaler("cpu").step(optimizer)


def _steps_without_scaler():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    optimizer.step()
    scaler.update()


def _asks_nccl():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)


def _stacks(sizes, workers):
    loader = torch.utils.data.DataLoader(list(map(torch.zeros, sizes)), 2, num_workers=workers)
    return list(loader)


def _asks_the_older_switch():
    """As max-autotune does, where only the newer one was set."""
    newer = torch.backends.cuda.matmul
    before = newer.fp32_precision
    try:
        torch.set_float32_matmul_precision("highest")
        newer.fp32_precision = "tf32"
        torch.get_float32_matmul_precision()
    finally:
        newer.fp32_precision = before


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("step", "hint", "call"),
    [
        pytest.param("01_gpu", "by-name", lambda: torch.zeros(1).to("cuda"), marks=no_gpu),
        ("02_amp", "scaler", lambda: SimpleNamespace().scaler),
        ("02_amp", "scaler", _steps_unscaled),
        ("02_amp", "scaler-update", _steps_twice),
        ("02_amp", "scaler-step", _steps_without_scaler),
        ("05_dataloader", "unequal", lambda: _stacks([(3, 2, 2), (1, 2, 2)], workers=0)),
        ("05_dataloader", "unequal", lambda: _stacks([(3, 2, 2), (1, 2, 2)], workers=1)),
        pytest.param("06_ddp", "backend", _asks_nccl, marks=no_gpu),
        ("09_compile", "switches", _asks_the_older_switch),
    ],
)
def test_an_error_of_torch_names_its_hint(step, hint, call):
    with pytest.raises((RuntimeError, ValueError, AttributeError, AssertionError)) as error:
        call()
    errors = exercises.find(step).errors
    assert next(key for pattern, key in errors if re.search(pattern, str(error.value))) == hint


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_solution_that_compiles_sets_both_switches_of_tf32(precision, monkeypatch):
    """Otherwise max-autotune fails, on a GPU only: torch 2.11 asks the older one."""
    trainer = solved.imported(course.solution("09_compile"))
    words = f"dlojz.py --model squeezenet1_1 --precision {precision} --compile max-autotune"
    monkeypatch.setattr("sys.argv", words.split())
    args = trainer.parse_args()
    newer = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [switch.fp32_precision for switch in newer]
    try:
        trainer.set_numerics(args)
        trainer.build_training(args, torch.device("cpu"), 10, 100)
        expected = "highest" if precision == "fp32" else "high"
        assert torch.get_float32_matmul_precision() == expected
        assert newer[0].fp32_precision == ("ieee" if precision == "fp32" else "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")
        for switch, value in zip(newer, before, strict=True):
            switch.fp32_precision = value
