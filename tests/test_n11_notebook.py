"""What notebook 11, its quiz and its answers say of recordings is in the recordings."""

import numpy as np
import pytest
from claims import claims

from dlojz import runs
from dlojz.chapters.n11_fsdp import figures
from dlojz.chapters.n11b_hybrid import figures as n11b
from dlojz.figures import plans
from dlojz.runs import derived, log
from dlojz.runs.stats import summary
from dlojz.training import models
from dlojz.widgets.answer import ANSWERS

PREDICTED = "cpu/11-predicted"
LARGE, SMALL = "vit_2b-b0032-off", "vit_600m-b0064-off"


def trained(name):
    """Return the summary of a training of a large model on H200."""
    return summary(runs.recorded(f"h200/11-{name}"))


def needed():
    """Return the predicted memory of each plan, as a Peak, by its name in the figure."""
    return figures.predicted(runs.recorded("cpu/11-fits"))


def ways(name):
    """Return the cases of an experiment with sharding.py of each process."""
    return [run.cases for run in log.read_ranks(runs.recorded(name))]


@claims("11_fsdp")
def test_the_plans_need_what_the_notebook_says():
    peaks = needed()
    gb = {name: peak.bytes / 1e9 for name, peak in peaks.items()}
    yield "for plans on 1 to 1,024 GPUs"
    assert {"1 GPU", "1,024 GPUs, FSDP"} <= {*peaks}
    held = ("parameters", "gradients", "optimizer", "casts")
    first = sum(peaks["1 GPU"].parts[part] for part in held) / 1e9
    yield f"that is 14 bytes each: {first:.0f} GB before the first image"
    alike = [gb[plan] for plan in ("1 GPU", "8 GPUs, DDP", "1,024 GPUs, DDP")]
    assert max(alike) < 1.01 * min(alike), "each of 1,024 GPUs needs as much as a single one"
    assert gb["64 GPUs, FSDP"] - gb["1,024 GPUs, FSDP"] < 0.02 * gb["64 GPUs, FSDP"]
    by_hand = 12 * 5.9 / 8 + 32 * 48 * 257 * 3200 * 2 / 1e9 + 1
    assert by_hand == pytest.approx(gb["8 GPUs, FSDP, checkpointing"], rel=0.03), "the formula"
    grows = [gb[f"{n} GPUs, FSDP, checkpointing"] for n in ("64", "1,024")]
    yield "*grows*, from {:.2f} to {:.2f} GB".format(*grows)
    gathered = [peaks[f"{n} GPUs, FSDP"].parts["gathered"] for n in ("64", "1,024")]
    assert gathered[1] - gathered[0] > 1e9 * (grows[1] - grows[0]), "it is the padding"
    most = []
    for plan in ("8 GPUs, FSDP", "8 GPUs, FSDP, checkpointing"):
        image = peaks[plan].parts["activations"] / 32
        most.append((80e9 - peaks[plan].bytes) // image + 32)
    assert most[0] == 49
    assert most[1] > 600, "`dlojz estimate --fits 80GB`: 626"
    yield "trains with 49 images on each, and with more than 600 if"
    left = gb["64 GPUs, FSDP, checkpointing"], gb["64 GPUs, FSDP"]
    assert "leaves {:.1f} GB of the {:.0f}".format(*left) in ANSWERS["11 from the figures"]


def test_no_width_of_the_largest_model_can_be_cut_evenly_by_1024():
    vit = models.LARGER["vit_6b"]
    assert all(width % 1024 for width in (vit.width, 3 * vit.width, vit.mlp))


@claims("11_fsdp")
def test_checkpointing_costs_what_the_notebook_says():
    found = figures.factors(runs.recorded("cpu/11-recompute"))
    blocks, but_products = found["blocks"], found["all but matrix products"]
    assert but_products["operations"] == 1 < blocks["operations"] < 4 / 3
    assert blocks["time"] == pytest.approx(but_products["time"], rel=0.1), "about that of *blocks*"
    off, again = (trained(f"vit_2b-b0032-{how}") for how in ("off", "blocks"))
    yield f"took {again.step_ms / off.step_ms:.2f} times as long"
    sizes = [s.peak_memory_bytes / 1e9 for s in (again, off)]
    yield "for {:.1f} GB instead of {:.1f}.".format(*sizes)


@claims("11_fsdp")
def test_fsdp2_sends_as_many_bytes_as_the_notebook_says():
    sent = {}
    for name in ("sharding-fp32-x2", "sharding-x2"):  # the second one in bf16
        run = runs.recorded(f"h200/11-{name}")
        sent[name] = [float(row[-1].split("x ")[1]) for row in figures.collectives(run).rows]
    assert sent == {"sharding-fp32-x2": [1, 1.5, 1, 1], "sharding-x2": [1, 1, 0.75, 0.75]}
    yield "In float32 that is 1.5 times the bytes"
    yield "then FSDP2 sends as many bytes as DDP"


@claims("11_fsdp")
def test_no_message_takes_longer_with_fsdp2_on_the_gpu_that_waited_less():
    spent = [
        [case["communication_ms"] for case in rank.values()] for rank in ways("h200/11-sharding-x2")
    ]
    ddp, fsdp2, *_ = np.min(spent, axis=0)
    yield f"all messages took {ddp:.1f} ms with DDP and {fsdp2:.1f} ms with FSDP2"


@claims("11_fsdp")
def test_ddp_is_faster_wherever_both_were_recorded():
    yield "It was faster in all our recordings"
    pairs = [("h200/11-{}-x2", f"{model}-{{}}") for model in (LARGE, SMALL)]
    pairs.append(("cpu/11-{}-x2", "cpu-{}"))
    for where, name in pairs:
        ddp, fsdp = (
            summary(runs.recorded(where.format(name.format(how)))) for how in ("ddp", "fsdp")
        )
        assert ddp.step_ms < fsdp.step_ms
    for name in ("sharding-x2", "sharding-fp32-x2"):
        ddp, *others = (np.median(case["step_ms"]) for case in ways(f"h200/11-{name}")[0].values())
        assert ddp < min(others)


@claims("11_fsdp")
def test_two_gpus_keep_as_much_of_their_speed_as_the_notebook_says():
    def kept(name, ddp):
        both = (trained(f"{each}-x2").images_per_s for each in (name, f"{ddp}-ddp"))
        return f"{100 * next(both) / next(both):.0f} %"

    shares = kept(f"{SMALL}-fsdp", SMALL), kept(f"{LARGE}-fsdp", LARGE)
    again = kept("vit_2b-b0032-blocks-fsdp", LARGE)
    yield "`vit_600m` kept {} of DDP's images per second, `vit_2b` {}".format(*shares)
    yield f", and {again} with checkpointing"
    speeds = [trained(f"vit_6b-b0064-off-fsdp{how}-x2").images_per_s for how in ("-compiled", "")]
    yield "at {:.0f} images/s instead of {:.0f}".format(*speeds)
    four = [trained(f"vit_6b-b0032-off-fsdp{how}-x4").images_per_s for how in ("", "-compiled")]
    yield "reach {:.0f}, or {:.0f} compiled".format(*four)


@claims("11_fsdp")
def test_hosts_are_as_late_as_the_notebook_says():
    lead = {
        name: [derived.lead_ms(run) for run in log.read_ranks(runs.recorded(f"h200/11-{name}-x2"))]
        for name in (f"{SMALL}-ddp", f"{SMALL}-fsdp", "vit_6b-b0064-off-fsdp")
    }
    both, (_, late), large = lead.values()
    yield f"both hosts are {min(both):.0f} ms ahead of their GPUs"
    assert round(min(both)) == round(max(both))
    yield f"one of them is {late:.1f} ms ahead"
    yield f"both are {min(large):.0f} ms or more ahead"


@claims("11_fsdp")
def test_predictions_are_as_close_as_the_notebook_says():
    pairs = [(s, plans.highest(case)[1]) for s, case in n11b.cases(runs.recorded(PREDICTED))]
    away = {n11b.run_name(s): s.peak_memory_bytes / p.bytes - 1 for s, p in pairs if s.completed}
    compiled = [away.pop(name) for name in [*away] if "compiled" in name]
    yield f"Compiled runs needed up to {-100 * min(compiled):.0f} % less"
    assert max(compiled) < 0.001
    twice = "vit_2b, 32 images, DDP on 2 GPUs"
    yield f"needed {100 * away.pop(twice):.0f} % more on one of its GPUs"
    first, second = (
        r.memory["device_peak_bytes"]
        for r in log.read_ranks(runs.recorded(f"h200/11-{LARGE}-ddp-x2"))
    )
    [peak] = [p for s, p in pairs if n11b.run_name(s) == twice]
    assert first == pytest.approx(peak.bytes, rel=0.005), "the other one needed what was predicted"
    assert second - peak.bytes == pytest.approx(peak.parts["gradients"], rel=0.02)
    assert len(away) == 10
    yield "Ten eager runs needed what `dlojz estimate` said, to within 0.7 %"
    assert 0.006 < max(map(abs, away.values())) < 0.007


@claims("11_fsdp")
def test_the_largest_model_does_not_fit_on_one_gpu():
    cases = {n11b.run_name(s): case for s, case in n11b.cases(runs.recorded(PREDICTED))}
    case = cases["vit_6b, 64 images, FSDP on 2 GPUs"]
    parts = plans.highest(case)[1].parts
    halves = sum(parts[part] for part in ("parameters", "gradients", "optimizer"))
    # One GPU has all of them, and autocast's copies of the weights in place of the gathered ones.
    alone = 2 * halves + parts["activations"] + 2 * case["parameters"]
    yield f"would need {alone / 1e9:.0f} GB on one GPU"
