"""The operations of training on one image, counted without a GPU, on tensors without memory.

As for a utilization, matrix products and convolutions count; a multiplication and an addition are
two operations. Attention counts as 2 products in the forward and 4 in the backward pass, without
the one that a kernel computes again.
"""

from dataclasses import replace
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dlojz.estimate import estimate
from dlojz.training import sharding

BATCH = 2  # batch normalization may refuse a single image


def of_an_image(trainer: ModuleType, plan: estimate.Plan) -> dict[str, float]:
    """Return the operations of an image: forward, backward, and again, repeated by checkpointing.

    They are those of the reader's own model, whatever its batch, precision and number of GPUs.
    """
    estimate.check(trainer, plan)
    plan = replace(plan, gpus=1, copies=1, sharding="ddp", batch=BATCH)
    with estimate.shown(plan):
        forward, both = counted(trainer, replace(plan, checkpointing="off"))
        more = counted(trainer, plan)[1] if plan.checkpointing != "off" else both
    return {"forward": forward, "backward": both - forward, "again": more - both}


def counted(trainer, plan) -> tuple[float, float]:
    """Return the operations of an image in the forward pass, and in both passes."""
    model = estimate.on_meta(trainer.build_model, plan, estimate.parsed(trainer, plan))
    if plan.checkpointing == "blocks":
        sharding.checkpoint_blocks(model)
    with torch.device("meta"):
        images = torch.empty(BATCH, 3, plan.image_size, plan.image_size)
        labels = torch.zeros(BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as count, sdpa_kernel(SDPBackend.MATH):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        forward = count.get_total_flops()
        loss.backward()
    return forward / BATCH, count.get_total_flops() / BATCH
