"""A vision transformer on several processes: whole in each (DDP), or sharded (FSDP2) in many ways.

Submitted by a notebook: submit("dlojz/chapters/n11_fsdp/experiments/sharding.py", n_gpu=2).

Each way trains the same model on the same images. Its record has its losses, its last gradients
against those of the first way, and their norm, the collectives of a step in the order of their
calls, the bytes in a process, and the time of a step. The model and its sizes suit the device.
"""

import argparse
import statistics
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n11_fsdp import transformers
from dlojz.course import UserError
from dlojz.training import sharding
from dlojz.watch import profile


@dataclass(frozen=True)
class Way:
    """A way to spread a model over the processes, and to make a step."""

    ddp: bool = False
    root_only: bool = False
    options: Mapping = field(default_factory=dict)  # fully_shard's, for each block and the root
    copies: int = 1  # of the model in shards (HSDP)
    ahead: int = 0  # blocks to gather ahead of time; 0: FSDP2's default
    parts: int = 1  # consecutive parts of the images
    each: bool = True  # exchange gradients after each part, not only after the last one


PINNED = torch.cuda.is_available()  # pinning needs a GPU
WAYS = {
    "DDP": Way(ddp=True),
    "FSDP2": Way(),
    "FSDP2, kept whole after forward": Way(options={"reshard_after_forward": False}),
    "FSDP2, root only": Way(root_only=True),
    "HSDP, 2 copies": Way(copies=2),
    "FSDP2, two blocks ahead": Way(ahead=2),
    "FSDP2, offloaded": Way(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "FSDP2, offloaded, pinned": Way(options={"offload_policy": CPUOffloadPolicy(PINNED)}),
    "DDP, in 2 parts": Way(ddp=True, parts=2, each=False),
    "FSDP2, in 2 parts": Way(parts=2),
    "FSDP2, in 2 parts, one exchange": Way(parts=2, each=False),
}
COMPARISONS = {
    "ways": ("DDP", "FSDP2", "FSDP2, kept whole after forward", "FSDP2, root only"),
    "nodes": ("DDP", "FSDP2", "HSDP, 2 copies"),
    "ahead": ("FSDP2", "FSDP2, two blocks ahead"),
    # Nothing moves on a processor.
    "offload": ("FSDP2", "FSDP2, offloaded", "FSDP2, offloaded, pinned"),
    "parts": ("DDP, in 2 parts", "FSDP2, in 2 parts", "FSDP2, in 2 parts, one exchange"),
}
BACKWARD = "pass: backward"  # its name in the profiler's record
# Names of the operations of torch's dispatcher. The implementation may differ: gloo has no
# reduce-scatter, and sums the whole tensor in each process.
CALLED = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}


def main():
    device = idr_torch.device()
    args = parse_args(device.type == "cuda")
    with session.begin(args, device) as (run, _):
        if idr_torch.size < 2:
            raise UserError("shards need at least two processes: submit it with n_gpu=2 or more")
        session.set_float32(args.precision)
        check(args)
        with session.process_group(device):
            found, trainings, first = {}, {}, None
            for name in COMPARISONS[args.compare]:
                trainings[name] = training = Training(WAYS[name], args, device)
                found[name], gradients = training.begin(args.steps)
                first = first or gradients
                found[name]["gradient_away"] = session.away(gradients, first)
            steps = {name: training.step for name, training in trainings.items()}
            times = session.in_turn(steps, device, args.rounds)
            for name, ms in times.items():
                run.measure(name, statistics.median(ms), "ms per step")
                run.case(name, step_ms=ms, **found[name], **seen(steps[name], WAYS[name]))


def parse_args(on_gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    transformers.add_flags(parser, on_gpu)
    parser.add_argument("--steps", type=int, default=4, help="steps for which losses are compared")
    parser.add_argument("--rounds", type=int, default=8, help="timings of a step")
    parser.add_argument("--compare", default="ways", choices=COMPARISONS, help="default: ways")
    return parser.parse_args()


def check(args):
    """Raise UserError for ways that are impossible with these sizes."""
    for name in COMPARISONS[args.compare]:
        way = WAYS[name]
        if idr_torch.size % way.copies:
            raise UserError(
                f"{name}: {idr_torch.size} processes; expected a multiple of {way.copies}"
            )
        if args.batch_size % way.parts:
            raise UserError(f"{name}: -b {args.batch_size}; expected a multiple of {way.parts}")


class Training:
    """A model wrapped in one of the ways, its optimizer, and this process's images."""

    def __init__(self, way, args, device):
        self.way, self.device, self.before = way, device, allocated(device)
        self.dtype = session.DTYPES.get(args.precision)
        torch.manual_seed(0)
        with device:
            model = transformers.build(args.model, args.image_size)
        self.model = wrapped(way, model, device, self.dtype)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=fused)
        torch.manual_seed(1 + idr_torch.rank)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        self.images = torch.randn(shape, device=device)
        self.labels = torch.randint(10, shape[:1], device=device)

    def step(self):
        """Train on the images, and return the loss."""
        parts, total = self.way.parts, 0
        self.optimizer.zero_grad()
        batches = zip(self.images.chunk(parts), self.labels.chunk(parts), strict=True)
        for part, (images, labels) in enumerate(batches, 1):
            self.exchange(self.way.each or part == parts)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                loss = torch.nn.functional.cross_entropy(self.model(images), labels) / parts
            with torch.profiler.record_function(BACKWARD):
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        return total

    def exchange(self, now: bool):
        """Set whether the next backward pass exchanges its gradients."""
        if self.way.ddp:
            self.model.require_backward_grad_sync = now
        elif self.way.parts > 1:
            self.model.set_requires_gradient_sync(now)

    def begin(self, steps):
        """Train, and return the record, and the whole gradients of the last step.

        In the first step all gradients but the last layer's are 0, because torchvision's last layer
        begins with zeros.
        """
        losses = [self.step()]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with gathered(self.model) as most:
            losses += [self.step() for _ in range(steps - 1)]
        found = {"losses": [mean(loss) for loss in losses], "bytes": self.held() | most}
        found["norm"], found["own_norm"] = self.norms()
        if self.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - self.before
        return found, [whole(p.grad).cpu() for p in self.model.parameters()]

    def held(self):
        """Return the bytes that this process holds between steps, on its device."""
        state = [v for each in self.optimizer.state.values() for v in each.values()]
        if sharding.own(next(self.model.parameters())).device != self.device:
            return {}  # the host holds them
        return sharding.share(self.model, [sharding.own(value) for value in state])["held"]

    def norms(self) -> tuple[float, float]:
        """Return the norm of all gradients, as for clipping, and of this process's part."""
        gradients = [p.grad for p in self.model.parameters()]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        own = torch.nn.utils.get_total_norm([sharding.own(g) for g in gradients])
        return norm.item(), own.item()


def wrapped(way, model, device, dtype):
    """Return the model, spread over the processes in this way."""
    if way.ddp:
        ids = [device] if device.type == "cuda" else None
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    shape = (way.copies, idr_torch.size // way.copies)[way.copies == 1 :]
    names = ("copies", "shards")[way.copies == 1 :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if way.root_only:
        half = {"param_dtype": dtype, "reduce_dtype": torch.float32} if dtype else {}
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**half))
    else:
        sharding.shard(model, mesh, dtype, **way.options)
    if way.ahead:
        gather_ahead(sharding.blocks(model), way.ahead)
    return model


def gather_ahead(blocks, number):
    """Set the number of blocks to gather ahead of each block, in both passes."""
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 :][:number])
        block.set_modules_to_backward_prefetch(blocks[:place][::-1][:number])


def allocated(device) -> int:
    """Return the bytes of all tensors on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def whole(tensor):
    """Return a tensor with the parts of all processes, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def mean(loss) -> float:
    """Return the mean of the losses of all processes."""
    torch.distributed.all_reduce(loss)
    return loss.item() / idr_torch.size


@contextmanager
def gathered(model):
    """Yield the most whole bytes at a time, as counted inside the blocks.

    gathered: weights, also those being gathered
    unreduced: gradients of earlier parts of the images, before their exchange
    """
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    most = {"gathered": 0, "unreduced": 0}

    def look(*_):
        arrived = [t for group in groups for p in group.fsdp_params for t in p.all_gather_outputs]
        under_way = [g._all_gather_result.all_gather_output for g in groups if g._all_gather_result]
        now = sum(tensor.untyped_storage().nbytes() for tensor in arrived + under_way)
        most["gathered"] = max(most["gathered"], now)

    def look_again(*_):
        look()
        most["unreduced"] = max(most["unreduced"], sum(map(kept, groups)))

    inside = [[*block.children()][-1] for block in sharding.blocks(model)]
    hooks = [part.register_forward_pre_hook(look_again) for part in inside]
    hooks += [part.register_full_backward_pre_hook(look) for part in inside]
    yield most
    for hook in hooks:
        hook.remove()


def kept(group) -> int:
    """Return the bytes of the whole gradients of an FSDP group, each counted once.

    In torch 2.11 those of earlier parts are separate. In 2.15 they are the parameters' own.
    """
    added = [p.unsharded_accumulated_grad for p in group.fsdp_params]
    new = [getattr(p, "_unsharded_param", None) for p in group.fsdp_params]
    gradients = {id(g): g for g in (*added, *(p.grad for p in new if p is not None))}
    return sum(gradient.nbytes for gradient in gradients.values() if gradient is not None)


def seen(step, way):
    """Return the collectives of a step, in the order of their calls, with their pass.

    group: "all", or with several copies of the model the processes of one ("shards"), or those
    with the same shard ("copies"); members: their number
    """
    shards = idr_torch.size // way.copies
    torch.distributed.barrier()
    events = profile.profiled(step)
    spans = [(e.start_ns(), e.end_ns()) for e in events if e.name() == BACKWARD]
    calls = sorted((e.start_ns(), CALLED[e.name()]) for e in events if e.name() in CALLED)
    found = profile.communication(events)
    for (start, op), collective in zip(calls, found["collectives"], strict=True):
        times = shards if op == "all_gather" else 1  # each process gives its part
        collective |= {"op": op, "ran": collective["op"], "bytes": times * collective["bytes"]}
        backward = any(begin <= start <= end for begin, end in spans)
        collective["phase"] = "backward" if backward else "forward"
        across = op == "all_reduce" and way.copies > 1
        collective["members"] = way.copies if across else shards
        group = "copies" if across else "shards"
        collective["group"] = group if way.copies > 1 else "all"
    return found


if __name__ == "__main__":
    main()
