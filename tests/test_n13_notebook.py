"""What notebook 13 says of recordings is what they hold."""

import re
import statistics
from itertools import groupby, pairwise

import nbformat
import optuna
from claims import claims
from programs import REPOSITORY

from dlojz import runs
from dlojz.chapters.n13_search import figures, kept, recorded
from dlojz.figures import paired
from dlojz.runs import log, stats
from dlojz.runs.stats import NO_DIFFERENCE
from dlojz.widgets.quiz import QUIZZES

NOTEBOOK = "13_search"
NUMBERS = dict(enumerate("zero one two three four five six seven eight nine ten".split()))


def title(ax):
    return ax.figure.get_suptitle()


def studies():
    return runs.recorded("h100/13-studies")


def study():
    """Return the search whose trials are jobs."""
    return kept.read(runs.recorded("h100/13-study"))


def transfer():
    return runs.recordings("*/13-*transfer*")[-1]


@claims(NOTEBOOK)
def test_no_sampler_is_shown_better_than_random_search():
    kinds = recorded.kinds(studies())
    reached = {
        name: {search.repeat: search.fresh("unseen") for search in kinds[name, "none"]}
        for name in recorded.SAMPLERS
    }
    found = {n: paired.difference(reached["random"], reached[n]) for n in ("tpe", "gp")}
    assert {difference.word for difference in found.values()} == {NO_DIFFERENCE}
    assert "No sampler is shown to be better than random search (3 repeats)" in title(
        figures.plot_budgets(studies())[0]
    )
    [whole] = {len(s.trials) for n in reached for s in kinds[n, "none"]}
    yield f"{NUMBERS[len(reached['random'])]} repeats, with {whole} trials each, would have seen "
    yield f"seen {found['tpe'].half:.1f} points for TPE and {found['gp'].half:.1f} for the GP"


@claims(NOTEBOOK)
def test_hyperbands_gain_is_barely_shown():
    kinds = recorded.kinds(studies())
    tried = [len(s.trials) for n in recorded.SAMPLERS for s in kinds[n, "hyperband"]]
    [whole] = {len(s.trials) for n in recorded.SAMPLERS for s in kinds[n, "none"]}
    yield f"tries {min(tried)} to {max(tried)} trials for the price of {whole}"
    by_repeat = [{}, {}]  # means over the samplers
    for pruner, means in zip(recorded.PRUNERS, by_repeat, strict=True):
        every = [kinds[name, pruner] for name in recorded.SAMPLERS]
        for own in zip(*every, strict=True):
            means[own[0].repeat] = statistics.fmean(search.fresh("unseen") for search in own)
    gain = paired.difference(*by_repeat)
    assert gain.half < gain.mean < 1.2 * gain.half, "barely"
    yield f"its winners are {gain.mean:.1f} ± {gain.half:.1f} points better: "
    yield f"points better: {NUMBERS[gain.seeds]} repeats barely show it"


@claims(NOTEBOOK)
def test_equal_numbers_in_the_table_are_the_same_trial():
    assert len(recorded.winning(studies())) < len(recorded.searches(studies()))
    yield "several can choose the same trial: the table gives it one number"


@claims(NOTEBOOK)
def test_stopped_trials_would_have_ended_among_the_best():
    told = title(figures.plot_stopped(studies())[0])
    ended, good = re.findall(r"stopped (\d+) .*: (\d+) would", told)[0]
    yield f"{ended} were stopped, and {good} of them, in red, would have ended among the best three"
    classes = stats.summary(studies()).arguments["classes"]
    yield f"near chance, {100 / classes:.0f} % with {classes} classes"
    trials = (t for own in recorded.stopped(studies()).values() for t in own)
    curves = [*{recorded.parameters(t): t["whole"] for t in trials}.values()]
    first, third, ninth = ([curve[epoch] for curve in curves] for epoch in (0, 2, -1))
    first, third = (figures._alike(early, ninth) for early in (first, third))
    yield f"after one epoch correlate with the last ones by {first:.2f}, after three by {third:.2f}"


def near(trials):
    """Return for each trial but the first whether its rate is within 10 % of the one before."""
    return [abs(b["lr"] / a["lr"] - 1) < 0.1 for a, b in pairwise(trials)]


@claims(NOTEBOOK)
def test_the_gp_repeats_what_was_stopped():
    own = recorded.stopped(studies())["gp"]
    [red] = (n for n, t in enumerate(own) if t["top"] and not recorded.is_complete(t))
    assert near(own)[red]
    yield "the GP's trial after its red one is nearly the same"
    found, longest = recorded.kinds(studies()), {}
    for name in recorded.SAMPLERS:
        longest[name] = [
            1 + max((len([*g]) for same, g in groupby(near(search.trials)) if same), default=0)
            for search in found[name, "hyperband"]
        ]
    assert max(longest["random"] + longest["tpe"] + longest["gp"][:1]) <= 2
    yield f"It tries a stopped one again, up to {NUMBERS[max(longest['gp'])]} times in a later"


@claims(NOTEBOOK)
def test_a_search_of_jobs():
    found, sizes = study(), log.read(runs.recorded("h100/13-study"))
    used = sum(found.seconds.values())
    yield f"It used {used:.0f} GPU-seconds, where {len(found.trials)} whole trainings take "
    yield f"whole trainings take {found.unstopped_s:.0f}, and its winner lost "
    again = [recorded.last(case) for case in found.again]
    lost = recorded.last(found.best) - statistics.fmean(again)
    yield f"its winner lost {lost:.1f} ± {stats.half_width(again):.1f} points with fresh seeds"
    early = [t for t in found.trials if len(t["accuracies"]) == 1]
    one, nine = (statistics.median(t["seconds"] for t in x) for x in (early, found.complete))
    yield f"one epoch takes {one:.1f} s, all nine {nine:.1f} s"
    assert sizes.start["arguments"]["epochs"] == 9
    accuracies = [recorded.last(trial) for trial in early]
    yield f"{len(early)} trials were stopped after one epoch, with {min(accuracies):.1f} to "
    chance = 1 / sizes.setup["classes"]
    noise = 100 * (chance * (1 - chance) / sizes.setup["val_images"]) ** 0.5
    assert all(abs(accuracy - 100 * chance) < noise for accuracy in accuracies), "by lot"
    yield f"to {max(accuracies):.1f} %, where chance is {100 * chance:.1f} %: the pruner"
    yield f"The winner had {100 * found.best['accuracies'][0]:.1f} %, and survived"
    assert "H100" in sizes.setup["device_name"]
    workers = {trial["worker"] for trial in found.trials}
    yield f"such a search on {NUMBERS[len(workers)]} H100"


@claims(NOTEBOOK)
def test_the_noise_of_seeds_is_as_told():
    told = title(figures.plot_noise(studies()))
    sd, of_two, apart = map(float, re.findall(r"\d+\.\d", told))
    default = [100 * case["accuracy"] for case in recorded.cases(studies(), "default")]
    assert statistics.stdev(default) > 4 * sd, "noisier"
    yield f"√2 times as large: {of_two:.1f} points for the winner's seeds. The best two trials of "
    yield f"of this study are {apart:.1f} points apart: chance may have decided"
    assert apart < 2 * of_two, "within the noise"


@claims(NOTEBOOK)
def test_winners_again():
    lost = recorded.lost(studies())
    mean, half = statistics.fmean(lost), stats.half_width(lost)
    assert 0 < mean < half, "neither is shown"
    assert min(lost) < 0 < max(lost), "up or down"
    yield f"On average they lose {mean:.1f} ± {half:.1f} points, so neither a loss nor a gain"
    moved = [abs(points) for points in lost]
    yield f"each of them moves, by {min(moved):.1f} to {max(moved):.1f} points, up or down"
    told = title(figures.plot_curse(studies()))
    yield f"Then {told.split('points; ')[1].split()[0]} points above the defaults are left"
    setup, given = log.read(runs.recorded("h100/13-study")).setup, stats.summary(studies())
    assert setup["val_images"] < given.arguments["classes"] * given.arguments["val_per_class"]
    jobs = len(study().trials)
    assert jobs > max(len(search.trials) for search in recorded.searches(studies()))
    yield f"the first part grows, as it may have in the search of {jobs} jobs"


@claims(NOTEBOOK)
def test_slices_and_importances():
    found = recorded.as_optuna(studies())
    least = statistics.quantiles([t.value for t in found.trials], n=4)[2]
    rates = [t.params["lr"] for t in found.trials if t.value >= least]
    yield f"the best quarter of them have rates from {min(rates):.2f} to {max(rates):.2f}"
    told = []
    for repeat in range(3):
        own = {
            recorded.parameters(t)
            for search in recorded.unpruned(studies())
            for t in search.trials
            if search.repeat == repeat
        }
        alone = optuna.create_study(direction="maximize")
        alone.add_trials([t for t in found.trials if recorded.parameters(t.params) in own])
        importances = optuna.importance.get_param_importances(alone)
        assert [*importances] == ["lr", "mom", "wd"]
        told.append(f"{importances['lr']:.2f}")
    yield f"this order, but the learning rate has {told[0]}, {told[1]} or {told[2]}"


@claims(NOTEBOOK)
def test_small_first():
    read = log.read(transfer())
    cases, of = read.cases.values(), read.start["arguments"]
    own = [
        [c for c in cases if c["phase"] == "trial" and c["model"] == of[name]]
        for name in ("model", "larger")
    ]
    best = [max(trials, key=recorded.last)["trial"] for trials in own]
    assert best[0] == best[1]
    assert not stats.summary(read).on_gpu
    yield "Recorded on a CPU: the same random trials with a small and with a larger model"
    yield f"Both models chose the same of {len(own[0])} trials"
    told = title(figures.plot_transfer(transfer())[0])
    yield f"it is {told.split('fresh seeds: ')[1]}"


def test_the_right_answer_of_a_quiz_is_neither_the_longest_nor_the_shortest():
    solved = nbformat.read(REPOSITORY / f"solutions/{NOTEBOOK}.ipynb", as_version=4)
    for key in re.findall(r'quiz\("([\w-]+)"\)', "\n".join(c.source for c in solved.cells)):
        quiz = QUIZZES[key]
        sizes = [len(answer.text) for answer in quiz.answers]
        right = sizes.pop(quiz.right)
        assert min(sizes) <= right <= max(sizes), key
