"""The plan that is predicted fastest, by model and number of GPUs.

`dlojz estimate` predicts the memory and the bytes sent of each plan. A step takes as long as its
operations at a measured speed, the pipeline's bubble, and the messages that nothing hides. Plans
are tried in the order of this time, until one fits.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product

import torch

from dlojz import course
from dlojz.chapters.n12_model_parallel.giants import (
    GIANTS,
    MFU,
    NODE,
    PATCH,
    VITS,
    Rates,
    giants,
    image_size,
    largest,
)
from dlojz.estimate import divided, estimate
from dlojz.training import imports, models
from dlojz.training.replaced import replaced

TENSOR, STAGES = (1, 2, 4, 8), (1, 2, 4, 8, 16)
MICRO = (128, 64, 32, 16, 8, 4, 2, 1)  # images of a part: of equal speeds the largest counts
PARTS = (2, 4, 8, 16)  # for each stage


# Models -------------------------------------------------------------------------------------------


def stand_in(giant) -> models.ViT:
    """Return a vision transformer with a giant's layers, width, heads and parameters."""
    layers, width = giant.layers, giant.width
    mlp = (giant.parameters / layers - 4 * width**2) / (2 * width)  # without a vocabulary
    return models.ViT(PATCH, layers, giant.heads, width, 64 * round(mlp / 64))


@cache
def known() -> dict[str, models.ViT]:
    """Return the models of the map: the course's, and stand-ins of giants."""
    found = giants()
    return {name: models.LARGER[name] for name in VITS} | {n: stand_in(found[n]) for n in GIANTS}


# The time of a step -------------------------------------------------------------------------------


def operations(plan) -> float:
    """Return the operations of an image, or a sequence, without recomputation.

    They are 6 for each weight and token, and attention's two products, three times.
    """
    vit = known()[plan.model]
    tokens = (plan.image_size // vit.patch) ** 2 + 1
    block = 4 * vit.width**2 + 2 * vit.width * vit.mlp
    return vit.layers * (6 * block * tokens + 12 * vit.width * tokens**2)


def seconds(plan: estimate.Plan, r: Rates) -> dict[str, float]:
    """Return the predicted time of a step, by what it goes into."""
    stage, sent = math.ceil(known()[plan.model].layers / plan.stages), messages(plan)
    passes = 4 if plan.checkpointing == "blocks" else 3  # the backward pass is as long as two
    own = stage / known()[plan.model].layers / plan.tensor  # of the operations: the longest stage's
    computing = operations(plan) * plan.batch * own * passes / 3 / r.flops
    tensor = sum(size for name, size in sent.items() if name.startswith("tokens")) / r.inside
    if plan.tensor > 1:
        tensor += plan.parts * stage * (8 if passes == 3 else 11) * r.latency_s
    near = r.inside if plan.gpus <= NODE else r.between
    return {
        "computing": computing,
        "bubble": (plan.stages - 1) / plan.parts * (computing + tensor),
        "tensor": tensor,
        "stages": sent.get("to other stages", 0) / near,
        "data": exposed(plan, sent, computing / passes / plan.parts, passes, r),
    }


def exposed(plan, sent, forward: float, passes: int, r: Rates) -> float:
    """Return the time of weights and gradients that no pass of a micro-batch hides.

    forward: the time of such a forward pass.
    """
    speed = r.inside
    if plan.tensor * plan.replicas > NODE:  # GPUs of a node that send the same share its network
        speed = min(speed, max(1, NODE // plan.tensor) * r.between)
    weights, gradients = (sent.get(name, 0) / speed for name in ("weights", "gradients"))
    before = weights / (1 if plan.stages > 1 else 2)
    behind = weights - before + gradients
    return max(0, before - forward) + max(0, behind - (passes - 1) * forward)


def messages(plan) -> dict[str, float]:
    """Return the bytes that a GPU of the first stage sends in a step, as dlojz estimate does."""
    one = sent(replace(plan, batch=plan.stages, parts=plan.stages))
    more = plan.batch / plan.stages
    return {n: size * (1 if n in ("weights", "gradients") else more) for n, size in one.items()}


@cache
def sent(plan) -> dict[str, float]:
    """Return the bytes that a process sends."""
    with replaced(models, LARGER=known()):
        model = estimate.on_meta(trainer().build_model, plan, estimate.parsed(trainer(), plan))
        return divided.sent(model, plan, torch.bfloat16)


@cache
def trainer():
    return imports.trainer(course.solution(course.CHAIN[-1]))


# The choice ---------------------------------------------------------------------------------------


def plans(name: str, gpus: int) -> Iterator[estimate.Plan]:
    """Yield the plans to choose from."""
    vit = known()[name]
    ways = product(TENSOR, STAGES, ("ddp", "fsdp"), ("off", "blocks"), MICRO, PARTS)
    for tensor, stages, sharding, checkpointing, micro, more in ways:
        parts = more * stages if stages > 1 else 1
        replicas = gpus // (tensor * stages)
        if not replicas or vit.heads % tensor or vit.layers < 2 * stages:
            continue
        if (stages == 1 and more > PARTS[0]) or (replicas == 1 and sharding == "fsdp"):
            continue  # a repetition
        if replicas * micro * parts <= largest(name):
            yield estimate.Plan(
                *(name, gpus, sharding, micro * parts, image_size(name), checkpointing, "bf16"),
                flags=("--optimizer", "adamw"),
                **{"tensor": tensor, "stages": stages, "parts": parts},
            )


def speed(plan, r: Rates) -> float:
    """Return the predicted images, or sequences, per second on each GPU."""
    return plan.batch / (plan.tensor * plan.stages) / sum(seconds(plan, r).values())


@cache
def needed(plan) -> float:
    """Return the bytes of the first stage, which holds most activations, as dlojz estimate does."""
    with replaced(models, LARGER=known()):
        return max(peak.bytes for peak in estimate.added_up(trainer(), plan).values())


def least(plan) -> float:
    """Return a bound below the bytes of a plan, so that most plans need no estimate."""
    vit, fsdp = known()[plan.model], plan.sharding == "fsdp"
    weights = vit.parameters(estimate.CLASSES, plan.image_size) / (plan.tensor * plan.stages)
    each = 16 / plan.replicas if fsdp else 16  # bytes of a weight, its gradient and AdamW's state
    if fsdp and plan.stages > 1:  # gathered in 16 bits, and the gradient whole
        each = 12 / plan.replicas + 6
    tokens = (plan.image_size // vit.patch) ** 2 * plan.batch / plan.parts / plan.tensor
    kept = 30 if plan.checkpointing == "off" else 2  # bytes of a block for each value of a token
    return each * weights + kept * tokens * vit.width * vit.layers / plan.stages * divided.live(
        plan
    )


def alike(plan, images: int) -> estimate.Plan:
    """Return a plan that takes as much memory, the same one for all such plans.

    images: of a part. Memory depends neither on more parts, nor on more copies of a model.
    """
    parts = 2 * plan.stages if plan.stages > 1 else 1
    copies = min(2, plan.replicas) if plan.sharding == "ddp" else plan.replicas
    gpus = copies * plan.tensor * plan.stages
    return replace(plan, gpus=gpus, parts=parts, batch=images * parts)


def fits(plan, r: Rates) -> bool:
    """Return whether a plan fits; one that cannot, by a line through two sizes, is not tried."""
    if least(plan) > r.memory:
        return False
    images, size = plan.batch // plan.parts, needed(alike(plan, 1))
    if images > 1 and size <= r.memory:
        size += (images - 1) * (needed(alike(plan, 2)) - size)
    return size <= r.memory and needed(alike(plan, images)) <= r.memory


def choose(name: str, gpus: int, r: Rates) -> dict | None:
    """Return the fastest plan that fits, with its prediction; None if none fits."""
    # Of equals, up to rounding errors, the first one: the simplest.
    ordered = sorted(plans(name, gpus), key=lambda plan: -float(f"{speed(plan, r):.6g}"))
    plan = next((each for each in ordered if fits(each, r)), None)
    if plan is None:
        return None
    undivided = [p for p in ordered if p.tensor * p.stages == 1]
    alone = next((p for p in undivided if fits(p, r)), None)
    return {
        "plan": asdict(plan),
        "seconds": seconds(plan, r),
        "bytes": needed(alike(plan, plan.batch // plan.parts)),
        "mfu": speed(plan, r) * operations(plan) / (r.flops / MFU),
        "undivided": len(undivided),
        "alone": alone and speed(alone, r) / speed(plan, r),
    }
