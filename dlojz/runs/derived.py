"""The figures of a run's steps, from the logs of its processes: the fields of a `stats.Summary`."""

import math
from collections import Counter

import numpy as np

from dlojz.runs import log
from dlojz.runs.columns import PHASES

MIN_ENERGY_WINDOW_S = 2.0  # the counter moves every 100 ms: 5 % of this


def measured(run) -> np.ndarray:
    """Return the indices of the measured steps: in the windows or, if none, after the warm-up."""
    if run.windows:
        spans = [(w["first_step"], w["first_step"] + w["steps"]) for w in run.windows]
        return np.concatenate([np.arange(a, min(b, len(run.steps))) for a, b in spans])
    return np.arange(run.first_step + run.setup.get("warmup_steps", 0), len(run.steps))


def step_times(run) -> tuple[str, dict[str, np.ndarray]]:
    """Return the clock ("device" where there is one) and its milliseconds, by phase and step."""
    clock = "device" if len(run.steps.device_ms["data"]) == len(run.steps) > 0 else "host"
    times = run.steps.device_ms if clock == "device" else run.steps.host_ms
    return clock, {phase: np.asarray(times[phase]) for phase in PHASES}


def lead_ms(run) -> float | None:
    """Return the lead of a process over its device in a measured step, in ms; None if unknown."""
    ahead = np.asarray(run.steps.ahead_ms)[measured(run)]
    known = ahead[~np.isnan(ahead)]  # NaN before the window
    return float(np.median(known)) if len(known) else None


def speed(ranks) -> dict:
    """Return the times of the steps, the throughput and the energy, as far as they are known."""
    first = ranks[0]
    chosen = measured(first)
    clock, times = step_times(first)
    times = {phase: values[chosen] for phase, values in times.items()}
    steps_ms = sum(times.values())
    told = _told_speed(ranks)
    images, wall_s = _timed_speed(ranks) if first.stopwatch else told
    found = {"seconds": sum(map(sum, first.steps.host_ms.values())) / 1000}
    if not (wall_s and images and 0 < steps_ms.sum() < math.inf):
        return found
    found |= {
        "steps": len(chosen),
        "clock": clock,
        "images_per_s": images / wall_s,
        "step_ms": float(np.median(steps_ms)),
        "step_ms_spread": tuple(np.percentile(steps_ms, (10, 90)).tolist()),
        "phase_ms": {p: float(v.mean()) for p, v in times.items()},
        "shares": {p: float(v.sum() / steps_ms.sum()) for p, v in times.items()},
    }
    if (tokens := np.asarray(first.steps.tokens)[chosen]).all():
        rows = np.asarray(first.steps.images)[chosen]
        found["tokens_per_s"] = found["images_per_s"] * float(tokens.sum() / rows.sum())
    if first.setup.get("train_images"):
        found["epoch_s"] = first.setup["train_images"] / found["images_per_s"]
    if clock == "device":
        found["device_images_per_s"] = 1000 * images / steps_ms.sum()
        leads = [ms for ms in map(lead_ms, ranks) if ms is not None]
        found["ahead_ms"] = min(leads, default=None)
    windows = [window for run in ranks for window in run.windows]
    if wall_s >= MIN_ENERGY_WINDOW_S and windows and all("energy_j" in w for w in windows):
        energy = sum(w["energy_j"] for w in windows)
        images, wall_s = told  # the sensors' window, which a stopwatch's is not
        found |= {"energy_per_image_j": energy / images, "power_w": energy / wall_s}
    return found


def _timed_speed(ranks):
    """Return the images and seconds of the windows that a check timed from outside."""
    windows = [r.stopwatch.windows for r in ranks]
    images = sum(w["images"] for own in windows for w in own)
    return images, max(sum(w["wall_s"] for w in own) for own in windows)


def _told_speed(ranks):
    """Return the images and seconds of the Chronometer's windows."""
    images = sum(int(np.asarray(r.steps.images)[measured(r)].sum()) for r in ranks)
    return images, max(_wall_s(r) for r in ranks)


def _wall_s(run):
    if run.windows:
        return sum(w["wall_s"] for w in run.windows)
    return sum(np.asarray(ms)[measured(run)].sum() for ms in run.steps.host_ms.values()) / 1000


def compiled(run) -> dict:
    """Return the time and the graphs of torch.compile; {} for a run without it."""
    seen = run.compilation
    if not seen.graphs:
        return {}
    breaks, seconds = sum(seen.breaks.values()), compile_seconds(run)
    return {
        "compile_s": seconds,
        # The log's times are whole seconds.
        "compile_share": min(1.0, seconds / run.seconds) if run.seconds else None,
        "compile_cached": seen.cached,
        "graphs": seen.graphs,
        "graph_breaks": breaks,
    }


def compile_seconds(run: log.Run) -> float:
    """Return the seconds of compiling, in training and validation.

    Of a step it is what the compiler says, or what the step took longer than others: the compiler
    counts neither the kernels that it tries before it chooses one, nor how they are loaded.
    """
    host = np.add(run.steps.host_ms["forward"], run.steps.host_ms["backward"])
    told = Counter()
    for one in run.compilation.seen:
        told[one["mode"], run.first_step + one["step"] - 1] += one["seconds"]
    longer = ((host - np.median(host)) / 1000).tolist() if len(host) else []
    return sum(
        max(seconds, longer[step]) if mode == "train" and 0 <= step < len(longer) else seconds
        for (mode, step), seconds in told.items()
    )


def first_load_s(ranks) -> float | None:
    """Return the time until the first batch was there, in the slowest process."""
    found = [r.steps.host_ms["data"][r.first_step] for r in ranks if len(r.steps) > r.first_step]
    return max(found) / 1000 if found else None


def memory(ranks) -> dict:
    """Return the peak of the fullest process, its limit, and the host memory of all of them."""
    memories = [r.memory for r in ranks if r.memory]
    kind = "device" if any("device_peak_bytes" in m for m in memories) else "process"
    peaks = [m[f"{kind}_peak_bytes"] for m in memories if f"{kind}_peak_bytes" in m]
    held = [[w["host_memory_bytes"] for w in r.windows if "host_memory_bytes" in w] for r in ranks]
    return {
        "host_memory_bytes": sum(map(max, held)) if all(held) else None,
        "memory_of": kind,
        "peak_memory_bytes": max(peaks, default=None),
        "memory_limit_bytes": next((m.get("device_total_bytes") for m in memories), None),
    }


def disturbance(ranks) -> dict:
    """Return the readings of the sensors in the worst window."""
    windows = [w for r in ranks for w in r.windows]
    clocks = [w["sm_clock_mhz"] for w in windows if "sm_clock_mhz" in w]
    return {
        "others_cpu": max((w["others_cpu"] for w in windows if "others_cpu" in w), default=None),
        "sm_clock_mhz": (max(map(max, clocks)), min(c[1] for c in clocks)) if clocks else None,
        "throttled": tuple(dict.fromkeys(word for w in windows for word in w.get("throttled", ()))),
    }


def divergence(ranks) -> str:
    """Return the training's loss and its first step, in words, if it is not finite; else ""."""
    if ranks[0].setup.get("device") == "meta":  # whose tensors have no values
        return ""
    steps = min(len(rank.steps) for rank in ranks)
    losses = np.array([np.asarray(rank.steps.loss)[:steps] for rank in ranks])
    wrong = ~np.isfinite(losses)
    lost = wrong.any(axis=0)
    if not lost.any():
        return ""
    first, count = int(lost.argmax()), int(lost.sum())
    if count == steps - first:
        value = losses[wrong[:, first], first][0]
        return f"{value} from step {first + 1} of {steps} on"
    return f"not finite in {count} of {steps} steps, first in step {first + 1}"


def skipped(run) -> tuple[int, int] | None:
    """Return the numbers of updates that a gradient scaler skipped, and of those due."""
    made, accumulate = run.whole.optimizer_steps, run.start.get("arguments", {}).get("accumulate")
    if run.whole.scale is None or made is None:
        return None
    steps = np.asarray(run.steps.step)[run.first_step :]
    due = int(((steps + 1) % (accumulate or 1) == 0).sum())
    return max(0, due - made), due
