"""The data of every step of a check's short run, which is not timed."""

import torch

from dlojz.training.data import normalize
from dlojz.training.sharding import own
from dlojz.watch import readings

SEEN = 8  # pixels of an image, and numbers of a weight, in a short run


class Steps:
    """The inputs and results of each step of a short run, in all epochs, without waiting.

    It also finds changes between two updates: only the optimizer may change weights and momenta,
    and only forward passes in training may change batch statistics. Some numbers of the first,
    the middle and the last tensor are compared.
    """

    def __init__(self, model):
        self._model = model
        self._images, self._labels, self._norms = [], [], []
        self._changed = 0  # updates that began with other values than the previous one had left
        self._left, self._statistics = {}, {}

    def enter(self, mode, images):
        """Note eight pixels of each image that enters the model, and changed statistics."""
        if mode == "train":
            self._compare(self._statistics, _statistics(self._model))
            self._statistics = {}  # until the next update
        flat = normalize(images.detach()).flatten(1)  # in case the model does it
        seen = flat[:, :: max(1, flat.shape[1] // SEEN)][:, :SEEN]
        self._images.append((mode, seen.float().clone()))

    def label(self, mode, labels):
        """Note the labels of a batch, in order."""
        found = classes(labels)
        places = torch.arange(1, len(found) + 1, device=found.device)
        self._labels.append((mode, (places * found).sum()))

    def begin(self, optimizer, args, kwargs):
        """Note the gradients of an update, and compare its state with the previous one's result."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [own(p.grad) for p in weights if p.grad is not None]
        scale = getattr(optimizer, "grad_scale", None)
        self._norms.append(
            torch.nn.utils.get_total_norm(gradients) / (1 if scale is None else scale)
        )
        self._compare(self._left, self._rows(optimizer))

    def _compare(self, left, found):
        """Count an update whose state differs from the previous one's result."""
        other = [_differ(row, found.get(key)) for key, row in left.items()]
        if any(it is None for it in other):  # another shape or device, or no tensor
            self._changed = self._changed + 1
        elif other:
            self._changed = self._changed + torch.stack(other).any()

    def end(self, optimizer, args, kwargs):
        """Keep the result of an update."""
        self._left = {key: row.clone() for key, row in self._rows(optimizer).items()}
        self._statistics = {key: row.clone() for key, row in _statistics(self._model).items()}

    def found(self) -> dict:
        """Return the fields of the run's record."""
        return {
            "touched": int(self._changed),
            "entered": [[mode, _rounded(seen)] for mode, seen in self._images],
            "labels": [[mode, int(number)] for mode, number in self._labels],
            "norms": [float(norm) for norm in self._norms],
        }

    def _rows(self, optimizer):
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        found, names = {}, readings.states_of(optimizer)
        for place in {0, len(weights) // 2, len(weights) - 1}:
            weight = weights[place]
            states = {key: optimizer.state.get(weight, {}).get(key) for key in names}
            for key, tensor in ({"weight": weight} | states).items():
                if tensor is not None and not tensor.is_meta:
                    found[place, key] = own(tensor.detach()).reshape(-1)[:SEEN]
        return found


def _statistics(model) -> dict:
    """Return some numbers of three of a model's batch statistics, by index."""
    found = [b.detach() for b in model.buffers() if b.is_floating_point() and not b.is_meta]
    places = {0, len(found) // 2, len(found) - 1} if found else ()
    return {place: found[place].reshape(-1)[:SEEN] for place in places}


def _differ(left, found):
    """Return whether two rows differ, as a tensor; None if they can't be compared."""
    if found is None or (left.shape, left.device) != (found.shape, found.device):
        return None
    return ((left != found) & ~(left.isnan() & found.isnan())).any()


def _rounded(rows):
    return [[round(value, 3) for value in row] for row in rows.tolist()]


def classes(labels):
    """Return the classes of a batch; labels: class indices, or probabilities [N, classes]."""
    return labels if labels.ndim == 1 else labels.argmax(1)
