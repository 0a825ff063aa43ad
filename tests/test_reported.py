"""What the log says of losses and accuracy is compared with what the check saw."""

import math
from array import array

import pytest

from dlojz.check import reported
from dlojz.check.exercise import State
from dlojz.runs import log, records

TRAIN, VAL = [[2.0, 8, 1], [1.0, 8, 3], [4.0, 8, 0], [3.0, 4, 4]], [[1.5, 8, 4], [2.5, 2, 1]]
EPOCHS = [  # two, of two batches and of one
    {"train_loss": 1.5, "train_accuracy": 4 / 16, "val_loss": 1.5, "val_accuracy": 0.5},
    {"train_loss": 44 / 12, "train_accuracy": 4 / 12, "val_loss": 2.5, "val_accuracy": 0.5},
]


def rank(epochs=EPOCHS, losses=(2.0, 1.0, 4.0, 3.0), train=TRAIN, val=VAL, images=(8, 8, 8, 4)):
    steps = log.Steps(loss=array("d", losses), images=array("q", images))
    met = records.Audit(met={"train": train, "val": val})
    return log.Run("mine", epochs=epochs, steps=steps, audit=met)


def test_a_log_that_says_what_was_seen_passes():
    assert reported.finding([rank()]).state == State.PASSED


def test_the_metrics_are_those_of_all_processes():
    other = rank(losses=(4.0, 1.0, 4.0, 3.0), train=[[4.0, 8, 1], *TRAIN[1:]])
    assert reported.finding([rank(), other]).fails
    both = [EPOCHS[0] | {"train_loss": 2.0}, EPOCHS[1]]
    assert reported.finding([rank(both), other]).state == State.PASSED


@pytest.mark.parametrize(
    ("epoch", "change"),
    [
        (0, {"train_loss": 2.0}),  # of its first batch alone
        (1, {"val_loss": 11 / 3}),  # the training's
        (1, {"val_accuracy": 1.5}),
        (0, {"train_accuracy": math.nan}),
        (1, {"train_loss": None}),
    ],
)
def test_an_epoch_that_is_not_the_mean_of_its_batches_is_refused(epoch, change):
    epochs = [e | change if i == epoch else e for i, e in enumerate(EPOCHS)]
    found = reported.finding([rank(epochs)])
    assert (found.state, found.hint) == (State.FAILED, "told")
    assert next(iter(change)).replace("_", " ") in found.yours


def test_a_loss_that_is_not_the_steps_own_is_refused():
    found = reported.finding([rank(losses=(2.0, 1.5, 4.0, 3.0))])
    assert (found.state, found.yours) == (State.FAILED, "loss of step 1: 1.5")
    found = reported.finding([rank(images=(8, 8, 16, 4))])
    assert (found.state, found.yours) == (State.FAILED, "images of step 2: 16")


def test_the_learning_rates_in_the_log_are_the_solutions():
    def run(*rates):
        return log.Run("mine", steps=log.Steps(lr=array("d", rates)))

    in_float32 = array("f", [0.2])[0]
    assert reported.rates(run(0.1, in_float32), run(0.1, 0.2)).state == State.PASSED
    assert reported.rates(run(0.1, 0.2 + 1e-9), run(0.1, 0.2)).fails
    found = reported.rates(run(0.2, 0.3), run(0.1, 0.2))
    assert (found.state, found.hint, found.yours) == (State.FAILED, "told", "0.2 in step 0")


def test_a_loss_that_diverged_may_be_logged_as_what_it_was():
    train = [*TRAIN[:3], [math.nan, 4, 4]]
    epochs = [EPOCHS[0], EPOCHS[1] | {"train_loss": math.nan}]
    assert not reported.finding([rank(epochs, (2.0, 1.0, 4.0, math.nan), train)]).fails


def test_a_loss_that_a_function_computes_is_not_seen():
    assert reported.finding([rank(train=[])]).state == State.NOT_ASKED


@pytest.mark.parametrize(("step", "hint"), [(0, True), (2, False)])
def test_the_first_epoch_can_be_asked_alone(step, hint):
    losses = [2.0, 1.0, 4.0, 3.0]
    losses[step] += 1
    assert reported.finding([rank(losses=losses)]).fails
    assert reported.finding([rank(losses=losses)], first=True).fails == hint


def test_a_log_without_its_epochs_is_refused():
    found = reported.finding([rank(epochs=[])])
    assert (found.state, found.hint) == (State.FAILED, "told")
