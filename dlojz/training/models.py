"""The models that `--model` names: torchvision's classifiers."""

import torchvision


def names() -> list[str]:
    """Return all the names that `build` knows."""
    return torchvision.models.list_models(torchvision.models)


def build(name: str, num_classes: int, image_size: int):
    """Return a classifier with random weights, for square images of `image_size` pixels."""
    options = {"image_size": image_size} if name.startswith("vit_") else {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False}  # one loss, as for all others
    return torchvision.models.get_model(name, num_classes=num_classes, **options)
