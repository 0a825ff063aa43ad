"""Tables of `dlojz worth compile`: a prediction, and its errors for models of torchvision."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dlojz.chapters.n09_compile import breakeven, figures
from dlojz.chapters.n09b_modes import worth
from dlojz.course import UserError
from dlojz.runs import stats
from dlojz.table import Table

PARTS = {
    "matrix": ("matrix products and convolutions", "leaves them to the library"),
    "normalization": ("normalization", "fuses it with its neighbours"),
    "rest": ("elementwise and the rest", "fuses them"),
}
UPDATE = "update: optimizer, metrics"
SIDES = {worth.DEVICE: "GPU", worth.HOST: "host"}
WHEN = {  # the host needs longer: eager, compiled
    (False, False): "The GPU decides here",
    (True, True): "The host decides here",
    (True, False): "The host decides here, until the model is compiled",
    (False, True): "The host decides here, once the model is compiled",
}
HOST_VARIES = (
    "How long a host takes depends on what else it does, so the gain is not known well. A larger "
    "batch keeps the GPU busy."
)


def step(row: Mapping) -> Table:
    """Return a table of the parts of an eager step's time, with a compiler's options for each.

    row: what `training.worth` has written.
    """
    profile = worth.Profile.of(row["profile"])
    rows = [
        (PARTS[part][0], f"{ms:.2f}", str(profile.launches.get(part, "")), PARTS[part][1])
        for part, ms in profile.device_ms.items()
    ]
    host = ("Python between operations", "leaves less of it")
    if profile.on_gpu:
        host = ("the host launches all this in", "launches less")
    rows.append((UPDATE, f"{profile.update_ms:.2f}", "", "nothing: it is not the model's"))
    rows.append((host[0], f"{_host_ms(profile):.2f}", "", host[1]))
    head = ("an eager step, under the profiler", "ms", "kernels", "what a compiler does")
    return Table(head, rows, "<>><")


def _host_ms(profile):
    return profile.host_ms + profile.update_host_ms


def about(row: Mapping) -> str:
    """Return the measurements in words: the eager step, one block, the whole model if compiled.

    row: what `training.worth` has written.
    """
    profile = worth.Profile.of(row["profile"])
    block, threads = profile.block, row["threads"]
    where = f"{row['device']}{f', threads: {threads}' if threads else ''}, torch {row['torch']}"
    lines = [
        f"{row['command']}\n{where}, mode {row['mode']}: {profile.step_ms:.2f} ms a step, eager",
        f"\n{step(row)}\n",
        f"one block: {block.name}, {block.operations} of {profile.operations} operations, compiled "
        f"in {block.compile_s:.0f} s, alone x {block.gain:.2f}",
    ]
    if "measured" in row:
        lines.append(f"the whole model, measured: {measured_text(row['measured'])}")
        lines.append(f"pays after: {steps_text(worth.measured_break_even(row))}, measured")
    return "\n".join(lines)


def answer(row: Mapping, steps: int | None) -> str:
    """Return the prediction, its conclusion, and its omissions."""
    profile, fit, found = _predicted(row)
    unseen = worth.unseen(profile, fit, row["device"], row["torch"])
    side, models = SIDES[found.decides], fit.decided[found.decides]
    like = f", of {models} where the {side} decides," if profile.on_gpu else ""
    origin = f"{fit.models} models{like} on {fit.device}, torch {fit.torch}, {fit.date}."
    not_seen = "\n".join(f"- {text}" for text in unseen)
    lines = (
        prediction(found, row),
        decided(profile, fit),
        sentence(found, steps),
        f"Coefficients of {origin}\nLeft out, or guessed:\n{not_seen}",
    )
    return "\n\n".join(str(text) for text in lines if text)


def to_dict(row: Mapping, steps: int | None) -> dict:
    """Return measurements and predictions for JSON. Infinite steps are None."""
    try:
        profile, fit, found = _predicted(row)
    except UserError as error:
        return dict(row) | {"prediction": None, "why": str(error)}
    ranges = {name: asdict(getattr(found, name)) for name in ("gain", "compile_s", "break_even")}
    finite = {
        name: {end: None if math.isinf(value) else value for end, value in ends.items()}
        for name, ends in ranges.items()
    }
    return dict(row) | {
        "prediction": finite,
        "decides": found.decides,
        "answer": None if steps is None else found.answer(steps),
        "fit": asdict(fit),
        "unseen": worth.unseen(profile, fit, row["device"], row["torch"]),
    }


def of_a_run(run, mode: str) -> str:
    """Return the gain of compiling a watched run's model, whose cost is not in the run."""
    s = stats.summary(run)
    profile = worth.of_a_run(run, s.step_ms)
    fit = worth.fit_for(s.device_name, profile.on_gpu, mode)
    decides = worth.decides(profile, fit.keeps)
    gain = worth.Range.within(worth.gain(profile, fit.keeps), fit.gain_within[decides])
    ends = (gain.value, gain.low, gain.high)
    even, most, least = (breakeven.steps(60, profile.step_ms, each) for each in ends)
    pays = "would never pay" if math.isinf(even) else f"would pay after {steps_text(even)}"
    return "\n\n".join(
        [
            f"job {s.name}, {s.device_name}, mode {mode}: {profile.step_ms:.2f} ms a step, eager",
            str(step({"profile": asdict(profile)})),
            f"gain x {gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f}). A minute of compiling "
            f"{pays} ({_count(least)} to {_count(most)}).",
            f"Coefficients of {fit.models} models on {fit.device}, torch {fit.torch}. How long "
            "compiling takes, graph breaks and recompilations are not in a run: name the model, "
            '`dlojz worth compile "module:function -b 64"`.',
        ]
    )


def _predicted(row):
    profile = worth.Profile.of(row["profile"])
    fit = worth.fit_for(row["device"], profile.on_gpu, row["mode"])
    return profile, fit, worth.predict(profile, fit)


def prediction(found: worth.Prediction, row: Mapping) -> Table:
    """Return a table of gain, compile time and break-even, beside any measured ones."""
    even = found.break_even
    rows = [
        ("gain", f"x {found.gain.value:.2f}", f"{found.gain.low:.2f} to {found.gain.high:.2f}"),
        ("to compile, cold", _s(found.compile_s.value), _interval(found.compile_s, _s)),
        ("break-even", steps_text(even.value), _interval(even, _count)),
    ]
    head, align = ("", "predicted", "interval (90 %)"), "<>>"
    if measured := row.get("measured"):
        steps = steps_text(worth.measured_break_even(row))
        measurements = (f"x {measured['gain']:.2f}", _s(worth.total_s(row)), steps)
        rows = [(*row, value) for row, value in zip(rows, measurements, strict=True)]
        head, align = (*head, "measured"), align + ">"
    return Table(head, rows, align)


def decided(profile: worth.Profile, fit: worth.Fit) -> str:
    """Return a sentence on the side that decides a step on a GPU; "" on a processor."""
    if not profile.on_gpu:
        return ""
    steps = [worth.sides_ms(profile, kept) for kept in (worth.NOTHING_DONE, fit.keeps)]
    when = WHEN[tuple(ms[worth.HOST] >= ms[worth.DEVICE] for ms in steps)]
    ms = [f"{ms[side]:.1f}" for ms in steps for side in (worth.DEVICE, worth.HOST)]
    told = (
        f"{when}: an eager step takes the GPU {ms[0]} ms to compute, and its host {ms[1]} ms to "
        f"launch. Compiled, {ms[2]} and {ms[3]} ms are expected."
    )
    if worth.decides(profile, fit.keeps) == worth.DEVICE:
        return told
    return f"{told} {HOST_VARIES}"


def _interval(found, text):
    return f"{text(found.low)} to {text(found.high)}"


def _s(seconds):
    return f"{seconds:.0f} s"


def steps_text(steps: float) -> str:
    """Return "2,100 steps", with two significant digits, or "never"."""
    return f"{_count(steps)} steps" if math.isfinite(steps) else _count(steps)


def _count(steps):
    """Return a number of steps with two significant digits, because more would look exact."""
    return "never" if math.isinf(steps) else f"{float(f'{steps:.2g}'):,.0f}"


def sentence(found: worth.Prediction, steps: int | None) -> str:
    """Return a conclusion, for a training run of `steps` steps if given."""
    even = found.break_even
    if math.isinf(even.value):
        text = "Compiling is not expected to pay, however long you train"
    else:
        likely = "may pay," if math.isinf(even.high) else "should pay"
        text = (
            f"Compiling {likely} after about {steps_text(even.value)} ({_interval(even, _count)})"
        )
    if steps is None and math.isinf(even.value):
        return f"{text}."
    if steps is None:
        return f"{text}. Give --steps, and this says whether your training run is long enough."
    answer = found.answer(steps)
    more = " (--measure compiles the whole model)" if answer == worth.OPEN else ""
    return f"{text}. You train {steps:,} steps: {answer}{more}."


def measured_text(measured: Mapping) -> str:
    """Return a measurement in a few words."""
    pairs = zip(measured["eager_ms"], measured["compiled_ms"], strict=True)
    low, high = figures.median_interval([eager / compiled for eager, compiled in pairs])
    gain = f"x {measured['gain']:.2f} ({low:.2f} to {high:.2f})"
    return f"{gain}, compiled in {measured['compile_s']:.0f} s once the compiler had started"


# The errors --------------------------------------------------------------------------------------


def of_devices(rows: Sequence[Mapping]) -> dict[tuple[str, str], list]:
    """Return the measured models, by device and mode.

    rows: from the JSON of tools/worth.py.
    """
    found = defaultdict(list)
    for row in rows:
        if "measured" in row:
            found[row["device"], row["mode"]].append(row)
    return dict(found)


def measured(file: Path, mode: str = "default") -> list[dict]:
    """Return the models of a recording on one device, measured in this mode.

    file: such as reference/cpu/09-worth.json.
    """
    rows = json.loads(file.read_bytes())
    return [row for row in rows if "measured" in row and row["mode"] == mode]


def scores(rows: Sequence[Mapping]) -> Table:
    """Return a table of each model's prediction by a fit of all others, beside its measurement.

    rows: of one device and mode. Deciding sides and flags are shown where they differ.
    """
    flags, held = _differing(rows), worth.leave_one_out(rows)
    found = [
        (SIDES[told.decides], row["model"], own, *_score(row, told))
        for row, own, told in zip(rows, flags, held, strict=True)
    ]
    found.sort(key=lambda cells: list(SIDES.values()).index(cells[0]))
    head = ("decides", "model", "flags", "gain", "measured")
    head += ("compile s", "measured", "steps", "measured")
    same = [i for i in (0, 2) if len({cells[i] for cells in found}) == 1]
    shown = [i for i in range(len(head)) if i not in same]
    head, *found = [[cells[i] for i in shown] for cells in (head, *found)]
    return Table(head, found, "".join("<<<>>>>>>"[i] for i in shown))


def _differing(rows):
    flags = [re.findall(r"-\S+(?: [^-]\S*)*", row["flags"]) for row in rows]
    common = set.intersection(*map(set, flags))
    return [" ".join(flag for flag in mine if flag not in common) for mine in flags]


def _score(row, prediction):
    """Yield gain, seconds to compile and break-even, each predicted and measured."""
    gain, seconds = row["measured"]["gain"], worth.total_s(row)
    for expected, value, text in (
        (prediction.gain, gain, "{:.2f}".format),
        (prediction.compile_s, seconds, "{:.0f}".format),
        (prediction.break_even, worth.measured_break_even(row), _count),
    ):
        yield f"{text(expected.value)} ({_interval(expected, text)})"
        yield text(value) if value in expected else f"{text(value)} (outside)"
