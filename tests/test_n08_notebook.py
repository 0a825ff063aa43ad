"""What notebook 08, its quiz and its answers say of recordings is in the recordings."""

import statistics
import tomllib
from functools import cache

import pytest
from claims import claims

from dlojz import course, runs
from dlojz.chapters import n08_large_batch as n08
from dlojz.chapters.n08_large_batch import figures
from dlojz.figures import paired

AGAIN = figures.AGAIN


def recorded(what):
    return runs.recorded(f"h100/08-{what}")


@cache
def trained():
    return figures.fresh(recorded("batches-x4"))


@cache
def ruled():
    found = {}
    for phase in ("rule", "as many updates"):
        for s in figures.settings(recorded("batches-x4"), phase):
            found[phase, s.rule] = s
    return found


@cache
def lengths():
    return runs.recorded("h200/08-lengths-x2")


@cache
def lines():
    return n08.lengths(lengths())


def needed(what):
    run = lengths()
    return {b: n08.needed(s, what, n08.target(run)) for b, s in n08.lengths(run).items()}


def chapter(name):
    path = course.course_root() / f"dlojz/chapters/n08_large_batch/{name}.toml"
    return tomllib.loads(path.read_text())


@claims("08_large_batch")
def test_both_rules_fail_in_as_many_epochs_and_win_in_as_many_updates():
    small, tuned = trained()["sgd", 64], trained()["sgd", 1024]
    assert n08.rate_ratio(recorded("batches-x4")) == 1
    root = figures.difference(small, ruled()["rule", "square root"])
    linear = figures.difference(small, ruled()["rule", "linear"])
    assert {root.word, linear.word} == {paired.WORSE}
    assert figures.difference(small, tuned).word == paired.WORSE
    yield "even with it the large batch loses"
    same, scaled = (ruled()["as many updates", rule] for rule in ("same rate", "linear"))
    assert figures.difference(small, same).word == paired.BETTER
    assert figures.difference(same, scaled).word == paired.BETTER
    yield "the rate of the linear rule better still"


@claims("08_large_batch")
def test_statistics_are_a_part_of_the_loss_with_few_updates_only():
    sgd = [s for (name, _), s in trained().items() if name == "sgd"]
    gained = {s.batch: s.accuracy(AGAIN).mean - s.accuracy().mean for s in sgd}
    assert all(abs(points) < 0.2 for batch, points in gained.items() if batch <= 1024)
    lamb = trained()["lamb", 4096]
    points = lamb.accuracy(AGAIN).mean - lamb.accuracy().mean
    yield f"SGD gains {gained[4096]:.0f} points, and LAMB, which comes next, {points:.0f}"


@claims("08_large_batch")
def test_a_finder_is_right_by_an_order_of_magnitude():
    minima = n08.lowest(recorded("finder"))
    ratios = {batch: trained()["sgd", batch].rate / rate for batch, rate in minima.items()}
    assert min(ratios[64], ratios[256]) > 3
    assert 0.8 < ratios[1024] < 1.25
    tuned = figures.settings(recorded("batches-x4"), "tuning")
    at = {s.rate: s.accuracy().mean for s in tuned if (s.optimizer, s.batch) == ("sgd", 1024)}
    assert minima[1024] / 0.016 == pytest.approx(5, abs=0.5)
    yield f"0.016, it had {at[0.016]:.1f} % while it was tuned, and {at[0.1]:.1f} % with 0.1"
    told = f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f} times"
    assert told in chapter("quiz")["large-minimum"]["answers"][2]["why"]


@claims("08_large_batch")
def test_muon_is_first_and_none_makes_up_for_the_missing_updates():
    at = {name: s for (name, batch), s in trained().items() if batch == 1024}
    order = sorted(at, key=lambda name: -at[name].accuracy().mean)
    ahead = figures.difference(at["lars"], at["muon"])
    assert (order[:2], ahead.word) == (["muon", "lars"], paired.BETTER)
    for one, other in (("lars", "adamw"), ("lars", "lamb"), ("adamw", "lamb")):
        assert figures.difference(at[one], at[other]).word not in (paired.BETTER, paired.WORSE)
    assert set(order[-2:]) == {"sgd", "lion"}
    behind = figures.difference(trained()["sgd", 64], at["muon"])
    assert behind.word == paired.WORSE
    yield "None of the six makes up for the missing updates"
    assert figures.difference(at["adamw"], at["lamb"], AGAIN).word == paired.BETTER
    for row in n08.optimizers(recorded("batches-x4")).rows:
        assert "grid's end" not in row[1]
        if row[0] in ("Muon", "LAMB"):
            assert float(row[2]) > at[row[0].lower()].accuracy().mean + 1


@claims("08_large_batch")
def test_updates_hardly_fall_above_the_critical_batch():
    updates, seconds, joules = (needed(what) for what in ("updates", "seconds", "joules"))
    assert 0.33 < updates[256].mean / updates[64].mean < 0.4
    assert 0.45 < updates[1024].mean / updates[256].mean < 0.55
    assert updates[4096].mean / updates[1024].mean == pytest.approx(5 / 6, abs=0.02)
    yield "saves only a sixth"
    assert min(seconds, key=lambda b: seconds[b].mean) == 1024
    assert min(joules, key=lambda b: joules[b].mean) == 256
    assert seconds[4096].mean == pytest.approx(2 * seconds[1024].mean, rel=0.1)
    assert joules[4096].mean == pytest.approx(3 * joules[1024].mean, rel=0.1)
    yield "takes twice as long as 1,024, and three times its energy"
    yield f"in {seconds[1024].mean / seconds[64].mean:.0%} of the time".replace("%", " %")
    yield f"for {joules[256].mean / joules[64].mean:.0%} of the energy".replace("%", " %")
    told = f"{updates[4096].mean:.0f} updates instead of {updates[1024].mean:.0f}"
    assert told in chapter("answers")["08 from the figures"]


@claims("08_large_batch")
def test_the_best_rate_grows_with_the_updates():
    rates = {s.mean("updates"): s.rate for s in lines()[1024]}
    assert [*rates.values()] == sorted(rates.values())
    yield f"1,024 images want {rates[72]:g} for 72 updates, and {rates[576]:g} for 576"
    (small,) = [s.rate for s in lines()[64] if s.mean("updates") == 1200]
    assert rates[1152] / small == pytest.approx(16, rel=0.05)
    grid = {s.rate for s in figures.settings(lengths(), "tuning")}
    assert max(s.rate for line in lines().values() for s in line) < max(grid)


@claims("08_large_batch")
def test_an_update_one_by_one_takes_the_time_of_its_launches():
    cases = figures.measured(recorded("costs")).cases.values()
    ms = {(c["optimizer"], c["way"]): statistics.median(c["ms"]) for c in cases}
    (first,) = [c for c in cases if (c["optimizer"], c["way"]) == ("lamb", "compiled")]
    yield f"To update {first['weights']} tensors"
    assert 3.7 < ms["lamb", "one by one"] / ms["lamb", "compiled"] < 4
    assert 110 < first["first_s"] < 150
    yield "nearly four times as fast, after two minutes of compiling"
    muon, sgd = (trained()[name, 1024].mean("seconds") for name in ("muon", "sgd"))
    yield f"Muon's 72 updates above took {muon:.1f} s"
    (same,) = [s for s in lines()[1024] if s.mean("updates") == 576]
    yield f"SGD makes {72 * muon / sgd:.0f} with the same batch, and"
    yield f"576 of them had {same.accuracy().mean:.1f} %"


@claims("08_large_batch")
def test_each_change_does_what_the_notebook_says():
    run = recorded("variants-x4")
    clean, others = figures.changes(run, "sgd")
    points = {title: figures.difference(clean, s) for title, s in others.items()}
    cold, warm = points["rate x 4, no warm-up"].mean, points["rate x 4"].mean
    long = others["rate x 4, warm-up over 50 %"].by_seed()
    lost = [clean.by_seed()[seed] - accuracy for seed, accuracy in long.items()]
    assert -cold > -warm + 15 > statistics.fmean(lost) + 30
    yield "the longer it is, the less is lost at four times the best rate"
    assert points["warm-up over 50 %"].mean - points["no warm-up"].mean < 0.1 * -cold
    yield "At the best rate there is less to gain"
    mean = points["constant rate, mean of the weights (EMA 0.9)"]
    assert mean.word == paired.BETTER
    yield "makes a constant rate better than a falling one"
    alone = figures.difference(clean, others["constant rate"], AGAIN)
    assert alone.word == paired.BETTER
    yield "the constant rate is better even without it"
    growing = others["3/4 of the side in the first half"]
    saved = 1 - growing.mean("seconds") / clean.mean("seconds")
    assert figures.difference(clean, growing).word == paired.WORSE
    yield f"saved {saved:.0%} of the time".replace("%", " %")


@claims("08_large_batch")
def test_decay_makes_no_difference_unless_it_is_coupled():
    clean, others = figures.changes(recorded("variants-x4"), "adamw")
    points = {title: figures.difference(clean, s) for title, s in others.items()}
    same = [points[title] for title in ("no decay", "decay on all weights")]
    assert {p.word for p in same}.isdisjoint({paired.BETTER, paired.WORSE})
    assert points["coupled: Adam with L2"].word == paired.WORSE
    yield "it is the statistics that lose the points"
    again = figures.difference(clean, others["coupled: Adam with L2"], AGAIN)
    assert again.word not in (paired.BETTER, paired.WORSE)
