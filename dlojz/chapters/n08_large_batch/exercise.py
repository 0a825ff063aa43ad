"""08_large_batch: a layer's step is as long as its weights, at a rate that a finder chose."""

from itertools import pairwise

from dlojz.check.bars import Bar
from dlojz.check.common import flag, like, no_brake
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, SAME, WORK_FIRST, Exercise, Extra, Finding, Runs, State
from dlojz.check.wording import both, share

FINDER = "finder"  # a run by AdamW: two groups of weights, and torch's own updates
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 8 "
SMALL += (
    "--precision fp32 --deterministic --optimizer adamw --accumulate 2 --warm-up 0.1 --find-lr 24"
)
LENGTH, ELEMENT = 5e-3, 0.02  # of a step's length, and of its elements
ROUNDING = 2.0**-24  # of a weight, of which a step at a rate of 1e-6 is hardly more
ALL, LARGEST = 0, 1  # of [least, largest]
MADE_UP, LOSSES, RATES = 1e-3, 1e-3, 1e-6  # as shares
# The known part of a run's geometry, by class: its name, the number, the parts of the model, the
# bounds, and whether the first update alone has it. Elements without a gradient don't move, and a
# matrix may have singular values of 0: so there the largest number is judged.
LIKE, ONE = (1 - LENGTH, 1 + LENGTH), (1 - ELEMENT, 1 + ELEMENT)
# Of values above half a percent of the matrix's norm the iteration makes 0.68 to 1.15, of smaller
# ones up to 1.202: computed.
SINGULAR = 0.68, 1.22
TRUST = 5e-4, 1.01e-3  # of LARS, whose length is a little less with weight decay
RULES = {
    "Lamb": ("length of each layer's step / its weights", "ratio", ALL, LIKE, False),
    "Lars": ("length of each layer's first step / its weights", "ratio", ALL, TRUST, True),
    "Lion": ("largest element of a step, without decay", "free", LARGEST, ONE, False),
    "AdamW": ("largest element of the first step", "free", LARGEST, ONE, True),
    "Muon": ("largest singular value of a step", "singular", LARGEST, SINGULAR, False),
}


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the optimizer and its geometry, the schedule, and the finder."""
    mine, reference = runs.mine, runs.reference
    epochs, finder = (runs.extras.get(name) for name in (Role.EPOCHS, FINDER))
    pairs = [pair for pair in ((mine, reference), epochs) if pair and pair[1].begun]
    names = ("--warm-up", "--schedule", "--find-lr")
    return [
        flag(mine, "--optimizer", lambda how: how != "sgd", "lamb, or another", "asked"),
        *(flag(mine, name, lambda _: True, "known", "flag") for name in names),
        *(finding for pair in pairs for finding in _optimizer(*pair)),
        *(_made_up(*(run.made_up for run in pairs[0])) if pairs else []),
        *(_schedule(*epochs, "schedule", "two epochs") if epochs else []),
        *(_schedule(*finder, "accumulated", "with --accumulate 2") if finder else []),
        *(_finder(*finder) if finder else []),
        *no_brake(mine, reference),
    ]


# The optimizer -----------------------------------------------------------------------------------


def _optimizer(mine, reference):
    """Yield findings on the class of a run's optimizer, its state, and its steps."""
    how, pair = reference.start["arguments"]["optimizer"], (mine, reference)
    what = f"class of the optimizer, {how}"
    yield like(MECHANISM, f"class-{how}", what, *pair, lambda run: run.begun.optimizer, "built")
    what = f"bytes of state for a weight, {how}"
    yield like(MECHANISM, f"state-{how}", what, *pair, _state, "state")
    if reference.begun.optimizer in RULES:
        yield _geometry(mine, reference.begun.optimizer)


def _state(run):
    held = run.share.held
    weights = held.get("parameters", 0) / 4  # float32
    return f"{held.get('optimizer', 0) / weights:.1f}" if weights else "unknown"


def _geometry(run, kind):
    """Return a finding on the known part of a run's geometry: see `dlojz.watch.geometry`."""
    label, number, first, (least, most), once = RULES[kind]
    updates = [u for u in run.geometry.updates if u][: 1 if once else None]
    parts = ("matrices", "classifier") if number == "ratio" else ("matrices",)
    found = [(x, u["rate"]) for u in updates for p in parts for x in u[p].get(number, [])[first:]]
    what, asked = f"{label}, {kind.lower()}", f"{least:.4g} to {most:.4g}"
    which = MECHANISM, f"geometry-{kind.lower()}", what
    if not found:
        return Finding(*which, State.NOT_ASKED, "not seen", asked)
    count = f"{len(updates)} updates" if len(updates) > 1 else "the first update"
    text = f"{min(found)[0]:.4g} to {max(found)[0]:.4g}, in {count}"
    near = (least - ROUNDING / rate <= x <= most + ROUNDING / rate for x, rate in found)
    return Finding(*which, all(near), text, asked, "ratio")


PARTS = {
    "matrices": "as long as the weights",
    "zeros": "as long as Adam's, of weights of 0",
    "vectors": "as long as Adam's, of norms and biases",
}
MISTAKES = (
    *("upside-down", "of-gradient", "one-ratio", "decay-outside", "no-ratio", "vectors"),
    *("zero-norm", "bias-correction", "decayed", "ratio"),
)


def _made_up(mine, reference):
    """Yield findings on the steps of made-up weights: see `dlojz.watch.optimizing`."""
    if not mine.ways:
        text = mine.error or "not seen"
        yield Finding(MECHANISM, "made-up", "made-up steps", State.NOT_ASKED, text, "no error")
        return
    yield from _reads(mine, reference)
    for how, usual in reference.ways.items():
        way = mine.ways.get(how)
        if way is None:
            text = mine.error or "not seen"
            which = MECHANISM, f"made-up-{how}", f"made-up steps, {how}"
            yield Finding(*which, False, text, "no error", "given")
            continue
        for part, asked in PARTS.items() if how == "lamb" else ():
            mistake = way["mistakes"][part]
            hint = mistake if mistake in MISTAKES else None
            which = MECHANISM, f"made-up-{part}", f"made-up step of {part}, lamb"
            yield Finding(*which, not mistake, "another" if mistake else asked, asked, hint)
        off = {name: both(a, b) for name, a, b in _lengths(way, usual) if not _near(a, b)}
        texts = [_steps(off, n) if off else "the solution's" for n in (0, 1)]
        what = f"made-up steps, {how}"
        hint = _why_made_up(how, off)
        yield Finding(MECHANISM, f"made-up-{how}", what, not off, *texts, hint)


def _reads(mine, reference):
    """Return a finding on the numbers that LAMB reads in an update; [] if it was not made."""
    yours, usual = (seen.ways.get("lamb", {}).get("reads") for seen in (mine, reference))
    if None in (yours, usual):
        return []
    which = MECHANISM, "made-up-reads", "numbers read in a made-up step, lamb"
    return [Finding(*which, yours <= usual, f"{yours}", f"at most {usual}", "item")]


def _lengths(way, usual):
    """Yield (name, length, the solution's) of each layer's step, from both updates."""
    for mine, other in zip(way["updates"], usual["updates"], strict=True):
        for row, expected in zip(mine, other, strict=True):
            yield row["name"], row["length"], expected["length"]


def _steps(off, which):
    """Return the lengths of steps, of the trainee (0) or the solution (1), for two layers."""
    told = [f"{name} by {texts[which]}" for name, texts in [*off.items()][:2]]
    return ", ".join([*told, f"{len(off) - 2} more"] if len(off) > 2 else told)


def _near(mine, usual):
    return abs(mine - usual) <= MADE_UP * usual


def _why_made_up(how, off):
    if how == "lamb":
        return "ratio"
    return "classifier" if how == "muon" and [*off] == ["fc.weight"] else "given"


# The schedule ------------------------------------------------------------------------------------


def _schedule(mine, reference, key, of):
    """Return a finding on the learning rates of a run's updates, against the solution's."""
    found, usual = mine.whole.rates, reference.whole.rates
    what = f"learning rates, {of}"
    if None in (*found, *usual) or not found or not usual:
        return [Finding(SAME, key, what, *UNSEEN)]
    same = len(found) == len(usual) and not _apart(found, usual)
    texts = _course(found), _course(usual)
    if not same and texts[0] == texts[1]:
        i = next(iter(_apart(found, usual)), 0)
        texts = (f"{text} in update {i}" for text in both(found[i], usual[i]))
    return [Finding(SAME, key, what, same, *texts, _why_rates(found, usual))]


UNSEEN = (State.NOT_ASKED, "not seen", "the updates are compared")


def _apart(found, usual):
    """Return the updates whose rates differ."""
    pairs = enumerate(zip(found, usual, strict=False))
    return [i for i, (a, b) in pairs if abs(a - b) > RATES * max(a, b)]


def _course(rates):
    top = max(rates)
    text = f"{rates[0]:.3g}, highest {top:.3g} in update {rates.index(top)} of {len(rates)}"
    return f"{text}, {rates[-1]:.3g} at the end"


def _why_rates(found, usual):
    half = len(found) // 2
    if len({*found[:half]}) == len({*found[half:]}) == 1:
        return "by-epochs"
    if not _apart([rate / found[0] for rate in found], [rate / usual[0] for rate in usual]):
        return "two-schedulers" if not _apart([25 * rate for rate in found], usual) else "scaled"
    if any(len(usual) > 3 and not _apart(found, usual[first::2]) for first in (0, 1)):
        return "micro-batches"
    tops = [rates.index(max(rates)) for rates in (found, usual)]
    if tops[1] < len(usual) - 1 and max(found) < 0.9 * max(usual):
        return "peak"
    rises = tops == [len(found) - 1, len(usual) - 1]  # of a long schedule the run sees no more
    return "warm-up" if rises or tops[0] != tops[1] else "schedule"


# The finder --------------------------------------------------------------------------------------


def _finder(mine, reference):
    """Yield findings on the finder's table, and on the training that begins after it."""
    table, usual = mine.rates, reference.rates
    text = f"{len(table.rates)} rates"
    yield Finding(
        MECHANISM, "finder-table", "finder's table", bool(table.rates), text, "a few", "table"
    )
    if not table.rates or not usual.rates:
        return
    off = _apart(table.rates, usual.rates)
    texts = _growth(table.rates), _growth(usual.rates)
    growth = [b / a for a, b in pairwise(table.rates)]
    even = not _apart([table.rates[0], *growth], [usual.rates[0], *growth[:1] * len(growth)])
    hint = "steps-between" if even else "geometric"
    yield Finding(SAME, "finder-rates", "finder's rates", not off, *texts, hint)
    lowest = usual.losses.index(min(usual.losses)) + 1  # beyond it rounding grows
    pairs = zip(table.losses[:lowest], usual.losses[:lowest], strict=False)
    worst = max(abs(a / b - 1) for a, b in pairs)
    text, asked = (f"up to {share(worst)} apart" if worst else "the same"), "the solution's"
    yield Finding(SAME, "finder-losses", "finder's losses", worst <= LOSSES, text, asked, "tried")
    texts = [_end(each) for each in (table, usual)]
    hint = "stop" if len(table.rates) > len(usual.rates) else "first-rise"
    same = len(table.rates) == len(usual.rates)
    yield Finding(SAME, "finder-end", "finder's end", same, *texts, hint)
    yield from _put_back(mine, reference)


# The fields of `records.Begun` that a finder puts back: in words, and the hint.
PUT_BACK = {
    "weights": ("weights", "weights-kept"),
    "buffers": ("batch statistics", "buffers-kept"),
    "states": ("optimizer's momenta", "states-kept"),
    "updates": ("schedule's updates", "updates-kept"),
}


def _put_back(mine, reference):
    """Yield findings on the training that begins after the finder."""
    for name, (what, hint) in PUT_BACK.items():
        yours, expected = (getattr(run.begun, name) for run in (mine, reference))
        text = "as before" if yours == expected else "others"
        which = SAME, f"{name}-after", f"{what} after the finder"
        yield Finding(*which, yours == expected, text, "as before", hint)
    kept = mine.rates.rates[-1] in mine.begun.rates  # others may come from the schedule
    which, text = (SAME, "rates-after", "learning rates after the finder"), "as before"
    yield Finding(*which, not kept, "its last one" if kept else text, text, "rates-kept")


def _growth(rates):
    if len(rates) < 3:
        return f"{len(rates)} of them"
    first, second = (b / a for a, b in pairwise(rates[:3]))
    then = f"then {second:.3g}" if abs(first / second - 1) > RATES else "each time"
    return f"from {rates[0]:.3g} on, times {first:.3g} {then}"


def _end(table):
    times = table.losses[-1] / min(table.losses)
    return f"after {len(table.rates)} rates, at {times:.2g} times the lowest loss"


def extras(on_gpu: bool) -> list[Extra]:
    """Return a run with a finder, which accumulates and has the default optimizer and schedule."""
    return [Extra(FINDER, tuple(SMALL.split()))]


EXERCISE = Exercise(
    step="08_large_batch",
    own_flags={"--optimizer": 1, "--warm-up": 1, "--schedule": 1, "--find-lr": 1},
    mechanism=mechanism,
    bars=(Bar(r"", None, "an optimizer is chosen for its accuracy, and most cost more than SGD"),),
    extras=extras,
    epochs="--precision fp32 --optimizer muon --schedule cosine --warm-up 0.4",
    hint_of={"optimizer": "ratio", "settings": "built", "rate": "schedule", "rates": "schedule"},
    first_hints=("asked", *WORK_FIRST),
    errors=(
        (r"unrecognized arguments: .*--(optimizer|warm-up|schedule|find-lr)", "flag"),
        (r"has no attribute '(optimizer|warm_up|schedule|find_lr)'", "flag"),
        (r"NotImplementedError.*find_rate", "table"),
    ),
)
