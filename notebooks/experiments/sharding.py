"""A vision transformer on several processes: whole in each (DDP), or sharded (FSDP2) in three ways.

Submitted by a notebook: submit("notebooks/experiments/sharding.py", n_gpu=2).

Each way trains the same model on the same images. Kept of each: its losses, its gradients after
these steps against those of the first way, the collectives of a step in the order of their calls,
the bytes that a process holds, and the time of a step. The model and its sizes suit the device.
"""

import argparse
import statistics
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dlojz import idr_torch
from dlojz.course import UserError
from dlojz.runs import log
from dlojz.training import evidence, experiments, sharding, transformers

DDP, ROOT = "DDP", "FSDP2, root only"
OPTIONS = {  # of fully_shard, for each block and for the root
    "FSDP2": {},
    "FSDP2, kept whole after forward": {"reshard_after_forward": False},
}
WAYS = (DDP, *OPTIONS, ROOT)
# What the operations of torch's dispatcher are called. What runs may differ: gloo has no
# reduce-scatter, and sums all of the tensor in each process.
CALLED = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


def main():
    device = idr_torch.device()
    args = parse_args(device.type == "cuda")
    run = log.open_run(args)
    run.experiment(device)
    if idr_torch.size < 2:
        raise UserError("one process has nobody to share with: submit it with n_gpu=2 or more")
    experiments.set_float32(args.precision)
    with experiments.process_group(device):
        mesh = init_device_mesh(device.type, (idr_torch.size,))
        found, steps, first = {}, {}, None
        for way in args.ways:
            training = Training(way, args, device, mesh)
            found[way], gradients = training.begin(args.steps)
            first = first or gradients
            found[way]["gradient_away"] = experiments.away(gradients, first)
            steps[way] = training.step
        times = experiments.in_turn(steps, device, args.rounds)
        for way, ms in times.items():
            run.measure(way, statistics.median(ms), "ms per step")
            run.case(way, step_ms=ms, **found[way], **seen(steps[way]))
    run.end()


def parse_args(on_gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    transformers.add_flags(parser, on_gpu)
    parser.add_argument("--steps", type=int, default=4, help="whose losses are compared")
    parser.add_argument("--rounds", type=int, default=8, help="how often a step is timed")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    return parser.parse_args()


class Training:
    """A model that is wrapped in one of the ways, its optimizer, and this process's images."""

    def __init__(self, way, args, device, mesh):
        self.device, self.before = device, allocated(device)
        self.dtype = experiments.DTYPES.get(args.precision)
        torch.manual_seed(0)
        with device:
            model = transformers.build(args.model, args.image_size)
        self.model = wrapped(way, model, device, mesh, self.dtype)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=fused)
        torch.manual_seed(1 + idr_torch.rank)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        self.images = torch.randn(shape, device=device)
        self.labels = torch.randint(10, shape[:1], device=device)

    def step(self):
        """Train on the images, and return the loss."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def begin(self, steps):
        """Train, and return what was found, and the whole gradients of the last step.

        Not of the first step: torchvision's last layer begins with zeros, so that all gradients but
        its own are 0 there.
        """
        losses = [self.step()]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with gathered(self.model) as most:
            losses += [self.step() for _ in range(steps - 1)]
        found = {"losses": [mean(loss) for loss in losses], "bytes": self.held() | most}
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - self.before
        return found, [whole(p.grad).cpu() for p in self.model.parameters()]

    def held(self):
        """Return the bytes that this process holds from one step to the next."""
        state = [v for each in self.optimizer.state.values() for v in each.values()]
        return sharding.share(self.model, [sharding.own(value) for value in state])["held"]


def wrapped(way, model, device, mesh, dtype):
    """Return the model as this way spreads it over the processes."""
    if way == DDP:
        ids = [device] if device.type == "cuda" else None
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    if way == ROOT:
        half = {"param_dtype": dtype, "reduce_dtype": torch.float32} if dtype else {}
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**half))
    else:
        sharding.shard(model, mesh, dtype, **OPTIONS[way])
    return model


def allocated(device) -> int:
    """Return the bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def whole(tensor):
    """Return a tensor with the parts of all processes; those call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def mean(loss) -> float:
    """Return the mean of the losses of all processes."""
    torch.distributed.all_reduce(loss)
    return loss.item() / idr_torch.size


@contextmanager
def gathered(model):
    """Yield {"gathered": bytes}: the most that were whole at a time, as seen inside the blocks."""
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    most = {"gathered": 0}

    def look(*_):
        outputs = [t for group in groups for p in group.fsdp_params for t in p.all_gather_outputs]
        now = sum(tensor.untyped_storage().nbytes() for tensor in outputs)
        most["gathered"] = max(most["gathered"], now)

    inside = [[*block.children()][-1] for block in sharding.blocks(model)]
    hooks = [part.register_forward_pre_hook(look) for part in inside]
    hooks += [part.register_full_backward_pre_hook(look) for part in inside]
    yield most
    for hook in hooks:
        hook.remove()


def seen(step):
    """Return the collectives of a step in the order of their calls, as called, with their pass."""
    torch.distributed.barrier()
    events = evidence.profiled(step)
    begins = min(e.start_ns() for e in events if e.name().startswith("autograd::engine"))
    calls = sorted((e.start_ns(), CALLED[e.name()]) for e in events if e.name() in CALLED)
    found = evidence.communication(events)
    for (start, op), collective in zip(calls, found["collectives"], strict=True):
        times = idr_torch.size if op == "all_gather" else 1  # each process gives its part
        collective |= {"op": op, "ran": collective["op"], "bytes": times * collective["bytes"]}
        collective["phase"] = "forward" if start < begins else "backward"
    return found


if __name__ == "__main__":
    main()
