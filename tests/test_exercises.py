"""What the exercises have in common: findings that are drawn from the trainee's own run."""

import pytest

from dlojz.check.exercises import State, common
from dlojz.runs import log


@pytest.mark.parametrize(
    ("arguments", "state", "yours", "hint"),
    [
        ({"channels_last": True}, State.PASSED, "True", "which"),
        ({"channels_last": False}, State.FAILED, "False", "which"),
        ({"model": "resnet18"}, State.FAILED, "not known", "flag"),
    ],
)
def test_a_flag_counts_only_if_the_trainer_knows_it(tmp_path, arguments, state, yours, hint):
    """The solution's default is no evidence of the trainee's flag."""
    mine = log.Run(tmp_path, start={"arguments": arguments})
    found = common.flag(mine, "--channels-last", bool, "True", "which")
    assert (found.state, found.yours, found.hint) == (state, yours, hint)
