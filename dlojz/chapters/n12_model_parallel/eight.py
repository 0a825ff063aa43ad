"""The trainee's plan on eight ranks in one process: what each holds, and whose gradients it has."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from dlojz import course
from dlojz.chapters.n12_model_parallel.blocks import Block
from dlojz.table import Table
from dlojz.training import imports, private

RANKS, WIDTH, TOKENS = 8, 64, 16


def eight_ranks(file) -> Table:
    """Return a table of a block's parameters under the plan of a file, 12b.

    Each operation runs once for each rank, and a message is a copy. Raises NotImplementedError if
    the plan is still to be written.
    """
    module = imports.from_file(course.course_root() / file, "parallel")
    torch.manual_seed(0)
    whole, x, weights = Block(WIDTH, RANKS, 4 * WIDTH), *torch.randn(2, 2, TOKENS, WIDTH)
    divided = copy.deepcopy(whole)
    (whole(x) * weights).sum().backward()
    private.join_fake_group(RANKS)
    try:
        with private.local_tensors(RANKS):
            mesh = init_device_mesh("cpu", (RANKS,))
            divided = parallelize_module(divided, mesh, module.plan())
            own, given = (
                distribute_tensor(each, mesh, [Shard(1)]).to_local() for each in (x, weights)
            )
            out = divided(own)
            out = out.to_local() if isinstance(out, DTensor) else out
            (out * given).sum().backward()
            rows = [_row(name, p, whole) for name, p in divided.named_parameters()]
    finally:
        dist.destroy_process_group()
    head = ("parameter", "placement", "shape", "in each rank", "gradient, away from one process's")
    return Table(head, rows, "<<>>>")


def _row(name, parameter, whole):
    """Return the cells of a parameter; the gradient's distance is relative to all of its layer."""
    expected, gradient, place = whole.get_parameter(name).grad, parameter.grad, "-"
    if isinstance(parameter, DTensor):
        (placement,) = parameter.placements
        place = f"Shard({placement.dim})" if placement.is_shard() else "Replicate"
        gradient, parameter = gradient.full_tensor(), parameter.to_local()
    away = (private.of_rank(gradient, 0) - expected).norm()
    layer = whole.get_parameter(name.replace("bias", "weight")).grad.norm()
    shapes = (list(tensor.shape) for tensor in (expected, parameter))
    return (name, place, *map(str, shapes), f"{(away / layer).item():.0e}")
