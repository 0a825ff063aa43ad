"""11_fsdp: each process holds a share of the model, and gathers one block at a time."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

from dlojz.check.bars import Bar
from dlojz.check.common import alike, flag, like, no_brake, words
from dlojz.check.exercise import (
    FASTER,
    MECHANISM,
    SAME,
    WORK_FIRST,
    Beside,
    Exercise,
    Extra,
    Finding,
    Runs,
    State,
    Unseen,
    shown,
)

SMALL = "--test --data synthetic --model vit_tiny --image-size 32 -b 8 --precision fp32"
UPDATES, COPIES = "two-batches", "copies"
DDP = "beside-ddp"  # a run of the solution
FIRST = "first weights of each process, checksum"
PARTS = ["parameters", "gradients", "optimizer"]
NEAR = 1e-3  # share of a norm: rounding differs between processes
UNEVEN = 1.1  # factor on an equal share: blocks of weights are not cut evenly
SAVED = 0.5  # share of the freed bytes that must show in the peak: gathered weights need room, too


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on shards, gathered weights, reductions, recomputation, and checkpoints."""
    mine, reference = runs.mine, runs.reference
    pair = mine.ranks, reference.ranks
    if len(mine.ranks) < 2:
        return [Finding(MECHANISM, *["processes"] * 2, False, "1", "2 or more", "alone")]
    return [
        *_flags(mine, runs.arguments),
        *_version(mine),
        *alike(*pair, (SAME, "first", FIRST, _first, "one-model")),
        _made(*pair),
        *alike(
            *pair,
            (MECHANISM, "cut", "weights, by how they are cut", _placements, _cut(*pair)),
            (MECHANISM, "units", "modules gathered one at a time", _units, _units_hint(mine)),
        ),
        *_held(*pair),
        *alike(
            *pair,
            (MECHANISM, "devices", "devices of the weights", _devices, "offload"),
            (MECHANISM, "reduced", "gradients reduced in a step", _reduced, "reduce"),
        ),
        _gathered(*pair),
        _recomputed(*pair),
        *alike(
            *pair,
            (MECHANISM, "products", "products computed again in a step", _products, "recompute"),
        ),
        *(_two_batches(*runs.extras[UPDATES]) if UPDATES in runs.extras else []),
        *(_copies(*runs.extras[COPIES]) if COPIES in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _flags(mine, arguments):
    """Yield a finding for each flag of the step, with the job's value."""
    for name in ("sharding", "checkpointing"):
        asked = arguments.get(name)
        yield flag(mine, f"--{name}", lambda value, asked=asked: value == asked, str(asked), "flag")
    if arguments.get("sharding") != "fsdp":
        text = shown(arguments.get("sharding"))
        yield Finding(MECHANISM, "sharding", "sharding of the job", False, text, "fsdp", "ask")


def _version(mine):
    """Return a failed finding for a model in FSDP's first version, else []."""
    found, asked = mine.last.wrapper, "fully_shard"
    if found != "FullyShardedDataParallel":
        return []
    return [Finding(MECHANISM, "version", "version of FSDP", False, found, asked, "version")]


def _made(mine, reference):
    """Return a finding that fails if the model was built with values: a large one would not fit."""
    sizes = [[run.probe.made_bytes for run in ranks] for ranks in (mine, reference)]
    yours, most = max(sizes[0]), max(sizes[1])
    text, asked = _mb(yours), f"at most {_mb(most)}" if most else "nothing"
    what = "weights made before they are shared"
    return Finding(MECHANISM, "made", what, yours <= most, text, asked, "whole")


def _first(ranks):
    found = [run.probe.weights for run in ranks]
    return Unseen.UNKNOWN if None in found else ", ".join(found)


def _known(of):
    """Return a function of all processes that returns UNKNOWN if one crashed too early."""

    def get(ranks):
        return of(ranks) if all(run.share.placements for run in ranks) else Unseen.UNKNOWN

    return get


@_known
def _placements(ranks):
    found = Counter()
    for run in ranks:
        found.update(run.share.placements)
    return ", ".join(f"{count} x {place}" for place, count in sorted(found.items()))


def _cut(mine, reference):
    whole, usual = (ranks[0].share.placements.get("whole", 0) for ranks in (mine, reference))
    return "shard" if whole > usual else "padding"


@_known
def _units(ranks):
    return words(run.share.units for run in ranks)


def _units_hint(mine):
    return "root-only" if mine.share.units == 1 else "blocks" if mine.share.units else "shard"


def _held(mine, reference):
    """Yield a finding for each part of a training, on the most that a process holds of it."""
    for part in PARTS:
        hint = _whole(mine) if part == "optimizer" else "shard"
        get = _known(partial(_most_of, part))
        yield like(MECHANISM, part, f"{part} in a process", mine, reference, get, hint)


def _alive(mine, reference):
    """Return a finding on all tensors of a process, among which may be a copy of the weights.

    It needs a run without an auditor, which keeps copies itself.
    """
    yours, usual = ([run.share.alive_bytes for run in ranks] for ranks in (mine, reference))
    if None in (*yours, *usual):
        return []  # not sharded: another finding
    most = UNEVEN * max(usual)
    ok, asked = max(yours) <= most, f"at most {_mb(most)}"
    what = "tensors in a process"
    return [Finding(MECHANISM, "alive", what, ok, _mb(max(yours)), asked, "shard")]


def _whole(ranks):
    """Return the hint for a process that holds too much: weights, or the optimizer's state."""
    return "shard" if "whole" in ranks[0].share.placements else "whole-state"


def _most_of(part, ranks):
    return _mb(max(run.share.held.get(part, 0) for run in ranks))


def _mb(nbytes):
    return f"{nbytes / 1e6:,.1f} MB"


def _devices(ranks):
    return words(device for run in ranks for device in run.probe.parameters.devices)


def _reduced(ranks):
    """Return the reductions over the processes in a step; gloo has no reduce-scatter."""
    found = Counter()
    if not ranks[0].last.collectives:
        return Unseen.NONE
    for collective in ranks[0].last.collectives:
        if "reduce" in collective["op"] and collective["bytes"] > 8 and _is_float(collective):
            found[collective["dtype"]] += 1
    return _in_words(found) or "nothing"


def _in_words(found):
    return ", ".join(f"{count} x {dtype}" for dtype, count in found.items())


def _is_float(collective):
    return "float" in collective["dtype"]


def _gathered(mine, reference, key="gathered", of=""):
    """Return a finding on the gathered blocks: as often as the solution's, and in its format.

    The last block may stay whole until its backward pass, which begins at once.
    """
    yours, usual = (
        Counter(c["dtype"] for c in ranks[0].last.collectives if "gather" in c["op"])
        for ranks in (mine, reference)
    )
    alike = yours.keys() == usual.keys()
    ok = alike and usual.total() - 1 <= yours.total() <= usual.total()
    text, asked = (_in_words(found) or Unseen.NONE for found in (yours, usual))
    hint = "blocks" if alike else "policy"
    return Finding(MECHANISM, key, f"weights gathered in a step{of}", ok, text, asked, hint)


def _recomputed(mine, reference, key="again", of=""):
    """Return a finding that fails if fewer layers are computed again than in the solution.

    Its checkpointing ends a block early, as soon as the backward pass has all that it needs. The
    reentrant one runs to the block's end. Products tell if it computes too much.
    """
    yours, usual = (min(run.share.again or 0 for run in ranks) for ranks in (mine, reference))
    which = MECHANISM, key, f"layers computed again{of}"
    return Finding(*which, yours >= usual, str(yours), f"at least {usual}", "recompute")


@_known
def _again(ranks):
    return words(run.share.again for run in ranks)


def _products(ranks):
    if not ranks[0].last.work:
        return Unseen.UNKNOWN
    return words(sum(w["count"] for w in run.last.work if w["when"] == "again") for run in ranks)


def _two_batches(mine, reference):
    pair = mine.ranks, reference.ranks
    norms = [run.probe.gradients.norm or math.nan for run in (mine, reference)]
    near = abs(norms[0] / norms[1] - 1) < NEAR
    what = "norm of the gradients after clipping"
    reduced = "no-sync", "reduced where no update follows", _reduced, "no-sync"
    (synchronised,) = alike(*pair, (MECHANISM, *reduced))
    alive = _alive(*pair)
    if synchronised.fails:  # what is not reduced stays whole until the next reduction
        alive = [replace(finding, hint=None) for finding in alive]
    return [
        Finding(SAME, "clip", what, near, f"{norms[0]:.4g}", f"{norms[1]:.4g}", "clip"),
        *alike(
            *pair,
            (SAME, "accumulate", "updates of 7 batches, 2 each", _updates, "accumulate"),
            (MECHANISM, "writers", "processes that wrote the checkpoint", _writers, "all-write"),
            (MECHANISM, "not-again", "layers computed again, not asked", _again, "not-asked"),
        ),
        synchronised,
        _gathered(*pair, "gathered-fp32", ", in fp32"),
        _written(*pair),
        *alive,
    ]


def _updates(ranks):
    return words(run.whole.optimizer_steps for run in ranks)


def _writers(ranks):
    return sum(bool(run.whole.saves) for run in ranks)


def _written(mine, reference):
    """Return a finding that fails if a process writes more than its share."""
    yours, usual = (max(r.whole.saved_bytes or 0 for r in ranks) for ranks in (mine, reference))
    ok = 0 < yours <= UNEVEN * usual
    what = "checkpoint, bytes that one process wrote"
    return Finding(MECHANISM, "written", what, ok, _mb(yours), f"about {_mb(usual)}", "all-write")


def _copies(mine, reference):
    """Return findings on the run with --sharding ddp: the model is whole in each process."""
    pair, of = (mine.ranks, reference.ranks), ", --sharding ddp"
    copies = MECHANISM, "copies", f"weights{of}", _placements, "not-asked"
    return [*alike(*pair, copies), _recomputed(*pair, "copied-again", of)]


def smaller(runs: Runs) -> list[Finding]:
    """Return findings on the memory of a process, against the solution's with DDP."""
    which = FASTER, "held", "weights, gradients and states in a process"
    whole = runs.beside.get(DDP)
    if whole is None:
        todo = "a run of the solution with DDP: check again"
        return [Finding(*which, State.UNMEASURED, "not compared", todo, "unmeasured")]
    mine, usual = runs.mine.ranks, runs.reference.ranks
    found, least = _most(mine), _most(usual)
    full = _most([whole.log]) or least * len(usual)
    most = UNEVEN * full / len(usual)
    text = f"at most {_mb(most)} ({_mb(full)} with DDP)"
    held = Finding(*which, 0 < found <= most, _mb(found), text, _whole(mine))
    return [held, *_peak(runs.job, whole, full - found)]


def _most(ranks):
    return max(sum(run.share.held.values()) for run in ranks)


def _peak(job, whole: Beside, less: float) -> list[Finding]:
    """Return a finding on the peak of a GPU's memory. less: bytes no longer held."""
    peaks = [run.memory.get("device_peak_bytes") for run in job.ranks] if job else [None]
    if None in peaks:
        return []
    which, yours = (FASTER, "peak", "peak memory of a GPU"), f"{max(peaks) / 1e9:,.2f} GB"
    if whole.out_of_memory:
        return [Finding(*which, State.PASSED, yours, "with DDP: out of memory", "peak")]
    full = max(run.memory.get("device_peak_bytes", 0) for run in whole.log.ranks)
    most = full - SAVED * less
    text = f"at most {most / 1e9:,.2f} GB ({full / 1e9:,.2f} GB with DDP)"
    return [Finding(*which, max(peaks) <= most, yours, text, "peak")]


def extras(on_gpu: bool) -> list[Extra]:
    """Return a run that accumulates, clips and saves, and one that is not sharded.

    The first asks whether the model is left alone without --checkpointing, and whether weights are
    gathered in float32 where it computes in it; the other, whether blocks are recomputed without
    shards, too.

    On a GPU the trainer compiles by default, for half a minute: the second run does without.
    """
    fsdp = "--sharding fsdp --accumulate 2 --clip-norm 0.1 --test-nsteps 7"
    saves = f"{SMALL} {fsdp} --checkpoint {{run}}/checkpoint"
    whole = f"{SMALL} --sharding ddp --checkpointing blocks --test-nsteps 2"
    whole += " --optimizer adamw --lr 0.001"
    whole += " --compile off" if on_gpu else ""
    return [Extra(UPDATES, tuple(saves.split())), Extra(COPIES, tuple(whole.split()))]


EXERCISE = Exercise(
    step="11_fsdp",
    own_flags={"--sharding": 1, "--checkpointing": 1},
    processes=2,
    mechanism=mechanism,
    follows=("clip",),
    bars=(Bar("", None, "sharding sends more, and makes nothing faster"),),
    extras=extras,
    beside={DDP: tuple("--sharding ddp --compile off".split())},
    second=smaller,
    second_name="smaller",
    epochs="--precision fp32 --compile off",
    small="--model vit_tiny",
    first_hints=("version", *WORK_FIRST),
    waited="together",
    causes=(
        (r"view size is not compatible", "layout"),
        (r"materialized on CPU when enabling CPU offloading", "offload"),
        (r"value was None when it should not be", "root-first"),
        (r"a whole checkpoint is one file", "goes-on"),
    ),
    errors=(
        (r"unrecognized arguments: .*--(sharding|checkpointing)", "flag"),
        (r"Cannot copy out of meta tensor|on the meta device|is on meta", "values"),
        (r"FSDP does not support .*contiguous|non-contiguous parameters", "layout"),
        (r"mixed torch.Tensor and DTensor", "order"),
        (r"requires even sharding|uneven sharding on", "even"),
        (r"has no attribute 'set_requires_gradient_sync'", "shard"),
    ),
)
