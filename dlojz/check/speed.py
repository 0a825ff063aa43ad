"""The speed that the Chronometer logged in the timed runs, against the check's own clock."""

import statistics
from collections.abc import Sequence

from dlojz.check.exercise import SAME, Finding
from dlojz.check.wording import number
from dlojz.runs import derived, log

WHICH, HINT = (SAME, "marks", "Chronometer's speed"), "marks"
# The share that may be missing from the sum of the Chronometer's marks: a busy machine can hold a
# process between two marks.
CHRONOMETER, CHRONOMETER_S = 0.10, 0.010


def finding(runs: Sequence[log.Run]) -> list[Finding]:
    """Return a finding on the speed that the Chronometer logged in timed runs: it was measured."""
    found = [_speed_of(run) for run in runs if run.stopwatch.windows]
    return [f for f in found if f.fails][:1] or found[:1]


def _speed_of(run):
    windows = run.stopwatch.windows
    images, wall_s = (sum(w[name] for w in windows) for name in ("images", "wall_s"))
    # A busy machine may hold a process between the stopwatch's mark and the Chronometer's.
    slack_s = CHRONOMETER * wall_s + CHRONOMETER_S
    asked = f"{number(images / wall_s)} images/s, as the check's own clock measured"
    logged = _logged(run, windows)
    if logged is None:
        return Finding(*WHICH, False, "nothing", asked, HINT)
    counted, least_s, most_s = logged
    ok = counted == images and least_s - slack_s <= wall_s <= most_s + slack_s
    return Finding(*WHICH, ok, f"{number(counted / least_s)} images/s", asked, None if ok else HINT)


def _logged(run, windows):
    """Return images and seconds of these windows by the Chronometer; None if it measured nothing.

    Its windows are not quite the stopwatch's. So the time is that from one forward pass to another,
    summed over its steps. The stopwatch comes after the Chronometer's mark, and a busy machine may
    hold a process between them: then the forward pass at which a window closes is longer than
    usual, and the seconds are known between two bounds.
    """
    spans, own = ([_steps(w) for w in some] for some in (windows, run.windows))
    if not own or max(span.stop for span in spans + own) > len(run.steps):
        return None
    times = derived.step_times(run)[1]
    steps_s = sum(times.values()) / 1000
    computing_s = (times["forward"] + times["backward"] + times["update"]) / 1000
    forward_s = [*steps_s.cumsum() - computing_s, steps_s.sum()]
    forward_ms = times["forward"]
    held_s = [*(forward_ms - statistics.median(forward_ms)).clip(min=0) / 1000, 0.0]
    seconds = sum(forward_s[s.stop] - forward_s[s.start] for s in spans)
    # A window of the Chronometer's may not take less time than its steps.
    shares = [w["wall_s"] / steps_s[s].sum() for w, s in zip(run.windows, own, strict=True)]
    most_s = (seconds + sum(held_s[s.stop] for s in spans)) * min(1.0, *shares)
    return sum(sum(run.steps.images[span]) for span in spans), seconds, most_s


def _steps(window):
    return slice(window["first_step"], window["first_step"] + window["steps"])
