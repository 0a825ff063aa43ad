"""The figures of chapter 08 say what their logs say."""

import matplotlib as mpl
import numpy as np
import pytest
import trained
from programs import load

mpl.use("Agg")

from dlojz.chapters import n08_large_batch as n08
from dlojz.chapters.n08_large_batch import figures, paying, trainings
from dlojz.course import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained.batches(tmp_path_factory.mktemp("batches") / "batches.jsonl")


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    return trained.lengths(tmp_path_factory.mktemp("lengths") / "lengths.jsonl")


@pytest.fixture
def changed(tmp_path):
    sgd = {"clean": ("SGD", 0), "no-warm-up": ("no warm-up", -5), "ema": ("mean", 8)}
    adam = {"clean": ("AdamW", 0), "no-decay": ("no decay", 0.0)}
    return trained.variants(tmp_path / "variants.jsonl", {"sgd": sgd, "adamw": adam})


def title(ax):
    return np.ravel(ax)[0].figure.get_suptitle()


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def rows(ax):
    return [text.get_text() for text in ax.get_yticklabels()]


def test_optimizers_have_the_names_of_the_experiments():
    named = {name: kind.title for name, kind in trainings.KINDS.items()}
    assert named == figures.TITLES


def test_a_mean_of_one_training_has_no_interval():
    assert figures.Mean.of([88.0]).text() == "88.0"
    told = figures.Mean.of([1.0, 2.0, 3.0])  # Student's t of 2 degrees: 4.3027
    assert told.text() == "2.0 ± 2.5"
    assert told.half == pytest.approx(4.302653 / 3**0.5)


def test_seeds_of_the_tuning_are_kept_apart(run):
    fresh = figures.fresh(run)
    assert {s.batch for s in fresh.values() if s.optimizer == "sgd"} == {64, 256, 1024, 4096}
    assert {case["seed"] for s in fresh.values() for case in s.cases} == {*range(5)}
    assert {c["seed"] for s in figures.settings(run, "tuning") for c in s.cases} == {100, 101}
    with pytest.raises(UserError, match="no training of the phase 'else' in it yet"):
        figures.settings(run, "else")


def test_a_loss_is_told_with_the_statistics_computed_again(run):
    ax = n08.plot_batches(run)
    assert "SGD, 1,024 instead of 64: 9.1" in title(ax)
    assert "points worse; statistics again: 9.0" in title(ax)
    assert "LAMB, statistics computed again" in labels(ax)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["64", "256", "1,024", "4,096"]


def test_each_batch_is_drawn_against_updates_seconds_and_joules(longer):
    axes = n08.plot_paying(longer)
    assert [ax.get_xlabel() for ax in axes] == [*paying.DRAWN.values()]
    assert labels(axes[-1]) == ["batch 64", "batch 256", "batch 1,024"]
    assert title(axes).startswith("SGD, 90.0 %: which batch gets there?")
    assert {text.get_text() for text in axes[0].texts} == {"0.1"}, "the rates, by length"


def test_what_a_batch_needs_lies_between_two_lengths(longer):
    line = n08.lengths(longer)[256]
    assert [s.mean("updates") for s in line] == [148, 296, 592]
    assert n08.target(longer) == pytest.approx(90.0), "of the smallest after the usual 8 epochs"
    found = n08.needed(line, "updates", 90.0)
    assert 296 < found.mean < 592
    assert found.mean == pytest.approx(296 * 2 ** (2 / 6)), "88 % with 296 updates, 94 with 592"
    rows = n08.needs(longer).rows
    assert n08.needs(longer).head[0] == "batch, until 90.0 %"
    assert [row[0] for row in rows] == ["64", "256", "1,024"]
    assert rows[1][1].startswith("373 ± ")
    assert rows[2][1:] == ("-", "-", "-", "-"), "1,024 images never get so far"


def test_seeds_that_do_not_get_there_leave_no_interval(tmp_path):
    reached = {(64, 600): 0.8, (64, 1200): 0.9, (256, 148): 0.85, (256, 296): 0.901}
    run = trained.lengths(tmp_path / "some.jsonl", reached)
    assert n08.needed(n08.lengths(run)[256], "updates", 90.0).half is None


@pytest.mark.parametrize(
    ("reached", "found"),
    [([80, 90], 2.0), ([80, 100], 2**0.5), ([91, 99], None), ([80, 89], None), ([80], None)],
)
def test_a_curve_crosses_an_accuracy_once_or_not(reached, found):
    spent = [1.0, 2.0][: len(reached)]
    assert paying.crossing(spent, reached, 90) == (found and pytest.approx(found))


def test_without_a_sensor_there_is_no_panel_of_energy(tmp_path):
    run = trained.lengths(tmp_path / "cpu.jsonl", joules=False)
    axes = n08.plot_paying(run)
    assert [ax.get_xlabel() for ax in axes] == ["updates", "seconds of a training"]
    assert "J" not in title(axes)
    assert n08.needs(run).rows[0][-1] == "-"


def test_the_most_accurate_optimizer_is_on_top(run):
    ax = n08.plot_optimizers(run)
    assert rows(ax)[0] == "Muon, 0.02"
    assert rows(ax)[-1] == "Lion, 0.001"
    first, second = title(ax).splitlines()
    assert first == "Batches of 1,024: Muon is first, 3.5 ± 0.0 points better than LAMB"
    assert second == "SGD, batches of 64: 3.6 ± 1.0 points better than Muon"
    greys = [line for line in ax.lines if line.get_color() == figures.PALETTE["limit"]]
    assert {len(line.get_xdata()) for line in greys} == {10}, "two seeds of five rates"


def test_a_rate_at_the_end_of_its_grid_is_told(run, monkeypatch):
    table = n08.optimizers(run)
    assert table.rows[0][:2] == ("Muon", "0.02 of 0.0032 to 0.125")
    found = figures.settings(run, "tuning")
    few = [s for s in found if s.optimizer != "muon" or s.rate <= 0.02]
    own = figures.settings
    monkeypatch.setattr(
        figures, "settings", lambda run, phase="fresh": few if phase == "tuning" else own(run)
    )
    assert n08.optimizers(run).rows[0][1] == "0.02 of 0.0032 to 0.02, at the grid's end"


def test_rules_are_compared_in_as_many_epochs_and_updates(run):
    ax = n08.plot_rules(run)
    assert rows(ax)[0] == "tuned rate, 0.1"
    assert rows(ax)[3] == "linear, 1.6: 72 updates"
    assert rows(ax)[5] == "linear, 1.6: 1,200 updates"
    assert "As many epochs, linear rule: 86.1" in title(ax)
    assert "As many updates, linear rule: 2.0" in title(ax)


def test_a_finder_is_compared_with_what_trains_best(run, tmp_path):
    curves = trained.finder(tmp_path / "finder.jsonl")
    minima = n08.lowest(curves)
    assert [*minima] == [64, 256, 1024]
    assert minima[1024] == pytest.approx(0.2, rel=0.2)
    ax = n08.plot_finder(curves, run)
    assert title(ax).endswith("0.87 (batch 64), 0.55 (batch 256), 0.5 (batch 1,024)")
    assert labels(ax)[-3:] == ["the rate that trains best", "square root rule", "linear rule"]
    marked = {(line.get_marker(), *np.round(line.get_xdata(), 2)) for line in ax.lines}
    assert {("o", 0.1), ("s", 0.4), ("^", 1.6)} <= marked, "64's rate, and 1,024's by the rules"
    alone = n08.plot_finder(curves)
    assert title(alone).startswith("The loss is lowest at 0.11 (batch 64)")
    assert len(labels(alone)) == 3


def test_a_loss_that_is_no_number_is_not_the_lowest(tmp_path):
    cases = {"a": {"batch": 8, "rates": [0.1, 0.2, 0.4], "losses": [3.0, 2.0, float("nan")]}}
    assert n08.lowest(trained.with_cases(tmp_path / "nan.jsonl", cases)) == {8: pytest.approx(0.2)}


def test_an_update_costs_time_and_bytes(tmp_path):
    run = trained.costs(tmp_path / "costs.jsonl")
    table = n08.costs(run)
    assert table.rows[0] == ("SGD", "one by one", "6 (5.82 to 6.3)", "0.24", "4", "")
    assert table.rows[3][-1] == "30"
    ax = n08.plot_costs(run)
    assert title(ax).endswith("fused AdamW: 55 times one by one, 2.8 times compiled")
    assert rows(ax)[0] == "SGD\n4 bytes/parameter"
    assert len(ax.patches) == 15


def test_changes_are_compared_in_pairs_with_the_clean_training(changed):
    ax = n08.plot_variants(changed)
    assert rows(ax) == ["no warm-up", "mean"]
    assert "Shown worse: 1 of 2 changes\nShown better: mean" in title(ax)
    assert "Shown better: none of them" in title(n08.plot_variants(changed, "adamw"))
    with pytest.raises(UserError, match="no change of 'lion' was trained"):
        n08.plot_variants(changed, "lion")


def test_the_first_change_of_each_optimizer_is_the_clean_training():
    for changes in load("variants").CHANGES.values():
        assert next(iter(changes)) == "clean"


@pytest.mark.parametrize("call", [n08.costs, n08.plot_finder])
def test_the_log_of_another_experiment_is_refused(run, call):
    with pytest.raises(UserError, match=r"expected a run of experiments/\w+\.py"):
        call(run)
