"""The program behind `dlojz estimate`: the memory of a training step, predicted without a GPU.

    python -m dlojz.estimate.estimate --into memory.json --model vit_2b -b 32 dlojz/dlojz.py

It runs a few steps of the reader's own trainer, with its `build_training` and `train_step`, on
tensors without memory (see `dlojz.estimate.storages`), as one of many GPUs whose others are fake.
--fits needs many predictions: for a model of many equal blocks it runs two short versions, and adds
the missing blocks.
"""

import argparse
import json
import logging
import math
import shlex
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz import idr_torch
from dlojz.course import UserError
from dlojz.estimate import divided
from dlojz.estimate.storages import UNCLEAR, Storages
from dlojz.runs import memory, source
from dlojz.training import any_model, data, imports, models, private, sharding
from dlojz.training.any_model import DTYPES
from dlojz.training.replaced import replaced

CLASSES, UPDATES = 1000, 100_000  # of the synthetic images, and of the schedule
STEPS = 2  # the second one begins with the first one's gradients and momentum
SHORT = (4, 6)  # blocks of the short versions, whose first and last blocks differ from the others
# Batches: the first to try, as batch normalization may refuse 1, and an upper limit.
FIRST, SECOND, MOST = 2, 10, 1 << 16
CPU = torch.device("cpu")  # of the fake tensors
# The variants that experiments compare: sharding and checkpointing.
WAYS = {"ddp": ("ddp", "off"), "fsdp": ("fsdp", "off"), "blocks": ("fsdp", "blocks")}


@dataclass(frozen=True)
class Plan:
    """A training to predict: its model, its sizes and its options."""

    model: str
    gpus: int
    sharding: str
    batch: int
    image_size: int | None  # None: the model's own
    checkpointing: str
    precision: str
    flags: tuple[str, ...] = ()  # further flags of the trainer
    copies: int = 1  # of the model in shards: HSDP, if there are several
    tensor: int = 1  # processes that share each tensor
    stages: int = 1  # of a pipeline
    parts: int = 1  # of a batch, in a pipeline
    stage: int = 0  # the one that is predicted

    @property
    def replicas(self) -> int:
        """Return the number of processes that hold the same part of the model, or its shards."""
        return self.gpus // (self.tensor * self.stages)

    @property
    def divided(self) -> bool:
        return self.tensor * self.stages > 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--into", type=Path, required=True, help="a file for the result, as JSON")
    memory.add_flags_of_a_plan(add)
    add("--flags", type=shlex.split, default=(), help="more of the trainer's, in quotes")
    add("trainer", help="such as dlojz/dlojz.py")
    args = vars(parser.parse_args())
    into, file, fits = (args.pop(name) for name in ("into", "trainer", "fits"))
    own = {name: args.pop(name) for name in ("input", "tokens", "optimizer")}
    foreign = source.names_model(args["model"])
    if foreign:
        args["flags"] = [f"--{name}={value}" for name, value in own.items() if value is not None]
    elif args["image_size"] is None:
        args["image_size"] = 224
    plan = Plan(**args | {"flags": tuple(args["flags"])})
    warnings.filterwarnings("ignore")  # DDP's on tensors without values
    logging.disable()  # torch logs an error that is reported below
    try:
        trainer = any_model if foreign else imports.trainer(file)
        found = result(trainer, plan)
        if fits:
            found["fits"] = [*fitting(trainer, plan, memory.bytes_of(fits))]
    except UserError as error:
        sys.exit(f"dlojz: {error}")
    into.write_text(json.dumps(found), encoding="utf-8")


def result(trainer: ModuleType, plan: Plan, by_blocks=False) -> dict:
    """Return the peak of each phase of a step, for JSON, with the plan and the model's size.

    by_blocks: run only a few of the model's blocks, if it has many and all are equal.
    """
    tell(f"running {STEPS} steps of {plan.model} on tensors without memory")
    check(trainer, plan)
    with shown(plan):
        args = parsed(trainer, plan)
        whole = on_meta(trainer.build_model, replace(plan, tensor=1, stages=1), args)
        peaks = added_up if by_blocks else measured
        stages = []
        for stage in (replace(plan, stage=number) for number in range(plan.stages)):
            found = {phase: dict(peak.parts) for phase, peak in peaks(trainer, stage).items()}
            model = on_meta(trainer.build_model, stage, args)
            stages.append({"peaks": found, "sent": divided.sent(model, stage, product(plan))})
        more = {"batch": any_model.described(whole, args)} if trainer is any_model else {}
    highest = max(stages, key=lambda stage: max(sum(p.values()) for p in stage["peaks"].values()))
    return {
        "plan": asdict(replace(plan, stage=stages.index(highest))),
        "parameters": sum(p.numel() for p in whole.parameters()),
        **highest,
        "stages": stages,
        **more,
    }


def tell(what):
    """Print the progress to stderr."""
    print(f"  {what} ...", file=sys.stderr, flush=True)


def planned(start: Mapping) -> Plan:
    """Return the plan of a run of the trainer, from the first event of its log."""
    run, flags = start["arguments"], ()
    if not run.get("channels_last", True):
        flags += ("--no-channels-last",)
    if "optimizer" in run:  # a flag of TODO 08
        flags += ("--optimizer", run["optimizer"])
    return Plan(
        model=run["model"],
        gpus=start["size"],
        sharding=run.get("sharding", "ddp"),
        batch=run["batch_size"],
        image_size=run["image_size"],
        checkpointing=run.get("checkpointing", "off"),
        precision=run.get("precision", "fp32"),
        flags=flags,
    )


# A plan that can't be ----------------------------------------------------------------------------


def check(trainer, plan):
    """Raise UserError for a plan that is wrong, before anything is built."""
    memory.must_be_positive(plan)
    if plan.replicas % plan.copies:
        raise UserError(f"{plan.copies} copies on {plan.gpus} GPUs: expected equal numbers in each")
    memory.must_divide(plan)
    if trainer is any_model:
        if plan.divided:
            raise UserError(
                f"{plan.model} can't be divided by --tensor and --stages, which know the course's "
                "vision transformers: expected --sharding fsdp, or --model vit_2b"
            )
        return
    if plan.model not in models.names():
        raise UserError(models.unknown(plan.model))
    if (vit := models.LARGER.get(plan.model)) and plan.image_size % vit.patch:
        below = plan.image_size // vit.patch * vit.patch
        raise UserError(
            f"--image-size {plan.image_size}: {plan.model} cuts images into patches of "
            f"{vit.patch} pixels; expected a multiple, such as {below or vit.patch}"
        )
    if plan.precision != "fp32" and not knows(trainer, "precision"):
        raise UserError(
            f"{trainer.__file__} has no --precision yet, which TODO 02 adds: leave it out, or take "
            "a solution: --trainer solutions/dlojz_09_compile.py"
        )


def knows(trainer, flag: str) -> bool:
    """Return whether a trainer has "precision", of TODO 02, or "sharding", of TODO 11."""
    if trainer is any_model:
        return flag == "precision"
    return f'"{flag}"' in Path(trainer.__file__).read_text(encoding="utf-8")


@contextmanager
def shown(plan):
    """Turn torch's error on an impossible size into a line for the reader."""
    try:
        yield
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".!")
        size = f" of {plan.image_size} pixels" if plan.image_size else ""
        raise UserError(
            f"a step of {plan.model} with {plan.batch} images{size} fails: "
            f"{reason}. Other sizes, or another --model?"
        ) from error


# One prediction ----------------------------------------------------------------------------------


def measured(trainer, plan: Plan, short: int | None = None) -> dict[str, memory.Peak]:
    """Return the peak of each phase of a step.

    short: the number of the model's equal blocks to run; None: all.
    """
    storages, _ = counted(trainer, plan, short)
    return memory.peaks(halved(storages.events), storages.parts)


def counted(
    trainer, plan: Plan, short: int | None = None, accumulate: int = 1
) -> tuple[Storages, range]:
    """Return the storages of a few updates, and the places of the last one's events.

    accumulate: batches per update, as the trainer's flag.
    """
    if plan.parts > divided.live(plan):
        accumulate *= 2  # earlier parts have left their gradients
    args = parsed(trainer, plan)
    args.accumulate = accumulate
    data.normalize(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))  # keeps tensors: they must be real
    unseen = private.first_buckets(), private.unseen_shapes()
    with (
        group(plan.gpus // plan.stages, plan.copies, plan.tensor) as mesh,
        unseen[0],
        unseen[1],
        Storages() as storages,
    ):
        training = build(trainer, plan, args, short, mesh)
        note(storages, training)
        note_gathered(storages, training.model)
        training.model.train()
        for step in range(STEPS * accumulate):
            if step == (STEPS - 1) * accumulate:
                begin = len(storages.events)
            part = plan.batch // plan.parts
            if trainer is any_model:
                images, labels = any_model.batch(training.own, args, part, CPU)
            else:
                images = torch.empty(part, 3, *2 * [plan.image_size], dtype=torch.uint8)
                labels = torch.zeros(part, dtype=torch.int64)
            storages.note("buffers", (images, labels))
            trainer.train_step(step, training, images, labels, args, marks(storages))
            note(storages, training)
            if plan.stages > 1:  # FSDP's whole gradients of the parts so far: activations are freed
                storages.note_left("unreduced")
        last = range(begin, len(storages.events))
    return storages, last  # later events free the training


def parsed(trainer, plan: Plan):
    """Return the trainer's arguments."""
    words = ["--model", plan.model, "-b", str(plan.batch)]
    words += ["--image-size", str(plan.image_size)] * (plan.image_size is not None)
    words += ["--precision", plan.precision] * knows(trainer, "precision")
    words += [*["--data", "synthetic"] * (trainer is not any_model), *plan.flags]
    if knows(trainer, "sharding"):
        words += ["--sharding", plan.sharding, "--checkpointing", plan.checkpointing]
    size = replaced(idr_torch, size=max(2, plan.replicas))  # one GPU may shard, too
    with size, replaced(sys, argv=[trainer.__file__, *words]):
        args = trainer.parse_args()
    args.accumulate = 1
    if "compile" in args:
        args.compile = "off"
    if "mix" in args:
        args.mix = "off"  # it needs a moment's memory, before the forward pass
    if "normalize" in args:
        args.normalize = "torch"  # tensors without memory have no address for a kernel
    if plan.sharding == "fsdp":
        args.channels_last = False  # FSDP2 refuses weights that are not contiguous
    return args


@contextmanager
def group(gpus: int, copies: int = 1, tensor: int = 1):
    """Join a process group of this many GPUs, all others fake. Yields its mesh.

    Its dimensions are the copies of the model in shards, if there are several, the shards, and the
    processes that share each tensor, if there are several.
    """
    private.join_fake_group(gpus)
    sizes = {"copies": copies, "shards": gpus // copies // tensor, "tensor": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    try:
        yield init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    finally:
        torch.distributed.destroy_process_group()


def build(trainer, plan, args, short, mesh):
    """Return the trainer's training, its model sharded and checkpointed as planned."""
    own = trainer.build_model

    names = mesh.mesh_dim_names
    others = mesh["tensor"].get_group() if "tensor" in names else None
    shards = mesh[tuple(name for name in names if name != "tensor")] if others else mesh

    def build_model(*_):
        with private.without_modes():
            model = on_meta(own, plan, args, short, others)
            if not by_itself and plan.checkpointing == "blocks":
                sharding.checkpoint_blocks(model)
            if not by_itself and plan.sharding == "fsdp":
                sharding.shard(model, shards, DTYPES.get(plan.precision), **kept)
        later = by_itself and plan.sharding == "fsdp"
        return model if later else emptied(model)

    # In a pipeline, for all parts at once.
    kept = {"reshard_after_forward": False} if plan.stages > 1 else {}

    def sharded(module, **options):
        with private.without_modes():  # it asks for values of its mesh
            return fully_shard(module, **{"mesh": shards} | options | kept)

    by_itself = knows(trainer, "sharding")
    processes = plan.replicas if plan.sharding == "ddp" or by_itself else 1
    # The processes' weights are not compared, as fake tensors have no values.
    wrapper = partial(DistributedDataParallel, init_sync=False)
    with (
        replaced(trainer, build_model=build_model),
        replaced(idr_torch, size=processes),
        replaced(torch.distributed.fsdp, fully_shard=sharded),
        replaced(models, draw=lambda model: model),
        replaced(torch.nn.parallel, DistributedDataParallel=wrapper),
    ):
        training = trainer.build_training(args, CPU, CLASSES, UPDATES)
        wrapped = isinstance(training.model, DistributedDataParallel | FSDPModule)
        if processes > 1 and not wrapped:
            training.model = wrapper(  # as the trainer will, from TODO 06c on
                training.model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
    if isinstance(training.model, DistributedDataParallel):
        training.model.register_comm_hook(None, noop_hook)  # no gradients are exchanged
    return training


def emptied(model):
    """Return a model with memory without values. Weights that modules share stay shared."""
    names = defaultdict(list)
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[weight].append(name)
    model.to_empty(device=CPU)
    for first, *others in names.values():
        for owner, _, name in (other.rpartition(".") for other in others):
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    return model


def product(plan) -> torch.dtype:
    """Return the dtype of matrix products."""
    return DTYPES.get(plan.precision, torch.float32)


def on_meta(build_model, plan, args, short=None, others=None):
    """Return the reader's model with shapes only, and with some or all of its equal blocks.

    A divided one is a share. others: the processes that share its tensors.
    """
    with torch.device("meta"):
        model = build_model(args, CLASSES)
    by_block = plan.sharding == "fsdp" or plan.checkpointing == "blocks"
    if by_block and not models.blocks(model):
        raise UserError(
            f"{plan.model} repeats no block of its own, so there is nothing to shard or "
            "checkpoint block by block: give --sharding ddp and --checkpointing off, or a ViT"
        )
    if plan.divided:
        divided.check(model, plan)
        # Autocast keeps float32 between blocks, and FSDP does not.
        dtype = product(plan) if plan.sharding == "fsdp" else torch.float32
        model = divided.Share(model, plan, dtype, others)
    if short:
        del container(model)[short:]
    return model


def marks(storages=None) -> SimpleNamespace:
    """Return a stand-in for the Chronometer, which tells the storages the present phase."""
    target = storages or SimpleNamespace()
    phases = ("forward", "backward", "update")
    return SimpleNamespace(**{name: partial(setattr, target, "phase", name) for name in phases})


def note(storages, training):
    """Note the roles of the tensors that stay: weights, gradients and state."""
    parameters = [*training.model.parameters()]
    storages.note("parameters", parameters)
    storages.note("gradients", [p.grad for p in parameters], over=(*UNCLEAR, "communication"))
    storages.note("optimizer", [*training.optimizer.state.values()])
    storages.note("buffers", [*training.model.buffers(), *training.metrics.buffers()])


def note_gathered(storages, model):
    """Register hooks that note FSDP2's gathered weights, as a module's pass begins."""

    def note(module, _):
        whole = [p for p in module.parameters() if not isinstance(p, DTensor)]
        storages.note("gathered", whole, over=(*UNCLEAR, "communication"))

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(note)  # after FSDP2's own, which gathers them


def halved(events):
    """Yield the events, with the forward and the backward pass each divided into halves.

    Activations grow while gathered weights are freed, or are freed while gradients grow: the peak
    of a pass is at one of its ends, perhaps depending on the number of blocks.
    """
    for phase, run in groupby(events, key=itemgetter(2)):
        run = [*run]
        for place, (number, size, _) in enumerate(run):
            half = " begins" if 2 * place < len(run) else " ends"
            yield number, size, phase + half * (phase in ("forward", "backward"))


# Many equal blocks -------------------------------------------------------------------------------


def added_up(trainer, plan: Plan) -> dict[str, memory.Peak]:
    """Return the peak of each phase of a step, from a few of many equal blocks."""
    blocks = len(equal_blocks(on_meta(trainer.build_model, plan, parsed(trainer, plan))))
    if blocks <= 2 * SHORT[-1]:
        return measured(trainer, plan)
    less, more = (measured(trainer, plan, short) for short in SHORT)
    times = (blocks - SHORT[1]) / (SHORT[1] - SHORT[0])
    return {phase: more[phase].beyond(less[phase], times) for phase in more}


def equal_blocks(model) -> list:
    """Return the model's blocks if they have equal shapes and are consecutive; else []."""
    found = models.blocks(model)
    shapes = {tuple(tuple(p.shape) for p in block.parameters()) for block in found}
    return found if len(shapes) == 1 and container(model) is not None else []


def container(model):
    """Return the torch.nn.Sequential or ModuleList that holds exactly the blocks."""
    found, lists = models.blocks(model), torch.nn.Sequential | torch.nn.ModuleList
    kept = (m for m in model.modules() if isinstance(m, lists) and [*m.children()] == found)
    return next(kept, None)


# The largest batch -------------------------------------------------------------------------------


def fitting(trainer, plan: Plan, limit: int) -> Iterator[dict]:
    """Yield the largest batch that fits this memory for each plan, the cheapest first, for JSON."""
    for way in ways(trainer, plan):
        tell(f"looking for the largest batch: {memory.means(asdict(way))}")
        with shown(way):
            batch, found = largest_batch(partial(needed, trainer, way), limit)
        yield {"plan": asdict(replace(way, batch=batch * way.parts)), "bytes": found}


def ways(trainer, plan: Plan) -> list[Plan]:
    """Return the plans to try: this one, then in 16 bits, with checkpointing, with FSDP."""
    half = plan
    if plan.precision not in DTYPES and knows(trainer, "precision"):
        half = replace(plan, precision="bf16")
    found = [plan, half]
    if models.blocks(on_meta(trainer.build_model, plan, parsed(trainer, plan))):
        found.append(replace(half, checkpointing="blocks"))
        if plan.replicas > 1:
            found += [replace(way, sharding="fsdp") for way in (half, found[-1])]
    return list(dict.fromkeys(found))


def needed(trainer, plan: Plan, batch: int) -> dict[str, float]:
    """Return the bytes of each phase, for a batch with parts of this size; of the first stage."""
    found = added_up(trainer, replace(plan, batch=batch * plan.parts))
    return {phase: peak.bytes for phase, peak in found.items()}


def largest_batch(of: Callable[[int], dict], limit: float) -> tuple[int, float]:
    """Return the largest batch whose bytes are within the limit, with them; 0 if one is not.

    A large one is exact to 1 %.
    of: the bytes of each phase by batch, which are nearly a line.
    """
    first = of(FIRST)
    if max(first.values()) > limit:
        try:
            one = max(of(1).values())
        except ValueError:  # from batch normalization: one value has no variance
            return 0, max(first.values())
        return int(one <= limit), one
    at, low, high, guess, last = {FIRST: first}, FIRST, MOST, SECOND, FIRST
    while high - low > (step := max(1, low // 100)):  # exact up to 199
        at[guess] = found = of(guess)
        low, high = (guess, high) if max(found.values()) <= limit else (low, guess)
        ahead = min(_ahead(at[last][p], found[p], limit, guess - last) for p in found)
        last, guess = guess, min(max(low + step, guess + ahead), high - 1)
    return low, max(at[low].values())


def _ahead(before, now, limit, steps) -> int:
    """Return the number of additional images up to the limit, on a line through two sizes."""
    slope = (now - before) / steps
    return math.floor((limit - now) / slope) if slope > 0 else MOST


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
