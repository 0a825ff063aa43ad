"""Loss and accuracy over an epoch, kept on the device: reading them is the only wait for it."""

import torch
import torchmetrics


def build(num_classes: int) -> torch.nn.ModuleDict:
    """The metrics "loss" and "accuracy", on the CPU; `.to(device)` moves them."""
    # Checks of values (NaN, range of labels) are off: each would make the host wait for the GPU.
    # MeanMetric then ignores weights, so it is given a batch's loss once for each image.
    loss = torchmetrics.MeanMetric(nan_strategy="disable")
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=num_classes, validate_args=False)
    loss.persistent(True)  # a checkpoint in the middle of an epoch holds their sums
    accuracy.persistent(True)
    return torch.nn.ModuleDict({"loss": loss, "accuracy": accuracy})


def update(metrics, loss, logits, labels):
    """Add a batch. loss: its mean; logits: [N, classes]; labels: [N]."""
    metrics["loss"].update(loss.expand(len(labels)))
    metrics["accuracy"].update(logits, labels)


def compute_and_reset(metrics) -> dict[str, float]:
    """The values by name; then begins anew. Waits for the device."""
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    for metric in metrics.values():
        metric.reset()
    return values
