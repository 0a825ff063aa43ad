"""The work of a step against the solution's: convolutions and matrix products, by their sizes.

`watch.workload` counts them under the profiler. That is exact where values are not: in 16 bits
a gradient may be mostly noise. More work than the solution's is allowed, and so is the same work
in another form: missing operations must be outweighed by others in their place.
"""

from collections import Counter
from collections.abc import Sequence

from dlojz.check.exercise import SAME, Finding, State
from dlojz.runs import log

WHICH, HINT = (SAME, "work", "work of a step"), "work"
COMPUTED = ("forward", "backward")  # recomputed layers are judged by the mechanism
# Compiled code may pad products, or make one of a convolution; what Inductor's autotuner generates
# itself, or a CUDA graph replays, is not seen at all. It is then counted before it is compiled.
COMPILED, UNSEEN = 0.05, ("max-autotune", "reduce-overhead")
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # any other: 1
SHOWN = 2  # missing operations in a message


def finding(pairs: Sequence[tuple[log.Run, log.Run]]) -> Finding:
    """Return a finding that fails if a step lacks a convolution or product of the solution's.

    pairs: a run of the trainee's trainer and one of the solution, with the same work.
    """
    ranks = [pair for runs in pairs for pair in zip(*(run.ranks for run in runs), strict=False)]
    seen = [(mine, usual) for mine, usual in ranks if usual.last.work]
    if not seen:
        return Finding(*WHICH, State.NOT_ASKED, "not seen", "the solution's was not looked at")
    expected = f"no less than the solution's: {_sum(seen[0][1].last.work)}"
    for mine, usual in seen:
        if not mine.last:
            todo = f"{expected}. Stop your profiler before the last step"
            return Finding(*WHICH, State.UNMEASURED, "the last step was not seen", todo)
        for place, there, here, tolerance in _looks(mine, usual):
            if missing := less(there, here, tolerance):
                return Finding(*WHICH, False, f"{missing}{place}", expected, HINT)
    text = _sum(seen[0][0].last.work)
    return Finding(*WHICH, True, f"{text}, in {len(seen)} steps", expected)


def _looks(mine, usual):
    """Yield (place, the trainee's work, the solution's, the share that may be missing)."""
    place, compiled = f" in step {mine.last.step}", usual.last.compiled_regions
    if not (compiled or mine.last.compiled_regions):
        yield place, mine.last.work, usual.last.work, 0.0
        return
    if usual.probe.work or mine.probe.work:
        yield ", before it is compiled", mine.probe.work, usual.probe.work or usual.last.work, 0.0
    if not (_hidden(mine) or _hidden(usual) or usual.share.again):
        tolerance = COMPILED if compiled else 0.0
        yield place, _merged(mine.last.work), _merged(usual.last.work), tolerance


def _hidden(run):
    modes = str(run.start["arguments"].get("compile"))
    graphs = any(c["why"].startswith("cudagraph") for c in run.compilation.seen)
    return graphs or modes.startswith(UNSEEN)


def _merged(work):
    """Return compiled code's work, with convolutions as products: Inductor may make them so."""
    return [entry | {"kind": "operation"} for entry in work]


def less(mine: list[dict], usual: list[dict], tolerance: float = 0.0) -> str:
    """Return the missing part of the solution's work in words; "" if nothing is missing.

    Convolutions and products are compared on their own, and both passes. A product in a narrower
    format than any of the solution's does not count.
    """
    groups = dict.fromkeys((e["when"], e["kind"]) for e in usual if e["when"] in COMPUTED)
    found = (_less(group, mine, usual, tolerance) for group in groups)
    return next(filter(None, found), "")


def _less(group, mine, usual, tolerance):
    there, here = (_of(group, work) for work in (usual, mine))
    least = min(BYTES.get(entry["dtype"], 1) for entry in there)
    narrow = [entry for entry in here if BYTES.get(entry["dtype"], 1) < least]
    expected, counted = _counts(there), _counts(e for e in here if e not in narrow)
    fewer, more = expected - counted, counted - expected
    if _flop(fewer) - _flop(more) <= tolerance * _flop(expected):
        return ""
    when, kind = group
    words = [f"{n} fewer {kind}{'s' * (n > 1)} {of}" for (of, _), n in fewer.most_common(SHOWN)]
    rest = fewer.total() - sum(n for _, n in fewer.most_common(SHOWN))
    words += [f"{rest} other{'s' * (rest > 1)}"] if rest else []
    words += [f"{n} more {of}" for (of, _), n in more.most_common(1)]
    formats = ", ".join(sorted({entry["dtype"] for entry in narrow}))
    words += [f"some in {formats}"] if formats else []
    return f"{', '.join(words)}, {when}"


def _of(group, work):
    return [entry for entry in work if (entry["when"], entry["kind"]) == group]


def _counts(work) -> Counter:
    found = Counter()
    for entry in work:
        found[entry["of"], entry["flop"]] += entry["count"]
    return found


def _flop(counts) -> int:
    return sum(flop * count for (_, flop), count in counts.items())


def _sum(work) -> str:
    """Return a sum of work in words: "112 convolutions and 4 products, 0.31 GFLOP"."""
    done = [entry for entry in work if entry["when"] in COMPUTED]
    numbers = Counter()
    for entry in done:
        numbers[entry["kind"]] += entry["count"]
    words = " and ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(numbers.items()))
    return f"{words}, {_flop(_counts(done)) / 1e9:,.2f} GFLOP"
