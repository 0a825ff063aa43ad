"""The surroundings of a learning-rate finder: its batches, its updates, and the way back.

Several processes run it together: each takes batches of its own, DDP or FSDP averages their
gradients, and their mean loss, which all get, decides when all of them stop.
"""

import copy
from argparse import Namespace
from itertools import chain, count, islice
from types import SimpleNamespace

import torch

from dlojz.training import checkpoint


class Batches:
    """The first batches of a training, in as many epochs as that takes."""

    def __init__(self, loader, number: int):
        self.loader, self.number = loader, number

    def __len__(self):
        return self.number

    def __iter__(self):
        drawn = self.loader.batch_sampler.drawn
        trained = len(drawn)
        try:
            yield from islice(chain.from_iterable(map(self._epoch, count())), self.number)
        finally:
            del drawn[trained:]  # what is noted there is the training's

    def _epoch(self, number):
        self.loader.batch_sampler.set_epoch(number)
        yield from self.loader


def updating(train_step, training, args):
    """Return train(images, labels): one update by the trainer's `train_step`, without a schedule.

    It returns the loss before the update, the mean of all processes. Waits for the device. Images
    are not mixed, and each batch makes an update of its own.
    """
    device = next(training.model.parameters()).device
    args = Namespace(**vars(args) | {"accumulate": 1, "mix": "off"})
    trial = copy.copy(training)
    trial.scheduler = SimpleNamespace(step=_nothing)
    chrono = SimpleNamespace(forward=_nothing, backward=_nothing, update=_nothing)

    def train(images, labels) -> float:
        trial.model.train()
        loss = train_step(0, trial, images.to(device), labels.to(device), args, chrono)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)
            loss /= torch.distributed.get_world_size()
        return loss.item()

    return train


def _nothing():
    pass


def snapshot(training) -> dict:
    """Return a copy of a training's state: of all of its parts, and of the random generators."""
    parts = checkpoint.parts(training).items()
    return {
        "parts": {name: copy.deepcopy(part.state_dict()) for name, part in parts},
        "buffers": {name: b.clone() for name, b in training.model.named_buffers()},
        "cpu": torch.get_rng_state(),
        "gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


@torch.no_grad()
def put_back(training, before: dict):
    """Give a training the state of a snapshot, which is good for once."""
    for name, part in checkpoint.parts(training).items():
        part.load_state_dict(before["parts"][name])
    for name, buffer in training.model.named_buffers():
        buffer.copy_(before["buffers"][name])  # some are in no state_dict
    training.optimizer.zero_grad()
    torch.set_rng_state(before["cpu"])
    if before["gpu"] is not None:
        torch.cuda.set_rng_state(before["gpu"])
