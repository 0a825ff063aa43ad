"""What notebooks 05 and 05b and their answers say of recordings is in the recordings."""

import math
import statistics
import tomllib
from functools import cache

from claims import claims

from dlojz import course, runs
from dlojz.chapters import n05_dataloader as n05
from dlojz.figures import paired, report
from dlojz.runs.stats import summary
from dlojz.widgets.answer import ANSWERS

V1, V2 = "PIL, v1, float32", "torchvision, v2, uint8"


@cache
def found(way):
    return [summary(r) for r in runs.recordings(f"h100/05-resnet50-bf16-{way}*")]


def speed(way):
    return statistics.median(s.images_per_s for s in found(way))


def one_core():
    """Return the images per CPU-second of each way to a crop."""
    ways = n05.ways(runs.recorded("h100/05-decoders"))
    return {way.name: way.median for way in ways if way.kind == "road"}


def answers():
    path = course.course_root() / "dlojz/chapters/n05_dataloader/answers.toml"
    return tomllib.loads(path.read_text())


@claims("05_dataloader")
def test_files_are_as_fast_as_synthetic_images_and_faster_than_pil():
    files, synthetic, pil = (speed(way) for way in ("files", "synthetic", "pil"))
    yield f"{100 * (files / pil - 1):.0f} % faster than before the edit"
    mean = statistics.fmean(s.images_per_s for s in found("synthetic"))
    yield f"as fast from files as without: {files:,.0f} and {mean:,.0f} images/s"
    pairs = zip(found("files"), found("synthetic"), strict=True)
    ratios = [f.images_per_s / s.images_per_s for f, s in pairs]
    assert all(0.99 < ratio < 1.01 for ratio in ratios)
    assert synthetic > pil


def test_the_time_lost_with_pil_is_in_all_phases():
    """As the notebook says: a little data, then transfer, and the GPU waits for its launches."""
    (pil,), files = found("pil"), found("files")[0]
    more = {phase: pil.phase_ms[phase] - files.phase_ms[phase] for phase in pil.phase_ms}
    assert all(more[phase] > 0.5 for phase in ("data", "transfer", "forward", "backward")), more


@claims("05_dataloader")
def test_cores_together_make_less_than_their_product():
    (pil,) = found("pil")
    ready = n05.ready(n05.trial(runs.recorded("h100/05-resnet50-bf16-pil")))
    each = one_core()[V1]
    yield f"make 16 times {each:.0f} images/s, which is {round(16 * each, -2):,.0f}"
    total = pil.arguments["test_nsteps"]
    made = pil.images_per_s * (total - ready) / total
    yield f"made about {round(made, -2):,.0f}"
    yield f"of its {total} batches, {ready} were ready when the clock started"
    assert 0.7 < made / (16 * each) < 0.8, "the answer says three quarters"


def test_the_answers_divide_what_is_recorded():
    cores, mean = one_core(), statistics.fmean(s.images_per_s for s in found("synthetic"))
    told = answers()["05 from the figures"]
    assert f"{mean:,.0f} / {cores[V2]:.0f}, so {math.ceil(mean / cores[V2])} cores" in told
    assert f"{mean:,.0f} / {cores[V1]:.0f}, so {math.ceil(mean / cores[V1])}, with" in told
    told = answers()["05 what if"]
    assert f"{math.ceil(2500 / 8)} images/s" in told
    pil = sorted(speed for name, speed in cores.items() if name.startswith("PIL"))
    assert all(f"{one:.0f}" in told for one in cores.values()), (pil, cores)


def test_a_batch_is_a_quarter_in_bytes():
    values = 256 * 3 * 224 * 224
    assert (round(values / 1e6, 1), round(4 * values / 1e6)) == (38.5, 154)


@claims("05b_storage")
def test_no_faster_way_to_make_images_is_shown_to_cost_accuracy():
    clean, *others = paired.rows(runs.recorded("h200/05-accuracy"))
    ways = {row.title: row for row in others}
    resized, rough, mixed, large, small = (
        ways[title]
        for title in (
            "decoded and resized by torchvision",
            "resized without antialias",
            "the training resized without antialias",
            "RandomResizedCrop",
            "RandomResizedCrop of images made smaller before",
        )
    )
    assert len(clean.accuracies) == 5
    assert {row.difference.word for row in (resized, rough, mixed)} == {"no difference shown"}
    yield f"A loss of {resized.difference.half:.1f} points would have shown with torchvision's"
    yield f"one of {rough.difference.half:.1f} without antialias"
    yield f"a loss below {mixed.difference.half:.1f} points would not have shown"
    small_is, large_is = (100 * statistics.fmean(r.accuracies.values()) for r in (small, large))
    yield f"{small_is:.1f} and {large_is:.1f} % are right"
    between = paired.difference(large.accuracies, small.accuracies)
    assert abs(between.mean) < between.half
    yield f"a difference below {100 * between.half:.1f} points would not have shown"


def test_shards_shorten_the_time_of_an_image_as_the_answer_says():
    cases = report.measured(runs.recorded("cpu/05-storage")).cases
    files, shards = (
        {what: 1000 / statistics.median(speeds) for what, speeds in case["images_per_s"].items()}
        for case in (cases["files, full size"], cases["shards, full size"])
    )
    decode = files["decoded"] - files["warm"]
    said = ANSWERS["05b from the figures"]
    assert f"takes {files['cold']:.1f} ms to read and {decode:.1f} ms to decode" in said
    saved = (files["cold"] - shards["cold"]) / (files["cold"] + decode)
    assert f"to {shards['cold']:.1f} ms: {100 * saved:.0f} % in all" in said
