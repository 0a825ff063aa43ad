"""Pipelines under four schedules: the begin and the end of each action, in each process.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/schedules.py",
n_gpu=2).

On GPUs the actions work, and CUDA's events time them. Processes that share the cores of a processor
would slow each other down, so there an action computes a little, and sleeps until it has lasted
--wait for each block (a backward pass twice that), as if it had a GPU of its own.
"""

import argparse
import time
from collections import Counter
from contextlib import contextmanager

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
ON_GPU = {"layers": 16, "width": 2048, "tokens": 256, "batch_size": 4, "wait": 0.0}
ON_CPU = {"layers": 8, "width": 32, "tokens": 8, "batch_size": 1, "wait": 6.0}


class Kept:
    """A tensor that is kept for the backward pass, and counted as long as it lives."""

    def __init__(self, tensor, live, part):
        self.tensor, self.live, self.part = tensor, live, part
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
        def pack(tensor):
            return Kept(tensor, self.live, fwd_chunk_id)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
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


def pieces(args, count) -> list[torch.nn.Sequential]:
    """Return the blocks, divided evenly among this number of stages."""
    torch.manual_seed(0)
    sizes = args.width, max(1, args.width // 128), 4 * args.width
    layers = [blocks.Block(*sizes) for _ in range(args.layers)]
    each = args.layers // count
    return [torch.nn.Sequential(*layers[i * each : (i + 1) * each]) for i in range(count)]


def timed(args, name, parts, device) -> list:
    """Return the actions of this process in one step of a schedule, after a step to warm up."""
    make, own = SCHEDULES[name]
    count = own * idr_torch.size
    stages = [
        Stage(module.to(device), number, count, device, args.wait)
        for number, module in enumerate(pieces(args, count))
        if number % idr_torch.size == idr_torch.rank
    ]
    schedule = make(stages if own > 1 else stages[0], parts, functional.mse_loss)
    x = torch.randn(parts * args.batch_size, args.tokens, args.width, device=device)
    given = [x] * (idr_torch.rank == 0)
    ends = {"target": x} if idr_torch.rank == idr_torch.size - 1 else {}
    schedule.step(*given, **ends)
    for stage in stages:
        stage.noted.clear()
    begin = torch.zeros(1, dtype=torch.float64)  # one clock for all processes of a node
    torch.distributed.barrier()
    session.wait(device)
    origin, begin[0] = now(device), time.perf_counter()
    own_begin = begin.item()
    torch.distributed.broadcast(begin, 0)
    schedule.step(*given, **ends)
    session.wait(device)
    late = 1000 * (own_begin - begin.item())

    def ms(moment):
        spent = moment - origin if device.type == "cpu" else origin.elapsed_time(moment) / 1000
        return round(late + 1000 * spent, 3)

    noted = [action for stage in stages for action in stage.noted]
    found = [(*what, ms(begin), ms(end), live) for *what, begin, end, live in noted]
    return sorted(found, key=lambda action: action[3])


def main():
    device = idr_torch.device()
    args = parse_args(ON_GPU if device.type == "cuda" else ON_CPU)
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


def parse_args(sizes):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    positive = flags.at_least(1)
    parser.add_argument("--layers", type=positive, help="blocks of all stages together")
    parser.add_argument("--width", type=positive, help="numbers of a token")
    parser.add_argument("--tokens", type=positive, help="tokens of an image")
    parser.add_argument("-b", "--batch-size", type=positive, help="images of a part")
    parser.add_argument("--parts", type=positive, nargs="+", default=[4, 8, 16])
    parser.add_argument("--wait", type=float, help="ms of a block's forward pass, without a GPU")
    parser.set_defaults(**sizes)
    return parser.parse_args()


if __name__ == "__main__":
    main()
