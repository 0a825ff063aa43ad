"""The figures of a run, computed from logs whose answers are known; and those of pairs of runs."""

import json
import math
import random
import subprocess
import sys
import warnings
from dataclasses import replace

import made
import pytest
from logs import write_log

from dlojz.figures import batch_sweep
from dlojz.figures.report import inspect_run
from dlojz.runs import stats
from dlojz.runs.columns import PHASES
from dlojz.runs.folder import events_file, recordings
from dlojz.runs.stats import Summary, compare, summary


def test_the_figures_of_a_cpu_run(tmp_path):
    s = summary(write_log(tmp_path / "run.jsonl"))
    assert s.state == "COMPLETED"
    assert s.steps == 7
    assert s.clock == "host"
    assert s.images_per_s == pytest.approx(320)
    assert s.device_images_per_s is None
    assert s.step_ms == pytest.approx(100)
    assert s.shares == pytest.approx(
        {"data": 0.1, "transfer": 0.01, "forward": 0.2, "backward": 0.6, "update": 0.09}
    )
    assert s.epoch_s == pytest.approx(20)
    assert s.peak_memory_bytes == 500_000_000
    assert s.memory_of == "process"
    unseen = (s.energy_per_image_j, s.others_cpu, s.sm_clock_mhz, s.host_memory_bytes)
    assert unseen == (None,) * 4, "no sensor is not zero"
    assert s.throttled == ()
    assert s.validation_s == 2.0
    assert s.synthetic


def test_the_figures_of_a_gpu_run(tmp_path):
    path = write_log(
        tmp_path / "run.jsonl",
        device=True,
        steps=43,
        window={"first_step": 3, "steps": 40, "wall_s": 4.0, "energy_j": 2000.0},
        memory={"device_peak_bytes": 7, "device_total_bytes": 80, "process_peak_bytes": 9},
    )
    s = summary(path)
    assert s.clock == "device"
    assert s.device_images_per_s == pytest.approx(320)
    assert s.ahead_ms == 40
    assert s.power_w == pytest.approx(500)
    assert s.energy_per_image_j == pytest.approx(2000 / (40 * 32))
    assert (s.peak_memory_bytes, s.memory_of, s.memory_limit_bytes) == (7, "device", 80)


def test_the_lead_of_a_run_is_that_of_the_process_for_which_the_others_wait(tmp_path):
    for rank in range(2):
        write_log(events_file(tmp_path, rank), device=True, rank=rank, size=2)
    late = events_file(tmp_path, 1)
    late.write_text(late.read_text().replace('"ahead_ms": 40.0', '"ahead_ms": 0.5'))
    assert summary(tmp_path).ahead_ms == 0.5
    assert "0 ms ahead of the device (median; of the process that is least" in repr(
        inspect_run(tmp_path)
    )


def test_a_run_too_short_to_know_how_far_the_host_was_ahead_does_not_say(tmp_path):
    path = write_log(tmp_path / "run.jsonl", device=True, steps=4)
    path.write_text(path.read_text().replace(', "ahead_ms": 40.0', ""))
    with warnings.catch_warnings(action="error"):
        s = summary(path)
    assert s.clock == "device"
    assert s.ahead_ms is None


def test_power_and_energy_of_a_timed_run_are_of_its_sensors_window(tmp_path):
    window = {"first_step": 3, "steps": 40, "wall_s": 4.0, "energy_j": 2000.0}
    path = write_log(tmp_path / "events.jsonl", device=True, steps=43, window=window)
    made.stopwatch(tmp_path, images=32, steps=43, step_s=0.09)
    s = summary(path)
    assert s.images_per_s == pytest.approx(32 / 0.09)
    assert s.power_w == pytest.approx(500)
    assert s.energy_per_image_j == pytest.approx(2000 / (40 * 32))


def test_energy_over_less_than_seconds_is_not_shown(tmp_path):
    window = {"first_step": 3, "steps": 7, "wall_s": 0.7, "energy_j": 350.0}
    assert summary(write_log(tmp_path / "r.jsonl", window=window)).energy_per_image_j is None


def test_several_processes_add_their_images_and_take_the_slowest_wall(tmp_path):
    slow = {"first_step": 3, "steps": 7, "wall_s": 1.4}
    write_log(tmp_path / "events.jsonl", size=2)
    write_log(tmp_path / "events.rank1.jsonl", size=2, rank=1, window=slow)
    assert summary(tmp_path).images_per_s == pytest.approx(2 * 32 * 7 / 1.4)


def test_a_killed_run_is_measured_over_its_steps(tmp_path):
    path = write_log(
        tmp_path / "r.jsonl", window=None, validation=None, epoch=None, memory=None, end=None
    )
    s = summary(path)
    assert s.state == "RUNNING"
    assert s.images_per_s == pytest.approx(320)
    assert s.peak_memory_bytes is None
    assert "no end" in s.notes[-1]


def test_a_run_of_warm_up_only_has_no_speed(tmp_path):
    s = summary(write_log(tmp_path / "r.jsonl", steps=2, window=None))
    assert s.images_per_s is None
    assert s.step_ms is None


def test_out_of_memory_is_a_state(tmp_path):
    end = {"outcome": "out_of_memory", "time": "2026-01-02T03:05:05", "error": "CUDA out of memory"}
    s = summary(write_log(tmp_path / "r.jsonl", steps=0, window=None, end=end))
    assert s.state == "OUT_OF_MEMORY"
    assert s.reason == "CUDA out of memory"


def test_the_memory_that_does_not_grow_with_the_batch_is_found(tmp_path):
    def run(batch):
        memory = {"process_peak_bytes": 1000 + 30 * batch}
        return summary(write_log(tmp_path / f"{batch}.jsonl", batch=batch, memory=memory))

    runs = [run(batch) for batch in (4, 16, 64)]
    fit = batch_sweep.fit_memory(runs)
    assert fit.fixed_bytes == pytest.approx(1000)
    assert fit.per_image_bytes == pytest.approx(30)
    assert batch_sweep.fit_memory(runs[:1]) is None


def test_what_disturbed_a_run_is_that_of_its_worst_window(tmp_path):
    path = write_log(tmp_path / "r.jsonl", device=True)
    calm = {"others_cpu": 0.1, "sm_clock_mhz": [1980, 1950], "throttled": []}
    bad = {"others_cpu": 0.7, "sm_clock_mhz": [1965, 1410], "throttled": ["power cap"]}
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"window"' in line)
    window = json.loads(lines[at])
    lines[at : at + 1] = [json.dumps(window | extra) for extra in (calm, bad, calm)]
    path.write_text("\n".join(lines) + "\n")
    s = summary(path)
    assert s.windows == 3
    assert s.others_cpu == 0.7
    assert s.sm_clock_mhz == (1980, 1410)
    assert s.throttled == ("power cap",)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"others_cpu": 0.2}, ""),
        ({"others_cpu": 0.92}, "others kept 0.9 of 2 CPUs busy: repeat it"),
        ({"sm_clock_mhz": (1980, 1410)}, "the GPU's clock fell from 1980 to 1410 MHz"),
        ({"sm_clock_mhz": (1980, 1410), "throttled": ("power cap",)}, ""),
        (
            {"others_cpu": 2, "throttled": ("power cap", "power brake")},
            "others kept 2.0 of 2 CPUs busy: repeat it; "
            "the GPU had lowered its clock (power brake)",
        ),
    ],
)
def test_what_disturbed_a_run_is_one_sentence(changes, text):
    assert Summary("1", "COMPLETED", cpus=2, **changes).disturbance == text


# Paired comparison --------------------------------------------------------------------------


def ran(speed, device="cpu", **changes):
    """The summary of a run at this speed, in images/s, that nothing disturbed."""
    fields = {
        "state": "COMPLETED",
        "model": "resnet18",
        "data": "synthetic",
        "image_size": 64,
        "batch_size": 32,
        "device": device,
        "device_name": "X1",
        "cpus": 8,
        "windows": 1,
        "images_per_s": speed,
        "shares": {"data": 0.01, "forward": 0.99},
    }
    return Summary("0042", **fields | changes)


def pairs(ratios, device="cpu"):
    return [ran(100, device) for _ in ratios], [ran(100 * r, device) for r in ratios]


def test_the_ratio_and_its_interval_as_computed_by_hand():
    # The logarithms are 0.1 ... 0.6: mean 0.35, s = sqrt(0.175 / 5), t(5) = 2.5706 in any table.
    found = compare(*pairs([math.exp(k / 10) for k in range(1, 7)]))
    half = 2.5706 * math.sqrt(0.175 / 5) / math.sqrt(6)
    assert found.ratio == pytest.approx(math.exp(0.35))
    assert found.low == pytest.approx(math.exp(0.35 - half), rel=1e-4)
    assert found.high == pytest.approx(math.exp(0.35 + half), rel=1e-4)
    assert (found.pairs, found.word, found.margin) == (6, "faster", 0.03)
    assert found.warnings[1:] == ()
    assert "disturbed: the speeds after spread" in found.warnings[0]


@pytest.mark.parametrize(
    ("values", "t"), [(2, 12.706), (6, 2.571), (8, 2.365), (12, 2.201), (20, 2.093), (31, 2.042)]
)
def test_students_t_is_that_of_the_tables(values, t):
    numbers = [math.sin(k) for k in range(values)]
    mean = sum(numbers) / values
    error = math.sqrt(sum((x - mean) ** 2 for x in numbers) / (values - 1) / values)
    assert stats.half_width(numbers) / error == pytest.approx(t, abs=5e-4)


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="1 value: an interval needs at least 2"):
        stats.half_width([1.0])


@pytest.mark.parametrize(("device", "margin"), [("cpu", 0.03), ("cuda:0", 0.01)])
def test_a_difference_must_clear_the_margin_of_the_hardware(device, margin):
    over, under = 1.001 + margin, 0.999 + margin
    found = [compare(*pairs([ratio] * 6, device)) for ratio in (over, under, 1 / under, 1 / over)]
    none = "no difference shown"
    assert [c.word for c in found] == ["faster", none, none, "slower"]
    assert [c.warnings for c in found] == [()] * 4


def test_an_interval_that_lies_above_1_but_not_above_the_margin_says_so():
    found = compare(*pairs([1.012, 1.02, 1.016] * 2))
    assert (found.low > 1, found.word) == (True, "no difference shown")
    assert str(found).endswith("6 pairs): no difference of over 3 % shown")
    assert str(compare(*pairs([0.99, 1.02] * 3))).endswith("6 pairs): no difference shown")


def test_the_interval_must_clear_the_margin_and_not_the_mean_alone():
    assert compare(*pairs([1.0, 1.2] * 3)).word == "no difference shown"
    assert compare(*pairs([1.0, 1 / 1.2] * 3)).word == "no difference shown"


def test_each_run_is_compared_with_its_own_partner():
    drifting = [100 * 1.5**i for i in range(6)]
    found = compare([ran(v) for v in drifting], [ran(1.2 * v) for v in drifting])
    assert found.ratio == pytest.approx(1.2)
    assert found.low == pytest.approx(1.2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_too_few_pairs_show_no_difference_whatever_their_ratio(count):
    found = compare(*pairs([2.0] * count))
    assert (found.ratio, found.low, found.high) == (pytest.approx(2), None, None)
    assert found.word == "no difference shown"
    assert f"{count} pair" in found.warnings[0]
    assert "6 are needed" in found.warnings[0]
    assert f"submit {6 - count} more" in found.warnings[0]


def test_a_comparison_is_one_readable_line():
    noisy = compare(*pairs([1.36, 1.48] * 3))
    assert str(noisy) == "1.42 times as fast (95 % interval 1.35 to 1.49, 6 pairs): faster"
    narrow = compare(*pairs([1.0231] * 6, "cuda:0"))
    assert str(narrow) == "1.023 times as fast (95 % interval 1.023 to 1.023, 6 pairs): faster"
    assert str(compare(*pairs([1.4]))) == "1.40 times as fast (1 pair): no difference shown"


@pytest.mark.parametrize(
    ("field", "was", "now", "text"),
    [
        ("batch_size", 32, 64, "batch size 32 before, 64 after"),
        ("image_size", 64, 128, "image size 64 before, 128 after"),
        ("model", "resnet18", "resnet50", "model resnet18 before, resnet50 after"),
        ("data", "synthetic", "data", "data synthetic before, data after"),
        ("size", 1, 2, "number of processes 1 before, 2 after"),
        ("device_name", "X1", "Y2", "device X1 before, Y2 after"),
    ],
)
def test_runs_of_something_else_are_not_comparable(field, was, now, text):
    before = [ran(100, **{field: was}) for _ in range(6)]
    after = [ran(200, **{field: was if i < 5 else now}) for i in range(6)]
    found = compare(before, after)
    assert not found.comparable
    assert found.warnings == (f"not comparable: {text}; submit both alike",)
    assert str(found).endswith("faster, but the runs are not comparable")


def test_another_device_can_be_what_is_compared():
    before = [ran(10) for _ in range(6)]
    after = [ran(500, "cuda:0", device_name="H100") for _ in range(6)]
    found = compare(before, after, same_hardware=False)
    assert found.comparable
    assert found.warnings == ()
    assert found.margin == 0.03, "one of them is a CPU"
    after = [ran(500, "cuda:0", device_name="H100", batch_size=64) for _ in range(6)]
    assert not compare(before, after, same_hardware=False).comparable


def spreading(spread):
    """Speeds of a mean of 100 with this standard deviation."""
    half = 100 * spread * math.sqrt(5 / 6)
    return [100 - half, 100 + half] * 3


@pytest.mark.parametrize(("device", "limit"), [("cpu", 0.05), ("cuda:0", 0.02)])
def test_speeds_that_spread_are_disturbed(device, limit):
    calm = [ran(v, device) for v in spreading(0.98 * limit)]
    assert compare(calm, calm).warnings == ()
    wild = [ran(v, device) for v in spreading(1.02 * limit)]
    (warning,) = compare(wild, calm).warnings
    assert warning.startswith(f"disturbed: the speeds before spread by {1.02 * limit:.1%}")
    (warning,) = compare(calm, wild).warnings
    assert warning.startswith("disturbed: the speeds after spread by")


@pytest.mark.parametrize(
    ("calm", "changes", "text"),
    [
        (
            {"throttled": ()},
            {"throttled": ("power cap", "board limit")},
            "the GPU had lowered its clock in 1 of 6 runs after (power cap, board limit)",
        ),
        (
            {"sm_clock_mhz": (1980, 1890)},
            {"sm_clock_mhz": (1900, 1860)},
            "the GPU's clock fell from 1980 to 1860 MHz in the runs after",
        ),
        (
            {"others_cpu": 0.79},
            {"others_cpu": 0.81},
            "others kept up to 0.8 of 8 CPUs busy in 1 of 6 runs after; stop them and measure "
            "again",
        ),
    ],
)
def test_what_disturbed_one_run_is_said(calm, changes, text):
    before = [ran(100, "cuda:0", **calm) for _ in range(6)]
    assert compare(before, before).warnings == ()
    after = [*before[:5], ran(100, "cuda:0", **calm | changes)]
    assert compare(before, after).warnings == (f"disturbed: {text}",)


def test_runs_that_wait_for_images_say_so_and_synthetic_ones_do_not():
    def waiting(share, data):
        return [ran(100, data=data, shares={"data": share}) for _ in range(6)]

    assert compare(waiting(0.19, "files"), waiting(0.19, "files")).warnings == ()
    (warning,) = compare(waiting(0.21, "files"), waiting(0.19, "files")).warnings
    assert warning.startswith("data-bound: the runs before waited for images for 21% of a step")
    assert warning.endswith("--data synthetic")
    assert compare(waiting(0.5, "synthetic"), waiting(0.5, "synthetic")).warnings == ()
    once = [*waiting(0.1, "files")[:5], *waiting(0.9, "files")[:1]]  # a hiccup of the storage
    assert compare(once, once).warnings == ()


def lengthen(path, step, phase, ms):
    """Make a phase of a step longer in a log."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    next(event for event in events if event.get("step") == step)["host_ms"][phase] += ms
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_warm_up_and_compilation_are_no_part_of_the_speed(tmp_path):
    quick, slow = (write_log(tmp_path / f"{i}.jsonl", warmup=3) for i in (1, 2))
    lengthen(slow, 1, "forward", 60_000)
    found = compare([quick] * 6, [slow] * 6)
    assert found.ratio == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 2, "window": None}, r"run r \(after\) measured nothing: .* with more steps"),
        ({"window": None}, r"run r \(after\) measured nothing"),
        (
            {"end": {"outcome": "failed", "time": "2026-01-02", "error": "Boom"}},
            r"run r \(after\) is FAILED \(Boom\), expected COMPLETED: see its stderr.txt",
        ),
        ({"end": None}, r"run r \(after\) is RUNNING, expected COMPLETED: wait for it"),
    ],
)
def test_a_run_without_a_speed_is_named_with_what_to_do(changes, message, tmp_path):
    good = write_log(tmp_path / "good.jsonl")
    bad = write_log(tmp_path / "r.jsonl", **changes)
    with pytest.raises(ValueError, match=message):
        compare([good, good], [good, bad])


@pytest.mark.parametrize(("before", "after"), [(0, 0), (5, 6)])
def test_runs_come_in_pairs(before, after):
    with pytest.raises(ValueError, match=f"{before} runs before and {after} after: expected pairs"):
        compare([ran(100)] * before, [ran(100)] * after)


def share_of(word, gain, noise, margin, trials=1000):
    draw, count = random.Random(7), 0
    for _ in range(trials):
        speeds = [(1 + draw.gauss(0, noise), gain * (1 + draw.gauss(0, noise))) for _ in range(6)]
        count += stats.judge([a / b for b, a in speeds], margin)[-1] == word
    return count / trials


def test_equal_runs_with_noise_are_told_apart_in_one_trial_of_twenty():
    error = 3 * math.sqrt(0.05 * 0.95 / 1000)
    shares = [share_of(word, 1, 0.02, margin=0) for word in ("faster", "slower")]
    assert sum(shares) == pytest.approx(0.05, abs=error)
    assert min(shares) > 0.01, "as often the one as the other"


def test_a_gain_of_5_percent_is_found_through_noise_of_1_percent():
    assert share_of("faster", 1.05, 0.01, stats.MARGIN_GPU, 200) > 0.97
    assert share_of("slower", 1 / 1.05, 0.01, stats.MARGIN_GPU, 200) > 0.97
    assert share_of("faster", 1.05, 0.01, stats.MARGIN_CPU, 200) > 0.6, "2 % beyond the margin"


NAN, INF = math.nan, math.inf
LOSSES = {  # of each process
    "all finite": ([[2.0, 1.0]], ""),
    "from a step on": ([[2.0, NAN, INF]], "nan from step 2 of 3 on"),
    "from the first on": ([[INF, NAN]], "inf from step 1 of 2 on"),
    "of the last": ([[1.0, 2.0, -INF]], "-inf from step 3 of 3 on"),
    "and back": ([[1.0, NAN, INF, 1.0]], "not finite in 2 of 4 steps, first in step 2"),
    "of another process": ([[1.0, 1.0, 1.0], [1.0, NAN, NAN]], "nan from step 2 of 3 on"),
}


@pytest.mark.parametrize(("losses", "told"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_not_finite_is_told_from_which_step_on(losses, told, tmp_path):
    for rank, own in enumerate(losses):
        size = {"rank": rank, "size": len(losses)}
        write_log(events_file(tmp_path, rank), steps=len(own), losses=own, **size)
    assert summary(tmp_path).divergence == told


def test_a_rehearsal_without_values_has_no_loss_that_could_be_finite(tmp_path):
    file = write_log(tmp_path / "a.jsonl", losses=[NAN] * 10, setup={"device": "meta"})
    assert summary(file).divergence == ""


def test_a_run_that_diverged_is_not_compared():
    before, after = pairs([1.5] * 6)
    found = compare(before, [replace(s, divergence="nan from step 2 of 8 on") for s in after])
    assert not found.comparable
    assert "not comparable: the loss is nan from step 2 of 8 on in 6 of 6 runs" in found.warnings[0]


@pytest.mark.parametrize(("accumulate", "made", "skipped"), [(1, 7, (3, 10)), (4, 2, (0, 2))])
def test_the_updates_that_a_scaler_skipped_are_those_that_were_due_and_not_made(
    accumulate, made, skipped, tmp_path
):
    given = {"accumulate": accumulate}
    seen = {"when": "whole", "optimizer_steps": made, "scale": 8192.0}
    found = summary(write_log(tmp_path / "a.jsonl", arguments=given, evidence=seen))
    assert (found.skipped, found.scale) == (skipped, 8192)
    del seen["scale"]
    found = summary(write_log(tmp_path / "a.jsonl", arguments=given, evidence=seen))
    assert found.skipped is None, "without a scaler"


def test_recorded_scalers_halved_their_scale_at_each_update_that_they_skipped():
    found = [summary(path) for path in recordings("h200/03-resnet*-fp16-*")]
    found = [s for s in found if s.skipped]
    assert {s.skipped[0] for s in found} >= {1, 2, 3, 6}
    assert [s.scale for s in found] == [2.0 ** (16 - s.skipped[0]) for s in found]


@pytest.mark.parametrize("ms", [0, NAN, INF])
def test_steps_that_took_no_time_or_no_number_have_no_speed(ms, tmp_path):
    window = {"first_step": 3, "steps": 7, "wall_s": 1.0}
    path = write_log(tmp_path / "a.jsonl", ms=dict.fromkeys(PHASES, ms), window=window)
    found = summary(path)
    assert (found.shares, found.step_ms, found.images_per_s) == ({}, None, None)
    assert "0.0%" not in repr(inspect_run(path))


def test_reading_figures_imports_neither_torch_nor_scipy():
    code = "import sys, dlojz.runs.stats; sys.exit(bool({'torch', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_host_memory_is_summed_and_the_first_batch_is_the_slowest(tmp_path):
    for rank, (name, held) in enumerate((("events", 5), ("events.rank1", 7))):
        window = {"first_step": 3, "steps": 7, "wall_s": 0.7, "host_memory_bytes": held}
        ms = dict(zip(PHASES, (10 + rank, 1, 20, 60, 9), strict=True))
        write_log(tmp_path / f"{name}.jsonl", size=2, rank=rank, window=window, ms=ms)
    s = summary(tmp_path)
    assert s.host_memory_bytes == 12
    assert s.first_load_s == pytest.approx(0.55)  # the log's first steps take 50 times as long


def compiled(path, *why, step=2, seconds=3, **more):
    """The log of a run that compiled for these reasons in this step, each time for `seconds`."""
    seen = [
        {"id": "0/0", "why": each, "mode": "train", "step": step, "seconds": seconds}
        for each in why
    ]
    seen += more.pop("besides", [])
    return write_log(path, evidence={"when": "compilation", "seen": seen, "graphs": 2, **more})


def test_code_from_a_cache_has_its_backward_pass_with_it(tmp_path):
    """So it says nothing of what compiling costs. A processor's aot_eager generates no code."""
    s = summary(compiled(tmp_path / "run.jsonl", "dynamo", seconds=6, generated=3))
    assert s.compile_cached
    assert "compiling took 6 s, 10% of the job; the code for training came" in repr(inspect_run(s))
    assert not summary(compiled(tmp_path / "run.jsonl", "dynamo", generated=0)).compile_cached


def test_kernels_that_are_tried_are_part_of_what_compiling_took(tmp_path):
    """The compiler says 5 s of the sixth step, which took 9 s longer than the others."""
    besides = [{"id": "0/0", "why": "dynamo", "mode": "val", "step": 9, "seconds": 2.0}]
    log_file = compiled(tmp_path / "run.jsonl", "dynamo", step=6, seconds=5.0, besides=besides)
    assert summary(log_file).compile_s == 7.0
    lengthen(log_file, 5, "backward", 9000)
    assert summary(log_file).compile_s == pytest.approx(9 + 2)


def test_what_the_compiler_took_is_told(tmp_path):
    breaks = {"a print": 1}
    s = summary(compiled(tmp_path / "run.jsonl", "dynamo", "lazy_backward", breaks=breaks))
    assert (s.compile_s, s.graphs, s.graph_breaks) == (6, 2, 1)
    assert "2 graphs, 1 break; compiling took 6 s, 10% of the job" in repr(inspect_run(s))
    assert not s.compile_cached
    eager = summary(write_log(tmp_path / "eager.jsonl"))
    assert eager.compile_s is None
    assert not eager.compile_cached
    assert "compiler" not in repr(inspect_run(eager))


def test_a_run_whose_images_a_stopwatch_saw_none_of_has_no_speed(tmp_path):
    write_log(tmp_path / "events.jsonl")
    made.stopwatch(tmp_path, images=0, steps=10, step_s=0.1)
    assert summary(tmp_path).images_per_s is None
