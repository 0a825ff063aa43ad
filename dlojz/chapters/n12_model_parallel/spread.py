"""A model of this chapter, divided among the processes by a plan, and its training.

Weights are of the format of the products. In 16 bits the optimizer updates copies in float32.
"""

import gc
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn import functional

from dlojz import idr_torch
from dlojz.chapters.n12_model_parallel.blocks import Model
from dlojz.course import UserError
from dlojz.traces import kinds, spans
from dlojz.training import sharding
from dlojz.watch import profile, workload

# Operations of torch's dispatcher by their names here. What runs may differ: gloo has no
# reduce-scatter, and sums the whole tensor in each process.
CALLED = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
BACKEND = re.compile(r"(gloo|nccl|xccl):(?!send|recv|coalesced)")
STEP = "step of a plan"  # its name in the profiler's record
UPDATED = 16  # weights at a time: only their gradients have a copy in float32


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and the images of a step, for all processes together."""

    layers: int
    width: int
    heads: int
    hidden: int
    tokens: int
    batch: int
    inputs: int = 588  # a square of 14 pixels, in three colours
    outputs: int = 1000

    def model(self) -> Model:
        """Return the whole model."""
        return Model(self.layers, self.width, self.heads, self.hidden, self.inputs, self.outputs)

    def flops(self) -> float:
        """Return the operations of the products in a training step."""
        block = 4 * self.width**2 + 2 * self.width * self.hidden
        weights = self.layers * block + self.width * (self.inputs + self.outputs)
        attention = 2 * self.layers * self.tokens * self.width
        return 6 * self.batch * self.tokens * (weights + attention)

    def stream(self, item: int) -> int:
        """Return the bytes that all images pass from a block to the next one."""
        return self.batch * self.tokens * self.width * item


@dataclass(frozen=True)
class Plan:
    """A way to divide a model and its images; the processes that hold the same weights are many."""

    tensor: int = 1  # processes that share each layer
    sequence: bool = False  # whether they share the tokens of norms and shortcuts, too
    stages: int = 1
    parts: int = 1  # of the images, for stages
    chunks: int = 1  # stages in a process, if interleaved
    sharding: str = "ddp"  # or fsdp

    @property
    def copies(self) -> int:
        """Return the number of processes that take different images."""
        return idr_torch.size // (self.tensor * self.stages)


def divide(model, mesh, sequence: bool):
    """Divide the layers of each block: columns, then rows; and the tokens between them."""
    tokens = Shard(1) if sequence else Replicate()
    whole = {"desired_input_layouts": Replicate()}
    for block in model.blocks:
        # One exchange for queries, keys and values, not three.
        roles = {"attention": tp.PrepareModuleInput(input_layouts=tokens, **whole)}
        roles |= {f"attention.{name}": tp.ColwiseParallel() for name in "qkv"}
        roles |= {"up": tp.ColwiseParallel(input_layouts=tokens)}
        for name in ("attention.o", "down"):
            roles[name] = tp.RowwiseParallel(output_layouts=tokens)
        for name in ("attention_norm", "mlp_norm") if sequence else ():
            roles[name] = tp.SequenceParallel()
        tp.parallelize_module(block, mesh, roles)
    if sequence:
        first = tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=tokens)
        last = tp.PrepareModuleInput(input_layouts=tokens, **whole, use_local_output=True)
        tp.parallelize_module(model, mesh, {"first": first, "norm": last})


class Optimizer:
    """AdamW, of this process's part of each weight, by copies in float32 if it has fewer bits."""

    def __init__(self, weights, fused):
        self.groups = []
        for first in range(0, len(weights), UPDATED):
            some = weights[first : first + UPDATED]
            copies = [sharding.own(weight).detach().float() for weight in some]
            self.groups.append((some, copies, torch.optim.AdamW(copies, 1e-4, fused=fused)))

    @torch.no_grad()
    def step(self):
        """Update the weights, and drop their gradients."""
        add_up([weight for weights, *_ in self.groups for weight in weights])
        for weights, copies, optimizer in self.groups:
            for weight, copy in zip(weights, copies, strict=True):
                copy.grad = sharding.own(weight.grad).float()
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            for weight, copy in zip(weights, copies, strict=True):
                if copy.dtype != weight.dtype:
                    sharding.own(weight).copy_(copy)

    def tensors(self) -> list:
        """Return the tensors that the optimizer holds beside the weights."""
        found = []
        for weights, copies, optimizer in self.groups:
            found += [v for state in optimizer.state.values() for v in state.values()]
            found += [c for w, c in zip(weights, copies, strict=True) if c.dtype != w.dtype]
        return found


def add_up(weights):
    """Sum the gradients of which each process has seen some of the tokens, in one message."""
    of_some = [w for w in weights if isinstance(w, DTensor) and w.grad.placements != w.placements]
    if of_some:
        whole = torch.cat([sharding.own(weight.grad).flatten() for weight in of_some])
        torch.distributed.all_reduce(whole, group=of_some[0].device_mesh.get_group())
        sums = whole.split([weight.numel() for weight in of_some])
        for weight, total in zip(of_some, sums, strict=True):
            place = weight.device_mesh, weight.placements
            weight.grad = DTensor.from_local(total.view(weight.shape), *place)


class Training:
    """A model divided by a plan, with its optimizer, and this process's images."""

    def __init__(self, plan: Plan, sizes: Sizes, device, dtype=torch.float32, compiled=False):
        self.plan, self.sizes, self.device = plan, sizes, device
        gc.unfreeze()
        torch.compiler.reset()  # it holds an earlier model
        gc.collect()
        torch.cuda.empty_cache()
        self.before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        torch.manual_seed(0)
        with device:
            model = sizes.model().to(dtype)
        names = ("copies", "stages", "tensor")
        shape = (plan.copies, plan.stages, plan.tensor)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.root = sum(p.numel() for name, p in model.named_parameters() if "blocks" not in name)
        self.item = next(model.parameters()).element_size()
        if plan.tensor > 1:
            divide(model, mesh["tensor"], plan.sequence)
        for block in model.blocks if compiled else ():
            block.compile()
        self.model = self.spread(model, mesh)
        self.weights = [p for module in self.own for p in module.parameters()]
        self.optimizer = Optimizer(self.weights, device.type == "cuda")
        torch.manual_seed(1)
        mine = mesh.get_local_rank("copies")
        shape = sizes.batch, sizes.tokens
        x = torch.randn(*shape, sizes.inputs, device=device, dtype=dtype)
        y = torch.randint(sizes.outputs, shape, device=device)
        self.x, self.y = (each.chunk(plan.copies)[mine].clone() for each in (x, y))

    def spread(self, model, mesh):
        """Return the model in shards or copies, or a schedule of its stages: it makes a step."""
        plan, copies, self.own, self.sends = self.plan, mesh["copies"], [model], 0
        if plan.stages > 1:
            return self.schedule(model, mesh["stages"])
        if plan.sharding == "fsdp":
            for part in (*model.blocks, model):
                fully_shard(part, mesh=copies)
        elif plan.copies > 1:
            options = {"gradient_as_bucket_view": True, "process_group": copies.get_group()}
            return torch.nn.parallel.DistributedDataParallel(model, **options)
        return model

    def schedule(self, model, mesh):
        """Return the schedule of a pipeline, which has only this process's blocks."""
        plan, sizes, rank = self.plan, self.sizes, mesh.get_local_rank()
        count, stages, self.own = plan.stages * plan.chunks, [], []
        if sizes.layers % count:
            raise UserError(
                f"{sizes.layers} blocks in {count} stages: expected a multiple of these"
            )
        images, dtype = sizes.batch // plan.copies // plan.parts, model.norm.weight.dtype
        ends, each = (sizes.inputs, sizes.outputs), len(model.blocks) // count
        for number in range(rank, count, plan.stages):
            first, last = number == 0, number == count - 1
            own = [model.first] * first + [*model.blocks][number * each : (number + 1) * each]
            self.own.append(torch.nn.Sequential(*own, *[model.norm, model.last] * last))
            self.sends += 2 - first - last
            given, result = (
                torch.empty(images, sizes.tokens, width, dtype=dtype, device="meta")
                for width in (ends[0] if first else sizes.width, ends[1] if last else sizes.width)
            )
            place = self.own[-1], number, count, self.device
            # torch 2.15 sends no gradients for what needs none.
            given.requires_grad_(not first), result.requires_grad_()
            shapes = {"input_args": given, "output_args": result}
            stages.append(pipelining.PipelineStage(*place, **shapes, group=mesh.get_group()))
        self.ends = rank == 0, rank == plan.stages - 1
        if plan.chunks > 1:
            return pipelining.ScheduleInterleaved1F1B(stages, plan.parts, entropy)
        return pipelining.Schedule1F1B(*stages, plan.parts, entropy)

    def step(self):
        """Train on the images, and return the loss, None if another process has it."""
        loss = None
        if self.plan.stages == 1:
            loss = entropy(self.model(self.x), self.y)
            loss.backward()
        else:
            losses, (first, last) = [], self.ends
            ends = {"target": self.y, "losses": losses} if last else {}
            self.model.step(*[self.x] * first, **ends)
            loss = torch.stack(losses).mean() if losses else None
        self.optimizer.step()
        return None if loss is None else loss.detach()

    def held(self) -> dict[str, int]:
        """Return the bytes that this process holds between steps: of gradients, DDP's buckets."""
        tensors = {"parameters": map(sharding.own, self.weights)}
        tensors["optimizer"] = self.optimizer.tensors()
        found = {part: sum(t.nbytes for t in some) for part, some in tensors.items()}
        whole = isinstance(self.model, torch.nn.parallel.DistributedDataParallel)
        return found | ({"gradients": found["parameters"]} if whole else {})

    def peak_bytes(self) -> int:
        """Return the most bytes of all tensors in a step; on a processor as its profiler counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() - self.before
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            self.step()
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        most = max(accumulate(change for _, change in changes))
        return most + sum(self.held().values()) + self.x.nbytes + self.y.nbytes

    def expected_bytes(self) -> float:
        """Return the bytes that this process must send in a step, in rings."""
        plan, sizes, item = self.plan, self.sizes, self.item
        d, t, layers = plan.copies, plan.tensor, sizes.layers / plan.stages
        own = self.held()["parameters"]
        between = (d - 1) / d * 2 * own  # gradients
        if plan.sharding == "fsdp":  # and the weights, in each pass, those outside of blocks once
            between = (d - 1) / d * (3 * d * own - self.root * item)
        stream = sizes.stream(item) / d
        inside = 2 * (t - 1) / t * layers * 4 * stream  # two sums in each pass, in each block
        if plan.sequence:  # tokens are divided and gathered, and the norms' gradients summed
            inside += 2 * (t - 1) / t * (stream + layers * 4 * sizes.width * item)
        return between + inside + self.sends * stream


def messages(training: Training) -> dict:
    """Return a step's messages, and on a GPU their ms, alone or not, and those of all work.

    calls: by operation their number, and the bytes that this process sends, in rings; {} and
    sent_bytes None if the profiler knows other calls than the dispatcher.
    """
    events, plan = profile.profiled(partial(together, training)), training.plan
    begin = min(e.start_ns() for e in events if e.name() == STEP)
    events = [e for e in events if e.start_ns() >= begin]
    host = [e for e in events if e.device_type() == profile.CPU]
    host.sort(key=lambda e: e.start_ns())
    called = [CALLED[e.name()] for e in host if e.name() in CALLED]
    ran = [e for e in host if BACKEND.match(e.name())]
    members = plan.tensor if plan.copies == 1 else plan.copies  # two of each, if of both
    calls = defaultdict(lambda: [0, 0.0])
    for op, event in zip(called, ran, strict=False):
        item = profile.ITEM_BYTES.get(workload.dtype(event.dtypes()[0]), 4)
        whole = math.prod(event.shapes()[0]) * item * (members if op == "all_gather" else 1)
        calls[op][0] += 1
        calls[op][1] += (2 if op == "all_reduce" else 1) * (members - 1) / members * whole
    if sends := sum(e.name() == "c10d::send" for e in host):
        part = training.sizes.stream(training.item) / plan.copies / plan.parts
        calls["send"] = [sends, sends * part]
    found = {"calls": {}, "sent_bytes": None}
    if len(called) == len(ran):
        found = {"calls": dict(calls), "sent_bytes": sum(size for _, size in calls.values())}
    ours, rest = [], []
    for event in events:
        if event.device_type() != profile.CPU and not event.is_user_annotation():
            span = event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6
            (ours if kinds.NCCL_KERNEL.match(event.name()) else rest).append(span)
    if rest:
        found["communication_ms"] = spans.length(spans.union(ours))
        found["exposed_ms"] = spans.length(spans.without(spans.union(ours), spans.union(rest)))
        found["busy_ms"] = spans.length(spans.union(ours + rest))
    return found


def together(training):
    """Make a step that all processes begin at once, so that none waits for a later one."""
    torch.distributed.all_reduce(torch.zeros(1))  # on the host
    with torch.profiler.record_function(STEP):
        training.step()


def entropy(logits, labels):
    """Return the loss: each token has a label."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
