"""Pipelines under four schedules: the begin and the end of each action, in each process.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/schedules.py",
n_gpu=2).

On GPUs the actions work, and CUDA's events time them. Processes that share the cores of a processor
would slow each other down, so there an action computes a little, and sleeps until it has lasted
--wait for each block (a backward pass twice that), as if it had a GPU of its own.
"""

import argparse
import gc
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed import pipelining
from torch.nn import functional
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n12_model_parallel import blocks
from dlojz.course import UserError
from dlojz.training import flags

SCHEDULES = {  # each with the stages of a process
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "interleaved 1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "zero bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
ON_GPU = {"layers": 8, "width": 2048, "tokens": 256, "batch_size": 4, "wait": 0.0, "rounds": 5}
ON_CPU = {"layers": 8, "width": 32, "tokens": 8, "batch_size": 1, "wait": 6.0, "rounds": 1}


class Kept:
    """A tensor that is kept for the backward pass, and counted as long as it lives."""

    def __init__(self, live, part, tensor):
        self.live, self.part, self.tensor = live, part, tensor
        live[part] += 1

    def __del__(self):
        self.live[self.part] -= 1


class Stage(pipelining.PipelineStage):
    """A stage that notes its actions: the forward pass (F) and the backward pass (B) of a part.

    A schedule may divide the latter: into the gradients of its input (I), and of its weights (W).
    """

    def __init__(self, module, number, count, device, wait):
        super().__init__(module, number, count, device)
        self.wait_s, self.noted, self.live = wait * len(module) / 1000, [], Counter()

    def forward_one_chunk(self, fwd_chunk_id, *args, **options):
        keep = partial(Kept, self.live, fwd_chunk_id)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor)
        with self.note("F", fwd_chunk_id, 1), hooks:
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **options):
        # Nothing waits for the first stage's gradients of its input: torch leaves them out.
        kind, times = ("B", 2) if full_backward else ("I", 0 if self.is_first else 1)
        with self.note(kind, bwd_chunk_id, times):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id, **options):
        with self.note("W", bwd_chunk_id, 2 if self.is_first else 1):
            return super().backward_weight_one_chunk(bwd_chunk_id, **options)

    @contextmanager
    def note(self, kind, part, times):
        """Note an action, its times, and the number of parts that are live when it has ended."""
        begin = now(self.device)
        yield
        if self.device.type == "cpu":
            time.sleep(max(0, begin + times * self.wait_s - time.perf_counter()))
        live = sum(count > 0 for count in self.live.values())
        self.noted.append((kind, self.stage_index, part, begin, now(self.device), live))


def now(device):
    """Return the time in seconds, or on a GPU an event that has it later."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def stage(args, number, count, device) -> Stage:
    """Return one of this number of equal stages."""
    sizes = args.width, max(1, args.width // 128), 4 * args.width
    with device:
        own = [blocks.Block(*sizes) for _ in range(args.layers // count)]
    return Stage(torch.nn.Sequential(*own), number, count, device, args.wait)


def timed(args, name, parts, device) -> list:
    """Return the actions of this process in one step of a schedule: of some, the median one."""
    gc.collect()  # of an earlier schedule
    (make, own), rank, size = SCHEDULES[name], idr_torch.rank, idr_torch.size
    stages = [stage(args, n, own * size, device) for n in range(rank, own * size, size)]
    schedule = make(stages if own > 1 else stages[0], parts, functional.mse_loss)
    x = torch.randn(parts * args.batch_size, args.tokens, args.width, device=device)
    given, ends = [x] * (rank == 0), {"target": x} if rank == size - 1 else {}
    step = partial(schedule.step, *given, **ends)
    step()  # to warm up
    rounds = [actions(step, stages, device) for _ in range(args.rounds)]
    spans = torch.tensor([max(end for *_, end, _ in each) for each in rounds])
    torch.distributed.all_reduce(spans, torch.distributed.ReduceOp.MAX)
    return rounds[spans.argsort()[len(rounds) // 2]]


def actions(step, stages, device) -> list:
    """Return the actions of this process's stages in a step, in the order of their begins."""
    for each in stages:
        each.noted.clear()
    session.wait(device)
    torch.distributed.barrier()
    origin, clock = now(device), time.perf_counter()  # all processes of a node have one clock
    first = torch.tensor([clock], dtype=torch.float64)
    torch.distributed.broadcast(first, 0)
    step()
    session.wait(device)

    def ms(moment):
        spent = moment - origin if device.type == "cpu" else origin.elapsed_time(moment) / 1000
        return round(1000 * (clock - first.item() + spent), 3)

    noted = [action for each in stages for action in each.noted]
    found = [(*what, ms(begin), ms(end), live) for *what, begin, end, live in noted]
    return sorted(found, key=lambda action: action[3])


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, positive = parser.add_argument, flags.at_least(1)
    add("--layers", type=positive, help="blocks of all stages together")
    add("--width", type=positive, help="numbers of a token")
    add("--tokens", type=positive, help="tokens of an image")
    add("-b", "--batch-size", type=positive, help="images of a part")
    add("--parts", type=positive, nargs="+", default=[4, 8, 16], help="parts of the images")
    add("--wait", type=float, help="ms of a block's forward pass, without a GPU")
    add("--rounds", type=positive, help="steps, of which the median one is kept")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        if idr_torch.size < 2 or args.layers % (2 * idr_torch.size):
            raise UserError(
                f"--layers {args.layers} on {idr_torch.size} processes: expected two or more, and "
                "a multiple of twice their number as layers; submit it with n_gpu=2"
            )
        session.set_float32("tf32")
        with session.process_group(device):
            for name, parts in tqdm([(n, p) for n in SCHEDULES for p in args.parts], unit="case"):
                actions = timed(args, name, parts, device)
                fields = {"schedule": name, "parts": parts, "stages": SCHEDULES[name][1]}
                run.case(f"{name}, {parts} parts", **fields, actions=actions)


if __name__ == "__main__":
    main()
