"""What every exercise looks at: is it the same training, and does nothing slow it down unseen?"""

import math
from collections import Counter

from dlojz.check.exercises import MECHANISM, SAME, Finding, Hint
from dlojz.runs import log

DOCS = "https://docs.pytorch.org/docs/stable/"

HINTS = {
    "images": Hint(
        "A faster step must do the same work. Yours shows the model other images than the "
        "solution's: fewer, smaller, or others.",
        "The batch that the loader gives goes into the model whole: `images` of shape "
        "[batch, 3, height, width], unchanged but for device, dtype and layout.",
        DOCS + "data.html",
    ),
    "backward": Hint(
        "Each step needs one backward pass and one update of the weights. Count yours.",
        "`loss.backward()` fills the gradients, `optimizer.step()` uses them: both, in every step.",
        DOCS + "optim.html#taking-an-optimization-step",
    ),
    "validation": Hint(
        "Validation is part of the training. Yours does not see the images that the solution's "
        "sees.",
        "`evaluate` runs the model over the batches of `val_loader`, as many as the flags say.",
        DOCS + "generated/torch.nn.Module.html#torch.nn.Module.eval",
    ),
    "no-grad": Hint(
        "Validation needs no backward pass, so nothing should be kept for one.",
        "`@torch.no_grad()` above `evaluate`.",
        DOCS + "generated/torch.no_grad.html",
    ),
    "item": Hint(
        "Something in your step asks the device for a number. Until it comes, Python waits.",
        "`.item()`, `float(tensor)`, `print(tensor)`, `.cpu()` and `if tensor:` all wait for the "
        "device. Keep numbers on the device, and read them at the end of the epoch.",
        DOCS + "notes/cuda.html#asynchronous-execution",
    ),
    "kept": Hint(
        "Something outlives its step: tensors that still hold the graph which made them. Memory "
        "grows with every step.",
        "Keep `loss.detach()`, never `loss`: a loss holds its whole graph.",
        DOCS + "generated/torch.Tensor.detach.html",
    ),
    "weights": Hint(
        "The training does not begin with the same weights as the solution's.",
        "The seed is set before the model is built, and the model is built once, by `build_model`.",
        DOCS + "notes/randomness.html",
    ),
    "losses": Hint(
        "The losses of the first steps are not those of the solution: something else is computed.",
        "Compare `train_step` and `forward` with the step before: same model, same criterion, same "
        "optimizer, same order; a gradient scaler with its defaults.",
        DOCS + "optim.html#taking-an-optimization-step",
    ),
    "speed": Hint(
        "All is as it should be, and the gain does not show. Is the step long enough to gain from "
        "it, does the model wait for its images, does somebody else use the machine?",
        "The preset's sizes, `--data synthetic` and a quiet machine; then `check` again. "
        "`report.plot_phases` shows where a step's time goes.",
        DOCS + "notes/cuda.html#asynchronous-execution",
    ),
    "failed": Hint(
        "The run did not get to its end. The error says why, and what to do where the fault is not "
        "in your file.",
        "`job.explain()` shows the error, the line of your file and where the output is.",
        DOCS + "notes/faq.html",
    ),
}


def inputs(run: log.Run, mode: str) -> list[dict]:
    """What entered the model in training ("train") or validation ("val"), each with its count."""
    return [i for i in run.whole.inputs if i["mode"] == mode]


def losses(run: log.Run, mode: str) -> list[dict]:
    """What entered and left the criterion, each with its count."""
    return [i for i in run.whole.losses if i["mode"] == mode]


def shapes(run: log.Run, mode: str) -> str:
    """Such as "12 x [32, 3, 64, 64]": the batches that the model saw."""
    counts = Counter()
    for entry in inputs(run, mode):
        counts[tuple(entry["shape"])] += entry["count"]
    return ", ".join(f"{n} x {list(s)}" for s, n in counts.items()) or "nothing"


def words(values) -> str:
    """Different values in words: "bfloat16, float32"."""
    return ", ".join(sorted(map(str, set(values)))) or "none"


def like(part, what, mine, reference, get, hint) -> Finding:
    """A finding that asks for what the reference shows: `get(run)` is the same of both."""
    yours, expected = get(mine), get(reference)
    return Finding(part, what, yours == expected, str(yours), str(expected), hint)


def same_work(mine: log.Run, reference: log.Run) -> list[Finding]:
    """The same images, passes and updates in each step as the solution."""
    looks = (
        ("images in training", lambda r: shapes(r, "train"), "images"),
        ("images in validation", lambda r: shapes(r, "val"), "validation"),
        ("backward passes", lambda r: r.whole.backward, "backward"),
        ("weights changed", lambda r: r.whole.weights_changed, "backward"),
        ("initial weights, checksum", lambda r: r.probe.weights, "weights"),
        ("labels of the first batch, checksum", lambda r: r.probe.labels, "images"),
        ("images drawn, by index", _drawn, "images"),
    )
    steps = [r.whole.optimizer_steps for r in (mine, reference)]
    # A gradient scaler skips an update now and then: how many depends on rounding.
    close = None not in steps and abs(steps[0] - steps[1]) <= 1
    return [
        *(like(SAME, what, mine, reference, get, hint) for what, get, hint in looks),
        Finding(SAME, "updates of the weights", close, str(steps[0]), str(steps[1]), "backward"),
    ]


def _drawn(run):
    drawn = run.whole.drawn
    return f"{len(drawn)} batches, checksum {sum(drawn) % 2**32:08x}" if drawn else "unknown"


def same_losses(mine: log.Run, reference: log.Run, tolerance: list[float] | None) -> Finding:
    """The losses of the first steps, within `tolerance` of the solution's (relative, by step)."""
    pairs = list(zip(mine.steps.loss, reference.steps.loss, tolerance or [], strict=False))
    if not pairs:
        return Finding(SAME, "losses of the first steps", None, "not compared", "no envelope")
    worst = max(pairs, key=lambda p: _away(p[0], p[1]) / p[2])
    step, away = pairs.index(worst), _away(*worst[:2])
    return Finding(
        SAME,
        f"losses of the first {len(pairs)} steps",
        away <= worst[2],
        f"{worst[0]:.5g} in step {step}, {away:.2%} away",
        f"{worst[1]:.5g}, at most {worst[2]:.2g} of it away",
        "losses",
    )


def _away(loss, expected):
    away = abs(loss - expected) / abs(expected)
    return math.inf if math.isnan(away) else away


def no_brake(mine: log.Run, reference: log.Run) -> list[Finding]:
    """Nothing that costs speed or memory without showing in the result."""
    waits = [_waits(r) for r in (mine, reference)]
    items = [r.last.calls.get("item", 0) for r in (mine, reference)]
    graphs = [r.last.graphs_alive for r in (mine, reference)]
    return [
        _at_most("numbers asked from the device in a step", *items, "item"),
        _at_most("waits for the device in a step", *waits, "item"),
        _at_most("tensors that keep their graph", *graphs, "kept"),
        like(
            *(MECHANISM, "gradients recorded in validation", mine, reference),
            lambda r: words(i["grad"] for i in inputs(r, "val")),
            "no-grad",
        ),
    ]


def _waits(run):
    return sum(n for call, n in run.last.calls.items() if call != "item")


def _at_most(what, yours, expected, hint):
    ok = None not in (yours, expected) and yours <= expected
    most = f"at most {expected}" if expected else "none"
    return Finding(MECHANISM, what, ok, str(yours), most, hint)


def hints(own: dict[str, Hint]) -> dict[str, Hint]:
    """All hints of an exercise in the order in which they are given: what is not the same work
    comes first, then what the exercise is about, then what slows it down."""
    first = ("images", "validation", "backward")
    return {k: HINTS[k] for k in first} | own | {k: h for k, h in HINTS.items() if k not in first}
