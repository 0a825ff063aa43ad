"""12_parallel: divided in four ways, a model has the outputs and gradients of one process."""

import math
import re

from dlojz.check.exercise import Finding, Prepared, State
from dlojz.check.wording import share

HAND, PLAN, RING, STAGES = WAYS = "by hand", "by a plan", "in a ring", "in stages"
TOLERANCE = 1e-5  # of a tensor's length, in float32; right answers are off by up to 1e-6
SAME = 0.9  # share of equal draws; half of them are equal by chance
ONE = "as in one process"
COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "up"), ("attention.o", "down")
# Messages of a pass, from and to. A common one of q, k and v is enough, but each may have its own.
MESSAGES = {
    (HAND, "forward"): ({"all-reduce": (2, 2)}, "reduce", "reduce"),
    (HAND, "backward"): ({"all-reduce": (2, 4)}, "copy", "doubled"),
    (PLAN, "forward"): ({"all-gather": (2, 4), "reduce-scatter": (2, 2)}, *["sequence"] * 2),
    (PLAN, "backward"): ({"all-gather": (2, 2), "reduce-scatter": (2, 4)}, *["sequence"] * 2),
}


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return findings on the log of `dlojz.chapters.n12_model_parallel.job`."""
    ways = {HAND: _by_hand, PLAN: _by_plan, RING: _in_a_ring, STAGES: _in_stages}
    return [finding for way, call in ways.items() for finding in _way(way, call, cases[way])]


def _way(way, call, case):
    """Return the findings on a way, as far as all processes came."""
    ranks = case["ranks"]
    raised = {number: seen for number, seen in enumerate(ranks) if "raised" in seen}
    unwritten = any(seen["unwritten"] for seen in raised.values())
    if way == STAGES and unwritten:
        return [Finding(way, "ran", way, State.NOT_ASKED, "not written", "optional")]
    own = {n: seen for n, seen in raised.items() if not seen["waited"]}
    errors = {n: " ".join(seen["raised"].split()) for n, seen in (own or raised).items()}
    same = len(errors) == len(ranks) and len({*errors.values()}) == 1
    texts = [errors[0]] if same else [f"process {n}: {text}" for n, text in errors.items()]
    texts += [f"process {n} waited for it in vain" for n in sorted(raised.keys() - errors.keys())]
    hint = "unwritten" if unwritten else "raised" if own else "waited"
    text, done = "; ".join(texts), "to its end"
    text = text.replace("NotImplementedError", "still to be written")
    ran = Finding(way, "ran", "each process", not raised, text or done, done, hint)
    return [ran, *call(ranks)]


def _by_hand(ranks):
    yield from _held(HAND, ranks, "whole", "cut", "cut")
    for factor in {_factor(seen["bias"]) for seen in _with("bias", ranks)} - {"equal"}:
        yield Finding(HAND, "bias", "a row layer's bias", False, factor, "added once", "bias")
    yield from _messages(HAND, ranks)
    yield from _output(HAND, ranks, "output")
    wrong = {name for seen in ranks for name in _wrong(seen)}
    biases = {f"{layer}.bias" for layer in ROWS}
    hint = "bias" if wrong and wrong <= biases else "gradients"
    yield from _gradients(HAND, ranks, hint)
    alike = [seen["alike"] for seen in _with("alike", ranks)[1:]]
    if alike:
        ok, text = max(alike) < SAME, f"{share(max(alike))} alike on two processes"
        yield Finding(HAND, "alike", "draws of dropout", ok, text, "others on each", "alike")
    norms = [seen["norm"] for seen in _with("norm", ranks)]
    if norms:
        worst = max(norms, key=lambda norm: abs(norm - 1))
        ok, text = abs(worst - 1) <= TOLERANCE, f"{worst:.6g} times that of one process"
        what = "norm of all gradients"
        yield Finding(HAND, "norm", what, ok, ONE if ok else text, ONE, "clipped")


def _by_plan(ranks):
    for seen in _with("grid", ranks)[:1]:
        text = ", ".join(f"{name} {n}" for name, n in seen["grid"].items())
        expected = f"data 1, tensor {len(ranks)}"
        yield Finding(PLAN, "mesh", "mesh of one copy", text == expected, text, expected, "mesh")
    yield from _held(PLAN, ranks, "Replicate", "norms", "placements")
    yield from _messages(PLAN, ranks)
    yield from _output(PLAN, ranks, "output")
    yield from _gradients(PLAN, ranks, "gradients")


def _held(way, ranks, whole, norms, others):
    """Yield findings on the placements of parameters. norms, others: the hints."""
    for seen in _with("held", ranks)[:1]:
        rows = {others: [], norms: []}
        for name, (place, shape) in seen["held"].items():
            layer, _, kind = name.rpartition(".")
            cut = "Shard(1)" if layer in ROWS and kind == "weight" else whole
            expected = "Shard(0)" if layer in COLUMNS else cut
            if place != expected:
                wrong = rows[norms if "norm" in layer else others]
                wrong.append((f"{name}: {place} {shape or ''}".rstrip(), expected))
        for hint, wrong in rows.items():
            text, expected = wrong[0] if wrong else ("as expected", "as expected")
            text += f", and {len(wrong) - 1} more" * (len(wrong) > 1)
            what = "norms" if hint == "norms" else "parts of the weights"
            yield Finding(way, hint, what, not wrong, text, expected, hint)


def _messages(way, ranks):
    """Yield a finding for each pass; too few and too many messages have hints of their own."""
    for direction in ("forward", "backward"):
        wanted, few, many = MESSAGES[way, direction]
        # After an error in a plan's forward pass its messages say more than the shapes.
        reached = "messages" if (way, direction) == (PLAN, "forward") else "output"
        for seen in _with(reached, ranks)[:1]:
            counts = seen["messages"][direction]
            short = any(counts.get(kind, 0) < low for kind, (low, _) in wanted.items())
            long = any(n > wanted.get(kind, (0, 0))[1] for kind, n in counts.items())
            text = _counted({kind: [n] for kind, n in counts.items()})
            what, ok = f"messages, {direction}", not (short or long)
            hint = few if short else many
            yield Finding(way, direction, what, ok, text, _counted(wanted), hint)


def _counted(counts) -> str:
    """Return numbers of messages by kind, or their limits, in words."""
    texts = [f"{' to '.join(map(str, dict.fromkeys(n)))} {kind}" for kind, n in counts.items()]
    plural = [text if text.startswith("1 ") else f"{text}s" for text in texts]
    return ", ".join(plural) or "none"


def _in_a_ring(ranks):
    first = [seen["all"] for seen in ranks if "output" in seen.get("all", {})]
    for look in first[:1]:
        counts, size = look["messages"]["forward"], len(ranks)
        others, sends = set(counts) - {"send"}, counts.get("send", 0)
        text = _counted({kind: [n] for kind, n in counts.items()})
        ok, expected = not others and size - 1 <= sends, f"{2 * (size - 1)} or {2 * size} sends"
        what = "messages, forward"
        yield Finding(RING, "messages", what, ok, text, expected, "gathered" if others else "hops")
    rows = (
        ("all", "all tokens", "rescale"),
        ("causal", "earlier tokens", "mask"),
        ("large", "large scores", "maximum"),
    )
    for look, what, hint in rows:
        seen = [rank[look] for rank in ranks if "output" in rank.get(look, {})]
        yield from _output(RING, seen, hint, what)
        if look != "large":  # rounding of products with numbers of 30
            yield from _gradients(RING, seen, "gradients", f"gradients, {what}")


def _in_stages(ranks):
    parts = [seen["parts"] for seen in _with("parts", ranks)]
    if len(parts) == len(ranks):
        held, count = [name for part in parts for name in part], ranks[0]["parameters"]
        ok = "a copy" not in held and len(held) == len({*held}) == count
        copied = held.count("a copy")
        text = "each in one stage" if ok else f"{len(held) - copied} of {count}, {copied} copies"
        yield Finding(STAGES, "parts", "parameters", ok, text, "each in one stage", "pieces")
        blocks = [len({*re.findall(r"blocks\.\d+", " ".join(part))}) for part in parts]
        text, ok = " and ".join(map(str, blocks)), len({*blocks}) == 1
        yield Finding(STAGES, "balance", "blocks of each stage", ok, text, "equal", "balance")
    for sizes, batch in [(seen["sizes"], seen["batch"]) for seen in ranks[:1] if seen.get("sizes")]:
        text, ok = " ".join(map(str, sizes)), len({*sizes}) == 1 and batch % sizes[0] == 0
        what, equal = "sequences in each micro-batch", f"equal shares of {batch}"
        yield Finding(STAGES, "sizes", what, ok, text, equal, "unequal")
    for number, seen in enumerate(ranks if all("gradients" in seen for seen in ranks) else []):
        live, most = 0, 0
        for action in seen["actions"]:
            live += 1 if action[0] == "F" else -1
            most = max(most, live)
        ok, what = most <= len(ranks) - number, f"live micro-batches in stage {number}"
        text = f"{most}: {' '.join(seen['actions'])}"
        yield Finding(STAGES, "order", what, ok, text, f"{len(ranks) - number} at most", "order")
    factors = {_factor(each) for seen in ranks for each in _wrong(seen).values()}
    scaled = len(factors) == 1 and "times" in next(iter(factors))
    yield from _gradients(STAGES, ranks, "averaged" if scaled else "gradients")


# Outputs and gradients ---------------------------------------------------------------------------


def _with(key, ranks):
    """Return the notes of the processes that came as far as this."""
    return [seen for seen in ranks if key in seen]


def _factor(pair) -> str:
    """Return a distance and a factor, as noted, in words: "equal" if right."""
    off, factor = pair
    if off <= TOLERANCE:
        return "equal"
    if math.isinf(off):
        return "none, not a number or of another shape"
    return f"off by {share(off)}" if factor is None else f"{factor:.3g} times as large"


def _wrong(seen) -> dict:
    """Return the gradients of a process that are off, by name."""
    return {n: pair for n, pair in seen.get("gradients", {}).items() if pair[0] > TOLERANCE}


def _output(way, ranks, hint, what="outputs"):
    offs = [(seen["output"], n) for n, seen in enumerate(ranks) if "output" in seen]
    if offs:
        pair, number = max(offs, key=lambda row: row[0][0])
        ok = pair[0] <= TOLERANCE
        text = ONE if ok else f"{_factor(pair)} (process {number})"
        yield Finding(way, what, what, ok, text, ONE, hint)


def _gradients(way, ranks, hint, what="gradients"):
    """Yield a finding on all gradients, which names the worst ones."""
    count = sum(len(seen.get("gradients", {})) for seen in ranks)
    wrong = [(p, name, n) for n, seen in enumerate(ranks) for name, p in _wrong(seen).items()]
    wrong.sort(key=lambda row: -row[0][0])
    texts = {_factor(pair) for pair, _, _ in wrong}
    names = [f"{name} (process {n}) {_factor(pair)}" for pair, name, n in wrong[:3]]
    which = f"all {next(iter(texts))}" if len(texts) == 1 and len(wrong) > 1 else "; ".join(names)
    text = f"{len(wrong)} of {count}: {which}" if wrong else ONE
    if count:
        yield Finding(way, what, what, not wrong, text, ONE, hint)


EXERCISE = Prepared("12_parallel", WAYS, findings, last=STAGES)
