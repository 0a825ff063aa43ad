"""Chapter 13's studies spend equal budgets, and train their winners again with fresh seeds."""

from types import SimpleNamespace

import optuna
import pytest
import torch
from programs import experiment_file, load, run_main

from dlojz.chapters.n13_search import curves
from dlojz.runs import log
from dlojz.training import models

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
TINY = "--model tiny --image-size 16 -b 8 -e 3 --classes 2 --images-per-class 8 --val-per-class 4"
SIZES = {"model": "tiny", "image_size": 16, "batch_size": 8, "epochs": 3, "classes": 2}
SIZES |= {"images_per_class": 8, "val_per_class": 4, "precision": "fp32", "compile": "off"}
ARGS = SimpleNamespace(**SIZES)
SUGGESTED = {"lr": 0.05, "mom": 0.9, "wd": 1e-4}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A model that takes milliseconds, by a name of its own."""
    own = models.build

    def build(name, classes, size):
        if name not in ("tiny", "wide"):
            return own(name, classes, size)
        width = {"tiny": 4, "wide": 16}[name]
        return torch.nn.Sequential(
            *(torch.nn.Conv2d(3, width, 3, stride=4), torch.nn.BatchNorm2d(width)),
            *(torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(classes)),
        ).eval()

    def initialized(*recipe):
        model = build(*recipe)
        model(torch.zeros(1, 3, 16, 16))
        return model

    monkeypatch.setattr(models, "build", initialized)
    monkeypatch.setattr(models, "names", lambda: ["tiny", "wide", "resnet18"])


@pytest.fixture(scope="module")
def images():
    return curves.draw(ARGS, CPU)


@pytest.fixture
def trained(images):
    return curves.Curves(ARGS, CPU, images)


# Trainings ---------------------------------------------------------------------------------------


def test_images_that_no_search_sees_are_other_ones(images):
    (seen, labels), (unseen, others) = images["val"], images["unseen"]
    assert seen["usual"].shape == unseen["usual"].shape == (8, 3, 20, 20)
    assert labels.tolist() == others.tolist() == [0] * 4 + [1] * 4
    assert (seen["usual"] != unseen["usual"]).any(dim=(1, 2, 3)).all()


def test_a_training_repeats_though_all_share_a_module(images):
    first, second = (curves.Curves(ARGS, CPU, images) for _ in range(2))
    found = first.whole(SUGGESTED, 0)
    second.whole(SUGGESTED | {"lr": 0.5}, 1)
    again = second.whole(SUGGESTED, 0)
    assert len(second.modules) == 1
    assert found["accuracies"] == again["accuracies"]
    assert found["accuracy"] == found["accuracies"][-1]
    assert found["unseen"] == again["unseen"]


def test_a_complete_training_is_told_again_and_a_stopped_one_is_not(trained, monkeypatch):
    seen, own = [], trained._train
    monkeypatch.setattr(trained, "_train", lambda *given: seen.append(given) or own(*given))
    next(trained.epochs(SUGGESTED, 0))
    found = [trained.whole(SUGGESTED, 0) for _ in range(2)]
    assert len(seen) == 3, "the first of a model, stopped, and whole"
    assert found[0] == found[1]
    trained.whole(SUGGESTED, 1)
    assert len(seen) == 4, "another seed"


def test_what_is_suggested_becomes_the_trainers_flags(trained):
    given = trained._arguments(SUGGESTED, 7, "tiny")
    assert (given.lr, given.mom, given.wd, given.seed) == (0.05, 0.9, 1e-4, 7)
    defaults = trained._arguments({}, 0, "tiny")
    assert (defaults.lr, defaults.mom, defaults.wd) == (0.1, 0.9, 5e-4)


def test_the_space_is_drawn_by_factors():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    drawn = [curves.space(study.ask()) for _ in range(60)]
    assert 12 < sum(found["lr"] < 0.01 for found in drawn) < 28, "a third in each decade"
    assert all(0.5 <= found["mom"] <= 0.99 for found in drawn)


# Studies -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The log of the studies; the fixture of the tiny model is that of each test."""
    return tmp_path_factory.mktemp("studies") / "run"


@pytest.fixture
def cases(studied):
    if not studied.exists():
        flags = "--trials 4 --repeats 2 --seeds 2 --samplers random tpe --reduction 3".split()
        run_main(experiment_file("studies.py"), studied, *TINY.split(), *flags)
    return list(log.read(studied).cases.values())


def of(cases, phase, **about):
    return [c for c in cases if c["phase"] == phase and about.items() <= c.items()]


def test_no_study_spends_more_than_its_budget(cases):
    for sampler in ("random", "tpe"):
        for pruner in ("none", "hyperband"):
            for repeat in (0, 1):
                found = of(cases, "study", sampler=sampler, pruner=pruner, repeat=repeat)
                spent = sum(len(trial["accuracies"]) for trial in found)
                assert 4 * 3 - 3 < spent <= 4 * 3
                assert len(found) >= 4 if pruner == "hyperband" else len(found) == 4
                assert [trial["trial"] for trial in found] == [*range(len(found))]


def test_random_search_draws_the_same_trials_with_and_without_hyperband(cases):
    drawn = [
        [trial["lr"] for trial in of(cases, "study", sampler="random", pruner=pruner, repeat=1)]
        for pruner in ("none", "hyperband")
    ]
    assert drawn[1][:4] == drawn[0]
    assert drawn[0] != [t["lr"] for t in of(cases, "study", sampler="random", repeat=0)][:4]


def test_a_stopped_trial_is_trained_to_its_end_afterwards(cases):
    ended = [t for t in of(cases, "study", repeat=0) if t["state"] == "PRUNED"]
    rest = of(cases, "rest")
    assert {(t["sampler"], t["trial"]) for t in ended} == {(r["sampler"], r["trial"]) for r in rest}
    for trial in ended:
        [whole] = of(rest, "rest", sampler=trial["sampler"], trial=trial["trial"])
        assert whole["accuracies"][: len(trial["accuracies"])] == trial["accuracies"]
        assert len(whole["accuracies"]) == 3


def test_the_winner_of_each_study_has_fresh_seeds(cases):
    for winner in of(cases, "winner"):
        about = {name: winner[name] for name in ("sampler", "pruner", "repeat")}
        complete = [t for t in of(cases, "study", **about) if t["state"] == "COMPLETE"]
        best = max(complete, key=lambda trial: trial["accuracies"][-1])
        assert winner["trial"] == best["trial"]
    assert len(of(cases, "winner")) == 2 * 2 * 2 * 2
    assert {winner["seed"] for winner in of(cases, "winner")} == {0, 1}
    assert [case["seed"] for case in of(cases, "default")] == [*range(10)]


def test_no_repeat_begins_that_would_take_too_long(tmp_path):
    flags = "--trials 1 --repeats 3 --seeds 1 --samplers random --minutes 0".split()
    folder = run_main(experiment_file("studies.py"), tmp_path / "run", *TINY.split(), *flags)
    assert {c["repeat"] for c in of(log.read(folder).cases.values(), "study")} == {0}


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_samplers_draw_a_third_of_the_trials(name):
    assert load("studies").sampler(name, 0, 15)._n_startup_trials == 5


def test_both_models_train_the_same_trials(tmp_path):
    flags = "--larger wide --trials 3 --seeds 2".split()
    folder = run_main(experiment_file("transfer.py"), tmp_path / "run", *TINY.split(), *flags)
    cases = list(log.read(folder).cases.values())
    tiny, wide = (of(cases, "trial", model=model) for model in ("tiny", "wide"))
    assert [t["lr"] for t in tiny] == [t["lr"] for t in wide]
    assert len(tiny) == 3
    again = of(cases, "winner")
    assert [(c["of"], c["seed"]) for c in again] == [
        (of, seed) for seed in (0, 1) for of in ("tiny", "wide", "default")
    ]
    best = max(wide, key=lambda trial: trial["accuracy"])
    assert of(again, "winner", of="wide")[0]["lr"] == best["lr"]
    assert "lr" not in of(again, "winner", of="default")[0]
