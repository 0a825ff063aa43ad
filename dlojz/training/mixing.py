"""The draws by which a batch is mixed: each image's partner, its share, and a box.

    draws = draws_of(args.seed, epoch, step, len(images), args.image_size)

They depend on the arguments alone, as the crops of `dlojz.training.data` do: a run draws them again
after a resume, and so does the solution. The arithmetic is the trainer's.
"""

from dataclasses import dataclass

import torch

from dlojz import idr_torch
from dlojz.training import data


@dataclass(frozen=True)
class Draws:
    """The draws of a batch of N images."""

    partner: torch.Tensor  # [N] int64: the place of another image in the batch
    share: torch.Tensor  # [N] float32, 0 to 1: mixup's share of the image itself
    box: torch.Tensor  # [N, 4] int64: top, left, bottom, right, perhaps outside of the image

    def to(self, device) -> "Draws":
        """Return the draws on a device. The host does not wait for their copies."""
        return Draws(*(t.to(device, non_blocking=True) for t in vars(self).values()))


def draws_of(
    seed: int,
    epoch: int,
    step: int,
    images: int,
    size: int | tuple[int, int],
    rank: int | None = None,
    processes: int | None = None,
    alpha: float = 1.0,
) -> Draws:
    """Return the draws of a batch, on the CPU.

    images: their number; size: their height and width, or one number for both.
    rank, processes: by default this process's. One process that accumulates the batches of several
    draws for each batch what they draw.
    alpha: shares follow Beta(alpha, alpha). With 1 all are equally likely; with 0.2 most images
    hardly change.

    A box has its centre anywhere in the image, and the area 1 - share: as CutMix draws it, in
    https://arxiv.org/abs/1905.04899, where it is clipped to the image. Bottom and right are the
    first row and column outside of it.
    """
    rank = idr_torch.rank if rank is None else rank
    processes = processes or idr_torch.size
    with data.draws_of(seed, epoch, -1 - (step * processes + rank)):  # no image has such an index
        others = torch.randint(1, max(2, images), (images,))
        share = torch.distributions.Beta(alpha, alpha).sample((images,))
        place = torch.rand(images, 2)
    size = torch.tensor(size).expand(2)
    centre = (place * size).long()
    half = (size * (1 - share[:, None]).sqrt() / 2).long()
    box = torch.cat([centre - half, centre + half], 1)
    return Draws((torch.arange(images) + others) % images, share, box)
