"""The figures of chapter 14 say what their logs say."""

import matplotlib as mpl
import numpy as np
import pytest
from logs import experiment, measure, with_cases

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters import n14_race as n14
from dlojz.chapters.n14_race import figures
from dlojz.course import UserError

SIZES = {"classes": 4, "images_per_class": 60, "val_per_class": 25, "judged": 100, "seconds": 15.0}
SIZES |= {"model": "resnet18", "image_size": 24, "batch_size": 32, "seeds": 3}
STARTS = {
    "00 starter": (3, 20),
    "03 channels_last": (3, 1.5),
    "05 loader": (3, 1),
    "09 compile": (40, 0.25),
}  # seconds of start and end, seconds of an epoch


def split(seconds, training):
    parts = dict.fromkeys(figures.COLOURS, 0.0)
    return {"parts": parts | {"imports": seconds - training, "training": training}}


def cases(joules=None):
    found = {}
    for rung, (start, epoch_s) in STARTS.items():
        ended = start + 3 * epoch_s > 60
        about = {"rung": rung, "epochs": 3, "seed": 0, "seconds": min(60, start + 3 * epoch_s)}
        pilot = {"phase": "pilot", **about}
        if not ended:
            pilot |= {
                "epoch_s": epoch_s,
                "accuracy": 0.3,
                **split(start + 3 * epoch_s, 3 * epoch_s),
            }
        found[f"{rung}, pilot"] = pilot
        fit = int((15 - start) / epoch_s)
        for seed in range(3) if fit > 0 else ():
            one = about | {"epochs": fit, "seed": seed, "seconds": start + fit * epoch_s}
            one |= {"phase": "training", "epoch_s": epoch_s, "accuracy": 0.04 * fit + 0.01 * seed}
            one |= {} if joules is None else {"joules": joules * fit}
            found[f"{rung}, seed {seed}"] = one | split(one["seconds"], fit * epoch_s)
    return found


@pytest.fixture
def run(tmp_path):
    return with_cases(tmp_path / "bought.jsonl", cases(), **SIZES)


def title(ax):
    return np.ravel(ax)[0].figure.get_suptitle()


def texts(ax):
    return [text.get_text().strip() for text in ax.texts]


def test_a_rung_knows_how_many_epochs_fit_in_any_budget(run):
    rungs = {rung.title: rung for rung in figures.rungs(run)}
    assert rungs["05 loader"].fixed_s == pytest.approx(3)
    spared = np.array([2, 3.5, 4.1, 10.9]) / 0.95
    assert list(rungs["05 loader"].fitting(spared)) == [0, 0, 1, 7]
    assert rungs["05 loader"].epochs == 12
    assert rungs["09 compile"].epochs == 0


def test_the_last_rung_is_compared_with_the_first(run, tmp_path):
    assert n14.epochs_ratio(run) is None
    others = {name: case for name, case in cases().items() if name[:2] in ("03", "05")}
    some = with_cases(tmp_path / "some.jsonl", others, **SIZES)
    assert n14.epochs_ratio(some) == pytest.approx(12 / 8)


def test_epochs_and_points_are_compared_by_pairs_of_seeds(run):
    axes = n14.plot_bought(run)
    assert "05 loader, beside 03 channels_last: 12 epochs in 15 s instead of 8" in title(axes)
    assert "Accuracy: 16.0 ± 0.0 points better, by pairs of 3 seeds" in title(axes)
    assert texts(axes[0]) == ["none: not ended after 60 s", "8", "12", "none: one takes 40 s"]
    assert texts(axes[1])[0] == "not judged"


def test_one_seed_shows_nothing(tmp_path):
    few = {name: case for name, case in cases().items() if case["seed"] == 0}
    axes = n14.plot_bought(with_cases(tmp_path / "few.jsonl", few, **SIZES | {"seeds": 1}))
    assert "+16 points with one seed, which shows nothing yet" in title(axes)


def test_a_budget_in_which_nothing_fits_is_told(tmp_path):
    none = {name: case for name, case in cases().items() if case["phase"] == "pilot"}
    run = with_cases(tmp_path / "none.jsonl", none, **SIZES)
    assert "too few rungs complete an epoch: give more seconds" in title(n14.plot_bought(run))
    assert title(n14.plot_seconds(run)) == "No rung completes an epoch in this budget"


def test_pilots_that_were_all_ended_ask_for_more_time(tmp_path):
    ended = {name: case for name, case in cases().items() if "00" in name}
    with pytest.raises(UserError, match="first, short training came to its end: give more --sec"):
        n14.plot_seconds(with_cases(tmp_path / "ended.jsonl", ended, **SIZES))


def test_compiling_breaks_even_where_the_lines_cross(run):
    when = n14.breaks_even(run, "09 compile", "05 loader")
    assert (0.95 * when - 40) / 0.25 == pytest.approx((0.95 * when - 3) / 1)
    assert n14.breaks_even(run, "05 loader", "03 channels_last") == pytest.approx(3 / 0.95)
    assert n14.breaks_even(run, "03 channels_last", "05 loader") is None
    told = (
        "09 compile, 0.25 s for an epoch; 03 channels_last, 1.50 s; compiling pays in budgets above"
    )
    assert f"{told} 55 s" in title(n14.plot_epochs(run)).replace("\n    ", " ")
    with pytest.raises(UserError, match="no pilot of '00 starter': expected two of 03"):
        n14.breaks_even(run, "00 starter", "05 loader")


def test_the_parts_of_a_run_are_its_seconds(run):
    for rung in figures.rungs(run)[1:]:
        own = rung.mean("seconds") or rung.pilot["seconds"]
        assert sum(figures.parts(rung).values()) == pytest.approx(own)
    ax = n14.plot_seconds(run)
    rows = [text.get_text() for text in ax.get_yticklabels()]
    assert rows == ["03 channels_last", "05 loader", "09 compile, 3 epochs"]
    assert title(ax).startswith("Training is 80 % (03 channels_last) to 80 % (05 loader) of a run")


def test_joules_that_were_not_measured_are_never_zero(run):
    assert figures.NO_SENSOR in texts(n14.plot_joules(run))
    assert {row[-1] for row in n14.bought(run).rows} == {"not measured"}


def test_idle_power_is_a_part_of_the_joules(tmp_path):
    events = [{"event": "case", "case": name, **c} for name, c in cases(joules=200).items()]
    path = experiment(tmp_path / "joules.jsonl", measure("idle", 50.0, "W"), *events, **SIZES)
    ax = n14.plot_joules(path)
    assert "Idle, the GPU takes 50 W: 31 % to 47 % of a run" in title(ax)
    assert texts(ax) == ["5.0 epochs per kJ", "5.0 epochs per kJ"]


def test_each_comparison_has_its_own_gate_and_a_difference_behind_is_no_lead():
    ax = n14.plot_gate(runs.recorded("cpu/14-cpu-race"))
    assert title(ax).endswith("show a difference of 15.3 points;\n16 would show the 6.4 found")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0].startswith("images-kept: 18.3 points ahead of first, one run of which")
    assert labels[1].startswith("loader: 6.4 points behind first")
