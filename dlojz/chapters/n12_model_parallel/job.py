"""The trainee's divided models beside the whole ones: outputs, gradients, parts and messages.

A file of this exercise ends with `job.examine(__file__)`, whose log is judged by the exercise of
this folder. Each way of dividing has its own process group. Each process computes the whole model,
too, in float32, and compares its own part.
"""

import copy
import json
import math
import os
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

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
RATE = 0.5  # of dropout
LARGE = 30.0  # times the usual scores: exp overflows unless the largest one is subtracted
NAMES = ("divide", "dropout", "norm", "mesh", "plan", "ring", "stage", "schedule", "Row")
# torch's names of messages, without their underscores.
KINDS = {
    **dict.fromkeys(("allreduce", "all_reduce"), "all-reduce"),
    **dict.fromkeys(("allgather", "allgather_base", "all_gather_into_tensor"), "all-gather"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_base"), "reduce-scatter"),
    **{name: name for name in ("send", "broadcast", "reduce", "scatter", "gather")},
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), "all-to-all"),
}


def examine(path):
    """Log what a trainee's file, at this path, computes in each of the ways."""
    args = parsed()
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a wait in vain raises, as with gloo
    device = idr_torch.device()
    with session.begin(args, device) as (run, _), harness.one_thread(device):
        if idr_torch.size < 2:
            raise UserError("1 process: expected two; submit(course.own(...), n_gpu=2)")
        session.set_float32("fp32")
        store, _, _ = next(dist.rendezvous("env://", idr_torch.rank, idr_torch.size))
        judged(run, path, args, store, device)


def parsed():
    """Return the arguments of the job."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="(default: all)")
    wait = "seconds that a process waits for another one"
    parser.add_argument("--patience", type=float, default=12.0, help=wait)
    return parser.parse_args()


def judged(run, path, args, store, device):
    """Log a case for each way, with what each process found."""
    module = harness.complete(imports.from_file(path, "parallel"), NAMES)
    if idr_torch.rank == 0:
        store.set("seed", str(args.seed))
    seed = int(store.get("seed"))  # every process has drawn another one
    for way in args.ways:
        torch.manual_seed(seed)
        with joined(dist.PrefixStore(way, store), device, args.patience):
            seen = {}
            try:
                WAYS[way](module, device, seen)
            except Exception as error:  # any, from the trainee's lines
                seen |= raised(error, path)
            store.set(f"{way} {idr_torch.rank}", json.dumps(seen))
            ranks = [json.loads(store.get(f"{way} {r}")) for r in range(idr_torch.size)]
        run.case(way, ranks=ranks)


@contextmanager
def joined(store, device, patience):
    """Open a process group in which no process waits longer than this for another one."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=idr_torch.rank,
        world_size=idr_torch.size,
        timeout=timedelta(seconds=patience),
        device_id=device if on_gpu else None,
    )
    distributed.keep_group()
    try:
        yield
    finally:
        distributed.leave_group()


def raised(error, path) -> dict:
    """Return an error of the trainee's lines, and the last of these lines."""
    places = traceback.extract_tb(error.__traceback__)
    lines = [place.lineno for place in places if Path(place.filename) == Path(path)]
    where = f"line {lines[-1]}: " if lines else ""
    waited = "imed out" in str(error) or "losed by peer" in str(error) or "imeout" in str(error)
    unwritten = isinstance(error, NotImplementedError)
    return {"raised": where + harness.short(error), "waited": waited, "unwritten": unwritten}


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
    """Return a model's outputs, and its gradients by name; note messages of both passes."""
    x = x.detach().requires_grad_()
    with Messages() as forward:
        out = model(x)
    with Messages() as backward:
        (out * weights).sum().backward()
    if seen is not None:
        seen["messages"] = {"forward": forward.counts, "backward": backward.counts}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return out.detach(), gradients | {"input": x.grad}


def apart(found, expected, scale=0.0) -> list[float]:
    """Return the distance of a tensor from another, relative to its length, and their factor.

    The factor is None unless the two are the same, up to that. scale: the least length.
    """
    if found is None or found.shape != expected.shape:
        return [math.inf, None]
    found, expected = found.double(), expected.double()
    length = max(expected.norm().item(), scale, 1e-12)
    off = (found - expected).norm().item() / length
    factor = ((found * expected).sum() / expected.square().sum().clamp(min=1e-24)).item()
    close = (found - factor * expected).norm().item() < 1e-4 * length * max(1, abs(factor))
    return [off if math.isfinite(off) else math.inf, factor if close else None]


def share_of(whole, like):
    """Return this rank's part of a tensor, of the shape of another; the whole one if none fits."""
    for dim in range(whole.ndim):
        part = whole.chunk(idr_torch.size, dim)[idr_torch.rank]
        if part.shape == like:
            return part
    return whole


def compared(found, expected) -> dict:
    """Return the distances of gradients by name.

    The gradient of k's bias is nothing but rounding: distances are relative to the mean length at
    least.
    """
    lengths = [gradient.norm().item() for gradient in expected.values()]
    scale = (sum(length**2 for length in lengths) / len(lengths)) ** 0.5
    return {name: apart(found.get(name), whole, scale) for name, whole in expected.items()}


def shapes(model) -> dict:
    """Return the shapes of the parts that this rank holds, by name."""
    return {name: [*own(p).shape] for name, p in model.named_parameters()}


def own(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed(parameter) -> str:
    """Return the placement of a parameter on its mesh, "none" for a tensor without a mesh."""
    if not isinstance(parameter, DTensor):
        return "none"
    (place,) = parameter.placements
    return f"Shard({place.dim})" if place.is_shard() else type(place).__name__.strip("_")


def random_norms(model):
    """Give each norm other weights than ones and zeros, so that no two parameters are equal."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
    return model


def drawn(device):
    """Return a block, its input, and weights of the outputs in the loss."""
    block = random_norms(Block(WIDTH, HEADS, HIDDEN))
    x, weights = torch.randn(2, BATCH, TOKENS, WIDTH)
    return block.to(device), x.to(device), weights.to(device)


# The four ways -----------------------------------------------------------------------------------


def by_hand(module, device, seen):
    """Note what a block of the trainee's layers computes, and both functions beside it."""
    block, x, weights = drawn(device)
    out, expected = step(copy.deepcopy(block), x, weights)
    mine = module.divide(copy.deepcopy(block))
    seen["shapes"] = shapes(mine)
    layer = nn.Linear(HIDDEN, WIDTH).to(device)
    nothing = torch.zeros(1, HIDDEN // idr_torch.size, device=device)
    seen["bias"] = apart(module.Row(layer)(nothing)[0].detach(), layer.bias.detach())
    found, gradients = step(mine, x, weights, seen)
    wanted = {
        name: share_of(whole, gradients[name].shape) if gradients.get(name) is not None else whole
        for name, whole in expected.items()
    }
    seen |= {"output": apart(found, out), "gradients": compared(gradients, wanted)}
    dropped = module.dropout(torch.ones(1000, device=device), RATE, 1) == 0
    other = dropped.clone()
    dist.broadcast(other, 0)
    seen["dropped"] = dropped.float().mean().item()
    seen["alike"] = (dropped == other).float().mean().item()
    divided = [wanted[name] for name in wanted if wanted[name].shape != expected[name].shape]
    rest = [wanted[name] for name in wanted if wanted[name].shape == expected[name].shape]
    length = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    seen["norm"] = (torch.as_tensor(module.norm(divided, rest)) / length).item()


def by_plan(module, device, seen):
    """Note what a block computes with the trainee's plan, on this rank's tokens."""
    block, x, weights = drawn(device)
    out, expected = step(copy.deepcopy(block), x, weights)
    mine = parallelize_module(block, module.mesh(device.type, 1)["tensor"], module.plan())
    seen["shapes"] = shapes(mine)
    seen["placements"] = {name: placed(p) for name, p in mine.named_parameters()}

    def tokens(t):
        return t.chunk(idr_torch.size, 1)[idr_torch.rank]

    found, gradients = step(mine, tokens(x), tokens(weights), seen)
    seen["output"] = apart(own(found), tokens(out))
    expected["input"] = tokens(expected["input"])
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    seen["gradients"] = compared(whole, expected)


def in_a_ring(module, device, seen):
    """Note what the trainee's ring computes: all tokens, earlier tokens, and with large scores."""
    shape = (BATCH, HEADS, TOKENS, WIDTH // HEADS)
    seen["looks"] = {}
    for look, causal, size in (("all", False, 1), ("causal", True, 1), ("large", False, LARGE)):
        q, k, v, weights = (torch.randn(shape).to(device) for _ in range(4))
        q *= size

        def attention(qkv, causal=causal):
            return nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)

        def ring(qkv, causal=causal):
            return module.ring(*qkv, causal)

        def tokens(t):
            return t.chunk(idr_torch.size, -2)[idr_torch.rank]

        qkv = torch.stack((q, k, v))
        whole, expected = step(_Called(attention), qkv, weights)
        note = seen["looks"][look] = {}
        found, gradients = step(_Called(ring), tokens(qkv), tokens(weights), note)
        note["output"] = apart(found, tokens(whole))
        wanted = dict(zip("qkv", tokens(expected["input"]), strict=True))
        note["gradients"] = compared(dict(zip("qkv", gradients["input"], strict=True)), wanted)


class _Called(nn.Module):
    """A function as a model without parameters."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def in_stages(module, device, seen):
    """Note what the trainee's schedule computes with this rank's stage, and in which order."""
    model = random_norms(Model(LAYERS, WIDTH, HEADS, HIDDEN, INPUTS, OUTPUTS)).to(device)
    x, target = torch.randn(BATCH, TOKENS, INPUTS), torch.randn(BATCH, TOKENS, OUTPUTS)
    x, target = x.to(device), target.to(device)
    whole = copy.deepcopy(model)
    loss = nn.functional.mse_loss(whole(x), target)
    loss.backward()
    names = {id(p): name for name, p in model.named_parameters()}
    mine = module.stage(model)
    seen["parts"] = [names.get(id(p), "a copy") for p in mine.parameters()]
    seen["actions"], seen["sizes"] = [], []

    def note(_, inputs, out):
        if out.requires_grad:  # else the schedule asks for shapes
            number = len(seen["sizes"])
            seen["sizes"].append(len(out))
            seen["actions"].append(f"F{number}")
            out.register_hook(lambda _: seen["actions"].append(f"B{number}"))

    mine.register_forward_hook(note)
    plan, losses = module.schedule(mine, device, nn.functional.mse_loss), []
    last = idr_torch.rank == idr_torch.size - 1
    plan.step(*[x] * (idr_torch.rank == 0), **{"target": target, "losses": losses} if last else {})
    found = {names[id(p)]: p.grad for p in mine.parameters() if id(p) in names}
    expected = {n: p.grad for n, p in whole.named_parameters() if n in found}
    seen["gradients"] = compared(found, expected)
    if last:
        seen["output"] = apart(torch.stack(losses).mean().detach(), loss.detach())


WAYS = {"by hand": by_hand, "by a plan": by_plan, "in a ring": in_a_ring, "in stages": in_stages}
