"""The diagnosis of any training run in three lines: its time, the suspect, and what cures it."""

from dlojz.runs import stats
from dlojz.runs.folder import path_of
from dlojz.traces import breakdown, kinds, suspects
from dlojz.traces.trace import TraceError, open_traces

CURES = {  # of the suspects' faults: the notebook that teaches it
    "item": "04_profiler",
    "print": "04_profiler",
    "garbage": "04_profiler",
    "elsewhere": "04_profiler",
    "waits": "04_profiler",
    "pauses": "04_profiler",
    "one-worker": "05_dataloader",
    "unpinned": "05_dataloader",
    "copies": "05_dataloader",
    "updates": "02_amp",
    "small-calls": "09_compile",
    "small-batch": "09_compile",
    "nchw": "03_channels_last",
    "allocator": "01b_memory",
    "straggler": "06b_scaling",
    "communication": "06b_scaling",
}
OF_LOSSES = {  # where no fault was found: by what most of the time is lost to
    breakdown.LAUNCHES: "09_compile",
    breakdown.PYTHON: "09_compile",
    breakdown.DATA: "05_dataloader",
    breakdown.COMMUNICATION: "06b_scaling",
    breakdown.COPIES: "05_dataloader",
}
UNEVEN = 1.1  # mean of the steps' times, in medians, above which both are told
SLOW_FORMAT = 0.5  # share of matrix products on tensor cores, below which a format is the cure


def diagnosis(run) -> list[str]:
    """Return three lines on a run: where its time goes, what is suspected, what teaches the cure.

    Raises UserError for a run without a log.
    """
    s = stats.summary(run)
    if not s.step_ms:
        return [
            "too few steps were measured: the first three are left out, so train a little longer"
        ]
    parts = ", ".join(f"{name} {share:.0%}" for name, share in s.shares.items())
    mean = s.mean_step_ms
    step = f"{_figure(mean)} ms on average"
    if mean > UNEVEN * s.step_ms:  # a late worker is waited for in some steps, not in most
        step += f" and {_figure(s.step_ms)} ms in the median"
    lines = [f"time: a step takes {step} ({s.clock} clock): {parts}"]
    try:
        traces = open_traces(path_of(run))
    except TraceError:
        return [*lines, "suspect: no trace, which is of steps 16 and 17: train a little longer"]
    suspect = suspects.suspects(traces, mean)[0]
    reading = breakdown.analyse(traces[0]).without_profiler(mean)
    lines.append(f"suspect: {suspects.sentence(suspect)}")
    cure = CURES.get(suspect.fault)
    cause, share = next(iter(reading.lost.items()), ("", 0.0))
    waited = s.shares["data"] if breakdown.DATA not in reading.lost else 0.0
    if cure is None and waited > max(stats.DATA_BOUND, share):
        lines[-1] += f"; but {waited:.0%} of the time is before the forward pass, in other steps"
        cure = OF_LOSSES[breakdown.DATA]
    elif cure is None and share > 1 - breakdown.BOUND:
        cure = OF_LOSSES.get(cause)
    matrix = reading.kinds.get(kinds.MATRIX, 0.0) / reading.step_ms
    slow = reading.tensor_cores is not None and reading.tensor_cores < SLOW_FORMAT
    if cure is None and slow and matrix > 1 - breakdown.BOUND:
        lines[-1] = (
            f"suspect: matrix products are not on tensor cores (certain): they take {matrix:.0%} "
            f"of the step, and {reading.tensor_cores:.0%} of that is on tensor cores"
        )
        cure = "02_amp"
    return [*lines, f"cure: notebook {cure}" if cure else "cure: no notebook, for what was seen"]


def _figure(ms):
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
