"""Spans of time."""

import pytest

from dlojz.traces import spans


@pytest.mark.parametrize(
    ("some", "cover", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (6, 20)], [(0, 2), (4, 6)]),
        ([(0, 1), (5, 9)], [(0, 7)], [(7, 9)]),
        ([(0, 4), (5, 6)], [(1, 2), (3, 10)], [(0, 1), (2, 3)]),
        ([], [(0, 1)], []),
    ],
)
def test_what_is_not_covered(some, cover, left):
    assert spans.without(some, cover) == left


def test_what_two_unions_share():
    assert spans.common([(0, 4), (5, 6)], [(1, 2), (3, 10)]) == 3


def test_a_union_counts_time_once():
    assert spans.union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert spans.length([(0, 3), (5, 6)]) == 4
