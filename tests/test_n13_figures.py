"""What figures of notebook 13 say of searches, from logs that were made for the purpose."""

import re

import matplotlib as mpl

mpl.use("Agg")

import statistics
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from logs import experiment, with_cases

from dlojz.chapters import n13_search as n13
from dlojz.chapters.n13_search import figures, recorded
from dlojz.course import UserError
from dlojz.widgets import predict, score_value

TASK = {"model": "resnet18", "image_size": 32, "classes": 20, "images_per_class": 60}
TASK |= {"val_per_class": 50, "epochs": 3}


def trial(phase, accuracies, **about):
    case = {"phase": phase, "accuracies": accuracies, "seconds": float(len(accuracies))}
    case |= {"wd": 1e-4} if phase == "study" else {}
    state = {"state": "COMPLETE" if len(accuracies) == 3 else "PRUNED"} if phase == "study" else {}
    return case | state | about


def search(sampler, pruner, repeat, curves, again, lr=0.1):
    """The cases of a study, with three fresh seeds of its winner."""
    about = {"sampler": sampler, "pruner": pruner, "repeat": repeat}
    for number, curve in enumerate(curves):
        yield trial("study", curve, trial=number, **about, lr=lr, mom=0.9 + number / 100)
    for seed, accuracy in enumerate(again):
        yield {"phase": "winner", "seed": seed, "accuracy": accuracy, "unseen": accuracy} | about


def cases():
    plain = [[0.1, 0.2, 0.6], [0.2, 0.5, 0.8], [0.1, 0.3, 0.7]]
    stopped = [[0.1, 0.2, 0.6], [0.2, 0.5, 0.8], [0.1], [0.2, 0.4, 0.5], [0.1]]
    for repeat in range(3):
        more = repeat / 100
        yield from search("random", "none", repeat, plain, [0.76 + more] * 3)
        longer = [*stopped, [0.1]] if repeat == 2 else stopped
        yield from search("random", "hyperband", repeat, longer, [0.76 + more] * 3)
        yield from search("tpe", "none", repeat, plain, [0.79 + more] * 3, lr=0.2)
    for number, last in ((2, 0.9), (4, 0.3)):
        about = {"sampler": "random", "pruner": "hyperband", "repeat": 0, "trial": number}
        yield trial("rest", [0.1, 0.3, last], **about)
    for seed in range(10):
        yield {"phase": "default", "seed": seed, "accuracy": 0.5 + seed / 100, "unseen": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "studies.jsonl"
    named = {f"{number}": case for number, case in enumerate(cases())}
    return with_cases(path, named, **TASK)


def title(axes):
    return np.ravel(axes)[0].figure.get_suptitle()


def test_a_search_has_its_trials_in_order_and_a_winner(run):
    found = recorded.searches(run)
    assert [s.title for s in found] == ["random"] * 3 + ["random + Hyperband"] * 3 + ["TPE"] * 3
    assert [t["trial"] for t in found[3].trials] == [0, 1, 2, 3, 4]
    assert found[0].best["trial"] == 1
    assert found[0].fresh() == pytest.approx(76)
    seconds, best = found[3].progress()
    assert seconds == [3, 6, 7, 10, 11]
    assert best == pytest.approx([60, 80, 80, 80, 80]), "a stopped trial is not the best"


def test_the_first_trial_may_be_a_stopped_one():
    trials = tuple(trial("study", curve, trial=n) for n, curve in enumerate([[0.9], [0, 0, 0.2]]))
    found = recorded.Search("tpe", "hyperband", 0, trials, ())
    assert np.isnan(found.progress()[1][0])
    assert found.progress()[1][1] == pytest.approx(20)


def test_a_winner_loses_what_it_had_more_than_its_fresh_seeds(run):
    # 80 % as they won; 76, 77 and 78 % again, and TPE's 79, 80 and 81 %
    assert recorded.lost(run) == pytest.approx([4, 3, 2, 1, 0, -1])
    assert n13.lost_points(run) == pytest.approx(1.5)
    ax = n13.plot_curse(run)
    first, second = title(ax).splitlines()
    assert first == "9 searches chose 6 different trials"
    assert second.startswith("Trained again, on average: \N{MINUS SIGN}1.5 ± 2.0 points")
    assert [text.get_text() for text in ax.texts] == ["won 2 searches"] * 3
    assert n13.best_rate(run) == pytest.approx((0.1 * 0.2) ** 0.5)


def test_a_gain_is_a_loss_below_zero_and_its_score_says_so(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("DLOJZ_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(recorded, "lost", lambda run: [-2.0, 1.0])
    monkeypatch.setattr(figures, "lost", recorded.lost)
    predict("13 search", points=2)
    shown = score_value("13 search", "recorded", points=n13.lost_points(run))
    assert "recorded -0.5 percentage points: the other way round" in repr(shown)
    assert "again, on average: +0.5 points" in title(n13.plot_curse(run))


def test_the_same_trial_of_another_repeat_is_another_winner(run):
    assert [len(every) for every in recorded.winning(run)] == [2, 2, 2, 1, 1, 1]


def test_a_table_of_winners_has_means_and_intervals(run):
    table = n13.winners(run)
    assert table.rows[0] == ("random", "1, 2, 3", "3", "80.0 ± 0.0", "77.0 ± 2.5", "77.0 ± 2.5")
    assert table.rows[1][:3] == ("random + Hyperband", "1, 2, 3", "5 to 6")
    assert table.rows[2][1] == "4, 5, 6"


def test_budgets_are_compared_with_random_search_by_repeats(run):
    axes = n13.plot_budgets(run)
    assert len(axes) == 2, "random search, and TPE"
    first, second, _ = title(axes).splitlines()
    assert first == "TPE is shown to be better than random search (3 repeats)"
    assert second.endswith("unseen images, no pruning: random 77.0 %, TPE 80.0 %")
    assert "Hyperband: random 77.0 %" in title(axes)
    compared = "TPE\nwinners beside random search's:\n3.0 ± 0.0 points better"
    assert axes[1].get_title("left") == compared
    assert axes[0].get_xlabel() == "GPU-seconds of trials"
    lines = {line.get_label(): line for line in axes[0].lines}
    assert lines["Hyperband: best so far"].get_ydata()[-1] == pytest.approx(80)


def test_a_stopped_trial_counts_that_would_have_been_among_the_best(run):
    [trials] = n13.stopped(run).values()
    assert [t["whole"][-1] for t in trials] == [0.6, 0.8, 0.9, 0.5, 0.3]
    assert [t["top"] for t in trials] == [True, True, True, False, False]
    axes = n13.plot_stopped(run)
    assert (
        title(axes)
        == "Hyperband stopped 2 trials of the first repeat: 1 would have ended in the best 3 of a "
        "study"
    )
    assert "chance: 5 %" in [line.get_label() for line in axes[0].lines]
    assert axes[0].get_title("left") == "random: 2 of 5 stopped, 1 of the best 3"


def test_the_noise_is_beside_the_trials(run):
    ax = n13.plot_noise(run)
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["the defaults, 10 seeds", "a winner, 3 fresh seeds", "its study, 3 trials"]
    assert title(ax).endswith("The best two of 3 trials are 10.0 points apart")
    values = [100 * case["accuracy"] for case in recorded.cases(run, "default")]
    bar, mean = ax.lines[0].get_xdata(), statistics.fmean(values)
    assert bar[1] - mean == mean - bar[0] == pytest.approx(statistics.stdev(values))
    assert [text.get_text().strip() for text in ax.texts] == ["sd 3.0", "sd 0.0", "sd 10.0"]
    assert "bars: mean ± one sd" in ax.figure.get_supxlabel()


def test_optunas_plots_get_all_trials_without_pruning(run):
    study = n13.as_optuna(run)
    assert len(study.trials) == 18, "the samplers' own ones"
    assert study.best_value == pytest.approx(80)
    assert set(study.best_params) == {"lr", "mom", "wd"}


def test_optunas_plots_leave_the_style_of_other_figures_alone(run):
    before = dict(mpl.rcParams)
    axes = n13.plot_mattered(run)
    assert len(axes) == 4
    assert axes[1].get_ylabel() == "accuracy (%)"
    assert re.fullmatch(r"\w+: \d+ % of the accuracy's variance", title(axes[0]))
    assert dict(mpl.rcParams) == before


def test_the_curves_of_a_study_are_in_percent_over_epochs(monkeypatch):
    study = optuna.create_study()
    for value in (0.1, 0.5):
        study.add_trial(
            optuna.trial.create_trial(value=value, intermediate_values={1: value / 2, 2: value})
        )
    monkeypatch.setattr(figures, "find", lambda name: SimpleNamespace(optuna=study))
    _, curves = n13.plot_study("first")
    assert curves.get_ylabel() == "validation accuracy (%)"
    assert curves.yaxis.get_major_formatter()(0.5) == "50.0"


def test_a_kept_study_shows_what_stopping_saved_and_its_best_trial_again(tmp_path):
    job = {"event": "case", "worker": 0, "begin_s": 0.0}
    trials = [
        job | trial("study", curve, case=f"trial {n}", seconds=seconds) | {"phase": "trial"}
        for n, (curve, seconds) in enumerate(
            [([0.1, 0.2, 0.6], 10.0), ([0.1, 0.5, 0.8], 12.0), ([0.1], 7.0), ([0.1], 6.0)]
        )
    ]
    trials[2]["worker"] = 1
    again = [
        job | {"case": f"again {n}", "phase": "again", "seconds": 9.0, "accuracies": [0.1, last]}
        for n, last in enumerate((0.75, 0.76, 0.77))
    ]
    setup = {"event": "setup", "device": "cuda:0", "device_name": "X1"}
    setup |= {"train_images": 1200, "val_images": 100}
    axes = n13.plot_jobs(experiment(tmp_path / "study.jsonl", setup, *trials, *again, **TASK))
    first, second = title(axes).splitlines()
    assert first == (  # 8 of 12 epochs, and 35 of 4 x 11 s
        "Stopping 2 of 4 trials saved 33 % of their epochs, and 20 % of their GPU-seconds"
    )
    assert second.endswith("had 80.0 %; again, with fresh seeds on unseen images: 76.0 ± 2.5 %")
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["worker 0", "worker 1"]
    assert [text.get_text() for text in axes[0].texts] == ["60.0", "80.0"]
    assert [text.get_text() for text in axes[1].texts] == ["22", "13", "44"]


def transferred():
    found = []
    for number, (small, large) in enumerate(((0.5, 0.3), (0.8, 0.6), (0.7, 0.7))):
        for model, last in (("resnet18", small), ("resnet50", large)):
            about = {"phase": "trial", "trial": number, "model": model}
            seconds = {"seconds": 1.0 if model == "resnet18" else 4.0}
            found.append(about | seconds | {"accuracies": [0.1, last]})
    for of, last in (("resnet18", 0.6), ("resnet50", 0.65), ("default", 0.4)):
        for seed in range(3):
            about = {"phase": "winner", "of": of, "model": "resnet50", "seed": seed}
            flags = {} if of == "default" else {"lr": last, "mom": 0.9, "wd": 1e-4}
            case = about | flags | {"seconds": 4.0, "accuracies": [0.1, last + seed / 100]}
            found.append(case)
    return found


def logged(path, found):
    named = {f"{number}": case for number, case in enumerate(found)}
    return with_cases(path, named, larger="resnet50", **TASK)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return logged(tmp_path_factory.mktemp("logs") / "transfer.jsonl", transferred())


def test_a_search_with_a_small_model_is_compared_with_the_larger_ones(moved):
    axes = n13.plot_transfer(moved)
    first, second = title(axes).splitlines()
    assert first.startswith("resnet18's trials take 25 % of resnet50's seconds")
    assert first.endswith("ranks of 3 trials correlate by 0.50")
    assert second.endswith("beside that model's own: 5.0 ± 0.0 points worse")
    assert axes[0].get_legend() is None, "its marks look like trials"


def test_models_that_chose_the_same_trial_are_not_compared(tmp_path):
    found = [c | {"lr": 0.1} if c.get("of", "default") != "default" else c for c in transferred()]
    axes = n13.plot_transfer(logged(tmp_path / "transfer.jsonl", found))
    rows = [label.get_text() for label in axes[1].get_yticklabels()]
    assert rows == ["best of both", "the defaults"]
    _, second = title(axes).splitlines()
    assert second.startswith(
        "Both chose the same trial; beside the defaults, with fresh seeds: 20.0"
    )


def test_the_log_of_another_experiment_is_refused(run, moved):
    with pytest.raises(UserError, match=r"expected a run of experiments/transfer\.py"):
        n13.plot_transfer(run)
    with pytest.raises(UserError, match=r"no 'study' in it; expected a run of studies\.py"):
        n13.plot_budgets(moved)
    with pytest.raises(UserError, match=r"expected a run of tools/keep_study\.py"):
        n13.plot_jobs(run)
