"""The shared parts of the jobs that examine a prepared file."""

import math
from types import SimpleNamespace

import pytest
import torch

from dlojz.chapters import harness
from dlojz.course import UserError

CPU = torch.device("cpu")
EXPECTED = torch.tensor([1.0, -4.0])


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ([1.0, -4.0], 0.0),
        ([1.0, -3.0], 0.25),
        ([1.0, math.nan], math.inf),
        ([1.0, math.inf], math.inf),
        ([1.0], math.inf),
    ],
)
def test_a_result_is_off_by_a_share_of_the_largest_number(found, error):
    assert harness.off(torch.tensor(found), EXPECTED) == error


def test_the_share_may_be_that_of_another_number():
    assert harness.off(EXPECTED + 1, EXPECTED, scale=2) == 0.5


def test_an_empty_result_is_right():
    assert harness.off(EXPECTED[:0], EXPECTED[:0]) == 0


def test_a_missing_function_is_named_with_all_that_are_expected():
    module = SimpleNamespace(one=print, two=2)
    with pytest.raises(UserError, match=r"no function two, three in your file: expected one, two"):
        harness.complete(module, ("one", "two", "three"))


def test_a_trainees_lines_compute_in_one_thread_until_they_have_failed():
    before, meanwhile = torch.get_num_threads(), []

    def fails():
        with harness.one_thread(CPU):
            meanwhile.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (meanwhile, torch.get_num_threads()) == ([1], before)


def test_each_submission_draws_other_cases_and_a_seed_repeats_them():
    seeds = {harness.parser("A job.").parse_args([]).seed for _ in range(3)}
    assert len(seeds) == 3
    assert harness.parser("A job.").parse_args(["--seed", "1"]).seed == 1
