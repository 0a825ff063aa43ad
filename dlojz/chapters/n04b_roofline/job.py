"""The trainee's segment mean, repaired and made faster, beside a reference and a baseline.

A repaired file ends with `segments.examine(segment_mean)`, whose log is judged by
`dlojz.chapters.n04b_roofline.exercise`. All cases are random, new ones in each run.
"""

import math
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from dlojz.chapters import harness, session
from dlojz.watch import profile

PAIRS, CALLS = 12, 5  # pairs of the baseline and the trainee's, and calls of each in a pair
ROWS, FEATURES, SEGMENTS = 20_000, 32, 200  # of timed calls, and a few more
# Shares of the largest number. A sum of thirty float32 is off by 1e-7, rounded to 16 bits by 5e-4.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ROUNDED = 0.02  # at most; bf16 is exact to 1/256 of a number, and a sum in it to less
# Rows, features and segments of the counted calls, each with more of one.
COUNTED = ((256, 4, 16), (260, 4, 128), (264, 16, 16), (1024, 4, 16))


def baseline(x, ids, segments):
    """Return the mean of each segment: the prepared function, with its division kept."""
    where = ids[:, None].expand_as(x)
    sums = x.new_zeros(segments, x.shape[1]).scatter_add_(0, where, x)
    counts = torch.zeros_like(sums).scatter_add_(0, where, torch.ones_like(x))
    return sums / counts.clamp(min=1)


class Case(NamedTuple):
    """A call of the function. Rows of x belong to segments, by number."""

    name: str
    x: torch.Tensor  # [rows, features]
    ids: torch.Tensor  # [rows]
    segments: int
    gradient: bool = True  # of x


def examine(mean):
    """Log this function's results, operations and speed.

    mean: takes x, ids and the number of segments.
    """
    args = harness.parser(__doc__).parse_args()
    with session.begin(args) as (run, device):
        torch.manual_seed(args.seed)
        draw = random.Random(args.seed)
        run.case("values", looks=[look(mean, case) for case in drawn(draw, device)])
        run.case("counts", calls=counted(mean, device))
        run.case("speed", **timed(mean, device, draw))


# Values ------------------------------------------------------------------------------------------


def drawn(draw, device) -> Iterator[Case]:
    """Yield the cases, all of different shapes, except repetitions."""

    def case(name, lengths, shuffled=True, dtype=torch.float32):
        number = next(numbers)
        lengths = torch.tensor(lengths)
        ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        ids = ids[torch.randperm(len(ids))] if shuffled else ids
        x = torch.randn(len(ids), 3 + number, dtype=dtype)
        return Case(name, x.to(device), ids.to(device), len(lengths))

    numbers = iter(range(20))
    yield case("neighbours", _lengths(draw), shuffled=False)
    yield case("unsorted", _lengths(draw))
    yield _in_blocks(case("blocks", _lengths(draw), shuffled=False), draw)
    yield case("empty", _with_empty(draw, _lengths(draw)), shuffled=False)
    yield case("unsorted, some empty", _with_empty(draw, _lengths(draw)))
    yield case("one segment", [draw.randrange(20, 40)])
    yield case("one row each", [1] * draw.randrange(20, 40))
    yield case("one row", draw.sample([1, 0, 0, 0], 4))
    yield case("float64", _lengths(draw), shuffled=False, dtype=torch.float64)
    first = case("first", _lengths(draw))
    yield first
    ids = (first.ids + 1) % first.segments  # each segment gets the length of another one
    again = Case("same shapes", torch.randn_like(first.x), ids, first.segments)
    yield again
    # After the look at them, the same tensors get other numbers, without a gradient.
    again.x.detach_().normal_()
    again.ids.copy_((ids + 1) % first.segments)
    yield Case("same tensors", again.x, again.ids, again.segments, gradient=False)


def _lengths(draw):
    """Return the lengths of some segments, all above 0."""
    return [draw.randrange(1, 30) for _ in range(draw.randrange(8, 30))]


def _with_empty(draw, lengths):
    """Return lengths with some zeros between them, and at the end."""
    for _ in range(draw.randrange(2, 6)):
        lengths.insert(draw.randrange(len(lengths)), 0)
    return [*lengths, 0, 0]


def _in_blocks(case, draw):
    """Return a case with neighbouring rows in a segment, and segments in any order."""
    names = draw.sample(range(case.segments), case.segments)
    renamed = torch.tensor(names[::-1] if names == sorted(names) else names)
    return case._replace(ids=renamed.to(case.ids.device)[case.ids])


def look(mean, case) -> dict:
    """Return the errors and the forms of a call's result and gradient."""
    x, ids = case.x.requires_grad_(case.gradient), case.ids
    before = x.detach().clone(), ids.clone()
    found = {"case": case.name}
    try:
        out = mean(x, ids, case.segments)
    except Exception as error:  # any, from the trainee's lines
        return found | {"raised": _raised(mean, error)}
    found["changed"] = not all(map(torch.equal, (x.detach(), ids), before))
    x, ids = before
    if not isinstance(out, torch.Tensor):
        return found | {"like": "form", "form": type(out).__name__, "expected": "a tensor"}
    expected, sums, counts = reference(x, ids, case.segments)
    if (out.shape, out.dtype) != (expected.shape, x.dtype):
        return found | {"like": "form", "form": _form(out), "expected": _form(expected.to(x.dtype))}
    found |= compared(out.detach().double(), expected, sums, counts, TOLERANCE[x.dtype])
    if case.gradient:
        found["gradient"] = gradient(out, case.x, ids, counts)
    return found


def _raised(mean, error) -> str:
    return harness.short_in(getattr(getattr(mean, "__code__", None), "co_filename", ""), error)


def reference(x, ids, segments):
    """Return means, sums and counts in float64, by a product with a matrix of zeros and ones."""
    belongs = (ids == torch.arange(segments, device=ids.device)[:, None]).double()
    sums, counts = belongs @ x.detach().double(), belongs.sum(1, keepdim=True)
    return sums / counts.clamp(min=1), sums, counts


def compared(out, expected, sums, counts, tolerance) -> dict:
    """Return the largest error, relative to the largest mean, and the form of the result."""
    full = counts[:, 0] > 0
    off = partial(harness.off, scale=expected.abs().max().clamp(min=1e-6))
    error = off(out, expected)
    longest = counts.max().item()  # a sum may be larger than its mean by this factor
    # The factor by which each row is too long, if it has the right direction.
    factor = (out * expected).sum(1, True) / expected.square().sum(1, True).clamp(min=1e-12)
    likes = {
        "right": error <= tolerance,
        "zeros": not out.any(),
        "sums": off(out, sums) <= longest * tolerance,
        "whole": bool((out == out.round()).all() and out.any()),
        "empty": off(out[full], expected[full]) <= tolerance,
        "counts": off(out[full], (factor * expected)[full]) <= longest * tolerance,
        "rounded": error <= ROUNDED,
        "other": True,
    }
    return {"error": error, "like": next(name for name, fits in likes.items() if fits)}


def gradient(out, x, ids, counts) -> float:
    """Return the error of the gradient of x, relative to its largest number."""
    weights = torch.randn_like(out)
    try:
        (found,) = torch.autograd.grad(out, x, weights)
    except RuntimeError:  # detached, or an operation has none, as a floor division
        return math.inf
    expected = (weights.double() / counts.clamp(min=1))[ids]  # each row's share of the mean
    return harness.off(found.double(), expected)


def _form(tensor):
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# Mechanism and speed -----------------------------------------------------------------------------


def _list(rows, features, segments, device):
    """Return x and ids of this size; the order of ids is random."""
    return (
        torch.randn(rows, features, device=device),
        torch.randint(segments, (rows,), device=device),
    )


def counted(mean, device) -> list[dict]:
    """Return the counts of operations and reads in calls of different sizes."""
    found = []
    for sizes in COUNTED:
        call = partial(mean, *_list(*sizes, device), sizes[-1])
        try:
            counts = profile.counts(profile.profiled(call))
        except Exception:  # reported by the looks
            return []
        found.append(dict(zip(("rows", "features", "segments"), sizes, strict=True)) | counts)
    return found


def timed(mean, device, draw) -> dict:
    """Return the milliseconds per call of the baseline and `mean`, in pairs on the same data.

    Calls are timed forward and with the backward pass, and their results are compared. On a
    processor it is the process's CPU time, in one thread, which other programs disturb little.
    """
    seen = {"device": device.type, "forward": [], "backward": [], "errors": []}
    try:
        with harness.one_thread(device):
            for number in range(PAIRS):
                _pair(mean, device, draw, number, seen)
    except Exception as error:  # any, from the trainee's lines
        seen["raised"] = _raised(mean, error)
    return seen


def _pair(mean, device, draw, number, seen):
    """Time one pair; the two begin in turns."""
    segments = SEGMENTS + draw.randrange(SEGMENTS // 10)
    rows = ROWS + 100 * number + draw.randrange(100)  # no two pairs have equal shapes
    x, ids = _list(rows, FEATURES, segments, device)
    ways = [baseline, mean] if number % 2 else [mean, baseline]
    calls = {way: partial(way, x, ids, segments) for way in ways}
    warm = {way: call().detach() for way, call in calls.items()}
    seen["errors"].append(harness.off(warm[mean], warm[baseline]))
    spent = _milliseconds(calls, device)
    seen["forward"].append([spent[baseline], spent[mean]])
    x.requires_grad_()
    if spent[mean] < 2 * spent[baseline] and calls[mean]().requires_grad:
        spent = _milliseconds({w: partial(_and_back, c, x) for w, c in calls.items()}, device)
        seen["backward"].append([spent[baseline], spent[mean]])


def _and_back(call, x):
    out = call()
    torch.autograd.grad(out, x, torch.ones_like(out))


def _milliseconds(calls, device) -> dict:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    return {w: 1000 * session.seconds(c, device, CALLS, clock) for w, c in calls.items()}
