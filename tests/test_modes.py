"""Figures of notebook 09b: rungs of a ladder, their prices, and what only the host explains."""

import matplotlib as mpl
import pytest
from logs import write_log

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters.n09b_modes import figures
from dlojz.course import UserError
from dlojz.runs.columns import PHASES

COLD = ("dynamo", "lazy_backward")
CACHED = ("dynamo",)


def log(folder, name, step_ms=100, compile_s=0.0, why=COLD, graphs=1, cpus=16, batch=32, **flags):
    """A log of equal steps; compile_s: of its compilation, if it has one."""
    changes = {"arguments": flags, "about": {"cpu_count": cpus}}
    if compile_s:
        each = {"id": "0/0", "mode": "train", "step": 2, "seconds": compile_s / len(why)}
        seen = [each | {"why": one} for one in why]
        changes["evidence"] = {"when": "compilation", "seen": seen, "graphs": graphs}
        changes["evidence"] |= {"generated": 2 * graphs}
    ms = dict.fromkeys(PHASES, 0) | {"forward": step_ms}
    return write_log(folder / f"{name}.jsonl", ms=ms, batch=batch, **changes)


@pytest.fixture
def three(tmp_path):
    """Fp32 in 100 ms, bf16 in 50 ms, and that compiled in 40 ms: 20 s of compiling."""
    bf16 = {"precision": "bf16", "channels_last": True}
    return [
        log(tmp_path, "c", 40, 20.0, compile="default", **bf16),
        log(tmp_path, "a", 100),
        log(tmp_path, "b", 50, compile="off", **bf16),
    ]


def only(found):
    (rungs,) = figures.ladders(found).values()
    return rungs


def words(ax):
    return [text.get_text() for text in ax.texts]


def test_rungs_are_in_the_order_of_the_course(three):
    rungs = only(three)
    named = ["01  fp32", "03  channels_last, bf16", "09  default, bf16"]
    assert [rung.words for rung in rungs] == named
    assert [rung.gain for rung in rungs] == pytest.approx([1, 2, 2.5])
    assert figures.gain(three) == pytest.approx(2.5)


def test_what_was_paid_is_won_back_by_what_is_saved_against_the_same_precision(three):
    """20 s for 10 ms less in each step: of bf16, and not of fp32."""
    rungs = only(three)
    assert [rung.break_even for rung in rungs] == [None, None, pytest.approx(2000)]
    assert rungs[-1].price == "compiled in 20 s on 16 cores, pays after 2,000 steps"


@pytest.mark.parametrize(
    ("compiled", "price"),
    [
        ({}, "nothing was compiled"),
        ({"compile": "off"}, ""),
        ({"compile_s": 9.0}, "compiled in 9 s on 16 cores, never pays"),
        (
            {"compile_s": 2.0, "why": CACHED, "step_ms": 40},
            "compiled in 2 s on 16 cores; the code for training was in a cache",
        ),
        ({"compile_s": 9.0, "precision": "tf32"}, "compiled in 9 s on 16 cores"),
    ],
)
def test_what_is_said_of_a_price_that_was_not_won_back(tmp_path, compiled, price):
    """Beside an eager run in fp32 of 50 ms."""
    eager = log(tmp_path, "a", 50)
    compiled = log(tmp_path, "b", **{"step_ms": 60, "compile": "default"} | compiled)
    [rung] = [rung for rung in only([eager, compiled]) if rung.run.name == "b"]
    assert rung.price == price


def test_the_eager_run_of_the_same_host_is_compared(tmp_path):
    found = [log(tmp_path, "a", 50, cpus=32), log(tmp_path, "b", 80, cpus=16)]
    found.append(log(tmp_path, "c", 40, 20.0, compile="default", cpus=16))
    assert only(found)[-1].break_even == pytest.approx(500)


def test_each_model_and_batch_has_a_ladder_of_its_own(tmp_path):
    found = [log(tmp_path, "a"), log(tmp_path, "b", batch=64), log(tmp_path, "c", model="vgg11")]
    assert [*figures.ladders(found)] == [
        "resnet18, 64 px, batch 32",
        "resnet18, 64 px, batch 64",
        "vgg11, 64 px, batch 32",
    ]
    assert len(figures.plot_rungs(found)) == 3


def test_a_run_without_a_measured_step_is_left_out(tmp_path, three):
    failed = log(tmp_path, "f", compile="max-autotune", precision="bf16")
    failed.write_text("".join(failed.read_text().splitlines(True)[:2]))
    assert only([*three, failed]) == only(three)
    with pytest.raises(UserError, match=r"no run with a measured step"):
        figures.plot_rungs([failed])


def test_a_bar_has_its_value_its_ratio_and_its_price(three):
    ((speed, energy),) = figures.plot_rungs(three)
    assert [bar.get_width() for bar in speed.patches] == pytest.approx([320, 640, 800])
    assert speed.get_yticklabels()[0].get_text() == "01  fp32"
    assert "800" in words(speed)
    assert "×2.50" in words(speed)
    assert "compiled in 20 s on 16 cores, pays after 2,000 steps" in words(speed)
    assert set(words(energy)) == {"no sensor"}, "a processor has none, which is not zero"
    speed.figure.canvas.draw()


def test_any_part_of_the_recorded_ladder_can_be_drawn():
    every = runs.recordings("h200/09-ladder-*")
    fast = [run for run in every if "5-" in run.name and "resnet152" in run.name]
    ((speed, energy),) = figures.plot_rungs(fast)
    assert "0.221" in words(energy)
    assert not [text for text in words(speed) if "pays" in text], "no eager run is shown"
    speed.figure.canvas.draw()
    axes = figures.plot_rungs(every)
    texts = [text for speed, _ in axes for text in words(speed)]
    assert {"7,014", "×7.71", "3,231", "×8.51"} <= set(texts)
    assert not [text for text in texts if "was in a cache" in text], "it would hide the price"
    axes[0][0].figure.canvas.draw()


def test_a_run_on_a_gpu_that_is_too_short_has_no_energy(tmp_path):
    run = write_log(tmp_path / "g.jsonl", device=True)
    ((_, energy),) = figures.plot_rungs([run])
    assert words(energy) == ["not measured: too short"]


def test_the_hosts_are_shown_with_how_far_they_were_ahead(tmp_path):
    gpu = write_log(tmp_path / "g.jsonl", device=True)
    cpu = log(tmp_path, "a", cpus=2)
    assert [row[-1] for row in figures.hosts([gpu, cpu]).rows] == ["40.0 ms", "-"]
    assert [row[2] for row in figures.hosts([gpu, cpu]).rows] == ["-", "2"]
