"""The verdict of 08: the geometry of updates names each fault, and the exercise judges by it."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import made
import pytest
import torch
from programs import load_file

from dlojz import course
from dlojz.chapters.n08_large_batch import exercise
from dlojz.check.exercise import State
from dlojz.runs import log, records
from dlojz.watch import geometry, optimizing, readings

ARGS = Namespace(optimizer="lamb", lr=optimizing.RATE, wd=optimizing.DECAY)


class Rule(torch.optim.Optimizer):
    """Weights move by rate times `rule(weight, gradient, decay)`; two groups of weights."""

    def __init__(self, rule, model, decays=(optimizing.DECAY, 0.0)):
        weights = list(model.parameters())
        parts = ([w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2])
        groups = [{"params": p, "weight_decay": d} for p, d in zip(parts, decays, strict=True)]
        super().__init__(groups, {"lr": optimizing.RATE, "weight_decay": 0.0})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for w in group["params"]:
                w -= group["lr"] * self.rule(w, w.grad, group["weight_decay"])


def norm_or_1(tensor):
    return tensor.norm() or torch.tensor(1.0)


def lamb(weight, gradient, decay, adam=torch.sign):
    update = adam(gradient) + decay * weight
    return update * trust(weight, update)


def trust(weight, update):
    return weight.norm() / update.norm() if weight.ndim > 1 and weight.any() else 1.0


def upside_down(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update / trust(weight, update)


def of_gradient(weight, gradient, decay):
    return (gradient.sign() + decay * weight) * trust(weight, gradient)


def of_vectors(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update * norm_or_1(weight) / update.norm()


def outside(weight, gradient, decay):
    return gradient.sign() * trust(weight, gradient.sign()) + decay * weight


def frozen(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update * weight.norm() / update.norm() if weight.ndim > 1 else update


def named(rule, **more):
    return optimizing.made(lambda args, model: Rule(rule, model, **more), ARGS)["mistakes"]


RIGHT = {"matrices": "", "zeros": "", "vectors": ""}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lamb, {}),
        (upside_down, {"matrices": "upside-down"}),
        (of_gradient, {"matrices": "of-gradient"}),
        (of_vectors, {"vectors": "vectors"}),
        (outside, {"matrices": "decay-outside"}),
        (frozen, {"zeros": "zero-norm"}),
        (lambda w, g, decay: lamb(w, g, decay) * w.norm() / w.norm(), {"zeros": "zero-norm"}),
        (lambda w, g, decay: g.sign() + decay * w, {"matrices": "no-ratio"}),
        (
            lambda w, g, decay: 7 * (g.sign() + decay * w),
            {"matrices": "one-ratio", "vectors": "bias-correction"},
        ),
        (
            lambda w, g, decay: lamb(w, g, decay, lambda gradient: gradient.sign() / 0.1**0.5),
            {"vectors": "bias-correction"},
        ),
        (
            lambda w, g, decay: lamb(w, g, decay) * (1 + w.ndim),
            {"matrices": "ratio", "vectors": "bias-correction"},
        ),
    ],
)
def test_each_fault_of_lamb_is_named_by_the_lengths_of_its_made_up_steps(rule, found):
    assert named(rule) == RIGHT | found


def test_decay_of_norms_and_biases_is_named():
    assert named(lamb, decays=(optimizing.DECAY, optimizing.DECAY)) == RIGHT | {
        "vectors": "decayed"
    }


# The solution's optimizers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def solved():
    return load_file(course.solution("08").with_name("optimizers.py"))


def seen(module, **changes):
    """The record of the made-up steps by the optimizers of this module."""
    ways = {
        how: optimizing.made(module.build, Namespace(**vars(ARGS) | {"optimizer": how, "mom": 0.9}))
        for how in optimizing.OPTIMIZERS
    }
    return records.MadeUp(ways | changes)


def failing(findings):
    return {f.key: f.hint for f in findings if f.fails}


def test_the_probe_finds_nothing_wrong_with_the_solution(solved):
    found = [*exercise._made_up(seen(solved), seen(solved))]
    assert failing(found) == {}
    assert {f"made-up-{how}" for how in optimizing.OPTIMIZERS} < {f.key for f in found}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "    if weight.ndim <= 1:\n        return one\n",
            "",
            {"made-up-vectors": "vectors", "made-up-lamb": "ratio"},
        ),
        (
            "of_weight / of_update, one)",
            "of_weight / of_update, one).item()",
            {"made-up-reads": "item"},
        ),
        ('"matrices": False}', '"matrices": True}', {"made-up-muon": "classifier"}),
        ('(group["momentum"]).add_', "(0.5).add_", {"made-up-lars": "given"}),
        (
            '"weight_decay": 0.0},\n    ]',
            '"weight_decay": wd},\n    ]',
            {"made-up-vectors": "decayed", "made-up-lamb": "ratio"}
            | {f"made-up-{how}": "given" for how in ("adamw", "lars", "lion", "muon")},
        ),
    ],
)
def test_the_probe_names_a_mistake_in_the_file(old, new, expected, solved, tmp_path):
    text = course.solution("08").with_name("optimizers.py").read_text()
    file = tmp_path / "optimizers.py"
    file.write_text(made.replaced(text, {old: new}))
    assert failing(exercise._made_up(seen(load_file(file)), seen(solved))) == expected


def test_an_optimizer_that_was_not_made_is_named_with_the_error(solved):
    usual = seen(solved)
    mine = records.MadeUp({"adamw": usual.ways["adamw"]}, "KeyError: 'lamb'")
    found = [*exercise._made_up(mine, usual)]
    assert failing(found) == {f"made-up-{how}": "given" for how in optimizing.OPTIMIZERS[1:]}
    (unseen,) = exercise._made_up(records.MadeUp(), usual)
    assert unseen.state == State.NOT_ASKED


class Run:
    """A log that keeps what it is given."""

    def __init__(self):
        self.kept, self.ends = [], []

    def evidence(self, record):
        self.kept.append(record)

    def before_end(self, call):
        self.ends.append(call)


def training(solved, how, updates):
    """A training of made-up weights that has made some updates, and its log."""
    run, model = Run(), optimizing.MadeUp()
    optimizer = solved.build(Namespace(**vars(ARGS) | {"optimizer": how, "mom": 0.9}), model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    own = SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    args = Namespace(**vars(ARGS) | {"optimizer": how, "mom": 0.9, "find_lr": 0})
    optimizing.watch(run, own, args)
    for _ in range(updates):
        optimizer.step()
    for call in run.ends:
        call()
    return run.kept


@pytest.mark.parametrize("how", optimizing.OPTIMIZERS)
def test_each_optimizers_geometry_is_within_its_bounds(how, solved, monkeypatch):
    monkeypatch.setenv("DLOJZ_AUDIT", '{"keep": 0}')
    file = course.solution("08")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    begun, made_up, found = training(solved, how, updates=geometry.UPDATES + 2)
    assert begun.optimizer == found.optimizer in exercise.RULES
    assert (begun.states, begun.updates, {*begun.rates}) == (0, 0, {optimizing.RATE})
    assert made_up.error is None
    assert len(found.updates) == geometry.UPDATES
    row = exercise._geometry(SimpleNamespace(geometry=found), found.optimizer)
    assert row.state == State.PASSED, row


@pytest.mark.parametrize("kind", exercise.RULES)
def test_steps_of_another_optimizer_are_out_of_bounds(kind):
    model = optimizing.MadeUp()
    optimizer = Rule(lambda w, g, decay: 30 * g, model)
    measured = geometry.Measured(SimpleNamespace(model=model, optimizer=optimizer))
    optimizer.step()
    row = exercise._geometry(SimpleNamespace(geometry=measured.finish()), kind)
    assert (row.state, row.hint) == (State.FAILED, "ratio")


def test_a_run_by_sgd_or_with_a_stopwatch_is_not_looked_at(solved, monkeypatch):
    monkeypatch.setenv("DLOJZ_AUDIT", '{"timed": true}')
    assert training(solved, "lamb", updates=1) == []
    run = Run()
    optimizing.watch(run, None, Namespace(optimizer="sgd", find_lr=0))
    optimizing.watch(run, None, Namespace())
    assert run.kept == []


def test_an_own_optimizer_is_named_by_its_class(solved):
    optimizer = solved.build(Namespace(**vars(ARGS)), optimizing.MadeUp())
    assert readings.kind(optimizer) == "Lamb"


def test_a_step_at_a_rate_of_zero_has_no_geometry():
    model = optimizing.MadeUp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {weight: weight.detach().clone() for weight in model.parameters()}
    optimizer.step()
    assert geometry.summary(geometry.layers(optimizer, model, before)) == {}


# The schedule ------------------------------------------------------------------------------------

RISES = [0.02, 0.04, 0.06, 0.08, 0.1, 0.09, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005]
LONG = [0.01, 0.02, 0.03, 0.04]  # the first four updates of a long schedule


def of_rates(rates, usual):
    runs = (SimpleNamespace(whole=records.WholeRun(rates=each)) for each in (rates, usual))
    (row,) = exercise._schedule(*runs, "schedule", "here")
    return row


@pytest.mark.parametrize(
    ("rates", "usual", "hint"),
    [
        ([0.02] * 6 + [0.04] * 6, RISES, "by-epochs"),
        ([rate * 8 for rate in RISES], RISES, "scaled"),
        ([rate / 25 for rate in RISES], RISES, "two-schedulers"),
        (
            [0.001 * i for i in range(1, 13)],
            RISES,
            "peak",
        ),
        ([*RISES[2:], 0.004, 0.003], RISES, "warm-up"),
        ([*RISES[:-1], 0.02], RISES, "schedule"),
        ([0.005, 0.0125, 0.02, 0.025], LONG, "warm-up"),
        ([0.02, 0.04, 0.06, 0.08], [0.01, 0.02, 0.03, 0.04], "scaled"),
        ([0.01, 0.03, 0.05, 0.07], LONG, "micro-batches"),
        ([0.02, 0.04, 0.065, 0.08], LONG, "micro-batches"),
    ],
)
def test_other_learning_rates_are_named(rates, usual, hint):
    row = of_rates(rates, usual)
    assert (row.state, row.hint) == (State.FAILED, hint), row
    assert row.yours != row.expected


def test_the_solutions_rates_pass_and_unknown_ones_are_not_judged():
    assert of_rates(RISES, RISES).state == State.PASSED
    assert of_rates([None], RISES).state == State.NOT_ASKED


# The finder --------------------------------------------------------------------------------------

TABLE = records.Rates([1e-5 * 4**i for i in range(6)], [2.3, 2.4, 2.0, 1.5, 3.0, 9.0])
BEGUN = records.Begun("AdamW", "aa", "bb", 0, [0.004], 0)


def of_finder(rates=TABLE, begun=BEGUN):
    mine, usual = log.Run("mine", rates=rates, begun=begun), log.Run("", rates=TABLE, begun=BEGUN)
    return failing(exercise._finder(mine, usual))


def rates_of(rates=TABLE.rates, losses=TABLE.losses):
    return records.Rates([*rates], [*losses])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"rates": records.Rates()}, {"finder-table": "table"}),
        (
            {"rates": rates_of([1e-5 + 2 * i for i in range(6)])},
            {"finder-rates": "geometric"},
        ),
        (
            {"rates": rates_of([1e-5 * 3.5**i for i in range(6)])},
            {"finder-rates": "steps-between"},
        ),
        ({"rates": rates_of(losses=[2.3, 2.5, *TABLE.losses[2:]])}, {"finder-losses": "tried"}),
        ({"rates": rates_of(losses=[*TABLE.losses[:-1], 8.0])}, {}),  # it has diverged by then
        (
            {"rates": rates_of([*TABLE.rates, 0.04], [*TABLE.losses, float("nan")])},
            {"finder-end": "stop"},
        ),
        ({"rates": rates_of(TABLE.rates[:2], TABLE.losses[:2])}, {"finder-end": "first-rise"}),
        (
            {"begun": records.Begun("AdamW", "cc", "bb", 0, [0.004], 0)},
            {"weights-after": "weights-kept"},
        ),
        (
            {"begun": records.Begun("AdamW", "aa", "cc", 0, [0.004], 0)},
            {"buffers-after": "buffers-kept"},
        ),
        (
            {"begun": records.Begun("AdamW", "aa", "bb", 9, [0.004], 0)},
            {"states-after": "states-kept"},
        ),
        (
            {"begun": records.Begun("AdamW", "aa", "bb", 0, [0.004], 6)},
            {"updates-after": "updates-kept"},
        ),
        (
            {"begun": records.Begun("AdamW", "aa", "bb", 0, [TABLE.rates[-1]], 0)},
            {"rates-after": "rates-kept"},
        ),
    ],
)
def test_what_a_finder_does_wrong_is_named(changes, expected):
    assert of_finder(**changes) == expected
