"""What notebook 02, its quiz and its answers say of recordings is in the recordings."""

import statistics
import tomllib

import numpy as np
from claims import claims

from dlojz import course, runs
from dlojz.chapters import n02_amp as n02
from dlojz.figures import paired
from dlojz.runs import log
from dlojz.runs.stats import summary

LADDER = {"fp32": "1-fp32", "tf32": "2-tf32", "bf16": "3-bf16", "fp16": "3-fp16"}
MISTAKES = ["training-only", "fresh-scaler", "loss-outside", "no-scaler"]


def steps():
    """Return the four runs of the figure, by precision."""
    return {p: summary(runs.recorded(f"h200/09-ladder-resnet50-{n}")) for p, n in LADDER.items()}


def models():
    """Return the runs of several models, by (model, precision)."""
    found = [summary(r) for r in runs.recordings("h100/03-*-nchw-b0256*")]
    return {(s.model, s.arguments["precision"]): s for s in found}


def ratio(runs, of, to, what="images_per_s"):
    return getattr(runs[of], what) / getattr(runs[to], what)


def trained(*names):
    return paired.rows(runs.recorded("h200/02-accuracy"), [*names])


def chapter(name):
    path = course.course_root() / f"dlojz/chapters/n02_amp/{name}.toml"
    return tomllib.loads(path.read_text())


@claims("02_amp")
def test_the_gain_is_that_of_this_edit_alone():
    found = steps()
    logs = [log.read(runs.recorded(f"h200/09-ladder-resnet50-{n}")) for n in LADDER.values()]
    assert not any(found.probe.numerics.cudnn_benchmark for found in logs)
    assert list(LADDER) == list(n02.FORMATS)
    gains = [ratio(found, p, "fp32") for p in ("bf16", "fp16")]
    yield "bf16 is {:.1f} times as fast as fp32 here, and fp16 {:.1f} times".format(*gains)
    energy = ratio(found, "bf16", "fp32", "energy_per_image_j")
    yield (
        f"ResNet-50 in bf16 was {gains[0]:.1f} times as fast as in fp32, at {energy:.0%} of the "
        "energy"
    ).replace("%", " %")
    assert all(s.shares["update"] < 0.01 for s in found.values())


@claims("02_amp")
def test_the_activations_are_halved_in_the_recorded_run():
    found = steps()
    peaks = {p: s.peak_memory_bytes / 1e9 for p, s in found.items()}
    yield f"ResNet-50 with a batch of 256 peaks at {peaks['fp32']:.0f} GB in fp32"
    assert 0.49 < peaks["fp16"] / peaks["fp32"] < 0.53
    yield f"It has {found['fp32'].parameter_bytes / 4e6:.1f} million parameters"


@claims("02_amp")
def test_a_wait_for_the_scaler_is_the_length_of_the_queue():
    cases = log.read(runs.recorded("h200/02-updates")).cases
    work = statistics.fmean(np.median(case["work_ms"]) for case in cases.values())
    yield f"each update came behind {round(work, -1):.0f} ms of other work"
    waits = {name for name, case in cases.items() if np.median(case["host_ms"]) > 40}
    assert waits == {"one by one, with a scaler", "in groups, with a scaler"}
    assert {name for name, case in cases.items() if case["reads"]} == waits


def test_tf32_saves_no_memory_and_energy_falls_with_time_or_more():
    found = models()
    for model in {model for model, _ in found}:
        mine = {p: s for (m, p), s in found.items() if m == model}
        assert mine["tf32"].peak_memory_bytes > 0.97 * mine["fp32"].peak_memory_bytes, model
        faster = ratio(mine, "fp16", "fp32")
        less = 1 / ratio(mine, "fp16", "fp32", "energy_per_image_j")
        assert less > 0.97 * faster, model
        assert (less > 1.05 * faster) >= ("resnet" in model), model


def test_models_gain_as_the_answer_says():
    found, told = models(), chapter("answers")["02 from the figures"]
    speeds = [found["resnet50", p].images_per_s for p in ("fp32", "tf32", "fp16")]
    assert "{:,.0f} images/s in fp32, {:,.0f} in TF32 and {:,.0f} in fp16".format(*speeds) in told
    assert 0.45 < (speeds[1] - speeds[0]) / (speeds[2] - speeds[0]) < 0.55
    names = {model for model, _ in found}
    gains = {m: ratio(found, (m, "fp16"), (m, "tf32")) for m in names}
    assert min(gains, key=gains.get) == "densenet121"
    assert max(gains, key=gains.get) == "vgg19"
    assert f"{gains['densenet121']:.2f} times" in told
    assert f"{gains['vgg19']:.2f} times" in told


def test_formats_and_most_mistakes_show_no_difference():
    _, *same = trained("tf32", "fp16", "bf16", *MISTAKES)
    words = {row.difference.word for row in same}
    assert len(same) == 7
    assert words.isdisjoint({paired.BETTER, paired.WORSE})


def test_the_others_lose_what_the_quiz_says():
    clean, *worse = trained("pure-bf16", "clipped", "not-unscaled")
    pure, clipped, forgotten = worse
    assert [row.difference.word for row in worse] == [paired.WORSE] * 3
    assert len(clean.accuracies) == 5
    assert max(pure.points) < 0
    assert max(clipped.points) < 0
    assert abs(statistics.fmean(forgotten.accuracies.values()) - 1 / 24) < 0.002
    answers = {a["text"]: a["why"] for a in chapter("quiz")["amp-mistakes"]["answers"]}
    assert f"{-pure.difference.mean:.1f} points" in answers["`model.to(torch.bfloat16)`"]
    _, outside, scaler = trained("loss-outside", "no-scaler")
    for text, row in (("The loss outside autocast", outside), ("fp16 without a scaler", scaler)):
        assert f"{row.difference.half:.1f} points would have been seen" in answers[text]
