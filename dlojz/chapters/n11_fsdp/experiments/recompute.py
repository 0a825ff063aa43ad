"""Activation checkpointing: kept bytes, recomputed operations, and the time of a step.

Submitted by a notebook: submit("dlojz/chapters/n11_fsdp/experiments/recompute.py").

A vision transformer trains without it, with it on each block, and with it on each block except for
the matrix products, whose results are kept. Kept bytes are those that a forward pass allocates and
does not free, minus its result: hooks on saved tensors would miss those of the last way.
"""

import argparse
import statistics
from functools import partial
from itertools import accumulate

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n11_fsdp import transformers
from dlojz.training import sharding

ATEN = torch.ops.aten
PRODUCTS = [
    *(ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default),
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
]


def all_but_products(model):
    """Keep the inputs of each block and its matrix products; compute the rest again."""
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)
    for block in sharding.blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


WAYS = {
    "off": lambda model: None,
    "blocks": sharding.checkpoint_blocks,
    "all but matrix products": all_but_products,
}


def main():
    device = idr_torch.device()
    args = parse_args(device.type == "cuda")
    with session.begin(args, device) as (run, _):
        session.set_float32(args.precision)
        steps, found, first = {}, {}, None
        for way in WAYS:
            training = Training(way, args, device)
            steps[way], found[way] = training.step, training.seen()
            gradients = [p.grad for p in training.model.parameters()]
            first = first or gradients
            found[way]["gradient_away"] = session.away(gradients, first)
        for way, ms in session.in_turn(steps, device, args.rounds).items():
            run.measure(way, statistics.median(ms), "ms per step")
            run.case(way, step_ms=ms, **found[way])


def parse_args(on_gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    transformers.add_flags(parser, on_gpu)
    parser.add_argument("--rounds", type=int, default=8, help="timings of a step")
    return parser.parse_args()


class Training:
    """A model with one of the ways to keep activations, its optimizer and a batch."""

    def __init__(self, way, args, device):
        torch.manual_seed(0)
        with device:
            self.model = transformers.build(args.model, args.image_size)
        WAYS[way](self.model)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=fused)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        images, labels = torch.randn(shape, device=device), torch.randint(10, shape[:1])
        self.images, self.labels, self.device = images, labels.to(device), device
        self.dtype = session.DTYPES.get(args.precision)

    def forward(self):
        """Return the loss of the batch."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return torch.nn.functional.cross_entropy(self.model(self.images), self.labels)

    def step(self):
        """Train on the batch."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def seen(self):
        """Return the kept bytes, the peak of a step, and the operations of a step.

        It begins with a second step, as the first one makes the optimizer's state.
        """
        self.step()
        self.optimizer.zero_grad()
        with FlopCounterMode(display=False) as count:
            self.forward().backward()
        self.optimizer.zero_grad()
        losses = []
        kept, first = growth(lambda: losses.append(self.forward()), self.device)
        added, second = growth(lambda: losses.pop().backward(), self.device)
        return {
            "kept_bytes": kept,
            "gradient_bytes": added + kept,
            "peak_bytes": max(first, kept + second),  # with the gradients
            "flops": count.get_total_flops(),
        }


def growth(call, device) -> tuple[int, int]:
    """Return the growth of the tensors' memory in bytes, after a call and at most during it.

    On a GPU these are the allocator's numbers, else the profiler's.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        after, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return after - before, most - before
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    levels = [0, *accumulate(size for _, size in moves)]
    return levels[-1], max(levels)


if __name__ == "__main__":
    main()
