"""What notebook 03 and its answers say of recordings is in the recordings."""

import numpy as np
from claims import claims

from dlojz import runs
from dlojz.chapters import n03_channels_last as n03
from dlojz.runs import log
from dlojz.runs.stats import summary
from dlojz.widgets.answer import ANSWERS

MODELS = ("resnet50", "resnet152", "densenet121", "vgg19")
WAYS = ("nchw", "nhwc")


def run(name):
    return summary(runs.recorded(name))


def gain(name, batch):
    """Return how many times as fast channels_last is."""
    first, last = (run(f"{name}-{way}-b{batch:04d}") for way in WAYS)
    return last.images_per_s / first.images_per_s


def split(name):
    """Return a recorded step by kind (ms), for each case."""
    cases = log.read(runs.recorded(name)).cases
    return {case: n03.step_by_kind(found, cases["neither"]) for case, found in cases.items()}


def saved(steps, kind):
    return round(steps["neither"][kind] - steps["both"][kind])


@claims("03_channels_last")
def test_most_of_the_gain_is_in_batch_normalization():
    steps = split("h100/03-layouts-fp16")
    whole = sum(steps["neither"].values())
    assert round(whole / steps["neither"]["change of layout"]) == 7
    assert (
        steps["both"]["change of layout"]
        < 0.1
        < 1
        < steps["both, and .contiguous()"]["change of layout"]
    )
    yield "About a seventh of the step is dark red"
    layout, normal, convolution = (
        saved(steps, kind) for kind in ("change of layout", "batch normalization", "convolution")
    )
    yield f"which saves {layout} ms. Batch normalization saves {normal} ms"
    yield f"the convolutions themselves only {convolution}"
    assert normal > 0.5 * (whole - sum(steps["both"].values()))
    for one in ("images only", "weights only"):
        assert sum(steps[one].values()) < 1.02 * sum(steps["both"].values())


@claims("03_channels_last")
def test_in_fp32_the_conversions_cost_more_than_normalization_saves():
    steps = split("h100/03-layouts")
    more = -saved(steps, "change of layout")
    normal = saved(steps, "batch normalization")
    assert more > normal > 0
    yield f"takes {more} ms more. Batch normalization still saves {normal}."


def test_each_model_gains_with_tensor_cores_and_loses_in_fp32():
    for model in MODELS:
        for precision in ("tf32", "fp16", "bf16"):
            assert gain(f"h100/03-{model}-{precision}", 256) > 1, (model, precision)
    for model in MODELS[:3]:
        assert 0.9 < gain(f"h100/03-{model}-fp32", 256) < 1, model


@claims("03_channels_last")
def test_a_small_batch_gains_less():
    name = "h200/03-resnet50-fp16"
    small, large = gain(name, 64), gain(name, 256)
    yield f"in fp16 {small:.2f} times instead of {large:.2f}."
    yield f"became {large:.2f} times as fast with 256 images, and {small:.2f} times with 64"
    for precision in ("tf32", "bf16", "fp16"):
        other = f"h200/03-resnet50-{precision}"
        assert gain(other, 64) < gain(other, 256)
    first, last = (run(f"{name}-{way}-b0064").ahead_ms for way in WAYS)
    yield f"In NCHW it was {first:.0f} ms ahead of the GPU."
    assert last < 1
    yield "less than a millisecond ahead"
    peaks = {f"{run(f'{name}-{way}-b0256').peak_memory_bytes / 1e9:.1f}" for way in WAYS}
    yield f"both recorded runs peaked at {' and '.join(peaks)} GB"


@claims("03_channels_last")
def test_the_smallest_good_batch_is_larger_in_channels_last():
    share = {}
    for way in WAYS:
        speed = {
            b: run(f"h200/03-resnet50-fp16-{way}-b{b:04d}").images_per_s for b in (64, 128, 256)
        }
        share |= {(way, b): 100 * speed[b] / speed[256] for b in speed}
    yield "In NCHW 64 images reached {:.0f} % of the speed of 256.".format(share["nchw", 64])
    yield "it is {:.0f} %, and 128 images reach {:.0f} %".format(
        share["nhwc", 64], share["nhwc", 128]
    )


@claims("03_channels_last")
def test_the_autotuner_pays_off_in_fp32_and_costs_memory():
    off, on = (run(f"h100/{n}-b0256") for n in ("01-resnet50-fp32", "03-resnet50-fp32-nchw"))
    peaks = [s.peak_memory_bytes / 1e9 for s in (off, on)]
    yield "peaked at {:.1f} GB without the autotuner, and at {:.1f} GB with it".format(*peaks)
    more = 100 * on.images_per_s / off.images_per_s - 100
    assert f"in true fp32 and NCHW it was worth {more:.0f} %" in ANSWERS["03 what if"]


@claims("03_channels_last")
def test_the_search_takes_seconds_and_finds_nothing_in_fp16():
    times = {}
    for word in ("off", "on"):
        for m in log.read(runs.recorded(f"h100/03-autotuner-{word}")).measures:
            times.setdefault((m.what, word), []).append(m.value)
    (one, six) = dict.fromkeys(what for what, _ in times)
    assert times[one, "on"][0] > 2000 > times[one, "off"][0]
    assert np.median(times[one, "on"][1:]) > 0.97 * np.median(times[one, "off"][1:])
    assert min(times[six, "on"][:6]) > 2 * max(times[six, "on"][6:])
    yield "the first step took seconds. After that the two lines coincide"
    yield "From step 7 on, all sizes are known."


def test_the_layout_is_worth_what_the_answer_says():
    name, told = "h100/03-resnet50-bf16", ANSWERS["03 from the figures"]
    assert f"{run(f'{name}-nhwc-b0256').images_per_s:,.0f} images/s in channels_last" in told
    assert f"{gain(name, 256):.2f} times as many as in NCHW" in told
