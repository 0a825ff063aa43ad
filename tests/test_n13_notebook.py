"""What notebook 13 says of recordings is what they hold."""

import re
import statistics
from itertools import groupby, pairwise

import nbformat
import optuna
from claims import claims
from programs import REPOSITORY

from dlojz import runs
from dlojz.chapters.n13_search import figures, recorded
from dlojz.figures import paired
from dlojz.runs import log, stats
from dlojz.runs.stats import NO_DIFFERENCE
from dlojz.widgets.quiz import QUIZZES

NOTEBOOK = "13_search"
NUMBERS = dict(enumerate("zero one two three four five six seven eight nine ten".split()))


def studies():
    """Return the recording that the notebook shows."""
    return runs.recordings("*/13-*studies*")[-1]


def transfer():
    return runs.recordings("*/13-*transfer*")[-1]


@claims(NOTEBOOK)
def test_no_sampler_is_shown_better_than_random_search():
    kinds = recorded.kinds(studies())
    reached = {
        name: {search.repeat: search.fresh("unseen") for search in kinds[name, "none"]}
        for name in recorded.SAMPLERS
    }
    for name in ("tpe", "gp"):
        assert paired.difference(reached["random"], reached[name]).word == NO_DIFFERENCE
    told = {name: statistics.fmean(by_repeat.values()) for name, by_repeat in reached.items()}
    yield f"random search have {told['random']:.1f} %, of TPE {told['tpe']:.1f} % and of the GP "
    yield f"of the GP {told['gp']:.1f} %."
    tried = [len(s.trials) for n in told for s in kinds[n, "hyperband"]]
    [whole] = {len(s.trials) for n in told for s in kinds[n, "none"]}
    yield f"tries {min(tried)} to {max(tried)} trials for the price of {whole}"


@claims(NOTEBOOK)
def test_winners_are_counted_once():
    searches, groups = recorded.searches(studies()), recorded.winning(studies())
    yield f"The {len(searches)} searches have {len(groups)} different winners"
    rows = [row[1] for row in figures.winners(studies()).rows]
    assert len(set(rows)) < len(rows), "equal rows"
    for repeat in {search.repeat for search in searches}:
        starts = {recorded.parameters(s.trials[0]) for s in searches if s.repeat == repeat}
        assert len(starts) == 1, "the same random trials"


@claims(NOTEBOOK)
def test_stopped_trials_would_have_ended_among_the_best():
    title = figures.plot_stopped(studies())[0].figure.get_suptitle()
    ended, good = re.findall(r"stopped (\d+) .*: (\d+) would", title)[0]
    yield f"{ended} were stopped, and {good} of them, in red, would have ended among the best three"
    classes = stats.summary(studies()).arguments["classes"]
    yield f"near chance, {100 / classes:.0f} % with {NUMBERS[classes]} classes"
    red = {
        trial["top"] for trial in recorded.stopped(studies())["gp"] if "PRUNED" in trial["state"]
    }
    assert red == {True, False}, "count the stopped curves of the GP, the red one too"


@claims(NOTEBOOK)
def test_the_gp_repeats_what_was_stopped():
    found = recorded.kinds(studies())
    longest = {}
    for name in recorded.SAMPLERS:
        rates = [[t["lr"] for t in search.trials] for search in found[name, "hyperband"]]
        near = [abs(b / a - 1) < 0.1 for own in rates for a, b in pairwise(own)]
        longest[name] = 1 + max((len([*g]) for same, g in groupby(near) if same), default=0)
    assert max(longest["random"], longest["tpe"]) <= 2
    yield f"tries nearly the same again, up to {NUMBERS[longest['gp']]} times here"


@claims(NOTEBOOK)
def test_the_noise_of_seeds_is_as_told():
    title = figures.plot_noise(studies()).figure.get_suptitle()
    sd, of_two, apart = map(float, re.findall(r"\d+\.\d", title))
    default = [100 * case["accuracy"] for case in recorded.cases(studies(), "default")]
    yield f"have a standard deviation of {sd:.1f} points, those of the defaults "
    yield f"those of the defaults {statistics.stdev(default):.1f}"
    yield f"√2 times as large: {of_two:.1f} points. The best two trials of this study are "
    yield f"this study are {apart:.1f} points apart, {apart / of_two:.1f} times that: chance may"
    assert apart < 2 * of_two, "within the noise"


@claims(NOTEBOOK)
def test_winners_again():
    lost = recorded.lost(studies())
    mean, half = -statistics.fmean(lost), stats.half_width(lost)
    assert 0 < mean < half, "neither is shown"
    assert min(lost) < 0 < max(lost), "up or down"
    yield f"On average they gain {mean:.1f} ± {half:.1f} points, so neither a loss nor a gain"
    moved = [abs(points) for points in lost]
    yield f"each of them moves, by {min(moved):.1f} to {max(moved):.1f} points, up or down"
    title = figures.plot_curse(studies()).figure.get_suptitle()
    yield f"Then {title.split('points; ')[1].split()[0]} points above the defaults are left"
    tried = {len(search.trials) for search in recorded.unpruned(studies())}
    yield f"the best of {NUMBERS[tried.pop()]} trials"


@claims(NOTEBOOK)
def test_slices_and_importances():
    study = recorded.as_optuna(studies())
    assert max(t.value for t in study.trials if t.params["lr"] > 0.1) < 50
    best = statistics.quantiles([t.value for t in study.trials], n=4)[2]
    assert max(t.params["lr"] for t in study.trials if t.value >= best) < 0.1
    lr, mom, wd = (optuna.importance.get_param_importances(study)[n] for n in ("lr", "mom", "wd"))
    assert lr > mom > wd
    yield f"the learning rate has {lr:.2f}, momentum {mom:.2f}, weight decay {wd:.2f}"
    yield f"From {len(study.trials)} trials their order is noise"
    half = optuna.create_study(direction="maximize")
    first = [search for search in recorded.unpruned(studies()) if search.repeat == 0]
    own = {recorded.parameters(trial) for search in first for trial in search.trials}
    half.add_trials([t for t in study.trials if recorded.parameters(t.params) in own])
    assert next(iter(optuna.importance.get_param_importances(half))) == "mom"


@claims(NOTEBOOK)
def test_small_first():
    read = log.read(transfer())
    cases, of = read.cases.values(), read.start["arguments"]
    own = [
        [c for c in cases if c["phase"] == "trial" and c["model"] == of[name]]
        for name in ("model", "larger")
    ]
    small, large = (statistics.median(case["seconds"] for case in trials) for trials in own)
    yield f"trials take {100 * small / large:.0f} % of the seconds"
    alike = figures._alike(*([recorded.last(case) for case in trials] for trials in own))
    yield f"the ranks of {len(own[0])} trials correlate by {alike:.2f}"
    best = [max(trials, key=recorded.last)["trial"] for trials in own]
    assert best[0] == best[1]
    title = figures.plot_transfer(transfer())[0].figure.get_suptitle()
    yield f"it is {title.split('fresh seeds: ')[1]}"


def test_the_right_answer_of_a_quiz_is_neither_the_longest_nor_the_shortest():
    solved = nbformat.read(REPOSITORY / f"solutions/{NOTEBOOK}.ipynb", as_version=4)
    for key in re.findall(r'quiz\("([\w-]+)"\)', "\n".join(c.source for c in solved.cells)):
        quiz = QUIZZES[key]
        sizes = [len(answer.text) for answer in quiz.answers]
        right = sizes.pop(quiz.right)
        assert min(sizes) <= right <= max(sizes), key
