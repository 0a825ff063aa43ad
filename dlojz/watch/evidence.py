"""Evidence of a run's real work, collected outside the trainer's source.

The trainer calls `watch` once. It logs these records of `dlojz.runs.records`:

samples  before a test run on files: the data set's images of a file of our own.
mixtures  before one with --mix: the trainer's mixture of a batch of our own.
normalized  before one with --normalize triton: its kernel, with images of our own.
begun, made_up, geometry  of one with another optimizer than SGD: see `dlojz.watch.optimizing`.
probe  the first training step, under hooks: devices, dtypes and strides of the weights, of each
       layer's input and output, of the loss; autocast, the gradient scaler, the gradients' norm;
       of a model to be compiled also its convolutions and products.
last   the last step of a test run, under the profiler, if the trainee's does not record it: its
       convolutions and matrix products with their sizes, copies, waits, tensors kept by autograd.
middle  the same for an earlier step, in a check that asks for it.
whole  all steps, from facts that the host has without waiting: shapes of the inputs, numbers of
       backward passes and optimizer steps, and whether the weights changed.
compilation  the work of torch.compile, if any: see `dlojz.watch.compilation`.
share  this process's part of the model and its training, and the layers that ran again.

The probe's hooks are removed when it ends. The others touch no data on the device: they cost
microseconds, and `torch.compile` leaves them out of its graphs.
"""

import sys
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch

from dlojz.runs import records
from dlojz.training import checkpoint, models, private, sharding
from dlojz.watch import (
    auditor,
    calls,
    casts,
    compilation,
    group,
    interpreted,
    inventory,
    mixtures,
    normalizing,
    optimizing,
    profile,
    readings,
    samples,
    workload,
)
from dlojz.watch.stopwatch import Stopwatch

LAYER = "layer in out device in_layout out_layout"  # the keys of a layer's row
NOTED = 64  # updates of a run to keep rates of
# Steps after the probe until compiling is over. On a GPU the first one compiles, the
# second warms a CUDA graph up, and the third records it.
COMPILES_IN = {"cpu": 2, "cuda": 3}


def watch(run, training, loader, args) -> "Witness":
    """Watch a training run that is about to begin, and write the evidence to `run`, its log.

    training: as `build_training` returned it; loader: that of the training images.
    """
    return Witness(run, training, loader, args)


class Witness:
    """The hooks and the profiler of one run; the Chronometer announces its last step."""

    def __init__(self, run, training, loader, args):
        self._run, self._training, self._loader = run, training, loader
        self._model, self._args = training.model, args
        group.watch(run)
        steps = min(args.test_nsteps, len(loader)) * args.epochs
        self.last = steps - 1 if args.test and steps > 1 else None
        self._looked_at = None  # the step that is profiled, or was last
        self._inputs, self._losses = Counter(), Counter()
        self._val_dtypes = set()
        self._counts = Counter()
        self._layers, self._later_layers, self._first = Counter(), Counter(), {}
        self.chronometer = None  # set by the Chronometer
        self._phases, self._threads = {}, 0
        self._rates = []
        self._loss_gradient = self._logits_gradient = None
        self._canary, self._stale = None, 0  # steps with old casts: a tensor on their device
        self._skipped = 0  # updates skipped by a fused optimizer: a tensor on its device
        self._deterministic = torch.get_deterministic_debug_mode()
        self._parameters = [*self._model.parameters()]  # as FSDP keeps them: in shards
        self._weights = None  # before the first update
        self._pixels = {}
        self._profiler = self._first_profiler = None
        self._counting, self._interpreted = ExitStack(), None  # of Triton's interpreter
        self._work = []
        self._stay, self._probe = [], []
        self._device = next(self._model.parameters()).device
        compiled = compilation.is_compiled(self._model)
        self._to_compile = COMPILES_IN.get(self._device.type, 0) * compiled
        asked = getattr(args, "compile", "off") != "off"  # perhaps not of the model itself
        self._compiles = asked or self._to_compile > 0
        self._counts_first = args.test and self._compiles
        self._counts_first &= "--profile" not in sys.argv  # only one profiler can run at a time
        if args.test and (seen := samples.look_within(loader)):
            run.evidence(records.Samples(**seen))
        mixtures.watch(run, training, args, loader)
        normalizing.watch(run, training, args)
        optimizing.watch(run, training, args)
        self._auditor = auditor.begin(run, training, args, self, steps, loader)
        self.middle = self._auditor.middle(self.last) if self._auditor and self.last else None
        timed = "timed" in auditor.wished()
        self._stopwatch = Stopwatch(run, self._model, args, self, steps) if timed else None
        self._hook()
        self._compilations = compilation.Compilations(self._place)
        run.before_end(self._finish)

    def _hook(self):
        torch.compiler.set_stance("force_eager")  # graphs would hide the layers from the probe
        self._stay = [
            *calls.hook(self._model, self._on_input, self._on_val_output),
            *calls.hook_loss(self._training, self._on_loss),
            self._training.optimizer.register_step_post_hook(self._on_update),
        ]
        weights = [p for p in self._model.parameters() if p.requires_grad]
        if weights:
            self._stay.append(weights[0].register_post_accumulate_grad_hook(self._on_gradient))
        layers = [
            calls.hook_layer(layer, self._on_layer) for layer in inventory.leaves(self._model)
        ]
        if self._auditor and not self._compiles:  # else it would be compiled again without them
            self._stay += layers
            layers = []
        self._probe = [
            *layers,
            calls.hook_layer(self._model, self._on_output),
            self._training.optimizer.register_step_pre_hook(self._on_gradients),
            self._training.optimizer.register_step_pre_hook(self._fill_undefined),
        ]

    @property
    def settled(self) -> bool:
        """Return whether the probe and the compilation are over, with their cost."""
        return not self._probe and self._to_compile <= 0

    # Every step: host data only ------------------------------------------------------------

    def _place(self):
        return "train" if calls.inner(self._model).training else "val", self._counts["forward"]

    def _on_input(self, model, args, kwargs):
        images = readings.entered(args, kwargs)
        mode = "train" if model.training else "val"
        if mode == "train":
            if self._canary:
                self._stale, self._canary = self._stale + self._canary.stale(), None
            self._count_work()
            self._counts["forward"] += 1
            self._note_phase("forward")
            self._note_threads()
            if not self._probe:
                self._to_compile -= 1
        else:
            self._note_phase("validation")
        if mode not in self._pixels and not images.is_meta:
            self._pixels[mode] = inventory.pixels(images)
        self._inputs[
            mode,
            tuple(images.shape),
            images.dtype,
            images.device,
            readings.layout(images),
            torch.get_autocast_dtype(images.device.type) if casts.enabled(images.device) else None,
            torch.is_grad_enabled(),
        ] += 1

    def _on_val_output(self, model, args, logits):
        if not model.training and torch.is_tensor(logits):
            self._val_dtypes.add(logits.dtype)

    def _on_loss(self, criterion, args, kwargs, loss):
        logits, labels = readings.given(args, kwargs)
        mode, _ = self._place()
        self._losses[mode, tuple(logits.shape), logits.dtype, labels.device, loss.dtype] += 1
        if self._probe and loss.requires_grad and not self._first:
            self._first = {
                "labels": inventory.crc(readings.classes(labels)),
                "logits": inventory.tensor(logits),
                "loss": inventory.tensor(loss),
            }
            of_mean = len(logits) if readings.sums(criterion) else 1
            loss.register_hook(lambda gradient: self._on_loss_gradient(gradient, of_mean))

    def _on_gradient(self, weight):
        self._counts["backward"] += 1
        self._note_phase("backward")
        self._note_threads()

    def _note_threads(self):
        """Note the number of threads for an operation, in each phase of a step."""
        self._threads = max(self._threads, torch.get_num_threads())

    def _on_update(self, optimizer, args, kwargs):
        if self._probe:
            torch.set_deterministic_debug_mode(self._deterministic)
        self._counts["optimizer_steps"] += 1
        self._note_phase("update")
        self._note_rate(optimizer)
        self._canary = casts.Canary(self._device) if casts.enabled(self._device) else None
        self._note_threads()
        skipped = inventory.found_inf(optimizer)
        if skipped is not None:
            self._skipped = self._skipped + skipped  # 0 or 1
        if self._probe and not skipped:
            self._end_probe()

    def _note_rate(self, optimizer):
        """Note the learning rate of one of the first updates, also of one that is skipped."""
        rates = {group["lr"] for group in optimizer.param_groups}
        known = not any(torch.is_tensor(rate) and rate.is_cuda for rate in rates)
        if len(self._rates) < NOTED:
            self._rates.append(max(map(float, rates)) if known else None)

    def _note_phase(self, work):
        """Note the Chronometer's phase in which this work is done."""
        self._phases.setdefault(work, set()).add(getattr(self.chronometer, "phase", None))

    # The probe: the first step that changes the weights ----------------------------------------

    def _count_work(self):
        """Begin to profile as the first batch enters the model, and stop at the next one.

        Nothing is compiled yet, so all of its convolutions and products are visible.
        """
        if self._first_profiler:
            self._work = workload.counted(profile.stop_profiler(self._first_profiler))
            self._first_profiler = None
        elif self._counts_first:
            self._counts_first = False
            self._first_profiler = profile.start_profiler([torch.profiler.ProfilerActivity.CPU])

    def _on_layer(self, layer, inputs, output):
        again = bool(self._probe and self._first)  # after the loss: the backward pass needs it
        self._counts["again"] += again
        if again or not layer.training or not torch.is_tensor(output):
            return
        entered = inputs[0] if inputs and torch.is_tensor(inputs[0]) else output
        seen = self._layers if self._probe else self._later_layers
        seen[
            type(layer).__name__,
            entered.dtype,
            output.dtype,
            output.device,
            readings.layout(entered),
            readings.layout(output),
        ] += 1

    def _on_loss_gradient(self, gradient, of_mean):
        if self._loss_gradient is None:
            self._loss_gradient = gradient.detach().sum() * of_mean

    def _on_output(self, model, inputs, logits):
        if torch.is_tensor(logits) and logits.requires_grad and self._logits_gradient is None:
            logits.register_hook(self._on_logits_gradient)

    def _on_logits_gradient(self, gradient):
        if self._logits_gradient is None:
            self._logits_gradient = gradient.detach().float().norm()

    def _on_gradients(self, optimizer, args, kwargs):
        if self._weights is None:  # the forward pass used them: no update has been made yet
            self._weights = inventory.checksum(self._parameters)
        if inventory.found_inf(optimizer):
            return
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._first["gradients"] = records.Gradients(
            dtypes=inventory.dtypes(gradients),
            missing=sum(p.grad is None for p in self._model.parameters() if p.requires_grad),
            norm=inventory.norm(gradients, getattr(optimizer, "grad_scale", None)),
        )

    def _fill_undefined(self, optimizer, args, kwargs):
        """Fill uninitialized memory with NaN until the optimizer is done.

        In torch 2.11 a fused SGD does not write its momenta if its first update is skipped: with
        memory that happens to be zero it would seem right.
        """
        self._deterministic = torch.get_deterministic_debug_mode()
        # `use_deterministic_algorithms` would also turn on Inductor's deterministic mode, for good,
        # which times no kernels of reductions and no choices for matrix products.
        torch.set_deterministic_debug_mode("warn")

    def _end_probe(self):
        if not self._probe:
            return
        for hook in self._probe:
            hook.remove()
        self._probe = []
        if self._first_profiler:
            self._count_work()
        torch.compiler.set_stance("default")
        states = [
            value
            for state in self._training.optimizer.state.values()
            for value in map(sharding.own, state.values())
            if torch.is_tensor(value) and value.ndim
        ]
        self._run.evidence(
            records.Share(
                **sharding.share(self._model, states),
                alive_bytes=inventory.alive_bytes() if inventory.is_sharded(self._model) else None,
                again=self._counts["again"],
            )
        )
        self._run.evidence(
            records.Probe(
                # Without an update: as they are.
                weights=self._weights or inventory.digest(self._model),
                parameters=inventory.parameters(self._model),
                metrics_devices=inventory.devices(self._training),
                layers=inventory.rows(self._layers, LAYER),
                **self._first,
                loss_gradient=inventory.value(self._loss_gradient),
                logits_gradient=inventory.value(self._logits_gradient),
                optimizer_state=inventory.dtypes(states),
                states_finite=inventory.finite(states),
                numerics=inventory.numerics(),
                loader=inventory.loader(self._loader),
                work=self._work,
                compiles_in=self._to_compile,
                batches=self._counts["forward"],
                made_bytes=models.made_bytes(),
            )
        )

    # The last step, and one in the middle: under the profiler ------------------------------------

    def begins(self, step: int):
        """Begin to profile a step, after the device has finished the earlier ones."""
        self._end_probe()
        if self._looked_at is None:
            self._run.note_memory()
        self._looked_at = step
        self._interpreted = self._counting.enter_context(interpreted.counted())
        self._profiler = profile.start_profiler()

    def ends(self):
        """Stop the profiler at the end of the step, and log its record."""
        if self._profiler is None:
            return
        events = profile.stop_profiler(self._profiler)
        self._profiler = None
        self._counting.close()
        seen = profile.summary(events) | inventory.distributed(
            self._model
        )  # by now DDP has its final buckets
        kind = records.MiddleStep if self._looked_at == self.middle else records.LastStep
        seen |= {"launches": self._interpreted.launches}
        alive = {"graphs_alive": inventory.graphs_alive(), "batches_alive": self._batches_alive()}
        self._run.evidence(kind(step=self._looked_at, **seen, **alive))

    def _batches_alive(self):
        shapes = {entry[1] for entry in self._inputs if entry[0] == "train"}
        return sum(tuple(t.shape) in shapes for t in inventory.tensors())

    def profiled(self, actions):
        """Log the actions of the trainee's profiler in each step, by torch's names."""
        self._run.evidence(records.Profiling(actions))

    # The whole run -------------------------------------------------------------------------------

    def _finish(self):
        for hook in self._stay:
            hook.remove()
        with suppress(RuntimeError):  # a device that has failed raises here; the log needs its end
            self._end_probe()
            self._run.evidence(self._whole())
            compiled = self._compilations.seen()
            if "rewritten" in auditor.wished() and "--compile" in sys.argv and not self._compiles:
                compiled = replace(compiled, words=compilation.words(self._model, self._args))
            if compiled != records.Compilation():
                self._run.evidence(compiled)
            if self._auditor:
                self._auditor.finish()
            if self._stopwatch:
                self._run.evidence(self._stopwatch.finish())
        self._loader = None
        private.end_workers()

    def _whole(self):
        after = inventory.digest(self._model)
        return records.WholeRun(
            inputs=inventory.rows(self._inputs, "mode shape dtype device layout autocast grad"),
            val_dtypes=sorted(map(inventory.word, self._val_dtypes)),
            losses=inventory.rows(self._losses, "mode logits logits_dtype labels_device dtype"),
            layers=inventory.rows(self._later_layers, LAYER),
            drawn=inventory.drawn(self._loader, self._args),
            backward=self._counts["backward"],
            optimizer_steps=self._counts["optimizer_steps"] - int(self._skipped),
            phases={work: sorted(map(str, phases)) for work, phases in self._phases.items()},
            threads=self._threads or None,
            rates=self._rates,
            scale=inventory.scale(self._training),
            stale_casts=int(self._stale),
            weights_changed=self._weights not in (None, after),  # None: no update has begun
            weights_after=after,
            buffers_after=inventory.checksum(self._model.buffers()),
            saves=len(checkpoint.saves),
            own_state=next(iter(checkpoint.own_states), None),
            pixels=self._pixels,
            **inventory.saved(self._model),
        )
