"""The auditor: it keeps what `dlojz.watch.replay` needs of a run of a check.

$DLOJZ_AUDIT asks for it. Its hooks are on the model, on the
criterion and on all optimizers of the process.

every step    some pixels of each image as they enter the model; logits and their gradient; loss
every update  learning rates and settings of the optimizer, weights without a gradient, a digest of
              the random generators; and of the first ones the whole state: weights, gradients and
              momenta as the optimizer begins, weights and momenta that followed, buffers and random
              generators before and after
"""

import json
import math
import os
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dlojz import idr_torch
from dlojz.machine import facts as machine
from dlojz.runs import records
from dlojz.runs.log import WARMUP_STEPS
from dlojz.traces import kinds
from dlojz.training import private
from dlojz.training.data import normalize
from dlojz.training.sharding import own
from dlojz.watch import calls, changing, readings, store
from dlojz.watch.watched import Batch, Facts, Watched, folder_of, watched_file

VARIABLE = "DLOJZ_AUDIT"
PIXELS = 8  # of each image, at the same places in all runs
ROOM = 8  # free memory that updates need, as a multiple of their size; else they go to the disk


def begin(run, training, args, witness, steps: int, loader) -> "Auditor | None":
    """Return the auditor that $DLOJZ_AUDIT asks for, such as {"keep": 8}, or None.

    keep: the number of updates, the first ones; watch: keep every step for a replay, even without
    an update; memory: files without a name, held in memory by the job, to write into if it has
    room; middle: true has the witness profile one more step, one before the last; rewritten: true
    changes the image files once their first epoch is over.
    """
    wish = wished()
    if "keep" not in wish:
        return None
    return Auditor(run, training, args, witness, steps, wish, loader)


def wished() -> dict:
    """Return the wishes in $DLOJZ_AUDIT; {} if it is not set.

    Besides an auditor's, see `begin`: timed, for a stopwatch; replays, the links of a replay.
    """
    return json.loads(os.environ.get(VARIABLE, "{}"))


def aside():
    """Return a context that marks the auditor's work in a profile, if one is being recorded."""
    recorded = private.is_profiling()
    return torch.profiler.record_function(kinds.ASIDE) if recorded else nullcontext()


class Auditor:
    """The hooks of a run of a check."""

    def __init__(self, run, training, args, witness, steps: int, wish: dict, loader=None):
        self._loader = loader
        self._witness = witness  # knows when the run is warm, and which step it profiles
        self._run, self._training, self._model = run, training, training.model
        self._wish, self._keep = wish, wish.get("keep", 0)
        self._watches = bool(self._keep or wish.get("watch"))
        self._accumulate = getattr(args, "accumulate", 1)
        self._precision = getattr(args, "precision", None)
        self._profiled = "--profile" in sys.argv  # the check's flag: args are the trainer's
        self._device = next(self._model.parameters()).device
        self._plain = readings.plainly(self._model)
        self._names = {p: self._plain(name) for name, p in self._model.named_parameters()}
        self._modules = list(self._model.modules())
        self._places = None
        self._forwards = 0
        self._state = None  # of the present update, if it is kept
        self._buffers, self._generators = None, ()  # as the present update begins
        self._skipped = False  # the previous update called no optimizer
        self._same_buffers = None  # at the beginning of validations
        self._validated = None  # the buffers at the beginning of the last validation
        self._unchanged = []  # those of the validation, as the next epoch begins
        self._weights = None  # norms after the last update of an epoch
        self._same_weights = None  # in all batches of the validations
        self._steps, self._per_epoch = steps, steps // getattr(args, "epochs", 1)
        self._kept, self._files = [], []
        self._memory = {}  # on the CPU, by part: updates are packed there one after the other
        self._steps_seen, self._updates = [], []
        self._val_buffers = None  # as the last validation began
        self._validating, self._validation = False, []
        changes = wish.get("rewritten") and idr_torch.is_master
        self._images = changing.Changing(args.data) if changes else None
        self._met = {"train": [], "val": []}  # the expected metrics of each batch
        self._foreign = 0
        self._hook()

    def _hook(self):
        self._hooks = [
            *calls.hook(self._model, self._on_input, self._on_output),
            *calls.hook_loss(self._training, self._on_loss),
            register_optimizer_step_pre_hook(self._on_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def middle(self, last: int) -> int | None:
        """Return a step before the last one for the witness to profile, too, or None.

        It comes after half of the run, and resembles the last step: only the last batch of an
        update exchanges gradients, an epoch's last batch may be smaller than any other, and the
        profile of its first step would hold the validation. In fp16 the first update can come at
        any step.
        """
        as_any = self._per_epoch < len(self._loader) and self._precision != "fp16"
        if not self._wish.get("middle") or self._profiled or not as_any:
            return None
        first = max(WARMUP_STEPS + 1 + self._accumulate, self._steps // 2)
        steps = range(last - self._accumulate, first - 1, -self._accumulate)
        steps = [step for step in steps if step % self._per_epoch]
        return steps[len(steps) // 2] if steps else None

    # Every step --------------------------------------------------------------------------------

    def _on_input(self, model, args, kwargs):
        trains = model.training and torch.is_grad_enabled()
        if self._images:
            self._images.enter(changing.TRAIN if trains else changing.VAL)
        if not trains:
            self._compare_buffers()
            self._compare_weights()
            self._see_validation(readings.entered(args, kwargs))
            self._validating = True
            return
        self._validating = False
        images = readings.entered(args, kwargs)
        with aside():
            if self._forwards % self._accumulate == 0:
                self._begin_update()
            self._steps_seen.append(Batch(self._sample(images), readings.layout(images)))
            ends = (self._forwards + 1) % self._per_epoch == 0
            self._weights = self._weight_norms() if ends else None  # its update may be skipped
        self._forwards += 1

    def _compare_buffers(self):
        """Note, as a validation begins, whether its buffers are the training's."""
        if self._skipped or not self._buffers:
            return
        now = {self._plain(name): buffer for name, buffer in readings.named_buffers(self._model)}
        same = now.keys() == self._buffers.keys() and all(
            torch.equal(now[name].to(buffer.device), buffer)
            for name, buffer in self._buffers.items()
        )
        self._same_buffers = same and self._same_buffers is not False
        self._validated = self._buffers if same else self._copied_buffers()
        self._buffers = None  # until the next update

    def _compare_validated(self):
        """Note, as an epoch begins, whether the last validation left the buffers unchanged."""
        buffers, self._validated = self._validated, None
        now = {self._plain(name): buffer for name, buffer in readings.named_buffers(self._model)}
        for name, buffer in buffers.items():
            other = now.get(name)
            alike = other is not None and other.shape == buffer.shape
            # Read at the end, so that nothing waits for a GPU.
            self._unchanged.append(alike and (other.to(buffer.device) == buffer).all())

    def _see_validation(self, images):
        """Keep the input of a batch of a validation, and the buffers as it begins."""
        with aside():
            if self._keep and not self._validating:
                self._val_buffers = self._copied_buffers()
            self._validation.append(Batch(self._sample(images)))

    def _compare_weights(self):
        """Note whether a batch is validated with the weights that the last update left."""
        if self._weights is not None:
            bits = (norms.view(torch.int32) for norms in (self._weights, self._weight_norms()))
            same = torch.equal(*bits)  # bits, so that NaN equals NaN
            self._same_weights = same and self._same_weights is not False

    def _weight_norms(self):
        """Return the norm of each weight of this process, without waiting for the device."""
        return torch.stack(private.norms([own(p.detach()) for p in self._names])).float()

    def _sample(self, images):
        if images.ndim != 4:
            return None
        images = normalize(images)  # in case the model does it
        sizes = tuple(images.shape[1:])
        if self._places is None:
            draw = torch.Generator().manual_seed(0)
            places = (torch.randint(size, (PIXELS,), generator=draw) for size in sizes)
            self._places = sizes, [place.to(images.device) for place in places]
        expected, (channels, down, right) = self._places
        if sizes != expected:  # an index out of range would end a process on a GPU
            return None
        return images.detach()[:, channels, down, right].float()

    def _on_output(self, model, inputs, logits):
        trains = torch.is_tensor(logits) and logits.requires_grad and model.training
        if not (trains and self._steps_seen):
            return
        step = self._steps_seen[-1]
        with aside():
            if self._watches:
                step.logits = logits.detach().clone()
        logits.register_hook(lambda gradient: self._on_logits_gradient(step, gradient))

    def _on_logits_gradient(self, step, gradient):
        with aside():
            step.images = (gradient.detach().flatten(1) != 0).any(1).sum()
            if step.logits is not None:
                step.gradient = gradient.detach().clone()

    def _on_loss(self, criterion, args, kwargs, loss):
        logits, labels = readings.given(args, kwargs)
        mode = "train" if calls.inner(self._model).training else "val"
        with aside():
            mean = readings.per_image(criterion, loss, len(logits))
            self._met[mode].append(readings.met(logits, labels, mean))
            batches = self._steps_seen if mode == "train" else self._validation
            if batches and (mode == "val" or loss.requires_grad):
                batches[-1].loss, batches[-1].labels = mean, labels.detach().clone()

    # Every update ------------------------------------------------------------------------------

    def _begin_update(self):
        """Keep the generators, and the buffers unless the previous update did."""
        self._generators = torch.get_rng_state(), _cuda_generator(self._device)
        if not self._watches:
            return
        if self._validated:
            self._compare_validated()
        if self._buffers is None or self._skipped:
            self._buffers = self._copied_buffers()
        self._skipped = True  # until its optimizer is called: in fp16 it may not be

    def _copied_buffers(self) -> dict:
        names, found = {}, {}
        for name, buffer in readings.named_buffers(self._model):
            names.setdefault((buffer.dtype, buffer.device), {})[self._plain(name)] = buffer
        for alike in names.values():  # in one call each: a hundred cost the host a millisecond
            found |= zip(alike, private.copies(list(alike.values())), strict=True)
        return found

    def _on_update(self, optimizer, args, kwargs):
        if not self._is_ours(optimizer):
            self._foreign += 1
            return
        with aside():
            if not self._is_skipped(optimizer):
                self._take(optimizer)

    def _after_update(self, optimizer, args, kwargs):
        if not self._is_ours(optimizer):
            return
        with aside():
            self._end_update()
            if self._weights is not None:
                self._weights = self._weight_norms()

    def _is_ours(self, optimizer) -> bool:
        return {p for g in optimizer.param_groups for p in g["params"]} <= self._names.keys()

    def _is_skipped(self, optimizer) -> bool:
        """Return whether a fused optimizer will skip this update: others are not called then."""
        found_inf = getattr(optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _take(self, optimizer):
        groups = optimizer.param_groups
        facts = Facts(
            update=(self._forwards - 1) // self._accumulate,
            scale=readings.scale(self._training),
            grad_scale=_copy(getattr(optimizer, "grad_scale", None)),
            found_inf=_copy(getattr(optimizer, "found_inf", None)),
            optimizer=readings.kind(optimizer),
            lr=[_copy(group["lr"]) for group in groups],
            settings=[readings.settings(group, optimizer) for group in groups],
            missing=[name for p, name in self._names.items() if p.grad is None],
            evaluating=sum(not module.training for module in self._modules),
            random=[zlib.crc32(g.numpy()) for g in self._generators if g is not None],
        )
        # None: no update has begun since a validation, as the model was left in evaluation mode
        if self._watches and self._generators and self._buffers is not None:
            buffers = self._copied_buffers()
            if len(self._kept) < self._keep:
                self._copy(optimizer, facts, buffers)
            self._buffers, self._skipped = buffers, False
        self._updates.append(facts)

    def _copy(self, optimizer, facts, buffers):
        """Keep this update as its optimizer begins. buffers: those after its forward passes."""
        cpu, cuda = self._generators
        self._state = {
            "facts": facts,
            "before": {part: _copies(tensors) for part, tensors in self._named(optimizer).items()},
            "begun": {"buffers": self._buffers, "cpu_rng": cpu, "cuda_rng": cuda},
            "buffers": buffers,
        }

    def _named(self, optimizer):
        gradients = {n: own(p.grad) for p, n in self._names.items() if p.grad is not None}
        kept = {
            f"{name} {key}": own(value)
            for p, name in self._names.items()
            for key, value in optimizer.state.get(p, {}).items()
            if torch.is_tensor(value)
        }
        weights = {name: own(p) for p, name in self._names.items()}
        return {"weights": weights, "gradients": gradients, "optimizer": kept}

    # The first updates --------------------------------------------------------------------------

    def _end_update(self):
        """Write an update, with the state that it left, if it is to be kept."""
        state, self._state = self._state, None
        if state is None:
            return
        update, after = state["facts"].update, self._named(self._training.optimizer)
        self._kept.append(update)

        def packed(place, tensors):
            return store.pack(tensors, self._memory.setdefault(place, {}))

        before = state["before"]
        kept = {part: packed(part, tensors) for part, tensors in before.items()} | {
            "facts": store.on_cpu(state["facts"]),
            "begun": state["begun"] | {"buffers": packed("begun", state["begun"]["buffers"])},
            "after": {part: packed(f"{part} after", after[part]) for part in store.AFTER}
            | {"buffers": packed("buffers", state["buffers"])},
        }
        nbytes = sum(t.nbytes for tensors in before.values() for t in tensors.values())
        self._files.append(self._file(update, nbytes))
        store.save(kept, self._files[-1])

    def _file(self, update: int, nbytes: int) -> Path:
        """Return the file for this update: in memory if there is ample room, else on the disk."""
        memory = machine.memory()
        room = min(memory.get(name, math.inf) for name in ("available_bytes", "limit_bytes"))
        places = self._wish.get("memory", ())[len(self._files) :]
        if places and ROOM * self._keep * idr_torch.size * nbytes <= room:
            return Path(places[0])
        name = f"update-{update:06d}.rank{idr_torch.rank}.pt"
        return folder_of(self._run.folder) / name

    def finish(self):
        """Write the record of every step, and log the auditor's measurements."""
        for hook in self._hooks:
            hook.remove()
        self._memory.clear()
        steps, updates = store.on_cpu(self._steps_seen), store.on_cpu(self._updates)
        watched = Watched(
            steps=steps,
            updates=updates,
            kept=self._kept,
            files=[str(file) for file in self._files],
            validated=store.on_cpu(self._val_buffers),
            validation=store.on_cpu(self._validation),
        )
        store.save(watched, watched_file(self._run.folder, idr_torch.rank))
        self._run.evidence(
            records.Audit(
                images=[int(s.images or 0) for s in steps],
                losses=[None if s.loss is None else float(s.loss) for s in steps],
                met={
                    mode: [list(map(float, b)) for b in batches]
                    for mode, batches in self._met.items()
                },
                same_buffers=self._same_buffers,
                kept_buffers=all(map(bool, self._unchanged)),
                same_weights=self._same_weights,
                updates=len(self._updates),
                kept=self._kept,
                foreign=self._foreign,
            )
        )


def _cuda_generator(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _copy(value):
    return value.detach().clone() if torch.is_tensor(value) else value


def _copies(tensors) -> dict:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
