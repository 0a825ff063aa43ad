"""The mean of each segment of a long list, in six ways: equal results, different times.

Submitted by a notebook: submit("dlojz/chapters/n04b_roofline/experiments/segment_mean.py").

The rows of x belong to segments of different lengths, like the atoms of molecules or the words of
sentences. Each way is checked against the first, timed in turn, forward and with its backward pass,
and profiled once.
"""

import argparse
import statistics
from functools import partial

import torch

from dlojz.chapters import session
from dlojz.chapters.n04b_roofline import job as segments
from dlojz.watch import profile


def segment_reduce(x, ids, segments):
    """Return the means by one operation on neighbouring rows; ids must be sorted."""
    return torch.segment_reduce(x, "mean", lengths=torch.bincount(ids, minlength=segments))


def sorted_first(x, ids, segments):
    """Return the means by a sort and one operation on neighbouring rows; ids in any order."""
    order = ids.argsort(stable=True)
    return segment_reduce(x[order], ids[order], segments)


def scatter_reduce(x, ids, segments):
    """Return the means by one operation that scatters rows to their segments; ids in any order."""
    out, where = x.new_zeros(segments, x.shape[1]), ids[:, None].expand_as(x)
    return out.scatter_reduce(0, where, x, "mean", include_self=False)


def scatter_add(x, ids, segments):
    """Return sums divided by counts; ids must be sorted, and no segment empty."""
    sums = x.new_zeros(segments, x.shape[1]).scatter_add_(0, ids[:, None].expand_as(x), x)
    return sums / torch.unique_consecutive(ids, return_counts=True)[1][:, None]


def loop_of_sums(x, ids, segments):
    """Return the means, segment by segment in Python."""
    return torch.stack([x[ids == i].sum(0) / (ids == i).sum() for i in range(segments)])


WAYS = {
    "two scatter_add_": segments.baseline,
    "scatter_reduce": scatter_reduce,
    "segment_reduce": segment_reduce,
    "a sort and segment_reduce": sorted_first,
    "scatter_add_ and unique_consecutive": scatter_add,
    "loop of sums": loop_of_sums,
}


def and_backward(way, x, ids, segments):
    """Compute the means, and the gradient of their sum."""
    way(x.requires_grad_(), ids, segments).sum().backward()
    x.grad = None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the list")
    parser.add_argument("--features", type=int, default=32, help="numbers in a row")
    parser.add_argument("--segments", type=int, default=200, help="number of means")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each case")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        torch.manual_seed(0)
        ids = torch.randint(args.segments, (args.rows,))
        ids[: args.segments] = torch.arange(args.segments)  # none is empty
        ids = ids.sort().values.to(device)
        x = torch.randn(args.rows, args.features, device=device)
        given = (ids, args.segments)
        calls = {name: partial(way, x, *given) for name, way in WAYS.items()}
        both = {name: partial(and_backward, way, x.clone(), *given) for name, way in WAYS.items()}
        expected = calls["two scatter_add_"]()
        for call in calls.values():
            torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)
        longer = session.in_turn(both, device, args.rounds)
        for name, ms in session.in_turn(calls, device, args.rounds).items():
            run.measure(name, statistics.median(ms), "ms")
            found = profile.counts(profile.profiled(calls[name]))
            run.case(name, ms=ms, and_backward_ms=longer[name], **found)


if __name__ == "__main__":
    main()
