"""Numbers in a verdict's rows."""

import math

import pytest

from dlojz.check import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.7, "0.7"),
        (65536.0, "65,536"),
        (3.14159, "3.142"),
        (math.nan, "not a number"),
        (-math.inf, "infinite"),
    ],
)
def test_a_number_has_the_digits_that_help(value, text):
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("pair", "texts"),
    [
        ((0.008, 0.004), ("0.008", "0.004")),
        ((1.0001, 1.0), ("1.0001", "1")),
        ((0.0950484632013, 0.0994415435451), ("0.095", "0.0994")),
        ((math.nan, 2.25), ("not a number", "2.25")),
    ],
)
def test_two_numbers_have_as_many_digits_as_show_their_difference(pair, texts):
    assert wording.both(*pair) == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 % of the step"),
        (1e-7, "less than 0.0001 % of the step"),
        (4e-5, "0.004 % of the step"),
        (0.11, "11 % of the step"),
        (1.6, "160 % of the step"),
        (5.4, "5.4 times the step"),
        (8.4e6, "8,400,000 times the step"),
        (math.inf, "infinite"),
    ],
)
def test_a_share_is_in_percent_and_above_twice_in_times(value, text):
    assert wording.share(value, "the step") == text
    assert wording.share(value) == text.removesuffix(" of the step").removesuffix(" the step")


def test_what_happened_once_is_not_1_times():
    assert [wording.times(n) for n in (1, 2, 1200)] == ["once", "2 times", "1,200 times"]
