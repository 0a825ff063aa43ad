"""The models that `--model` names: torchvision's classifiers, and larger vision transformers."""

from typing import NamedTuple

import torchvision


class ViT(NamedTuple):
    """A vision transformer: the sizes that torchvision's class takes."""

    patch: int  # pixels, each side
    layers: int
    heads: int
    width: int
    mlp: int  # width of the layer inside each block

    def parameters(self, num_classes: int, image_size: int) -> int:
        """Return how many it has."""
        tokens, w = (image_size // self.patch) ** 2 + 1, self.width  # one is the class token
        # Queries, keys, values and output; the two layers of the MLP; two layer norms.
        block = 4 * w * (w + 1) + (2 * w * self.mlp + self.mlp + w) + 4 * w
        patches = (3 * self.patch**2 + 1) * w
        return patches + (tokens + 1) * w + self.layers * block + 2 * w + num_classes * (w + 1)


LARGER = {  # heads of 80, 128 and 128 channels
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
    """Return why this is not a model, and what is."""
    return (
        f"--model {name}: not in torchvision.models, and not one of {', '.join(LARGER)}; "
        "try resnet18 or resnet50"
    )


def build(name: str, num_classes: int, image_size: int):
    """Return a classifier with random weights, for square images of `image_size` pixels."""
    if name in LARGER:
        patch, *sizes = LARGER[name]
        return torchvision.models.VisionTransformer(
            image_size, patch, *sizes, num_classes=num_classes
        )
    options = {"image_size": image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False}  # one loss, as for all others
    return torchvision.models.get_model(name, num_classes=num_classes, **options)
