"""The solution's training, which can be put into any kept state: see `dlojz.watch.replay`."""

import math
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlojz import idr_torch
from dlojz.training import imports, mixing
from dlojz.training.chronometer import Chronometer
from dlojz.training.sharding import own
from dlojz.watch import auditor, changing, readings

FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


class Solution:
    """The solution's training, its batches, and its steps from a state."""

    def __init__(self, trainer, args, device):
        self.trainer, self.args, self.device = trainer, args, device
        self._wish = auditor.wished()
        self.loaders = trainer.build_loaders(args)
        batches = len(self.loaders[0])
        updates = args.epochs * (batches // args.accumulate)
        classes = len(self.loaders[0].dataset.classes)
        self.training = trainer.build_training(args, device, classes, updates)
        self.per_epoch = min(args.test_nsteps, batches) if args.test else batches
        self._model = self.training.model
        plainly = readings.plainly(self._model)
        self.weights = {plainly(name): p for name, p in self._model.named_parameters()}
        self._buffers = {plainly(name): b for name, b in self._model.named_buffers()}
        self._gradients = self._stream = None
        self._outputs = []
        self._noises = []
        self.rates = _rates(self.training, self.per_epoch * args.epochs // args.accumulate)
        self._chrono = Chronometer()
        self._chrono.start()
        self._chrono.next_iter()
        self._model.train()

    def _on_update(self, optimizer, args, kwargs):
        scale, skips = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if skips is not None and float(skips):
            return
        by = 1.0 if scale is None else float(scale)
        self._gradients = {
            name: own(p.grad) / by for name, p in self.weights.items() if p.grad is not None
        }

    def _on_output(self, model, inputs, logits):
        self._outputs.append(logits.detach().clone())

    def _batches(self, update):
        """Return the solution's batches of an update, on the device. Updates must come in order."""
        epoch, step = divmod(update * self.args.accumulate, self.per_epoch)
        numbered = islice(self._keys(epoch, step), self.args.accumulate)
        return [(number, *self._made(self.loaders[0].dataset, keys)) for number, keys in numbered]

    def _made(self, dataset, keys):
        if hasattr(dataset, "__getitems__"):
            samples = dataset.__getitems__(keys)
        else:
            samples = [dataset[key] for key in keys]
        images, labels = dataset.collate(samples)
        return images.to(self.device), labels.to(self.device)

    def _laid_out(self, batches, steps):
        """Return the batches in the layout of the trainee's images.

        A GPU's kernels depend on it, and round differently: see `_lay_out`.
        """
        wanted = steps[0].layout if steps else None
        like = {"memory_format": FORMATS.get(wanted, torch.preserve_format)}
        return [(number, images.to(**like), labels) for number, images, labels in batches]

    def _keys(self, epoch, first):
        """Yield (step, keys of its images) from the step `first` on."""
        sampler = self.loaders[0].batch_sampler
        if self._stream is None or self._stream[0] != epoch:
            if epoch and self._wish.get("rewritten"):
                self._change_files()
            sampler.set_epoch(epoch)
            self._stream = epoch, enumerate(sampler)
        return (item for item in self._stream[1] if item[0] >= first)

    def _change_files(self):
        """Change this replay's image files, as those of the run did after the first epoch."""
        if idr_torch.is_master:
            changing.change(Path(self.args.data, changing.TRAIN))
        in_each_process(None)  # none reads them before

    def _step(self, state, batches, moved=None) -> dict | None:
        """Return the result of the solution's step from a state; None if it skipped the update."""
        self._load(state, moved)
        self._gradients, self._outputs = None, []
        hooks = [
            register_optimizer_step_pre_hook(self._on_update),
            self._model.register_forward_hook(self._on_output),
        ]
        try:
            for step, *batch in batches:
                self._chrono.transfer()
                self._draw(state["facts"].update, step, batch[0])
                self.trainer.train_step(step, self.training, *batch, self.args, self._chrono)
                self._chrono.next_iter()
        finally:
            for hook in hooks:
                hook.remove()
        if self._gradients is None:
            return None
        return {
            "outputs": self._outputs,
            "gradients": self._gradients,
            "buffers": _copied(self._buffers),
        }

    def _draw(self, update, step, images):
        """Make the draws of a batch, if the run mixes any."""
        if getattr(self.args, "mix", "off") != "off":
            epoch = update * self.args.accumulate // self.per_epoch
            size = tuple(images.shape[2:])
            draws = mixing.draws_of(self.args.seed, epoch, step, len(images), size)
            self.training.draws = draws.to(self.device)

    def _put(self, weights, buffers, moved):
        for name, tensor in weights.items():
            self._lay_out(self.weights[name], tensor)
            own(self.weights[name]).copy_(tensor)
        if moved:
            perturb(self._model, *moved)
        for name, buffer in self._buffers.items():  # the trainee's may have more
            buffer.copy_(buffers[name])

    @torch.no_grad()
    def _load(self, state, moved=None):
        """Put the training into a kept state: its tensors, and nothing else."""
        training, number = self.training, state["facts"].update
        self._must_fit(state)
        self._put(state["weights"], state["begun"]["buffers"], moved)
        optimizer = training.optimizer
        optimizer.state.clear()
        for key, tensor in state["optimizer"].items():
            name, _, what = key.rpartition(" ")
            weight = self.weights[name]
            like_it = tensor.shape == own(weight).shape  # or a number of steps
            on = weight.device if self._fused else "cpu"
            kept = torch.empty_like(weight) if like_it else torch.empty_like(tensor, device=on)
            own(kept).copy_(tensor)
            optimizer.state[weight][what] = kept
        self._complete(optimizer)
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, self.rates[number], strict=True):
            group["lr"] = rate
        torch.set_rng_state(state["begun"]["cpu_rng"])
        if state["begun"]["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["begun"]["cuda_rng"], self.device)
        scaler, scale = getattr(training, "scaler", None), state["facts"].scale
        if scaler is not None and scaler.is_enabled() and scale is not None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": float(scale)})

    def _lay_out(self, weight, tensor):
        """Give a weight its layout in the trainee's run, so that the kernels are the same.

        On an H200 the gradients of small networks, in float32, differed by 0.0013 between the
        layouts, and by 0.00004 with weights that are off by a rounding error.
        """
        wanted = readings.layout(tensor)
        if own(weight) is weight and wanted in FORMATS and wanted != readings.layout(weight):
            weight.data = weight.data.contiguous(memory_format=FORMATS[wanted])

    def _complete(self, optimizer):
        """Add momenta of zero where the trainee has none: a fused optimizer needs all or none."""
        if any("momentum_buffer" in state for state in optimizer.state.values()):
            for weight in self.weights.values():
                optimizer.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))

    @property
    def _fused(self):
        return bool(self.training.optimizer.defaults.get("fused"))

    def _must_fit(self, state):
        there = {"weight": state["weights"], "buffer": state["begun"]["buffers"]}
        here = {"weight": self.weights, "buffer": self._buffers}
        for kind, tensors in here.items():
            theirs = {name: tuple(t.shape) for name, t in there[kind].items()}
            for name, tensor in zip(tensors, map(own, tensors.values()), strict=True):
                if theirs.get(name) != tuple(tensor.shape):
                    raise SystemExit(
                        f"the solution's {kind} {name} has the shape {tuple(tensor.shape)}, yours "
                        f"{theirs.get(name, 'is not there')}"
                    )


def in_each_process(here) -> list:
    """Return this value of each process: they replay an update together."""
    if not torch.distributed.is_initialized():
        return [here]
    every = [None] * idr_torch.size
    torch.distributed.all_gather_object(every, here)
    return every


def imported(file):
    """Return a trainer as a module."""
    return imports.from_file(file, "solution")


def perturb(model, relative: float, seed: int):
    """Move each weight by a share of it, drawn with this standard deviation."""
    generators = {}
    with torch.no_grad():
        for weight in map(own, model.parameters()):
            device = weight.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            noise = torch.randn(weight.shape, generator=generators[device], device=device)
            weight.mul_(1 + relative * noise)


def _rates(training, updates) -> list[list[float]]:
    """Return the solution's learning rates for each update; its scheduler is not used again."""
    rates = []
    with warnings.catch_warnings(action="ignore"):  # no optimizer steps before it
        for _ in range(updates):
            rates.append([group["lr"] for group in training.optimizer.param_groups])
            training.scheduler.step()
    training.scheduler = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [math.nan])
    return rates


def _copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
