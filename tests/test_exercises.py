"""What the exercises have in common: findings that are drawn from the trainee's own run."""

import pytest

from dlojz.check.exercises import Runs, State, common, gpu
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


def short_run(**others):
    """A check's short run of two processes; others: of the second one, by field."""
    usual = {
        "touched": 0,
        "entered": [["train", [[0.1, 0.2, 0.3]]], ["train", [[0.4, 0.5, 0.6]]]],
        "labels": [["train", 3], ["train", 5]],
        "norms": [1.0, 2.0],
    }
    first, second = run(**usual), run(**(usual | others))
    first.start["arguments"] = {"epochs": 2}
    first.ranks = [first, second]
    return first


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"entered": [["train", [[0.1, 0.2, 0.3]]]] * 2}, "other pixels in batch 1 of 2"),
        ({"labels": [["train", 3], ["train", 6]]}, "other labels in train batch 1 of 2"),
        ({"norms": [1.0, 9.0]}, "other gradients in update 1 of 2"),
        ({"norms": [1.0]}, "other gradients in update 1 of 2"),
        ({"touched": 1}, "changed 1 times"),
        ({"norms": [1.1, 1.9]}, ""),  # rounding
    ],
)
def test_a_short_run_is_looked_at_in_each_process(others, said):
    found = common.still_trains("with two epochs", short_run(**others), short_run())
    assert [f.yours for f in found if f.fails] == ([said] if said else [])


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


@pytest.mark.parametrize(("last", "middle", "passes"), [(2, 0, True), (0, 2, True), (0, 1, False)])
def test_what_copies_a_batch_ahead_copies_none_in_the_last_step(last, middle, passes):
    def a_run(last, middle=None):
        steps = records.LastStep(non_blocking=last), records.MiddleStep(non_blocking=middle)
        return log.Run("run", last=steps[0], middle=steps[1])

    (found,) = gpu._copies(Runs(a_run(last, middle), a_run(2), {}))
    assert (found.state == State.PASSED) is passes
