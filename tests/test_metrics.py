"""The metrics: means over images, whatever the sizes of the batches."""

import pytest
import torch
import torchmetrics

from dlojz import metrics


def batches(sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 10, generator=generator), torch.randint(10, (size,))


def test_loss_and_accuracy_are_those_of_all_images():
    ours, expected = metrics.build(), torchmetrics.Accuracy("multiclass", num_classes=10)
    losses = []
    for logits, labels in batches((8, 8, 3)):
        loss = torch.nn.functional.cross_entropy(logits, labels)
        metrics.update(ours, loss, logits, labels)
        expected.update(logits, labels)
        losses += [loss.item()] * len(labels)
    values = metrics.compute_and_reset(ours)
    assert values["loss"] == pytest.approx(sum(losses) / 19)
    assert values["accuracy"] == pytest.approx(expected.compute().item())


def test_it_begins_anew():
    ours = metrics.build()
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(3.0), logits, labels)
    metrics.compute_and_reset(ours)
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(5.0), logits, labels)
    assert metrics.compute_and_reset(ours)["loss"] == 5


def test_a_checkpoint_holds_the_sums():
    ours, later = metrics.build(), metrics.build()
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(3.0), logits, labels)
    later.load_state_dict(ours.state_dict())
    for logits, labels in batches((4,)):
        metrics.update(later, torch.tensor(5.0), logits, labels)
    assert metrics.compute_and_reset(later)["loss"] == 4
