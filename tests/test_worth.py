"""The oracle of `dlojz worth compile`: its prediction, its fits, its measurements, its score."""

import dataclasses
import json
import math
import os
import random
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worth as tool  # in tools/
from torch import nn
from torch._dynamo.utils import counters

from dlojz import cli, course
from dlojz.chapters.n09b_modes import measuring, worth
from dlojz.chapters.n09b_modes import worth_figures as tables
from dlojz.course import UserError
from dlojz.runs import source
from dlojz.traces import trace
from dlojz.traces.trace import Event, Trace
from dlojz.training import imports

REPOSITORY = Path(__file__).parent.parent
KEEPS = {"normalization": 0.5, "rest": 0.25, "host": 0.3}
COSTS = {"kernel": 2.0, "power": 0.8}
BLOCK = worth.Block("layer1.0 (Block)", 10, 5, 2.0, 1.3)


def profile(on_gpu=False, matrix=0.0, normalization=0.0, rest=0.0, **more):
    """Return a profile with these milliseconds on the device, and nothing else in its step."""
    device_ms = {"matrix": matrix, "normalization": normalization, "rest": rest}
    found = {"update_ms": 0.0, "host_ms": 0.0, "update_host_ms": 0.0, "launches": {}}
    found |= {"operations": 100, "different": 50, "start_s": 1.0, "block": BLOCK}
    found |= {"step_ms": sum(device_ms.values())} | more
    return worth.Profile(on_gpu=on_gpu, device_ms=device_ms, **found)


def fit(**more):
    """Return a fit whose intervals have no width, unless they are given."""
    found = {"device": "X1", "on_gpu": False, "mode": "default", "torch": "2.11.0", "date": ""}
    found |= {"models": 9, "keeps": KEEPS, "costs": COSTS, "compile_within": 1}
    found |= {"decided": {"device": 9, "host": 9}, "gain_within": {"device": 1, "host": 1}}
    return worth.Fit(**found | more)


def row(found, **more):
    """Return what would be measured of a model for which KEEPS and COSTS are exactly right."""
    seconds = worth.compile_s(found, COSTS)
    measured = {"gain": worth.gain(found, KEEPS), "compile_s": seconds}
    measured |= {"eager_ms": [found.step_ms] * 6, "compiled_ms": [found.step_ms] * 6}
    found = {"profile": dataclasses.asdict(found), "measured": measured, "mode": "default"}
    found |= {"device": "X1", "threads": None, "torch": "2.11.0", "date": "2026-01-02"}
    return found | {"model": "m", "flags": "-b 8"} | more


def rows(count=12, on_gpu=False):
    """Return models of many kinds, for which the coefficients are exactly right."""
    draw = random.Random(0)
    found = []
    for i in range(count):
        parts = {name: draw.uniform(0.5, 5) for name in ("matrix", "normalization", "rest")}
        size, host = draw.randint(100, 2000), draw.uniform(1, 12)
        block = dataclasses.replace(BLOCK, operations=draw.randint(8, 40))
        more = {"operations": size, "different": size // draw.randint(2, 6), "block": block}
        found.append(row(profile(on_gpu, **parts, host_ms=host, **more), model=f"m{i}"))
    return found


# The prediction ----------------------------------------------------------------------------------


def test_a_step_of_matrix_products_gains_nothing_and_never_pays():
    found = worth.predict(profile(matrix=10.0), fit())
    assert found.gain.value == 1
    assert math.isinf(found.break_even.value)
    assert found.answer(10**9) == worth.NEVER
    assert "not expected to pay" in tables.sentence(found, None)


@pytest.mark.parametrize(
    ("what", "parts", "gain"),
    [
        ("a pointwise step gains what fusing saves", {"rest": 10.0}, 4),
        ("normalization is fused less", {"rest": 5.0, "normalization": 5.0}, 10 / 3.75),
        ("the update is not compiled", {"rest": 8.0, "update_ms": 8.0}, 16 / 10),
        ("a processor is its own host", {"matrix": 7.0, "host_ms": 10.0}, 17 / 10),
        ("launch bound", {"on_gpu": True, "matrix": 1.0, "host_ms": 10.0}, 10 / 3),
        ("until the GPU is the limit", {"on_gpu": True, "matrix": 5.0, "host_ms": 10.0}, 10 / 5),
        ("a busy GPU needs no launches", {"on_gpu": True, "matrix": 10.0, "host_ms": 8.0}, 1),
    ],
)
def test_a_step_gains_what_the_parts_save_that_decide_it(what, parts, gain):
    assert worth.gain(profile(**parts), KEEPS) == pytest.approx(gain), what


@pytest.mark.parametrize(
    ("parts", "decided", "told"),
    [
        ({"matrix": 9.0, "host_ms": 8.0}, "device", "The GPU decides here: "),
        ({"matrix": 2.0, "rest": 2.0, "host_ms": 30.0}, "host", "The host decides here: "),
        ({"matrix": 6.0, "host_ms": 10.0}, "host", "here, until the model is compiled: "),
        ({"rest": 10.0, "host_ms": 9.0}, "host", "here, once the model is compiled: "),
    ],
)
def test_the_gpu_decides_if_it_does_so_eager_and_compiled(parts, decided, told):
    found = profile(on_gpu=True, **parts)
    assert worth.decides(found, KEEPS) == decided
    said = tables.decided(found, fit())
    assert told in said
    assert (tables.HOST_VARIES in said) == (decided == "host")


def test_what_decides_a_step_is_shown_with_its_times_eager_and_compiled():
    found = profile(on_gpu=True, rest=8.0, update_ms=1.0, host_ms=20.0, update_host_ms=0.5)
    told = "an eager step takes the GPU 9.0 ms to compute, and its host 20.5 ms to launch."
    assert f"{told} Compiled, 3.0 and 6.5 ms are expected." in tables.decided(found, fit())
    processor = profile(matrix=1.0, host_ms=50.0)
    assert worth.decides(processor, KEEPS) == "device"
    assert tables.decided(processor, fit()) == "", "it always decides: not worth a word"


def test_the_interval_is_that_of_what_decides():
    wide = fit(gain_within={"device": 1.1, "host": 1.5})
    for host_ms, decided, factor in ((1.0, "device", 1.1), (90.0, "host", 1.5)):
        found = worth.predict(profile(on_gpu=True, rest=8.0, host_ms=host_ms), wide)
        assert found.decides == decided
        assert found.gain.high / found.gain.value == pytest.approx(factor)


def test_a_model_compiles_as_long_as_its_block_by_its_size_in_blocks():
    same = profile(rest=1.0, operations=BLOCK.operations, different=BLOCK.different)
    assert worth.compile_s(same, COSTS) == BLOCK.compile_s
    assert worth.predict(same, fit()).compile_s.value == BLOCK.compile_s + same.start_s
    larger = profile(operations=160, different=80)  # 16 blocks of 10 operations and 5 kinds
    assert worth.compile_s(larger, {"kernel": 2.0, "power": 0.5}) == pytest.approx(2.0 * 4)


@pytest.mark.parametrize(
    ("steps", "answer"), [(10, worth.NEVER), (1000, worth.OPEN), (10**6, worth.PAYS)]
)
def test_an_answer_is_given_only_outside_of_the_interval(steps, answer):
    gain, seconds = worth.Range(2, 1.5, 3), worth.Range(50, 25, 100)
    found = worth.Prediction(100, gain, seconds)
    assert (found.break_even.low, found.break_even.high) == pytest.approx((375, 3000))
    assert found.answer(steps) == answer
    told = tables.sentence(found, steps)
    assert told.startswith("Compiling should pay after about 1,000 steps (380 to 3,000)")
    assert f"You train {steps:,} steps: {answer}" in told


def test_a_gain_that_may_be_none_may_never_pay():
    found = worth.Prediction(100, worth.Range(1.1, 0.9, 2), worth.Range(50, 25, 100))
    told = tables.sentence(found, None)
    assert told.startswith("Compiling may pay, after about 5,500 steps (500 to never)")


# The fit -----------------------------------------------------------------------------------------


def test_a_fit_recovers_the_coefficients_and_is_sure_of_them():
    found = worth.fit(rows())
    assert found.keeps == pytest.approx(KEEPS, rel=0.08)
    assert found.costs == pytest.approx(COSTS, rel=0.05)
    assert found.gain_within.keys() == {"device"}, "a processor is its own host"
    assert 1 <= found.gain_within["device"] < 1.03
    assert (found.device, found.models, found.torch) == ("X1", 12, "2.11.0")


def noisy_hosts():
    """Return models on a GPU, and what each is decided by. Where the host decides, gains vary."""
    found, draw = rows(24, on_gpu=True), random.Random(3)
    sides = [worth.decides(worth.Profile.of(row["profile"]), KEEPS) for row in found]
    for row, side in zip(found, sides, strict=True):
        row["measured"]["gain"] *= math.exp(draw.gauss(0, 0.4)) if side == "host" else 1
    return found, sides


def test_a_noisy_host_spoils_neither_what_a_gpu_keeps_nor_its_interval():
    found, sides = noisy_hosts()
    fitted = worth.fit(found)
    assert fitted.decided == {side: sides.count(side) for side in ("device", "host")}
    assert min(fitted.decided.values()) > 5
    for name in ("normalization", "rest"):
        assert fitted.keeps[name] == pytest.approx(KEEPS[name], rel=0.1)
    assert fitted.keeps["host"] == pytest.approx(KEEPS["host"], rel=0.3)
    assert fitted.gain_within["device"] < 1.05
    assert fitted.gain_within["host"] > 1.7


def test_too_few_models_of_one_side_are_fitted_with_the_others_and_called_a_guess():
    found, sides = noisy_hosts()
    first = sides.index("device")
    few = [row for i, row in enumerate(found) if sides[i] == "host" or i == first]
    fitted = worth.fit(few)
    assert fitted.decided == {"device": 1, "host": sides.count("host")}
    assert fitted.gain_within["device"] == fitted.gain_within["host"] > 1.7
    busy, launching = profile(True, rest=8.0), profile(True, rest=8.0, host_ms=90.0)
    sentence = "the device decides here, as it did for 1 of the models that were measured: "
    assert worth.unseen(busy, fitted, "X1", "2.11.0")[0].startswith(sentence)
    assert not any("decides" in told for told in worth.unseen(launching, fitted, "X1", "2.11.0"))


def test_two_rows_of_a_model_make_no_interval_narrower():
    found, draw = rows(8), random.Random(2)
    for one in found:
        one["measured"]["gain"] *= math.exp(draw.gauss(0, 0.1))
    twice = [row | {"flags": flags} for row in found for flags in ("-b 8", "-b 9")]
    once, both = worth.fit(found), worth.fit(twice)
    assert both.models == once.models == 8
    assert both.gain_within["device"] == pytest.approx(once.gain_within["device"], rel=0.05)


def test_few_models_that_disagree_make_no_absurd_coefficients():
    found = rows(4)
    for one, factor in zip(found, (0.5, 2, 0.6, 1.5), strict=True):
        one["measured"]["gain"] *= factor
        one["measured"]["compile_s"] *= factor
    noisy = worth.fit(found)
    assert all(0.03 < value < 10 for value in (*noisy.keeps.values(), *noisy.costs.values()))
    assert noisy.gain_within["device"] > 2, "and it says how little it knows"


def test_a_fit_is_as_unsure_as_its_models_differ():
    noisy, draw = rows(40), random.Random(1)
    for found in noisy:
        found["measured"]["gain"] *= math.exp(draw.gauss(0, 0.1))
    assert worth.fit(noisy).gain_within["device"] == pytest.approx(math.exp(1.69 * 0.1), rel=0.05)
    held = [told.gain for told in worth.leave_one_out(noisy)]
    inside = sum(r["measured"]["gain"] in gain for r, gain in zip(noisy, held, strict=True))
    assert 33 <= inside <= 39  # nine of ten


def test_a_model_that_is_left_out_does_not_predict_itself():
    found = rows()
    found[3]["measured"]["gain"] *= 2
    right = found[3]["measured"]["gain"] / 2
    assert worth.leave_one_out(found)[3].gain.value == pytest.approx(right, rel=0.03)
    held = worth.leave_one_out([*found, found[3] | {"flags": "-b 9"}])
    assert [held[i].gain.value for i in (3, 12)] == pytest.approx([right, right], rel=0.03)
    lines = str(tables.scores(found)).splitlines()
    assert "(outside)" in lines[4]
    assert "(outside)" not in lines[1]


def test_what_was_measured_is_shown_where_nothing_can_be_predicted(known):
    known(fit(on_gpu=True))
    found = row(profile(rest=1.0), command="mine.py", threads=1)
    assert "the whole model, measured: x 4.00" in tables.about(found)
    assert tables.to_dict(found, 9)["measured"]["gain"] == 4
    assert "no coefficients for mode default on a CPU" in tables.to_dict(found, 9)["why"]


def test_errors_are_shown_by_what_decides_and_with_the_flags_that_differ():
    found = noisy_hosts()[0][:8]
    for i, one in enumerate(found):
        one["flags"] = f"-b {64 if i < 4 else 256} --precision bf16 --fast"
    told = str(tables.scores(found)).splitlines()
    head, *lines = [line.split() for line in told]
    assert head[:4] == ["decides", "model", "flags", "gain"]
    sides = [line[0] for line in lines]
    assert sides == sorted(sides, key=["GPU", "host"].index)
    assert set(sides) == {"GPU", "host"}
    flags = {line[1]: " ".join(line[2:4]) for line in lines}
    assert flags == {f"m{i}": "-b 64" if i < 4 else "-b 256" for i in range(8)}
    assert "--" not in "".join(told)


def test_a_prediction_says_what_decides_in_text_and_in_json(known):
    known(fit(on_gpu=True, decided={"device": 4, "host": 7}))
    found = row(profile(True, rest=8.0, host_ms=90.0), command="mine.py")
    told = tables.answer(found, 9)
    assert "The host decides here: an eager step takes" in told
    assert "Coefficients of 9 models, of 7 where the host decides, on X1" in told
    assert json.loads(json.dumps(tables.to_dict(found, 9)))["decides"] == "host"
    known(fit())
    told = tables.answer(row(profile(rest=8.0, host_ms=90.0)), 9)
    assert "decides" not in told
    assert "Coefficients of 9 models on X1" in told
    assert "\n\n\n" not in told


def test_a_recording_shows_its_errors(tmp_path):
    file = tmp_path / "09-worth.json"
    other = row(profile(rest=1.0), mode="reduce-overhead")
    file.write_text(json.dumps([*rows(6), other, {"model": "bad", "mode": "default"}]))
    lines = str(tables.scores(tables.measured(file))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"m{i}" for i in range(6)]
    assert lines[0].split()[:2] == ["model", "gain"], "and nothing that is the same for all"


def test_too_few_models_make_no_fit():
    with pytest.raises(UserError, match="3 models: a fit needs more than 3"):
        worth.fit(rows(3))


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Make these the only fits: known(fit(), fit(device="X2"))."""
    monkeypatch.setattr(worth, "FITS", tmp_path / "worth.toml")
    return lambda *fits: worth.FITS.write_text("\n".join(map(tool.toml, fits)))


def test_a_fit_of_this_device_is_preferred_and_another_one_is_called_a_guess(known):
    known(fit(), fit(device="X2"), fit(device="Y", on_gpu=True))
    assert worth.fit_for("X1", False, "default").device == "X1"
    other = worth.fit_for("X3", False, "default")
    assert other.device == "X2"
    told = worth.unseen(profile(), other, "X3", "2.12.0")
    assert told[0] == "the coefficients are of torch 2.11.0, and this is 2.12.0"
    assert told[1] == "the coefficients are of X2: for X3 they are a guess"
    assert len(worth.unseen(profile(), fit(), "X1", "2.11.0")) == len(told) - 2


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"varied": 0.5}, "the eager steps differed by 50 %"),
        ({"nchw": True}, "weights in NCHW: the compiler changes the layout"),
    ],
)
def test_what_a_prediction_cannot_see_is_told(more, sentence):
    usual = worth.unseen(profile(), fit(), "X1", "2.11.0")
    (told,) = set(worth.unseen(profile(**more), fit(), "X1", "2.11.0")) - set(usual)
    assert sentence in told


def test_an_unknown_mode_is_refused_with_the_known_ones(known, capfd):
    known(fit(on_gpu=True))
    with pytest.raises(UserError, match=r"reduce-overhead on a GPU \(known there: default\)"):
        worth.fit_for("X1", True, "reduce-overhead")
    assert cli.main(["worth", "compile", "dlojz/dlojz.py", "--mode", "max-autotune"]) == 2
    err = capfd.readouterr().err
    assert "no coefficients for mode max-autotune on any device" in err
    assert "importing torch" not in err


@pytest.mark.parametrize("text", ["[[fit]", '[[fit]]\ndevice = "X1"\n', "fit = [1]", "fit = 1"])
def test_damaged_coefficients_are_named(text, known, capfd):
    known()
    worth.FITS.write_text(text)
    assert cli.main(["worth", "compile", "dlojz/dlojz.py"]) == 2
    err = capfd.readouterr().err
    assert f"{worth.FITS} is damaged" in err
    assert "git checkout" in err


def test_a_fit_is_the_same_after_it_was_written(known):
    known(fit(), fit(mode="other"))
    assert worth.fits() == [fit(), fit(mode="other")]


def test_what_the_changelog_says_of_the_fits_is_so():
    said = (REPOSITORY / "CHANGELOG.md").read_text()
    found = worth.fit_for("NVIDIA H200", True, "default")
    gpu, host = (found.gain_within[side] for side in ("device", "host"))
    assert f"the gain is known within {100 * (gpu - 1):.0f} %" in said
    assert f"where its host does, within a factor of {host:.1f}" in said
    assert f"predicted there within a factor of {found.compile_within:.1f}" in said
    assert (found.models, found.decided["device"]) == (12, 5), "twelve, and five of these"


def test_the_coefficients_are_those_of_the_recordings():
    for file in ("cpu", "h200"):
        mine = tables.measured(REPOSITORY / "reference" / file / "09-worth.json")
        on_gpu = worth.Profile.of(mine[0]["profile"]).on_gpu
        written = worth.fit_for(mine[0]["device"], on_gpu, "default")
        fitted = worth.fit(mine, "; ".join(dict.fromkeys(map(tool.command, mine))))
        numbers = ("keeps", "costs", "gain_within", "compile_within")
        same = {name: getattr(written, name) for name in numbers}
        for name, value in same.items():
            assert value == pytest.approx(getattr(fitted, name), rel=2e-3), name
        assert dataclasses.replace(fitted, **same) == written
        assert "python tools/worth.py FILE --mode" in written.command
        assert ("host" in written.decided) == on_gpu


# The measurements --------------------------------------------------------------------------------


def test_a_trace_is_split_into_kinds_and_the_update():
    ops = [("aten::mm", 1, 5), ("aten::relu", 5, 7), ("aten::batch_norm", 7, 8)]
    ops += [("aten::add_", 9, 12)]  # the optimizer's
    made = Trace(Path("t"), None, [Event("ProfilerStep#0", 0, 13, "1")])
    made.ops = [Event(name, begin, end, "1") for name, begin, end in ops]
    made.ranges = [Event(worth.UPDATE, 9, 13, "1")]
    found = worth.split(made)
    assert found["device_ms"] == {"matrix": 4, "normalization": 1, "rest": 2}
    assert (found["update_ms"], found["update_host_ms"], found["host_ms"]) == (3, 1, 2)


def test_a_recorded_trace_of_a_gpu_is_split():
    file = next((REPOSITORY / "reference/h100/04-trace-fault-none").glob("*trace*"))
    whole = trace.read(file)
    optimizer = next(e for e in reversed(whole.ranges) if e.name.startswith("Optimizer.step"))
    last = dataclasses.replace(whole, steps=whole.steps[-1:])
    last.ranges = [optimizer._replace(name=worth.UPDATE)]
    found = worth.split(last)
    assert found["on_gpu"]
    parts = found["device_ms"]
    assert parts["normalization"] > parts["matrix"] > found["update_ms"] > 0
    assert found["launches"]["matrix"] > 100
    assert "host_ms" not in found  # is measured without the profiler


def test_a_layout_that_the_compiler_would_change_is_seen():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
    assert measuring.has_nchw(model)
    assert not measuring.has_nchw(model.to(memory_format=torch.channels_last))


class Part(nn.Module):
    """A block of a model of one's own."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])

    def forward(self, x):
        return self.layers(x) + x


@pytest.mark.parametrize(
    ("model", "sizes", "block"),
    [
        (nn.Sequential(Part(1), Part(1), nn.Linear(4, 4)), (9, 8, 9, 8, 1), "0"),
        (nn.Sequential(Part(2), Part(1), nn.Linear(4, 4)), (12, 11, 9, 9, 8, 1), "1"),
        (nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), (9, 1, 12, 1), "0"),
        (nn.Sequential(nn.ReLU(), nn.ReLU()), (1, 1), ""),
    ],
)
def test_the_block_is_the_smallest_of_the_outermost_repeated_parts(model, sizes, block):
    names = [name for name, _ in model.named_modules() if name]
    names = [n for n in names if not (n.endswith("layers.0") or n.endswith("layers.1"))]
    spans = {name: (0, size) for name, size in zip(names, sizes, strict=False)}
    assert measuring.block_of(model, {"": (0, 30)} | spans) == block


class Changes(nn.Module):
    """A block that changes its input in place, and is called with names."""

    def forward(self, x, factor):
        return torch.relu_(x) * factor


class Named(nn.Module):
    """A model of such blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Changes(), Changes()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x * self.factor
        return self.second(self.first(x, factor=self.factor) + 1, factor=self.factor)


def test_a_block_may_change_its_input_and_be_called_with_names():
    model = Named()
    training = SimpleNamespace(model=model, device=torch.device("cpu"))
    training.step = lambda: model(torch.ones(2, 4)).sum().backward()
    calls, spans = measuring.counted(training)
    names = [name.split(".")[1] for name, _ in calls]
    names = [name for name in names if name != "detach"]  # autograd's, for what changes its input
    assert names == ["mul", "relu_", "mul", "add", "relu_", "mul"]
    own, options = calls[slice(*spans["first"])], {"backend": "aot_eager"}
    _, block = measuring.compiled_block(training, "first", own, options)
    assert (block.name, block.operations, block.different) == ("first (Changes)", 3, 3)
    assert block.compile_s > 0 < block.gain


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import nowhere", "ModuleNotFoundError: No module"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_a_trainer_that_cannot_be_imported_is_refused_with_its_line(code, error, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"{code}\n{'; '.join(f'{name} = None' for name in source.FUNCTIONS)}\n")
    with pytest.raises(UserError, match=f"mine.py, line 1 can't be imported: {error}"):
        imports.trainer(str(file))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("inner: No working C++ compiler found in ..."), "install g\\+\\+"),
        (RuntimeError("OSError: [Errno 28] No space left on device"), "no room .* set TMPDIR"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install g\\+\\+"),
        (ValueError("no rule\nand more"), "Part can't be compiled: ValueError: no rule. Leave"),
    ],
)
def test_a_compiler_that_refuses_is_answered_with_what_to_do(error, message):
    assert re.search(message, measuring.refusal("Part", error))


def test_both_kinds_of_too_little_memory_are_known():
    assert measuring.is_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert measuring.is_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you"))
    assert not measuring.is_of_memory(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), trace.TraceError("trace.json: can't be read")]
)
def test_a_full_disk_is_told_with_what_to_do(error, tmp_path, monkeypatch):
    def full(args):
        raise error

    monkeypatch.setattr(measuring, "result", full)
    monkeypatch.setattr(sys, "argv", ["worth", "--into", str(tmp_path / "a"), "dlojz/dlojz.py"])
    with pytest.raises(SystemExit, match=r"no room for files in .*: set TMPDIR to a folder"):
        measuring.main()


# The command -------------------------------------------------------------------------------------

TINY = """
class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(4):
            x = self.linear(x).relu() * 2
        return x


def build_model(args, num_classes):
    first = (torch.nn.Flatten(), torch.nn.Linear(3 * args.image_size**2, 16))
    return torch.nn.Sequential(*first, Part(), Part(), Part(), torch.nn.Linear(16, num_classes))
"""


@pytest.fixture
def mine(course_folder):
    """The trainer with a model of the reader's own."""
    file = course_folder / "dlojz/dlojz.py"
    old = file.read_text()
    begin = old.index("def build_model")
    end = old.index("def compiled")
    file.write_text(old[:begin] + textwrap.dedent(TINY).strip() + "\n\n\n" + old[end:])
    return file


@pytest.mark.slow
def test_the_step_of_a_model_of_ones_own_is_predicted(mine, capfd, known, monkeypatch):
    monkeypatch.setattr(sys, "executable", os.environ["DLOJZ_PYTHON"])
    known(fit(gain_within={"device": 1.2}, compile_within=2.0))
    words = ["worth", "compile", "dlojz/dlojz.py -b 4 --image-size 8", "--steps", "9"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert "compiling one block with an empty cache: 2 ..." in err
    found = json.loads(out)
    model = worth.Profile.of(found["profile"])
    assert model.block.operations == 20  # four times transpose, addmm, view ..., of a Linear
    assert model.different < model.operations
    assert found["answer"] == worth.NEVER
    assert found["decides"] == "device"
    assert found["prediction"]["gain"]["low"] < found["prediction"]["gain"]["value"]
    text = tables.about(found) + tables.answer(found, 9)
    assert "You train 9 steps: it does not pay" in text
    assert "the coefficients are of X1" in text


def test_the_whole_model_is_compiled_beside_the_eager_one(mine, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])  # which the trainer reads
    monkeypatch.setattr(measuring, "WINDOWS", 3)
    monkeypatch.setattr(measuring, "options", lambda mode: {"backend": "aot_eager"})
    args = SimpleNamespace(trainer=mine, flags=["-b", "4", "--image-size", "8"], mode="default")
    counters.clear()
    measured = measuring.measured(measuring.Training(args.trainer, args.flags), args)
    assert counters["stats"]["unique_graphs"] == 2  # the tiny one, and the model as a whole
    assert len(measured["eager_ms"]) == len(measured["compiled_ms"]) == 6
    assert measured["gain"] > 0 < measured["compile_s"]


def test_a_trainer_that_compiles_is_switched_off_or_refused(mine, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    solution = mine.with_name("mine.py")
    text = course.solution("09").read_text()
    solution.write_text(text)
    flags = ["--model", "shufflenet_v2_x0_5", "-b", "4", "--image-size", "32"]
    measuring.Training(solution, [*flags, "--compile", "aot_eager"])
    solution.write_text(text.replace('args.compile == "aot_eager"', "True"))
    with pytest.raises(UserError, match="compiles its model already: give flags"):
        measuring.Training(solution, flags)


def test_a_trainer_that_mixes_gets_its_draws(monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    flags = ["--model", "shufflenet_v2_x0_5", "-b", "4", "--image-size", "32"]
    training = measuring.Training(course.solution("07"), [*flags, "--mix", "cutmix"])
    training.step()
    assert training.parts.draws.box.shape == (4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "no trainer 'nowhere.py'"),
        (["a'; echo foo"], "can't read the command \"a'; echo foo\" (No closing quotation)"),
        ([""], "an empty command: expected one like"),
        (["dlojz/dlojz.py --model nothing"], "--model nothing: not in torchvision.models"),
        (["dlojz/dlojz.py", "--steps", "0"], "--steps 0: expected how many steps"),
    ],
)
def test_what_cannot_be_tried_is_one_clear_line(
    words, message, course_folder, capfd, known, monkeypatch
):
    monkeypatch.setattr(sys, "executable", os.environ["DLOJZ_PYTHON"])
    known(fit())
    assert cli.main(["worth", "compile", *words]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    ['worth compile "dlojz/dlojz.py --help"', "estimate --model resnet18 --flags=--help"],
)
def test_a_program_that_measured_nothing_is_told(words, course_folder, capfd, known, monkeypatch):
    """The trainer's --help ends it, for one, and with success."""
    known(fit())
    monkeypatch.setattr(cli.tools, "_run_program", lambda words, folder: 0)
    assert cli.main(shlex.split(words)) == 1
    assert "ended before a step, so nothing was measured" in capfd.readouterr().err


def test_flags_outside_of_the_quotes_are_met_with_the_right_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["worth", "compile", "dlojz/dlojz.py", "--model", "resnet18"])
    told = 'dlojz worth compile "dlojz/dlojz.py --model resnet18"'
    assert told in capsys.readouterr().err


def test_a_program_that_is_killed_is_told_and_leaves_its_files_where_they_are_removed(
    capfd, tmp_path
):
    kill = "import os, signal, tempfile; tempfile.mkdtemp(); os.kill(os.getpid(), signal.SIGKILL)"
    assert cli.tools._run_program([sys.executable, "-c", kill], tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert "ended by SIGKILL: perhaps the memory was not enough" in capfd.readouterr().err


def test_help_says_what_to_type(capsys):
    with pytest.raises(SystemExit):
        cli.main(["worth", "--help"])
    out = capsys.readouterr().out
    assert '"dlojz/dlojz.py --model resnet18 -b 64"' in out
    assert "--measure" in out


# The score ---------------------------------------------------------------------------------------


def test_the_score_goes_on_where_it_stopped(tmp_path, monkeypatch):
    file, asked = tmp_path / "worth.json", []

    def measured(model, args, left):
        asked.append(model)
        return row(profile(rest=1.0)) | {"model": model} if len(asked) != 2 else None

    monkeypatch.setattr(tool, "measured", measured)
    words = ["worth.py", str(file), "--models", "a", "b", "--flags=-b 8"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="b: no time left; call again to go on"):
        tool.main()
    tool.main()
    tool.main()
    assert asked == ["a", "b", "b"]
    assert [found["model"] for found in json.loads(file.read_text())] == ["a", "b"]


def test_a_fit_of_several_files_is_written_and_its_errors_shown(
    tmp_path, known, capsys, monkeypatch
):
    files, measured = [tmp_path / "a.json", tmp_path / "b.json"], rows()
    failed = {"model": "bad", "mode": "default", "flags": "-b 8", "error": "no"}
    files[0].write_text(json.dumps([*measured[:5], failed]))
    files[1].write_text(json.dumps(measured[5:]))
    monkeypatch.setattr(sys, "argv", ["worth.py", *map(str, files), "--fit"])
    known(fit(device="kept"))
    tool.main()
    assert [found.device for found in worth.fits()] == ["kept", "X1"]
    assert worth.fits()[1].command == "python tools/worth.py FILE --mode default --flags '-b 8'"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [f"m{i}" for i in range(12)]
