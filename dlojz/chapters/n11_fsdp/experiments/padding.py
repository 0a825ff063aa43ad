"""The padding of FSDP2: the gathered bytes of each parameter, by number of processes.

Submitted by a notebook: submit("dlojz/chapters/n11_fsdp/experiments/padding.py").

FSDP2 cuts each parameter along one dimension, and all parts get the size of the largest one. A
process group with fake members, and tensors without memory, show FSDP2's own allocations for any
number of processes on one machine. The model has two blocks, as all are equal.
"""

import argparse
from functools import partial

import torch
import torchvision
from torch.distributed.tensor import DTensor, Shard

from dlojz.chapters import session
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.training import models, private, sharding

MODELS = {"vit_l_14": models.ViT(14, 24, 16, 1024, 4096), **models.LARGER}


def even(gpus, parameter) -> Shard:
    """Return a placement without padding, along the first evenly divisible dimension.

    Without one it is dimension 0, the default: FSDP2 refuses to cut another one unevenly.
    """
    return Shard(next((dim for dim, size in enumerate(parameter.shape) if size % gpus == 0), 0))


PLACEMENTS = {"dimension 0": None, "an even dimension": even}  # fully_shard's shard_placement_fn


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_l_14", choices=MODELS)
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8, 64, 256, 1024])
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        if min(args.gpus) < 1:
            raise UserError(f"--gpus {min(args.gpus)}: expected whole numbers of at least 1")
        for name, placement in PLACEMENTS.items():
            for gpus in args.gpus:
                rows = parameters(args, gpus, placement)
                total = sum(row["gathered"] for row in rows if row["part"] == "root")
                run.measure(name, total, "gathered bytes of the root", x=gpus)
                run.case(f"{name}, {gpus}", gpus=gpus, placement=name, parameters=rows)


def parameters(args, gpus, placement):
    """Return the bytes of each parameter of the root and of a block: whole, gathered, its part."""
    patch, _, *sizes = MODELS[args.model]
    with torch.device("meta"):
        model = torchvision.models.VisionTransformer(args.image_size, patch, 2, *sizes)
    with estimate.group(gpus) as mesh:
        sharding.shard(model, mesh, shard_placement_fn=placement and partial(placement, gpus))
        with private.fake_mode():
            model.to_empty(device=estimate.CPU)
            root, block = gathered("root", model), gathered("block", models.blocks(model)[0])
            return [*root, *block]


def gathered(part, module):
    """Gather a module's own parameters, and yield the bytes of each."""
    shards = dict(module.named_parameters())
    module.unshard()
    for name, whole in module.named_parameters():
        if isinstance(whole, DTensor):
            continue  # a block's
        yield {
            "part": part,
            "name": name,
            "shape": [*whole.shape],
            "bytes": whole.nbytes,
            "gathered": whole.untyped_storage().nbytes(),
            "held": sharding.own(shards[name]).untyped_storage().nbytes(),
        }


if __name__ == "__main__":
    main()
