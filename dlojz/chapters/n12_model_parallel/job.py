"""The trainee's divided models beside the whole ones: outputs, gradients, parts and messages.

A file of this exercise ends with `job.examine(__file__)`, whose log is judged by the exercise of
this folder. Each way of dividing has a process group of its own. Each process also computes the
whole model, in float32, and compares its own part.
"""

import copy
import faulthandler
import json
import math
import os
import re
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dlojz import idr_torch
from dlojz.chapters import harness, session
from dlojz.chapters.n12_model_parallel.blocks import Block, Model
from dlojz.course import UserError
from dlojz.training import distributed, imports, private

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 8, 16, 32, 4, 64
LAYERS, INPUTS, OUTPUTS = 4, 6, 5  # of the model in stages
LARGE = 30.0  # times the usual scores: exp overflows unless the largest one is subtracted
NAMES = ("divide", "Row", "dropout", "norm", "mesh", "plan", "ring", "stage", "schedule")
# torch's names of messages, without their outer underscores.
KINDS = {
    **dict.fromkeys(("allreduce", "all_reduce"), "all-reduce"),
    **dict.fromkeys(("allgather", "allgather_base", "all_gather_into_tensor"), "all-gather"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_base"), "reduce-scatter"),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), "all-to-all"),
    **{name: name for name in ("send", "broadcast", "reduce")},
}
LEAST_S = 15.0  # that a process waits for the notes of others, once it has met an error
WAITED = re.compile(r"timed out|timeout|(closed|reset) by peer", re.I)


def examine(path):
    """Log what a trainee's file, at this path, computes in each of the ways."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="(default: all)")
    wait = "seconds that a process waits for another one"
    parser.add_argument("--patience", type=float, default=12.0, help=wait)
    args = parser.parse_args()
    with session.begin(args) as (run, device), harness.one_thread(device):
        if idr_torch.size < 2:
            raise UserError('one process: expected two, submit(course.own("12_parallel"), n_gpu=2)')
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a vain wait raises, as with gloo
        session.set_float32("fp32")
        store, _, _ = next(dist.rendezvous("env://", idr_torch.rank, idr_torch.size))
        if idr_torch.rank == 0:
            store.set("seed", str(args.seed))
        seed = int(store.get("seed"))  # each process has drawn another one
        module = harness.complete(imports.from_file(path, "parallel"), NAMES)
        for way in args.ways:
            torch.manual_seed(seed)
            with joined(dist.PrefixStore(way, store), device, args.patience):
                seen = tried(partial(WAYS[way], module, device), path)
                ranks = exchanged(store, way, seen, args.patience)
            run.case(way, ranks=ranks)


def exchanged(store, way, seen, patience) -> list[dict]:
    """Return the notes of each process. After an error here, others may wait for ever on a GPU."""
    store.set(f"{way} {idr_torch.rank}", json.dumps(seen))
    names = [f"{way} {rank}" for rank in range(idr_torch.size)]
    if "raised" in seen:
        try:
            store.wait(names, timedelta(seconds=max(LEAST_S, 1.4 * patience)))
        except dist.DistStoreError:
            told = f"process {idr_torch.rank}: {seen['raised']}; another one waited for it in vain"
            raise UserError(f"{way}: {told}") from None
    return [json.loads(store.get(name)) for name in names]


@contextmanager
def joined(store, device, patience):
    """Open a process group in which no process waits longer than this for another one.

    It is not bound to a GPU (device_id): torch 2.11 then ends with a segmentation fault when a mesh
    divides the second such group of a process.
    """
    nccl, rank, size = device.type == "cuda", idr_torch.rank, idr_torch.size
    if nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience),
    )
    distributed.keep_group()
    if nccl:
        # First messages make NCCL's connections: no timeout ends that if a process is missing.
        zero, near = torch.zeros(1, device=device), [(rank + hop) % size for hop in (1, -1)]
        dist.all_reduce(zero)
        sent = [dist.P2POp(dist.isend, zero, peer) for peer in near]
        received = [dist.P2POp(dist.irecv, torch.empty_like(zero), peer) for peer in near[::-1]]
        for work in dist.batch_isend_irecv(sent + received):
            work.wait()
        faulthandler.dump_traceback_later(1.5 * patience, exit=True)  # for those made later
    try:
        yield
    finally:
        distributed.leave_group()
        faulthandler.cancel_dump_traceback_later()


def tried(call, path) -> dict:
    """Return the notes of a call, which may end with an error in the trainee's lines."""
    seen = {}
    try:
        call(seen)
    except Exception as error:  # any
        seen["raised"] = harness.short_in(path, error).rstrip(": ")
        seen["waited"] = bool(WAITED.search(str(error)))
        # torch's own have a message, such as that of a ModuleList that is called.
        seen["unwritten"] = isinstance(error, NotImplementedError) and not str(error)
    return seen


# Comparisons -------------------------------------------------------------------------------------


class Messages(private.dispatch_mode()):
    """The number of messages of each kind that this process took part in."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        space, name = str(operation).split(".")[:2]
        if "c10d" in space and (kind := KINDS.get(name.strip("_"))):
            self.counts[kind] += 1
        return operation(*args, **(kwargs or {}))


def step(model, x, weights, seen=None):
    """Return a model's outputs, and its gradients by name; note the messages of both passes."""
    x, forward, backward = x.detach().requires_grad_(), Messages(), Messages()
    if seen is not None:
        seen["messages"] = {"forward": forward.counts, "backward": backward.counts}
    with forward:
        out = model(x)
    with backward:
        (out * weights).sum().backward()
    named = getattr(model, "named_parameters", dict)()  # a function has none
    return out.detach(), {"input": x.grad} | {name: weight.grad for name, weight in named}


def apart(found, expected, scale=0.0) -> list:
    """Return the distance of a tensor from another, relative to its length, and their factor.

    The factor is None unless the two are equal up to that. scale: the least length.
    """
    if found is None or found.shape != expected.shape:
        return [math.inf, None]
    found, expected = found.double(), expected.double()
    length = max(expected.norm().item(), scale, 1e-12)
    off = (found - expected).norm().item() / length
    factor = ((found * expected).sum() / expected.square().sum().clamp(min=1e-24)).item()
    close = (found - factor * expected).norm().item() < 1e-4 * length * max(1, abs(factor))
    return [off if math.isfinite(off) else math.inf, factor if close else None]


def compared(found, expected) -> dict:
    """Return the distances of gradients by name, relative to their mean length at least.

    The gradient of k's bias, for example, is nothing but rounding.
    """
    lengths = [gradient.square().sum().item() for gradient in expected.values()]
    scale = (sum(lengths) / len(lengths)) ** 0.5
    return {name: apart(found.get(name), whole, scale) for name, whole in expected.items()}


def tokens(x):
    """Return this rank's tokens: the last dimension but one."""
    return x.chunk(idr_torch.size, -2)[idr_torch.rank]


def cut_along(part, whole):
    """Return the dimension in which a part is smaller than the whole tensor, or None."""
    pairs = enumerate(zip(part.shape, whole.shape, strict=True))
    return next((dim for dim, (mine, all_of_it) in pairs if mine != all_of_it), None)


def held(model, whole) -> dict:
    """Return the placement and the shape of each parameter's part on this rank, by name.

    whole: tensors of the whole shapes, by name, as only a DTensor knows its placement.
    """
    found, parameters = {}, dict(model.named_parameters())
    for name in (name for name in whole if name != "input"):
        if (weight := parameters.get(name)) is None:
            found[name] = ["no parameter", []]
            continue
        if isinstance(weight, DTensor):
            (place,), weight = weight.placements, weight.to_local()
            place = f"Shard({place.dim})" if place.is_shard() else type(place).__name__
        else:
            dim = cut_along(weight, whole[name])
            place = "whole" if dim is None else f"Shard({dim})"
        found[name] = [place, [*weight.shape]]
    return found


def drawn(model, inputs, outputs, device):
    """Return a model whose norms do something, random tokens, and weights of its outputs."""
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.weight, 1, 0.2)
        nn.init.normal_(norm.bias, 0, 0.2)
    x, weights = (torch.randn(BATCH, TOKENS, width) for width in (inputs, outputs))
    return model.to(device), x.to(device), weights.to(device)


# The four ways -----------------------------------------------------------------------------------


def by_hand(module, device, seen):
    """Note what a block of the trainee's layers computes, and the functions beside it."""
    block, x, weights = drawn(Block(WIDTH, HEADS, HIDDEN), WIDTH, WIDTH, device)
    out, whole = step(copy.deepcopy(block), x, weights)
    divided = module.divide(copy.deepcopy(block))
    seen["held"] = held(divided, whole)
    row = module.Row(block.down)(x.new_zeros(1, HIDDEN // idr_torch.size))
    seen["bias"] = apart(row[0].detach(), block.down.bias.detach())
    found, gradients = step(divided, x, weights, seen)
    wanted, parts, rest = {"input": whole["input"]}, [], []
    own = {name: weight for name, weight in divided.named_parameters() if name in whole}
    for name, weight in own.items():
        dim, wanted[name] = cut_along(weight, whole[name]), whole[name]
        if dim is not None:
            wanted[name] = whole[name].chunk(idr_torch.size, dim)[idr_torch.rank]
        (rest if dim is None else parts).append(wanted[name])
    seen |= {"output": apart(found, out), "gradients": compared(gradients, wanted)}
    dropped = module.dropout(torch.ones(1000, device=device), 0.5, 1) == 0
    other = dropped.clone()
    dist.broadcast(other, 0)
    seen["alike"] = (dropped == other).float().mean().item()
    length = sum(whole[name].square().sum() for name in own).sqrt()
    seen["norm"] = (module.norm(parts, rest) / length).item()


def by_plan(module, device, seen):
    """Note what a block computes with the trainee's plan, on this rank's tokens."""
    block, x, weights = drawn(Block(WIDTH, HEADS, HIDDEN), WIDTH, WIDTH, device)
    out, whole = step(copy.deepcopy(block), x, weights)
    grid = module.mesh(device.type, 1)
    names = grid.mesh_dim_names or [f"dimension {n}:" for n in range(grid.ndim)]
    seen["grid"] = dict(zip(names, grid.shape, strict=True))
    divided = parallelize_module(block, grid["tensor"], module.plan())
    seen["held"] = held(divided, whole)
    found, gradients = step(divided, tokens(x), tokens(weights), seen)
    found = found.to_local() if isinstance(found, DTensor) else found
    whole["input"] = tokens(whole["input"])
    gathered = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    seen |= {"output": apart(found, tokens(out)), "gradients": compared(gathered, whole)}


def in_a_ring(module, device, seen):
    """Note what the trainee's ring computes: all tokens, earlier tokens only, and large scores."""
    for look, causal, factor in (("all", False, 1), ("causal", True, 1), ("large", False, LARGE)):
        _look(module.ring, causal, factor, device, seen.setdefault(look, {}))


def _look(ring, causal, factor, device, seen):
    qkv = torch.randn(3, BATCH, HEADS, TOKENS, WIDTH // HEADS).to(device)
    qkv[0] *= factor
    weights, attention = torch.randn_like(qkv[0]), nn.functional.scaled_dot_product_attention
    out, whole = step(lambda qkv: attention(*qkv, is_causal=causal), qkv, weights)
    found, gradients = step(lambda qkv: ring(*qkv, causal), tokens(qkv), tokens(weights), seen)
    both = gradients["input"], tokens(whole["input"])
    pair = (dict(zip("qkv", each, strict=True)) for each in both)
    seen |= {"output": apart(found, tokens(out)), "gradients": compared(*pair)}


def in_stages(module, device, seen):
    """Note what the trainee's schedule computes with this rank's stage, and in which order."""
    model = Model(LAYERS, WIDTH, HEADS, HIDDEN, INPUTS, OUTPUTS)
    model, x, target = drawn(model, INPUTS, OUTPUTS, device)
    whole, names = copy.deepcopy(model), {id(p): name for name, p in model.named_parameters()}
    loss = nn.functional.mse_loss(whole(x), target)
    loss.backward()
    stage, actions, sizes = module.stage(model), [], []
    seen["parts"] = [names.get(id(p), "a copy") for p in stage.parameters()]
    seen |= {"parameters": len(names), "actions": actions, "sizes": sizes, "batch": BATCH}

    def note(_, inputs, out):
        if out.requires_grad:  # else the schedule only asks for its shape
            number = len(sizes)
            sizes.append(len(out))
            actions.append(("F", number))
            out.register_hook(lambda _: actions.append(("B", number)))

    stage.register_forward_hook(note)
    schedule = module.schedule(stage, device, nn.functional.mse_loss)
    given = {"target": target} if idr_torch.rank == idr_torch.size - 1 else {}
    schedule.step(*[x] * (idr_torch.rank == 0), **given)
    # torch 2.15 asks for shapes by passes of its own, before those of the batch.
    ran = sorted({number for kind, number in actions if kind == "B"})
    while sum(sizes[number] for number in ran) > BATCH:
        del ran[0]
    seen["sizes"] = [sizes[number] for number in ran]
    seen["actions"] = [f"{kind}{ran.index(number)}" for kind, number in actions if number in ran]
    found = {names[id(p)]: p.grad for p in stage.parameters() if id(p) in names}
    wanted = {name: p.grad for name, p in whole.named_parameters() if name in found}
    seen["gradients"] = compared(found, wanted)


WAYS = {"by hand": by_hand, "by a plan": by_plan, "in a ring": in_a_ring, "in stages": in_stages}
