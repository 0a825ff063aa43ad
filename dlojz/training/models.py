"""The models that `--model` names: torchvision's classifiers, and larger vision transformers."""

from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
import torchvision
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from dlojz import idr_torch


class ViT(NamedTuple):
    """A vision transformer: the sizes that torchvision's class takes."""

    patch: int  # pixels, each side
    layers: int
    heads: int
    width: int
    mlp: int  # width of the layer inside each block

    def parameters(self, num_classes: int, image_size: int) -> int:
        """Return the number of its parameters."""
        tokens, w = (image_size // self.patch) ** 2 + 1, self.width  # with the class token
        # Queries, keys, values and output; the two layers of the MLP; two layer norms.
        block = 4 * w * (w + 1) + (2 * w * self.mlp + self.mlp + w) + 4 * w
        patches = (3 * self.patch**2 + 1) * w
        return patches + (tokens + 1) * w + self.layers * block + 2 * w + num_classes * (w + 1)


LARGER = {  # than torchvision's, except the first one. Heads of 64, 80, 128 and 128 channels
    "vit_tiny": ViT(patch=16, layers=12, heads=3, width=192, mlp=768),  # DeiT's, for processors
    "vit_600m": ViT(patch=14, layers=32, heads=16, width=1280, mlp=5120),  # ViT-H/14
    "vit_2b": ViT(patch=14, layers=40, heads=16, width=2048, mlp=8192),
    "vit_6b": ViT(patch=14, layers=48, heads=25, width=3200, mlp=12800),  # InternViT-6B
}


def names() -> list[str]:
    """Return all the names that `build` knows."""
    return [*torchvision.models.list_models(torchvision.models), *LARGER]


def larger(num_classes: int = 1000, image_size: int = 224) -> str:
    """Return the larger models with their sizes: "vit_600m (0.63 billion parameters), ..."."""
    billions = {n: vit.parameters(num_classes, image_size) / 1e9 for n, vit in LARGER.items()}
    first, *rest = (f"{name} ({size:.2f})" for name, size in billions.items())
    return ", ".join([first.replace(")", " billion parameters)"), *rest])


def unknown(name: str) -> str:
    """Return an error on an unknown model, with known ones."""
    return (
        f"--model {name}: not in torchvision.models, and not one of {', '.join(LARGER)}; "
        "try resnet18 or resnet50"
    )


def build(name: str, num_classes: int, image_size: int):
    """Return a classifier with random weights, for square images of `image_size` pixels.

    With `torch.device("meta")` it has no values until `draw`, which gives it the same ones.
    """
    recipe = name, num_classes, image_size
    if name not in LARGER:
        model = _torchvisions(*recipe)
        model.recipe = recipe
        return model
    patch, *sizes = LARGER[name]
    device = torch.get_default_device()
    with torch.device("meta"):
        model = torchvision.models.VisionTransformer(
            image_size, patch, *sizes, num_classes=num_classes
        )
    model.recipe = recipe
    return model if device.type == "meta" else draw(model.to_empty(device=device))


def _torchvisions(name, num_classes, image_size):
    options = {"image_size": image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False}  # one loss, as for all others
    return torchvision.models.get_model(name, num_classes=num_classes, **options)


@torch.no_grad()
def draw(model):
    """Return a model of `build` with random weights, in the memory that `model.to_empty` made.

    Each process keeps its shards of the weights that a single process would draw. Raises
    ValueError for any other model, whose initialization is unknown here.
    """
    recipe = getattr(model, "recipe", None)
    if recipe is None:
        raise ValueError(
            f"models.draw: {type(model).__name__} is not of models.build: fill its weights yourself"
        )
    for name, weight in model.named_parameters():
        _note(model, name, weight)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    larger = recipe[0] in LARGER
    values = _weights(model) if larger else _torchvisions(*recipe).state_dict().items()
    for name, whole in values:
        weight = own[name]
        if isinstance(weight, DTensor):
            mesh, places = weight.device_mesh, weight.placements
            whole = distribute_tensor(whole.to(weight.device), mesh, places, src_data_rank=None)
        weight.copy_(whole)
    return model


_made = []  # the bytes of each whole weight that this process made, with values


def made_bytes() -> int:
    """Return the bytes of all whole weights that this process made, with values."""
    return sum(_made)


def _note(module, name, weight):
    """Note a module's new weight, unless it is a shard or has no values."""
    if weight is not None and not isinstance(weight, DTensor) and not weight.is_meta:
        _made.append(weight.nbytes)


register_module_parameter_registration_hook(_note)


def _weights(model):
    """Yield the name and the values of each weight of a transformer, drawn one by one.

    Each has a seed of its own, and is freed before the next, so they need not fit together.
    """
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
    for number, (name, weight) in enumerate(model.named_parameters()):
        generator.manual_seed(torch.initial_seed() + number)
        whole = torch.empty(weight.shape, device=generator.device)
        initialize(name, whole, generator)
        yield name, whole


@torch.no_grad()
def initialize(name: str, weight, generator):
    """Fill a weight as the paper's program does, with two exceptions.

    The classifier does not begin with zeros, because then no other weight would learn in the first
    step; and all biases do. Source: https://github.com/google-research/vision_transformer
    """
    if name.endswith(("class_token", "bias")):
        weight.zero_()
    elif weight.ndim == 1:  # of a layer norm
        weight.fill_(1)
    elif name.endswith(("pos_embedding", "head.weight")):
        weight.normal_(std=0.02, generator=generator)
    elif weight.ndim == 4:
        std = weight[0].numel() ** -0.5
        torch.nn.init.trunc_normal_(weight, 0, std, -2 * std, 2 * std, generator)
    else:
        torch.nn.init.xavier_uniform_(weight, generator=generator)


def recompute(block):
    """Keep only the input of a block; the backward pass computes the rest again."""
    forward = block.forward
    block.forward = partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)


def dimension(weight) -> Shard | None:
    """Return the dimension of a weight to shard, for FSDP2; None: the first, as usual.

    A single row can't be cut: it would be padded to one for each process. Its columns can, if
    they divide evenly.
    """
    columns = weight.shape[-1] if weight.ndim > 1 else 1
    even = columns > 1 and columns % idr_torch.size == 0
    return Shard(weight.ndim - 1) if len(weight) == 1 and even else None


def blocks(model) -> list[torch.nn.Module]:
    """Return the parts that a model repeats, [] if it has none: a ViT's layers, a ResNet's blocks.

    They are of one class, not one of torch.nn's own, and not inside each other. Of several such
    classes the one with most parameters counts.
    """
    own = [m for m in model.modules() if not type(m).__module__.startswith("torch.nn.")]
    count, held = Counter(map(type, own)), Counter()
    for module in own:
        held[type(module)] += sum(p.numel() for p in module.parameters())
    kinds = [kind for kind in held if count[kind] > 1 and held[kind]]
    return outermost(model, max(kinds, key=held.get)) if kinds else []


def outermost(module, kind) -> list[torch.nn.Module]:
    """Return the outermost modules of this class in a module."""
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in outermost(child, kind)]
