"""What notebook 13 says of recordings is what they hold."""

import statistics
from itertools import groupby, pairwise

import optuna
from claims import claims

from dlojz import runs
from dlojz.chapters.n13_search import figures, recorded
from dlojz.figures import paired
from dlojz.runs import log
from dlojz.runs.stats import NO_DIFFERENCE

NOTEBOOK = "13_search"


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
    tried = [statistics.fmean(len(s.trials) for s in kinds[n, "hyperband"]) for n in told]
    [whole] = {len(s.trials) for n in told for s in kinds[n, "none"]}
    yield f"tries {min(tried):.0f} to {max(tried):.0f} trials for the price of {whole}"


@claims(NOTEBOOK)
def test_stopped_trials_would_have_ended_among_the_best():
    trials = [trial for own in recorded.stopped(studies()).values() for trial in own]
    ended = [trial for trial in trials if not recorded.is_complete(trial)]
    good = sum(trial["top"] for trial in ended)
    yield f"{len(ended)} were stopped, and {good} of them would have ended among the best three"


@claims(NOTEBOOK)
def test_the_gp_repeats_what_was_stopped():
    found = recorded.kinds(studies())
    longest = {}
    for name in recorded.SAMPLERS:
        rates = [[t["lr"] for t in search.trials] for search in found[name, "hyperband"]]
        near = [abs(b / a - 1) < 0.1 for own in rates for a, b in pairwise(own)]
        longest[name] = 1 + max((len([*g]) for same, g in groupby(near) if same), default=0)
    assert max(longest["random"], longest["tpe"]) <= 2
    number = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven"}[longest["gp"]]
    yield f"tries nearly the same again, up to {number} times here"


@claims(NOTEBOOK)
def test_the_noise_of_seeds_is_as_told():
    title = figures.plot_noise(studies()).figure.get_suptitle()
    default = [100 * case["accuracy"] for case in recorded.cases(studies(), "default")]
    yield f"of {title.split('sd ')[1].split()[0]} points, those of the defaults "
    yield f"those of the defaults {statistics.stdev(default):.1f}"
    yield f"this study are {title.split(' are ')[1].split()[0]} points apart"


@claims(NOTEBOOK)
def test_winners_again():
    lost = recorded.lost(studies())
    yield f"they gain {-statistics.fmean(lost):.1f} points"
    yield f"it takes {-lost[0]:.1f} points from every winner"
    title = figures.plot_curse(studies()).figure.get_suptitle()
    yield f"Then {title.split('still ')[1].split()[0]} points above the defaults are left"


@claims(NOTEBOOK)
def test_slices_and_importances():
    study = recorded.as_optuna(studies())
    assert max(t.value for t in study.trials if t.params["lr"] > 0.15) < 0.5
    best = statistics.quantiles([t.value for t in study.trials], n=4)[2]
    assert max(t.params["lr"] for t in study.trials if t.value >= best) < 0.1
    yield f"From {len(study.trials)} trials they are noise"
    shares = optuna.importance.get_param_importances(study).values()
    assert max(shares) < 2 * min(shares), "about equal"


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
    yield f"correlate by {alike:.2f}"
    best = [max(trials, key=recorded.last)["trial"] for trials in own]
    assert best[0] == best[1]
