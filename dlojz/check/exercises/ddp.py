"""06_ddp: several processes share the images and hold the same weights."""

import math
from collections import Counter

from dlojz.check.exercises import MECHANISM, SAME, Exercise, Extra, Finding, Hint, Runs
from dlojz.check.exercises.common import DOCS, hints, like, no_brake, words

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8"
EPOCHS, ACCUMULATES = "two-epochs", "accumulates"
FIRST_STEPS, NEAR = 4, 1e-3  # of the training that accumulates: its losses beside the solution's
DDP = DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html"
SAMPLER = DOCS + "data.html#torch.utils.data.distributed.DistributedSampler"

OWN_HINTS = {
    "flag": Hint(
        "The trainer does not know the flag --accumulate yet.",
        'In `parse_args`: `flag("--accumulate", type=positive, default=1, help=...)`.',
        "https://docs.python.org/3/library/argparse.html#type",
    ),
    "alone": Hint(
        "This run had one process: there is nothing to prove.",
        "Submit it with `n_gpu=2`, or more.",
        DDP,
    ),
    "share": Hint(
        "Processes train on the same images: together they learn no more than one of them.",
        "`DistributedSampler(..., num_replicas=idr_torch.size, rank=idr_torch.rank)`.",
        SAMPLER,
    ),
    "epoch": Hint(
        "The second epoch brings the images in another order than the solution's.",
        "`loader.batch_sampler.set_epoch(epoch, first_step)` at the beginning of each epoch: "
        "without it DistributedSampler shuffles every epoch alike.",
        SAMPLER,
    ),
    "wrap": Hint(
        "The processes do not tell each other their gradients: each trains a model of its own.",
        "`model = torch.nn.parallel.DistributedDataParallel(model, ...)`, before the optimizer is "
        "built.",
        DDP,
    ),
    "statistics": Hint(
        "Each process evaluates with running statistics of its own; only process 0's are saved.",
        "`torch.distributed.broadcast(buffer, src=0)` for each of `training.model.buffers()`, "
        "before the evaluation.",
        DOCS + "distributed.html#torch.distributed.broadcast",
    ),
    "accumulate": Hint(
        "With --accumulate 2 there must be an update after every second batch, of both batches.",
        "`(step + 1) % args.accumulate == 0` ends an update; `zero_grad` only where one begins.",
        DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ),
    "deal": Hint(
        "One process that accumulates sees other batches than several processes would see.",
        "`data.Batches(..., together=args.accumulate)`: so many batches are dealt like cards.",
        SAMPLER,
    ),
    "mean": Hint(
        "An update is the mean of its batches: of all of them, and each counts for its share.",
        "`zero_grad` only where an update begins; `(loss / args.accumulate)` before `backward`.",
        DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ),
    "schedule": Hint(
        "The learning rate goes another way: there are fewer updates than batches.",
        "`total_steps` counts updates: `len(train_loader) // args.accumulate` in an epoch.",
        DOCS + "generated/torch.optim.lr_scheduler.OneCycleLR.html",
    ),
    "no-sync": Hint(
        "The processes meet in each step, also where none of them will update its weights.",
        "`model.require_backward_grad_sync = False` before the forward pass of such a step; the "
        "context `model.no_sync()` does the same.",
        DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ),
    "device": Hint(
        "Two processes compute on the same GPU.",
        "`idr_torch.device()` is this process's own; `torch.cuda.set_device(device)` before the "
        "processes meet.",
        DDP,
    ),
    "unused": Hint(
        "DDP looks for parameters without a gradient in every step. This model has none.",
        "Leave `find_unused_parameters` as it is, False.",
        DDP,
    ),
    "one-writer": Hint(
        "Several processes write the same checkpoint, over each other.",
        "`if idr_torch.is_master:` before `checkpoint.save`.",
        DOCS + "distributed.html",
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """Who drew which images, who told whom the gradients, who wrote."""
    pair = runs.mine.ranks, runs.reference.ranks
    return [
        Finding(MECHANISM, "processes", len(pair[0]) > 1, str(len(pair[0])), "2 or more", "alone"),
        like(SAME, "processes with images of their own", *pair, _shares, "share"),
        like(MECHANISM, "gradients reduced in a step", *pair, _reduced, "wrap"),
        like(MECHANISM, "processes with the same weights", *pair, _weights, "wrap"),
        like(MECHANISM, "processes that judge the same model", *pair, _buffers, "statistics"),
        like(MECHANISM, "devices", *pair, _devices, "device"),
        like(MECHANISM, "search for unused parameters", *pair, _unused, "unused"),
        *(_two_epochs(*runs.extras[EPOCHS]) if EPOCHS in runs.extras else []),
        *(_accumulates(*runs.extras[ACCUMULATES]) if ACCUMULATES in runs.extras else []),
        *no_brake(runs.mine, runs.reference),
    ]


def _two_epochs(mine, reference):
    pair = mine.ranks, reference.ranks
    return [
        like(SAME, "images in two epochs", *pair, _drawn, "epoch"),
        like(MECHANISM, "processes that wrote the checkpoint", *pair, _writers, "one-writer"),
    ]


def _accumulates(mine, reference):
    pair = mine.ranks, reference.ranks
    away = _away(*pair)
    # After the first update, and no later: then rounding has not grown yet.
    near = f"at most {NEAR:.1%} away in {FIRST_STEPS} batches"
    return [
        like(SAME, "updates of 7 batches, 2 each", *pair, _updates, "accumulate"),
        like(SAME, "images of batches that accumulate", *pair, _drawn, "deal"),
        Finding(SAME, "losses of an update's batches", away < NEAR, f"{away:.2g}", near, "mean"),
        like(MECHANISM, "learning rate in the end", *pair, _last_rate, "schedule"),
        like(MECHANISM, "reduced where no update follows", *pair, _reduced, "no-sync"),
    ]


def _shares(ranks):
    return len({tuple(run.whole.drawn or ()) for run in ranks})


def _drawn(ranks):
    found = (run.whole.drawn or [] for run in ranks)
    return "; ".join(f"{len(d)} batches, checksum {sum(d) % 2**32:08x}" for d in found)


def _reduced(ranks):
    sizes = (sum(c["bytes"] for c in run.last.collectives if _is_of_gradients(c)) for run in ranks)
    return ", ".join(f"{size / 1e6:.4g} MB" for size in sizes)


def _is_of_gradients(collective):
    return collective["op"] == "all_reduce" and "float" in collective["dtype"]


def _weights(ranks):
    return _agree(run.whole.weights_after for run in ranks)


def _buffers(ranks):
    """After the validation, in which they do not change."""
    return _agree(run.whole.buffers_after for run in ranks)


def _agree(found):
    """How many processes have the same."""
    return Counter(found).most_common(1)[0][1]


def _away(mine, reference):
    """How far the losses of the first batches are from the solution's: the largest share."""
    pairs = zip(mine, reference, strict=False)
    losses = [(list(a.steps.loss), list(b.steps.loss)) for a, b in pairs]
    if any(len(a) < FIRST_STEPS or len(b) < FIRST_STEPS for a, b in losses):
        return math.inf
    return max(abs(a[i] / b[i] - 1) for a, b in losses for i in range(FIRST_STEPS))


def _last_rate(ranks):
    return ", ".join(f"{run.steps.lr[-1]:.7g}" if len(run.steps) else "none" for run in ranks)


def _updates(ranks):
    return ", ".join(str(run.whole.optimizer_steps) for run in ranks)


def _devices(ranks):
    return words(run.setup.get("device") for run in ranks)


def _unused(ranks):
    return words(bool(run.last.find_unused_parameters) for run in ranks)


def _writers(ranks):
    return sum(bool(run.whole.saves) for run in ranks)


def extras(on_gpu: bool) -> list[Extra]:
    """Two epochs and a checkpoint; and seven batches, of which the last ends no update."""
    two = f"{SMALL} --test-nsteps 2 -e 2 --checkpoint {{run}}/checkpoint.pt"
    return [
        Extra(EPOCHS, tuple(two.split())),
        Extra(
            ACCUMULATES, tuple(f"{SMALL} --test-nsteps 7 --accumulate 2 --precision fp32".split())
        ),
    ]


EXERCISE = Exercise(
    step="06_ddp",
    own_flags={},
    processes=2,
    mechanism=mechanism,
    extras=extras,
    recorded=("h200/06-resnet50-bf16-x1-1.jsonl", "h200/06-resnet50-bf16-x2-1"),
    # Whose images these are comes before which they are.
    hints={"share": OWN_HINTS["share"]} | hints(OWN_HINTS),
    errors=(
        (r"unrecognized arguments: .*--accumulate", "flag"),
        (r"Duplicate GPU detected", "device"),  # NCCL's
    ),
)
