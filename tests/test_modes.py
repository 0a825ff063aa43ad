"""Figures of notebook 09b: rungs of a ladder, their prices, and what only the host explains."""

import statistics
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
import torchvision
from claims import claims
from logs import write_log

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters.n09b_modes import figures, worth
from dlojz.chapters.n09b_modes import worth_figures as tables
from dlojz.course import UserError
from dlojz.figures import report
from dlojz.runs import derived
from dlojz.runs.columns import PHASES
from dlojz.runs.log import read
from dlojz.runs.stats import summary

SOLVED = Path(__file__).parent.parent / "solutions"
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
    assert rungs[-1].price == "compiled in 20 s on 16 cores, won back after 2,000 steps"


@pytest.mark.parametrize(
    ("compiled", "price"),
    [
        ({}, "nothing was compiled"),
        ({"compile": "off"}, ""),
        ({"compile_s": 9.0}, "compiled in 9 s on 16 cores, never won back"),
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
    assert "compiled in 20 s on 16 cores, won back after 2,000 steps" in words(speed)
    assert set(words(energy)) == {"no sensor"}, "a processor has none, which is not zero"
    speed.figure.canvas.draw()


def test_any_part_of_the_recorded_ladder_can_be_drawn():
    every = runs.recordings("h200/09-ladder-*")
    fast = [run for run in every if "5-" in run.name and "resnet152" in run.name]
    ((speed, energy),) = figures.plot_rungs(fast)
    assert "0.221" in words(energy)
    assert not [text for text in words(speed) if "won back" in text], "no eager run is shown"
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


# What the notebooks say of their recordings ------------------------------------------------------


def recorded(name):
    return summary(runs.recorded(f"h200/{name}"))


def faster(after, before):
    return recorded(after).images_per_s / recorded(before).images_per_s


def steps_of(name):
    """Return after how many steps a rung of the recorded ladders was won back, as it is drawn."""
    every = figures.ladders(
        [*runs.recordings("h200/09-ladder-*"), *runs.recordings("h200/09-batch-*")]
    )
    [rung] = [r for rungs in every.values() for r in rungs if r.run.name == name]
    return rung.price.rpartition("after ")[2]


@claims("09_compile")
def test_what_notebook_09_says_of_its_h200_is_so():
    eager, default = (
        recorded(f"09-ladder-resnet152-{rung}") for rung in ("4-channels-last", "5-default")
    )
    joules = [s.energy_per_image_j for s in (default, eager)]
    yield f"takes {1 - joules[0] / joules[1]:.0%} less energy".replace("%", " %")
    yield "{:.3f} J instead of {:.3f}".format(*joules)
    forward, backward = (
        [run.phase_ms[phase] for run in (default, eager)] for phase in ("forward", "backward")
    )
    yield "{:.1f} ms instead of {:.1f}".format(*forward)
    yield "{:.1f} instead of {:.1f}".format(*backward)
    yield f"compiled for {default.compile_s:.0f} s, on {default.cpus} cores"
    steps = steps_of("09-ladder-resnet152-5-default")
    yield f"about {steps}"
    yield f"needed {steps}"
    for model, size in ("resnet152", "Compiled it is "), ("resnet50", "instead of 4,660, "):
        ladder = f"09-ladder-{model}-"
        yield f"{size}{faster(ladder + '5-default', ladder + '4-channels-last'):.2f} times"
    assert not default.compile_cached
    minutes = 3900 * eager.step_ms / 60_000
    assert round(minutes, 1) == 7.5, "until both are at the same step"


@claims("09b_modes")
def test_what_notebook_09b_says_of_its_ladders_is_so():
    graphs, defaults, fp16 = [], [], []
    for model in ("resnet50", "resnet152"):
        ladder = f"09-ladder-{model}-"
        fp32, graph = ladder + "1-fp32", ladder + "5-reduce-overhead"
        yield f"{faster(graph + '-fp16', fp32):.2f} times as fast"
        fp16.append(f"{faster(graph + '-fp16', graph) - 1:.0%}")
        yield f"{faster(ladder + '4-channels-last', fp32):.2f}"
        graphs.append(f"{faster(graph, ladder + '5-default') - 1:.0%}")
        defaults.append(f"{faster(ladder + '5-default', ladder + '4-channels-last'):.2f}")
        yield steps_of(graph)
    assert (graphs, fp16) == (["1%", "4%"], ["4%", "1%"])
    yield "makes them {} and {} times".format(*defaults)
    ladder = "09-ladder-resnet50-"
    eager = faster(ladder + "4-channels-last-fp16", ladder + "4-channels-last")
    yield f"Eager, ResNet-50 was {eager:.2f} times as fast in fp16 as in bf16"
    ends = ("5-reduce-overhead-fp16", "1-fp32")
    joules = [recorded(ladder + end).energy_per_image_j for end in ends]
    yield "{:.3f} J instead of {:.3f}".format(*joules)
    paid = [
        recorded(f"09-ladder-{m}-5-reduce-overhead").compile_s for m in ("resnet50", "resnet152")
    ]
    yield f"won its {paid[0]:.0f} s back"
    yield f"ResNet-152 compiled for {paid[1]:.0f} s"
    ahead = [recorded(f"09-ladder-{m}-5-default").ahead_ms for m in ("resnet50", "resnet152")]
    yield f"was {ahead[0]:.0f} ms ahead of it in ResNet-50's default mode, and {ahead[1]:.0f} ms"


@claims("TALK.md")
def test_what_cuda_graphs_added_is_in_all_texts_what_was_recorded():
    models = ("resnet50", "resnet152", "convnext_tiny", "vit_b_16")
    rungs = ("09-ladder-{}-5-reduce-overhead", "09-ladder-{}-5-default")
    added = [100 * faster(*(rung.format(model) for rung in rungs)) - 100 for model in models]
    said = f"{min(added):.1f} to {max(added):.0f} %"
    assert {recorded(rung.format(model)).batch_size for rung in rungs for model in models} == {256}
    yield "09b_modes", f"with 256 images on an H200 they added {said}"
    yield f"with 256 images an H200 gained {said} from it"


@claims("09b_modes")
def test_what_notebook_09b_says_of_tuned_kernels_is_so():
    tuned = runs.recorded("h200/09-tuned-resnet50-fp16")
    [rungs] = figures.ladders([*runs.recordings("h200/09-ladder-resnet50-*"), tuned]).values()
    *_, usual, rung = rungs
    assert rung.words == "09  reduce-overhead, fp16, tuned"
    assert usual.words == "09  reduce-overhead, fp16"
    steps = [r.price.rpartition("after ")[2].removesuffix(" steps") for r in (rung, usual)]
    yield f"{rung.run.images_per_s:,.0f} images/s, {rung.gain:.2f} times as fast as fp32"
    yield f"{rung.gain / usual.gain - 1:.0%} faster than without it".replace("%", " %")
    yield f"took {rung.run.compile_s:.0f} s to compile instead of {usual.run.compile_s:.0f}"
    yield "after {} steps instead of {}".format(*steps)
    itself = sum(c["seconds"] for c in read(tuned).compilation.seen)
    yield f"compiler says of itself: {itself:.0f} s"
    joules = [r.run.energy_per_image_j for r in (rung, usual)]
    yield f"takes {1 - joules[0] / joules[1]:.0%} less energy".replace("%", " %")
    page = (SOLVED.parent / "docs" / "benchmark.md").read_text()
    assert f"{rung.run.images_per_s:,.0f} images/s, {rung.gain:.2f} times fp32" in page


@claims("09b_modes")
def test_what_notebook_09b_says_of_other_models_is_so():
    models = ("convnext_tiny", "vit_b_16")
    gains, saved, steps, whole, fp16 = [], [], [], [], []
    for model in models:
        ladder = f"09-ladder-{model}-"
        eager, default = ladder + "4-channels-last", ladder + "5-default"
        gains.append(faster(default, eager))
        saved.append(recorded(eager).step_ms - recorded(default).step_ms)
        steps.append(steps_of(default).removesuffix(" steps"))
        top = max(
            (summary(run) for run in runs.recordings(f"h200/{ladder}5-*")),
            key=lambda s: s.images_per_s,
        )
        whole.append(faster(top.name, ladder + "1-fp32"))
        fp16.append(faster(ladder + "5-reduce-overhead-fp16", ladder + "5-reduce-overhead"))
    resnet = [f"09-ladder-resnet50-{rung}" for rung in ("4-channels-last", "5-default")]
    saved.append(recorded(resnet[0]).step_ms - recorded(resnet[1]).step_ms)
    yield "{:.2f} and {:.2f} times as fast as bf16 was".format(*gains)
    yield "after {} and {} steps".format(*steps)
    yield "{:.0f} and {:.0f} ms instead of ResNet-50's {:.0f}".format(*saved)
    yield "it is {:.1f} times for the ConvNeXt".format(*whole)
    yield f"and {whole[1]:.1f} for the transformer"
    assert [f"{ratio - 1:+.0%}" for ratio in fp16] == ["+1%", "-2%"]


@claims("09b_modes")
def test_what_notebook_09b_says_of_its_supply_is_so():
    [*_, most] = report.measured(runs.recorded("h200/09-supply-loader")).cases.values()
    gives = statistics.median(most["images_per_s"])
    takes = recorded("09-ladder-resnet50-5-reduce-overhead-fp16").images_per_s
    assert most["num_workers"] == 16
    assert round(gives, -2) == 5000
    assert round(gives / 16, -1) == 310
    assert gives / takes < 3 / 4, "more than a quarter is missing"
    taken = summary(runs.recorded("h100/05-resnet50-bf16-synthetic-1")).images_per_s
    assert round(taken, -2) == 3900
    yield f"takes {takes:,.0f}."


@claims("09b_modes")
def test_what_notebook_09b_says_of_small_batches_is_so():
    batch = "09-batch-resnet50-"
    yield f"In the recording {faster(batch + '09-b0064', batch + '03-b0064'):.2f} times"
    yield f"{steps_of(batch + '09-b0064')} until that has paid"
    gains = [faster(f"{batch}09-b{n}", f"{batch}03-b{n}") for n in ("0128", "0512")]
    yield "With 128 images it is {:.2f} times, with 512 it is {:.2f}".format(*gains)
    lost = faster(batch + "09-b0032", batch + "03-b0032")
    yield f"With 32 images compiling *lost*: {lost:.2f} times"
    twice = [recorded(f"09-compiled-resnet50-b0032-{n}").images_per_s for n in (1, 2)]
    yield "reached {:,.0f} images/s, and {:,.0f} when it was run again".format(*twice)
    other = "03-resnet50-bf16-nhwc-b"
    apart = abs(faster(batch + "03-b0512", other + "0512") - 1)
    yield f"machines differ by {100 * apart:.1f} %"
    yield f"reaches {recorded(other + '0064').images_per_s:,.0f} images/s *eager*"
    assert faster(other + "0064", batch + "09-b0064") > 1, "eager, and ahead of the compiled one"
    assert recorded(batch + "03-b0064").ahead_ms < 1


def phase(name, part, share):
    """Return the quantile of a part of the steps of a recording, in ms of the device."""
    run = read(runs.recorded(f"h200/{name}"))
    return np.quantile(np.array(derived.step_times(run)[1][part])[derived.measured(run)], share)


@claims("09b_modes")
def test_what_notebook_09b_says_of_two_gpus_is_so():
    cases = read(runs.recorded("h200/09-ddp-x2")).cases
    alone = np.array(cases["no communication"]["step_ms"])
    ms = {name: np.array(case["step_ms"]) for name, case in cases.items()}
    added = {name: 100 * np.median(times - alone) / np.median(alone) for name, times in ms.items()}
    kept = {name: 100 * np.median(alone) / np.median(times) for name, times in ms.items()}
    more = np.median(ms["DDP"] - alone)
    yield f"adds {more:.1f} ms to a step of {np.median(alone):.1f} ms. In notebook 06 it was"
    yield f"**both** adds {added['both']:.1f} %: two GPUs do {kept['both']:.1f} % of twice"
    yield f"DDP as it comes is at {kept['DDP']:.1f} %"
    cut, fewer = (added[f"both, {what}"] for what in ("graph not cut", "buckets of 50 MB"))
    yield f"optimize_ddp = False`) adds {cut:.1f} %"
    yield f"It adds {fewer:.1f} %, too"
    yield f"without cuts a step is {added['both'] - cut:.0f} % shorter. The other {cut:.1f} %"
    sent = min(case["communication_ms"] for case in cases.values() if "communication_ms" in case)
    yield "all gradients are sent in 0.35 ms (notebook 06)"
    assert 0.3 < sent < 0.6, "compiled, no longer than there"
    assert len(cases["both"]["collectives"]) == 5
    assert len(cases["both, buckets of 50 MB"]["collectives"]) == 2
    assert round(added["both"] - cut) == 1, "the price of the cuts"
    assert (added["DDP"] - added["both"]) == pytest.approx(added["DDP"] / 2, rel=0.1), "half of it"
    eager = read(runs.recorded("h200/06-ddp-x2")).cases
    alone, with_ddp = (np.array(eager[n]["step_ms"]) for n in ("no communication", "DDP"))
    yield f"{np.median(with_ddp - alone):.1f} ms, of a step of {np.median(alone):.0f} ms"


def test_a_static_graph_brings_nothing_to_compiled_ddp_as_notebook_09b_says():
    cases = read(runs.recorded("h100/09-ddp-graphs-x2")).cases
    both, static = (cases[name] for name in ("both", "both, static graph"))
    sent = [[message["bytes"] for message in case["collectives"]] for case in (both, static)]
    assert sent[0] == sent[1]
    assert len(sent[0]) == 5
    assert np.median(static["step_ms"]) > 0.99 * np.median(both["step_ms"])


@claims("09b_modes")
def test_what_notebook_09b_says_of_the_trainer_on_two_gpus_is_so():
    cases = read(runs.recorded("h200/09-ddp-x2")).cases
    ms = {n: np.median(cases[n]["step_ms"]) for n in ("no communication", "both")}
    kept = 100 * ms["no communication"] / ms["both"]
    name = "09-compiled-resnet50-bf16-x{}-{}"
    pairs = [[recorded(name.format(n, pair)) for n in (1, 2)] for pair in (1, 2, 3)]
    speeds = np.array([[s.images_per_s for s in pair] for pair in pairs])
    (low, twice_low), (high, twice_high) = speeds.min(0), speeds.max(0)
    yield f"{low:,.0f} to {high:,.0f} images/s on one GPU"
    yield f"{twice_low:,.0f} to {twice_high:,.0f} on two"
    shares = 50 * speeds[:, 1] / speeds[:, 0]
    yield f"{shares.min():.1f} to {shares.max():.1f} % of twice as much"
    yield f"{kept - shares.mean():.0f} % less than in the figure"
    leads = [
        [derived.lead_ms(run) for run in read(runs.recorded(f"h200/{name.format(n, pair)}")).ranks]
        for n in (1, 2)
        for pair in (1, 2, 3)
    ]
    alone, both = np.array(leads[:3]).round(), np.sort(leads[3:]).round()
    yield f"is {alone.min():.0f} to {alone.max():.0f} ms ahead"
    early, late = both[:, 1], both[:, 0]
    yield f"one host was {early.min():.0f} or {early.max():.0f} ms ahead"
    yield f"the other one {late.min():.0f} to {late.max():.0f} ms"
    assert [s.ahead_ms for _, s in pairs] == [min(found) for found in leads[3:]]
    more = {}
    for part, share in (("forward", 0.5), ("backward", 0.5), ("backward", 0.9)):
        ms = [[phase(name.format(n, pair), part, share) for n in (1, 2)] for pair in (1, 2, 3)]
        more[part, share] = np.diff(ms)
    assert more["forward", 0.5].max() < 0.3, "as long as on one GPU"
    usual, late = more["backward", 0.5], more["backward", 0.9]
    yield f"{usual.min():.1f} to {usual.max():.1f} ms longer in the median"
    yield f"{late.min():.0f} to {late.max():.0f} ms longer in one step of ten"


@claims("09b_modes")
def test_a_resnet50_is_cut_as_notebook_09b_says():
    from torch._dynamo.backends.distributed import DDPOptimizer  # seconds to import

    pieces = []
    cut = DDPOptimizer(50 * 2**20, lambda piece, _: pieces.append(piece) or piece)
    torch._dynamo.reset()
    model = torchvision.models.resnet50()
    torch.compile(model, backend=cut.compile_fn)(torch.zeros(2, 3, 32, 32))
    torch._dynamo.reset()
    assert len(pieces) == 3, "its first bucket is of 1 MB"
    yield "two buckets instead of five, and two cuts instead of four"


@claims("09b_modes")
def test_what_notebook_09b_says_of_a_cache_is_so():
    cases = [*report.measured(runs.recorded("cpu/09-stale")).cases.values()]
    bf16, fp16, tagged = cases
    assert [case["asked"] for case in cases] == ["bf16", "fp16", "fp16"]
    assert [case["from_cache"] for case in cases] == [False, True, False]
    assert [case["computed"] for case in cases] == ["bfloat16", "bfloat16", "float16"]
    assert fp16["error"] == bf16["error"] == bf16["eager_error"], "to the last digit"
    assert tagged["error"] == tagged["eager_error"]
    yield "eight times the error"
    assert round(fp16["error"] / tagged["error"]) == 8


@claims("09b_modes")
def test_what_notebook_09b_says_of_the_prediction_is_so():
    rows = tables.measured(SOLVED.parent / "reference/cpu/09-worth.json")
    gains = {row["model"]: row["measured"]["gain"] for row in rows}
    held = worth.leave_one_out(rows)
    assert [row["model"] for row, told in zip(rows, held, strict=True)
            if gains[row["model"]] not in told.gain] == ["squeezenet1_1"]  # fmt: skip
    assert all(told.gain.low < 1 < told.gain.high for told in held), "a gain, and a loss"
    assert all(worth.total_s(row) in told.compile_s for row, told in zip(rows, held, strict=True))
    assert min(gains, key=gains.get) == "squeezenet1_1"
    yield f"between {min(gains.values()):.2f} and {max(gains.values()):.2f} times"
    yield f"within a factor of {worth.fits()[0].compile_within:.1f}"
    profile = worth.Profile.of(rows[0]["profile"])
    kept = profile.device_ms["matrix"] + profile.update_ms
    whole = worth.modelled_ms(profile, worth.NOTHING_DONE)
    asked = (SOLVED.parent / "dlojz/chapters/n09b_modes/quiz.toml").read_text()
    assert f"{profile.device_ms['matrix']:.0f} ms are matrix products" in asked
    assert f"{whole:.0f} ms / {kept:.0f} ms" in asked
    assert f"{gains['resnet18']:.2f} times" in asked


@claims("09b_modes")
def test_what_notebook_09b_says_of_predictions_for_an_h200_is_so():
    rows = tables.measured(SOLVED.parent / "reference/h200/09-worth.json")
    told = list(zip(rows, worth.leave_one_out(rows), strict=True))
    device, host = (
        [(row, found) for row, found in told if found.decides == side]
        for side in (worth.DEVICE, worth.HOST)
    )
    yield f"{sum(worth.total_s(row) in found.compile_s for row, found in told)} of {len(told)}"
    fit = worth.fit_for("NVIDIA H200", True, "default")
    yield f"within a factor of {fit.compile_within:.1f}, and"

    assert (len(device), len({row["model"] for row, _ in device})) == (6, 5)
    assert all(gain_of(row) in found.gain for row, found in device)
    assert all(found.gain.low > 1 for _, found in device)
    off = max(abs(found.gain.value / gain_of(row) - 1) for row, found in device)
    yield f"All six gains are inside, predicted to within {100 * off:.0f} %"
    yield f"if you train {tables.steps_text(max(f.break_even.high for _, f in device))}"
    assert all(found.answer(6_200) == worth.PAYS for _, found in device)
    gains = [gain_of(row) for row, _ in device]
    yield f"five models, and they gained alike, {min(gains):.2f} to {max(gains):.2f} times"

    inside = sum(gain_of(row) in found.gain for row, found in host)
    yield f"Where the host decides, {inside} of {len(host)} gains are inside"
    assert sum(found.gain.low < 1 < found.gain.high for _, found in host) == len(host) - 1
    gains = [gain_of(row) for row, _ in host]
    yield f"gained between {min(gains):.2f} and {max(gains):.2f} times"
    low, high = eager_ms(rows, "resnet50", "-b 64")
    yield f"ResNet-50 took between {low:.0f} and {high:.0f} ms"
    yield "ResNet-50 took {:.1f} to {:.1f} ms".format(*eager_ms(rows, "resnet50", "-b 256"))
    low, high = eager_ms(rows, "shufflenet_v2_x1_0", "-b 256")
    yield f"ShuffleNet still between {low:.0f} and {high:.0f} ms"
    assert fit.models == len({row["model"] for row in rows}) == 12, "twelve on an H200"


def gain_of(row):
    return row["measured"]["gain"]


def eager_ms(rows, model, flags):
    """Return the shortest and the longest eager step of a model, in all windows."""
    (row,) = [row for row in rows if row["model"] == model and flags in row["flags"]]
    return min(row["measured"]["eager_ms"]), max(row["measured"]["eager_ms"])
