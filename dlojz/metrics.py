"""Loss and accuracy over an epoch, kept on the device: reading them is the only wait for it."""

import torch
import torchmetrics


def build() -> torch.nn.ModuleDict:
    """The metrics "loss" and "accuracy", on the CPU; `.to(device)` moves them.

    Two means over images. torchmetrics' Accuracy would say the same with many more kernels.
    """
    # The check for NaN is off: it would make the host wait for the GPU. MeanMetric then ignores
    # weights, so it is given a batch's loss once for each image.
    names = ("loss", "accuracy")
    means = {name: torchmetrics.MeanMetric(nan_strategy="disable") for name in names}
    for mean in means.values():
        mean.persistent(True)  # a checkpoint in the middle of an epoch holds their sums
    return torch.nn.ModuleDict(means)


def update(metrics, loss, logits, labels):
    """Add a batch. loss: its mean; logits: [N, classes]; labels: [N]."""
    metrics["loss"].update(loss.expand(len(labels)))
    metrics["accuracy"].update((logits.argmax(1) == labels).float())


def compute_and_reset(metrics) -> dict[str, float]:
    """The values by name; then begins anew. Waits for the device."""
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    for metric in metrics.values():
        metric.reset()
    return values
