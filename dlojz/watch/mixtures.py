"""A probe of the mixing of batches: the trainer's `forward`, with images and draws of our own.

The images are black or white, and wider than high, and each one's partner has the other colour: a
mixed image shows the share that is left of it, and the place of its partner's pixels. A model and a
criterion that keep what they are given stand in for the trainer's. A trainer that mixes elsewhere
is not seen: there the comparison of all pixels and updates decides.
"""

import sys
from argparse import Namespace
from types import SimpleNamespace

import torch

from dlojz.runs import records
from dlojz.training import data, mixing
from dlojz.watch import auditor, calls, inventory, readings

HEIGHT, WIDTH = 40, 72
FEW, MANY = 16, 64  # images
WAYS = ("cutmix", "mixup")


def watch(run, training, args, loader):
    """Log the batches that the trainer's `forward` makes, if there are any."""
    if mixed := look(training, args, loader):
        run.evidence(records.Mixtures(**mixed))


def look(training, args, loader) -> dict:
    """Return the fields of `records.Mixtures`; {} for a run that mixes nothing, or is timed.

    The run's random draws are left alone.
    """
    forward = getattr(sys.modules["__main__"], "forward", None)
    if not forward or getattr(args, "mix", "off") == "off" or "timed" in auditor.wished():
        return {}
    device = next(training.model.parameters()).device
    probe = _Probe(forward, training, args, len(loader.dataset.classes), device)
    with data.draws_of(0, 0, 0), torch.compiler.set_stance("force_eager"):
        try:
            return {
                "ways": [probe.way(how) for how in WAYS],
                "unasked": probe.leaves_alone("off", trains=True),
                "validated": all(probe.leaves_alone(how, trains=False) for how in WAYS),
            }
        except Exception as error:  # of any kind: it is the trainer's code
            return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


class _Probe:
    def __init__(self, forward, training, args, classes, device):
        self._forward, self._training, self._args = forward, training, args
        self._classes, self._device = classes, device

    def way(self, how: str) -> dict:
        """Return the trainer's batch, and the shares that the draws ask for."""
        seen = self._call(how, FEW)
        counts = [self._counted(how, images) for images in (FEW, MANY)]
        found = {
            "how": how,
            "images": FEW,
            "classes": self._classes,
            "operations": [count.operations for count in counts],
            "reads": counts[-1].reads,
            "in_place": not torch.equal(seen.given, seen.before),
        }
        draws, targets = seen.draws, seen.targets
        wanted, inside = _asked(draws, how)
        found |= {"wanted": wanted.tolist(), "drawn": draws.share.tolist()}
        if seen.images is not None and seen.images.shape == seen.before.shape:
            own = seen.before[:, :1, :1, :1].float().cpu() / 255
            other = (_unit(seen.images) - own).abs()  # 1 where the partner is
            found["pixels"] = (1 - other.mean((1, 2, 3))).tolist()
            there = other.mean(1) > 0.5
            turned = _inside(draws.box[:, [1, 0, 3, 2]])
            found["placed"] = [int((there == box).all((1, 2)).sum()) for box in (inside, turned)]
        if targets is None:
            return found
        found["calls"] = seen.calls
        found |= {"shape": list(targets.shape), "dtype": inventory.word(targets.dtype)}
        if tuple(targets.shape) == (FEW, self._classes):
            targets, labels = targets.float().cpu(), seen.labels.cpu()
            found["sums"] = [float(sums) for sums in targets.sum(1).aminmax()]
            for name, place in (("own", labels), ("partners", labels[draws.partner])):
                found[name] = targets.gather(1, place[:, None])[:, 0].tolist()
        return found

    def leaves_alone(self, how: str, trains: bool) -> bool:
        """Return whether images and labels stay as they are."""
        seen = self._call(how, FEW, trains)
        if seen.images is None or seen.images.shape != seen.before.shape:
            return False
        same = bool((_unit(seen.images) - seen.before.cpu() / 255).abs().max() < 0.01)
        return same and (seen.targets is None or torch.equal(seen.targets, seen.labels))

    def _call(self, how, images, trains=True):
        """Return the inputs of model and criterion; None for one that is not called."""
        numbers = torch.arange(images)
        batch = (255 * (numbers % 2)).to(torch.uint8).view(-1, 1, 1, 1)
        batch = batch.repeat(1, 3, HEIGHT, WIDTH).to(self._device)
        labels = (numbers % self._classes).to(self._device)
        draws = mixing.draws_of(0, 0, 0, images, (HEIGHT, WIDTH))
        draws = mixing.Draws(numbers ^ 1, draws.share, draws.box)  # of the other colour and class
        seen = SimpleNamespace(images=None, targets=None, calls=0, labels=labels, draws=draws)
        seen.given, seen.before = batch, batch.clone()
        model = _Model(seen, self._classes, trains)
        names = getattr(self._training, "__slots__", None) or vars(self._training)
        parts = {name: getattr(self._training, name) for name in names}
        own = {"model": model, "criterion": _criterion(seen), "draws": draws.to(self._device)}
        args = Namespace(**vars(self._args) | {"mix": how})
        with torch.set_grad_enabled(trains):
            self._forward(SimpleNamespace(**parts | own), batch, labels, args)
        return seen

    def _counted(self, how, images):
        with calls.counted() as count:
            self._call(how, images)
        return count


class _Model:
    """A model that keeps its images."""

    def __init__(self, seen, classes, trains):
        self.training, self._seen, self._classes = trains, seen, classes

    def __call__(self, images):
        self._seen.images = images.detach().clone()
        return torch.zeros(len(images), self._classes, device=images.device, requires_grad=True)


def _criterion(seen):
    """Return a criterion that keeps its targets, and counts its calls."""

    def keep(*args, **kwargs):
        logits, seen.targets = readings.given(args, kwargs)
        seen.calls += 1
        return logits.float().mean()

    return keep


def _asked(draws, how):
    """Return each image's share, and the places that its partner takes: [N, HEIGHT, WIDTH]."""
    inside = _inside(draws.box)
    if how == "mixup":
        return draws.share, draws.share[:, None, None].expand_as(inside) < 0.5
    return 1 - inside.float().mean((1, 2)), inside


def _inside(boxes):
    found = torch.zeros(len(boxes), HEIGHT, WIDTH, dtype=torch.bool)
    for place, (top, left, bottom, right) in zip(found, boxes.clamp(min=0).tolist(), strict=True):
        place[top:bottom, left:right] = True
    return found


def _unit(images):
    """Return images that enter a model as numbers from 0 to 1, on the CPU."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.MEAN, data.STD))
    return data.normalize(images.cpu()).float() * std + mean
