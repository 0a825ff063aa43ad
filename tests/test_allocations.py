"""Experiments and figures of notebook 01b: what is in memory in a step, and what is held for it."""

import pickle

import matplotlib as mpl
import pytest
from claims import claims
from logs import with_cases
from programs import load

mpl.use("Agg")
import torch
from torch.cuda import _memory_viz

from dlojz import course, runs
from dlojz.chapters import session
from dlojz.chapters.n01b_memory import figures
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.runs import log, memory
from dlojz.runs.stats import summary
from dlojz.training import imports

MIB = 2**20
SMALL = ("--model", "resnet18", "--image-size", "64")


def texts(ax):
    return [text.get_text() for text in ax.texts]


# Moments -----------------------------------------------------------------------------------------

EVENTS = [(0, 4 * MIB, ""), (1, 8 * MIB, "forward"), (2, 2 * MIB, "forward")]
EVENTS += [(2, -2 * MIB, "backward"), (1, -8 * MIB, "backward"), (0, -4 * MIB, "update")]
PARTS = {0: "parameters", 1: "activations", 2: "activations"}


def test_moments_are_what_is_alive_after_each_event():
    alive = load("alive")
    found = alive.over_time(EVENTS, PARTS, range(1, 5))
    assert [moment["event"] for moment in found] == [0, 1, 2, 3]
    assert [moment["phase"] for moment in found] == ["forward"] * 2 + ["backward"] * 2
    kept = [moment["parts"].get("activations", 0) / MIB for moment in found]
    assert kept == [8, 10, 8, 0]
    assert all(moment["parts"]["parameters"] == 4 * MIB for moment in found)
    assert all(moment["parts"]["cublas"] == memory.CUBLAS_BYTES for moment in found)
    held = [moment["reserved"] for moment in found]
    assert held == sorted(held), "the allocator gives nothing back"


def test_of_many_moments_the_highest_are_kept(monkeypatch):
    alive = load("alive")
    monkeypatch.setattr(alive, "POINTS", 2)
    found = alive.over_time(EVENTS, PARTS, range(6))
    assert [moment["event"] for moment in found] == [2, 3]
    assert max(sum(m["parts"].values()) for m in found) == 14 * MIB + memory.CUBLAS_BYTES


def test_a_trace_counts_tensors_and_segments():
    trace = [("segment_alloc", 20), ("alloc", 6), ("alloc", 3), ("free_requested", 6)]
    trace += [("free_completed", 6), ("segment_free", 20)]
    found = load("snapshot").traced({"action": action, "size": size} for action, size in trace)
    assert [allocated for _, allocated, _ in found] == [0, 6, 9, 9, 3, 3]
    assert [reserved for _, _, reserved in found] == [20] * 5 + [0]


# The experiments, for real -----------------------------------------------------------------------


def test_accumulation_counts_a_quarter_of_the_activations(ran):
    folder = ran("alive", *SMALL, "-b", "64", "--accumulate", "1", "4")
    whole, parts = log.read(folder).cases.values()
    assert [*log.read(folder).cases] == ["64 images at once", "4 x 16 images"]
    most = [max(m["parts"].get("activations", 0) for m in case["at"]) for case in (whole, parts)]
    assert most[1] == pytest.approx(most[0] / 4, rel=0.05)
    peak = max(whole["at"], key=lambda moment: sum(moment["parts"].values()))
    assert peak["phase"] in ("forward", "backward")
    for case in (whole, parts):
        last = case["at"][-1]["parts"]
        weights = last["parameters"]
        assert last["gradients"] == last["optimizer"] == weights
        assert last.get("activations", 0) < 0.01 * weights
    axes = figures.plot_update(folder)
    titles = [ax.get_title("left") for ax in axes]
    assert titles == ["64 images at once, fp32", "4 x 16 images, fp32"]
    assert {"forward", "backward"} <= set(texts(axes[0]))
    assert any(text.startswith("peak: ") for text in texts(axes[1]))


def test_the_peak_of_a_counted_update_is_that_of_the_estimate(ran):
    folder = ran("alive", *SMALL, "-b", "8")
    trainer = imports.trainer(course.solution("01_gpu"))
    plan = estimate.Plan("resnet18", 1, "ddp", 8, 64, "off", "fp32")
    expected = max(peak.bytes for peak in estimate.measured(trainer, plan).values())
    counted = log.read(folder).measures[0].value
    assert counted == pytest.approx(expected, rel=0.002), "the first update is not in it"


def test_activations_grow_with_the_pixels(ran):
    alive = ("alive", "--model", "resnet18", "-b", "8", "--image-size")
    small, large = (figures.by_size([ran(*alive, size)]).rows[0] for size in ("64", "128"))
    assert [row[:2] for row in (small, large)] == [("64 px", "12.3 kB"), ("128 px", "49.2 kB")]
    assert float(large[2].split()[0]) == pytest.approx(4 * float(small[2].split()[0]), rel=0.05)


def test_an_update_that_cannot_be_cut_is_refused(ran):
    with pytest.raises(UserError, match=r"--accumulate 3: expected a divisor of -b 64"):
        ran("alive", *SMALL, "-b", "64", "--accumulate", "3")


def test_accumulated_gradients_differ_by_rounding_unless_batches_are_normalized(ran):
    folder = ran("accumulated", *SMALL, "-b", "16")
    apart = {(m.what, m.variant): m.value for m in log.read(folder).measures}
    own, same = dict.fromkeys(what for what, _ in apart)
    assert apart[same, "loss"] < 1e-6
    assert apart[same, "gradient"] < 1e-4
    assert apart[own, "loss"] > 1e-5
    assert apart[own, "gradient"] > 0.01
    assert [row[0] for row in figures.distances(folder).rows] == [own, same]


def test_a_snapshot_without_a_gpu_has_torch_s_format(ran):
    folder = ran("snapshot", *SMALL, "-b", "8")
    snapshot = pickle.loads((folder / "snapshot.pickle").read_bytes())
    [trace] = snapshot["device_traces"]
    alive, end = {}, 0
    for entry in trace:
        where = entry["addr"], entry["addr"] + entry["size"]
        if entry["action"] == "segment_alloc":
            assert where[0] == end, "segments follow each other"
            end = where[1]
        elif entry["action"] == "alloc":
            assert 0 <= where[0] < where[1] <= end, "in a segment"
            assert all(where[1] <= a or b <= where[0] for a, b in alive.items()), "nothing overlaps"
            alive[where[0]] = where[1]
        elif entry["action"] == "free_completed":
            del alive[where[0]]
    assert "cudaMalloc" in _memory_viz.trace(snapshot), "torch's own reader"
    case = log.read(folder).cases["counted"]
    assert case["entries"] == len(trace)
    assert max(case["allocated"]) <= max(case["reserved"]) == end
    assert "counted" in figures.plot_snapshot(folder).figure.get_supxlabel()


def test_on_a_gpu_torch_records_the_snapshot(ran, monkeypatch):
    """As far as a machine without one can tell: torch's recorder is replaced, the steps are run."""
    calls = []
    trace = [{"action": "segment_alloc", "size": 2 * MIB, "addr": 0, "frames": []}]
    trace += [{"action": "alloc", "size": MIB, "addr": 0, "frames": []}]
    recorder = torch.cuda.memory
    monkeypatch.setattr(recorder, "_record_memory_history", lambda **how: calls.append(how))
    monkeypatch.setattr(recorder, "_snapshot", lambda: {"device_traces": [[], trace]})
    module = load("snapshot")
    trainer = imports.trainer(course.solution("01_gpu"))
    plan = estimate.Plan("resnet18", 1, "ddp", 2, 32, "off", "fp32")
    found = module.recorded(trainer, plan, torch.device("cpu"))
    assert found["device_traces"][1] == trace
    assert calls == [{"max_entries": module.ENTRIES, "stacks": "python"}, {"enabled": None}]


# Recorded runs -----------------------------------------------------------------------------------


def test_what_was_held_is_drawn_beyond_what_was_in_use():
    recorded = {b: runs.recorded(f"h100/01-resnet50-fp32-b{b:04d}") for b in (64, 512)}
    ax = figures.plot_held(None, recorded)
    assert [text.strip() for text in texts(ax)] == [
        "5.91 GB of 6.18 GB held",
        "45.2 GB of 52.3 GB held",
    ]


@claims("01b_memory")
def test_what_the_notebook_says_of_the_recorded_parts_is_so():
    whole, parts = (
        summary(runs.recorded(f"h200/01-{name}"))
        for name in ("resnet50-fp32-b0256", "accumulate-4x64")
    )
    assert whole.batch_size == 4 * parts.batch_size
    speed = parts.images_per_s / whole.images_per_s
    memory_of = parts.peak_memory_bytes / whole.peak_memory_bytes
    yield f"keeps {100 * speed:.0f} % of the speed in {100 * memory_of:.0f} % of the memory"


@claims("01b_memory")
def test_the_autotuner_takes_memory_that_is_in_no_tensor():
    names = ("01-resnet50-fp32-b0256", "09-ladder-resnet50-2-tf32", "03-resnet50-tf32-nchw-b0256")
    logs = [log.read(runs.recorded(f"h200/{name}")) for name in names]
    assert [found.probe.numerics.cudnn_benchmark for found in logs] == [False, False, True]
    peaks = [summary(found).peak_memory_bytes / 1e9 for found in logs]
    assert peaks[0] / peaks[1] < 1.03
    low, _, high = (peak - 22.5 for peak in peaks)
    yield f"at most {low:.1f} GB without the autotuner, {high:.1f} GB with it"
    yield f"in TF32 cuDNN's autotuner took {peaks[2] - peaks[1]:.1f} GB more"


@claims("01b_memory")
def test_what_the_notebook_says_of_the_recorded_gradients_is_so():
    found = log.read(runs.recorded("h200/01-accumulated"))
    away = {m.variant: m.value for m in found.measures if m.what == "the same statistics for all"}
    assert away["loss"] < 1e-7
    assert away["gradient"] == pytest.approx(5e-4, rel=0.1)
    yield "256 images, it was about five parts in ten thousand, although TF32 was off"
    arguments = found.start["arguments"]
    assert (arguments["model"], arguments["batch_size"]) == ("resnet50", 256)
    session.set_float32("fp32")
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"


@claims("01b_memory")
def test_what_the_notebook_says_of_the_recorded_snapshot_is_so():
    run = runs.recorded("h200/01-snapshot")
    case = log.read(run).cases["recorded"]
    tensors, held = case["allocated"], case["reserved"]
    yield f"At most {max(tensors) / 1e9:.1f} GB are in tensors, and {held[-1] / 1e9:.1f} are held"
    half = len(tensors) // 2
    top = max(range(half), key=lambda i: tensors[i])
    grown = [i for i in range(top + 1, half) if held[i + 1] > held[i]]
    large = [i for i in grown if held[i + 1] - held[i] > 100e6]
    assert large, "it rises while the tensors shrink"
    for i in large:
        assert held[i] - tensors[i] > 2 * (held[i + 1] - held[i]), "more than enough is free"
    assert len(set(held[half:])) == 1, "flat in the second step"
    figure = figures.plot_snapshot(run).figure
    assert figure.get_suptitle() == "At most 5.89 GB are tensors, 7.07 GB are held"
    assert figure.get_supxlabel().startswith("resnet50, 224 px, batch 64: recorded on NVIDIA H200")


def test_what_is_beyond_the_count_is_a_bar_of_its_own(tmp_path):
    moment = {"event": 0, "phase": "forward", "reserved": 23e9, "parts": {"activations": 22e9}}
    cases = {"256 images at once": {"precision": "fp32", "events": 1, "at": [moment]}}
    counted = with_cases(tmp_path / "alive.jsonl", cases)
    ax = figures.plot_held(counted, {"run": runs.recorded("h200/01-resnet50-fp32-b0256")})
    in_step, beyond, unused = [bar.get_width() for bar in ax.patches]
    kept = log.read(runs.recorded("h200/01-resnet50-fp32-b0256")).memory
    assert in_step == 22
    assert in_step + beyond == pytest.approx(kept["device_peak_bytes"] / 1e9)
    assert in_step + beyond + unused == pytest.approx(kept["device_reserved_bytes"] / 1e9)


def test_the_error_of_a_run_out_of_memory_is_shown_a_sentence_a_line():
    lines = figures.what_cuda_said(runs.recorded("h100/01-resnet50-fp32-b1024")).splitlines()
    assert lines[0] == "OutOfMemoryError: CUDA out of memory."
    assert any("reserved by PyTorch but unallocated" in line for line in lines)
    with pytest.raises(UserError, match="it was not out of memory"):
        figures.what_cuda_said(runs.recorded("h100/01-resnet50-fp32-b0064"))


def test_a_run_of_another_kind_is_refused(tmp_path):
    other = with_cases(tmp_path / "other.jsonl", {"a": {"step_ms": [1]}})
    with pytest.raises(UserError, match=r"expected a run of alive\.py"):
        figures.plot_update(other)
    with pytest.raises(UserError, match="no memory of a GPU in it"):
        figures.plot_held(None, {"cpu": runs.recorded("h100/00-resnet50-cpu-b0032")})


def test_fsdp_divides_what_stays_and_checkpointing_what_piles_up():
    cases = log.read(runs.recorded("cpu/11-alive")).cases
    ddp, fsdp, again = (
        [sum(m["parts"].get(part, 0) for part in ("parameters", "gradients", "optimizer"))
         for m in case["at"]] for case in cases.values()
    )  # fmt: skip
    assert max(ddp) > 7.5 * max(fsdp)
    assert max(fsdp) == pytest.approx(max(again), rel=0.05)
    piled = [max(m["parts"].get("activations", 0) for m in c["at"]) for c in cases.values()]
    assert piled[2] < 0.2 * piled[1]
    axes = figures.plot_update(runs.recorded("cpu/11-alive"))
    assert [ax.get_title(loc="left") or ax.get_title() for ax in axes][2].startswith(
        "FSDP, checkpointing"
    )
    enlarged = [len(ax.child_axes) for ax in axes]
    assert enlarged == [0, 0, 1], "a panel that is low beside the others has a scale of its own"
