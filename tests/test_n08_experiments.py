"""Chapter 08's trainings choose their rates on seeds of their own, and log what they measured."""

import argparse
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
import torch
from programs import experiment_file, load, run_main

from dlojz.chapters import resident
from dlojz.chapters.n08_large_batch import trainings
from dlojz.chapters.n08_large_batch.trainings import KINDS, Plan
from dlojz.launch import Request, State, series
from dlojz.runs import log
from dlojz.training import data, models

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SIZES = {"model": "shufflenet_v2_x0_5", "image_size": 32, "epochs": 2, "classes": 3}
SIZES |= {"images_per_class": 16, "val_per_class": 4, "graphs": True}
ARGS = SimpleNamespace(**SIZES)
TINY = "--model shufflenet_v2_x0_5 --image-size 32 -e 1 --classes 3 --images-per-class 8"
TINY += " --val-per-class 4 --batches 8 16 --at 16 --rates 2 --seeds 2 --scale 1"
TINY += " --optimizers sgd lamb"


@pytest.fixture(scope="module")
def images():
    return resident.draw(ARGS, CPU)


# A training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", KINDS)
def test_each_optimizer_updates_a_model_in_channels_last(optimizer, images):
    found = trainings.train(Plan(optimizer, 16, KINDS[optimizer].rate, 0, 2), ARGS, images, CPU)
    assert (found["updates"], found["images"]) == (2, 32)
    assert found["seconds"] > 0
    assert "joules" not in found, "a processor has no sensor"
    assert {found["accuracy"], found["accuracy_again"]} <= {n / 12 for n in range(13)}


def test_a_training_repeats_and_another_seed_does_not(images, monkeypatch):
    losses = []
    own = trainings.backward
    monkeypatch.setattr(
        trainings, "backward", lambda *args: losses.append(own(*args)) or losses[-1]
    )
    for seed in (0, 0, 1):
        trainings.train(Plan("sgd", 16, 0.1, seed, 1), ARGS, images, CPU)
    assert losses[0] == losses[1] != losses[2]


def test_updates_go_on_over_epochs_with_other_images(images):
    loader = trainings.loader(images, "train", 32, Plan("sgd", 16, 0.1, 0))
    batches = trainings.endless(loader)
    seen = [next(batches) for _ in range(4)]
    assert len(loader) == 3
    assert loader.epoch == 1
    assert (seen[0][0] != seen[3][0]).any()


def test_half_of_a_growing_training_has_smaller_images(images, monkeypatch):
    sizes, own = [], trainings.run
    monkeypatch.setattr(trainings, "run", lambda m, x: sizes.append(x.shape[-1]) or own(m, x))
    trainings.train(Plan("sgd", 16, 0.1, 0, 4, growing=True), ARGS, images, CPU)
    assert sizes[:4] == [24, 24, 32, 32]
    assert set(sizes[4:]) == {32}


def rates_of(plan, updates=100):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], plan.rate)
    scheduler, found = trainings.schedule(plan, optimizer, updates), []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("share", "peak"), [(0.0, 0), (0.3, 29), (0.5, 49)])
def test_the_rate_rises_for_a_share_of_the_updates(share, peak):
    found = rates_of(Plan("sgd", 16, 0.4, 0, warm_up=share))
    assert abs(found.index(max(found)) - peak) <= 1
    assert max(found) == pytest.approx(0.4, rel=1e-3)
    assert found[-1] < 1e-3


def test_a_constant_rate_stays_after_its_warm_up():
    found = rates_of(Plan("sgd", 16, 0.4, 0, constant=True))
    assert found[0] < found[15] < found[30]
    assert set(found[30:]) == {0.4}


def test_statistics_are_computed_again_and_weights_stay(images):
    model = models.build("resnet18", 3, 32)
    loader = trainings.loader(images, "train", 32, Plan("sgd", 16, 0.1, 0))
    loader.epoch = 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainings.compute_again(model, loader)
    for name, value in model.state_dict().items():
        changed = (value != before[name]).any()
        assert changed == ("running" in name or "tracked" in name), name
    outputs = [model.conv1(data.normalize(x)).mean((0, 2, 3)) for x, _ in loader]
    torch.testing.assert_close(model.bn1.running_mean, torch.stack(outputs).mean(0))


def test_the_mean_of_the_weights_lags_behind(images):
    model = torch.nn.Linear(1, 1, bias=False)
    mean = trainings._mean(model, 0.9)
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        mean.update_parameters(model)
    assert mean.module.weight.item() == pytest.approx(0.9 * 1 + 0.1 * 2)


# The choice of a rate ----------------------------------------------------------------------------


def test_each_optimizer_has_as_many_rates_around_its_own():
    for name, kind in KINDS.items():
        grid = trainings.rates(name, 5)
        assert grid[2] == kind.rate
        assert len({round(b / a, 1) for a, b in pairwise(grid)}) == 1


def test_the_best_rate_has_the_highest_mean():
    cases = [
        {"optimizer": "sgd", "batch": 8, "rate": rate, "accuracy": accuracy}
        for rate, accuracy in ((0.1, 0.9), (0.1, 0.1), (0.2, 0.6), (0.2, 0.6), (0.4, 0.5))
    ]
    assert trainings.best(cases) == {("sgd", 8): 0.2}


def test_a_batch_larger_than_the_set_is_refused(capsys):
    parser = argparse.ArgumentParser()
    trainings.add_flags(parser, CPU)
    with pytest.raises(SystemExit):
        trainings.check(parser, parser.parse_args(["--at", "4096"]))
    assert "240 images are less than a batch of 4096" in capsys.readouterr().err


# The programs ------------------------------------------------------------------------------------


def test_trainings_are_dealt_out_and_fresh_seeds_have_the_chosen_rate():
    entry = series.Entry("dealt", experiment_file("batches.py"), TINY.split())
    job = series.submit([entry], Request(name="batches", n_gpu=2))
    assert job.wait() == State.COMPLETED, job.explain()
    (folder,) = series.folders(job).values()
    ranks = [list(rank.cases.values()) for rank in log.read_ranks(folder)]
    cases = [*chain(*ranks)]
    assert [len(rank) for rank in ranks] == [17, 17]
    tuned = [case for case in cases if case["phase"] == "tuning"]
    chosen = trainings.best(tuned)
    assert {case["seed"] for case in tuned} == {*trainings.TUNING_SEEDS}
    fresh = [case for case in cases if case["phase"] == "fresh"]
    assert {case["seed"] for case in fresh} == {0, 1}
    assert all(c["rate"] == chosen[c["optimizer"], c["batch"]] for c in fresh)
    many = [case for case in cases if case["phase"] == "as many updates"]
    assert {case["updates"] for case in many} == {3}, "those of the small batch"
    rule = {c["rule"]: c["rate"] / chosen["sgd", 8] for c in cases if c["phase"] == "rule"}
    expected = {"same rate": 1, "square root": 2**0.5, "linear": 2}
    assert rule == pytest.approx(expected, rel=0.01)


def test_every_change_is_trained_with_every_seed(tmp_path, monkeypatch):
    program, trained = load("variants"), []
    monkeypatch.setattr(
        program.trainings,
        "train",
        lambda plan, *_: trained.append(plan) or {"accuracy": plan.rate, "accuracy_again": 0.5},
    )
    folder = run_main(experiment_file("variants.py"), tmp_path / "run", *TINY.split())
    fresh = [c for c in log.read(folder).cases.values() if c["phase"] == "fresh"]
    names = [(o, name) for o, changes in program.CHANGES.items() for name in changes]
    assert [(c["optimizer"], c["variant"]) for c in fresh] == names * 2
    highest = max(trainings.rates("sgd", 2))
    assert fresh[0]["rate"] == highest
    assert fresh[3]["rate"] == pytest.approx(program.HIGHER * highest, rel=0.01)
    assert next(p for p in trained if p.ema).ema == 0.9


@pytest.mark.parametrize(("how", "decays"), [("coupled", 1), ("everywhere", 2), ("clean", 1)])
def test_decay_is_where_a_change_says(how, decays):
    program = load("variants")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = program.CHANGES["adamw"][how].of["build"](Plan("adamw", 16, 0.1, 0), model)
    decayed = [w for g in optimizer.param_groups if g["weight_decay"] for w in g["params"]]
    assert {w.ndim for w in decayed} == {*range(3 - decays, 3)}
    kind = torch.optim.Adam if how == "coupled" else torch.optim.AdamW
    assert type(optimizer) is kind


def test_each_length_chooses_its_own_rate(tmp_path):
    flags = [*TINY.split(), *"--lengths 1 2 4 --updates 2 6".split()]
    folder = run_main(experiment_file("lengths.py"), tmp_path / "run", *flags)
    cases = log.read(folder).cases.values()
    made = {(c["batch"], c["updates"]) for c in cases}
    assert made == {(8, 3), (8, 6), (16, 2), (16, 4)}, "24 images, 2 to 6 updates"
    tuned = [c for c in cases if c["phase"] == "tuning"]
    assert len(tuned) == 4 * 2 * 2, "lengths, rates, seeds"
    chosen = trainings.best(tuned, "batch", "updates")
    fresh = [c for c in cases if c["phase"] == "fresh"]
    assert len(fresh) == 4 * 2
    assert all(c["rate"] == chosen[c["batch"], c["updates"]] for c in fresh)


def test_no_length_with_so_many_updates_is_an_error(tmp_path, capsys):
    flags = [*TINY.split(), *"--lengths 1 --updates 100 200".split()]
    with pytest.raises(SystemExit):
        run_main(experiment_file("lengths.py"), tmp_path / "run", *flags)
    assert "no training has as many --updates: give other --lengths" in capsys.readouterr().err


def test_a_finder_has_a_curve_for_each_batch_and_seed(tmp_path):
    flags = [*TINY.split(), "--steps", 6, "--seeds", 2]
    folder = run_main(experiment_file("finder.py"), tmp_path / "run", *flags)
    cases = log.read(folder).cases.values()
    assert [(c["batch"], c["seed"]) for c in cases] == [(8, 0), (8, 1), (16, 0), (16, 1)]
    for case in cases:
        assert case["rates"] == sorted(case["rates"])
        assert len(case["rates"]) == len(case["losses"])


def test_costs_count_the_bytes_of_the_states(tmp_path):
    flags = "--model shufflenet_v2_x0_5 --rounds 2 --times 1".split()
    folder = run_main(experiment_file("optimizer_costs.py"), tmp_path / "run", *flags)
    cases = log.read(folder).cases
    values = {name: case["state_bytes"] / case["parameters"] for name, case in cases.items()}
    assert values["SGD, fused"] == values["LARS, one by one"] == values["Lion, one by one"] == 4
    assert values["AdamW, fused"] == pytest.approx(8, rel=0.001)
    assert values["LAMB, one by one"] == 8
    assert 4 < values["Muon, one by one"] < 8, "two values for the classifier only"
    assert all(len(case["ms"]) == 2 for case in cases.values())


def test_an_update_that_cannot_be_compiled_is_left_out_and_told(monkeypatch, capsys):
    program = load("optimizer_costs")

    def refused():
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(program, "prepared", lambda *_: (None, refused))
    assert program.first_updates("lamb", "compiled", None, CPU) is None
    assert capsys.readouterr().out == "lamb, compiled: left out: no compiler\n"
    with pytest.raises(RuntimeError, match="no compiler"):
        program.first_updates("lamb", "one by one", None, CPU)
