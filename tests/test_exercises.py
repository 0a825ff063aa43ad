"""What the exercises have in common: findings that are drawn from the trainee's own run."""

import pytest

from dlojz.check.exercises import State, common
from dlojz.runs import log, records


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


def run(train=12, val=12, **whole):
    seen = [
        {"mode": mode, "shape": [8, 3, 32, 32], "count": n, "grad": mode == "train"}
        for mode, n in (("train", train), ("val", val))
        if n
    ]
    return log.Run("mine", whole=records.WholeRun(inputs=seen, **whole))


@pytest.mark.parametrize(
    ("train", "val", "hints"),
    [
        (24, 0, {"eval-mode"}),  # model.eval() is forgotten
        (6, 18, {"train-mode"}),  # model.train() is
        (0, 0, {"called", "validation"}),  # model.forward(...)
        (6, 12, {"images"}),
        (12, 6, {"validation"}),
    ],
)
def test_images_that_did_not_come_have_the_hint_of_their_reason(train, val, hints):
    found = common.same_work(run(train, val), run())
    assert {f.hint for f in found if f.fails and f.what.startswith("images in")} == hints


def test_each_pass_belongs_into_its_phase():
    usual = {"forward": ["forward"], "backward": ["backward"], "update": ["update"]}
    late = usual | {"backward": ["backward", "forward"]}
    found = common.no_brake(run(phases=late), run(phases=usual))[0]
    assert (found.fails, found.hint) == (True, "phases")
    assert "backward in backward and forward" in found.yours
    assert not common.no_brake(run(phases=usual), run(phases=usual))[0].fails
    crashed = run(phases={"forward": ["forward"]})
    assert not common.no_brake(crashed, run(phases=usual))[0].fails, "it never came to the others"


def test_more_threads_are_no_faster_step():
    found = common.no_brake(run(threads=4), run(threads=2))[1]
    assert (found.fails, found.hint) == (True, "threads")
