"""The metrics: means over images, whatever the sizes of the batches."""

import math

import pytest
import torch

from dlojz.training import metrics


def batches(sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield torch.randn(size, 10, generator=generator), torch.randint(10, (size,))


def test_loss_and_accuracy_are_those_of_all_images():
    ours, losses, right = metrics.build(), [], 0
    for logits, labels in batches((8, 8, 3)):
        loss = torch.nn.functional.cross_entropy(logits, labels)
        metrics.update(ours, loss, logits, labels)
        losses += [loss.item()] * len(labels)
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            right += row.index(max(row)) == label
    values = metrics.compute_and_reset(ours)
    assert values["loss"] == pytest.approx(sum(losses) / 19)
    assert values["accuracy"] == pytest.approx(right / 19)


def test_it_begins_anew():
    ours = metrics.build()
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(3.0), logits, labels)
    metrics.compute_and_reset(ours)
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(5.0), logits, labels)
    assert metrics.compute_and_reset(ours)["loss"] == 5


def test_no_graph_is_kept_whatever_is_added():
    ours, loss = metrics.build(), torch.tensor(3.0, requires_grad=True)
    for logits, labels in batches((4,)):
        metrics.update(ours, loss * 2, logits, labels)
    assert not any(b.requires_grad for b in ours.buffers())


def test_a_checkpoint_holds_the_sums():
    ours, later = metrics.build(), metrics.build()
    for logits, labels in batches((4,)):
        metrics.update(ours, torch.tensor(3.0), logits, labels)
    later.load_state_dict(ours.state_dict())
    for logits, labels in batches((4,)):
        metrics.update(later, torch.tensor(5.0), logits, labels)
    assert metrics.compute_and_reset(later)["loss"] == 4


def test_a_rehearsal_on_meta_has_no_values():
    rehearsed = metrics.build().to("meta")
    metrics.update(
        rehearsed,
        torch.zeros((), device="meta"),
        torch.zeros(4, 3, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    assert all(map(math.isnan, metrics.compute_and_reset(rehearsed).values()))
