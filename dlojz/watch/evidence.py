"""Evidence of a run's real work, collected outside the trainer's source.

The trainer calls `watch` once. It logs these records of `dlojz.runs.records`:

samples  before a test run on files: the data set's images of a file of our own.
probe  the first training step, under hooks: devices, dtypes and strides of the weights, of each
       layer's input and output, of the loss; autocast, the gradient scaler, the gradients' norm.
       For a model to be compiled, also its convolutions and products: compiled code hides some.
last   the last step of a test run, under the profiler, outside the measured window: convolutions
       and matrix products with their sizes and dtypes, copies, waits, tensors kept by autograd. It
       is left out if the trainee's profiler records that step.
middle  the same for an earlier step, in a check that asks for it.
whole  all steps, from facts that the host has without waiting: shapes of the inputs, numbers of
       backward passes and optimizer steps, and whether the weights changed.
compilation  the work of torch.compile, if any: see `dlojz.watch.compilation`.
share  this process's part of the model and its training, in shards or whole, and the layers
       that ran again in the backward pass.

The probe's hooks are removed when it ends. The others touch no data on the device: they cost
microseconds, and `torch.compile` leaves them out of its graphs. In a check's short run of several
epochs, which is not timed, `Steps` looks at the data of every step.
"""

import atexit
import gc
import math
import sys
import time
import zlib
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import chain, islice

import torch
from torch.distributed.tensor import DTensor

from dlojz import idr_torch
from dlojz.runs import records
from dlojz.runs.folder import group_file
from dlojz.traces import kinds, spans
from dlojz.training import checkpoint, distributed, models, private, sharding
from dlojz.training.data import CHECKED_BATCHES, normalize
from dlojz.watch import auditor, calls, casts, compilation, samples, workload

ITEM_BYTES = {
    **{"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4},
    "uint8": 1,
}
# The keys of DDP's logging data to keep.
DDP_FACTS = (
    *("backend_name", "world_size", "bucket_cap_bytes", "bucket_sizes", "rebuilt_bucket_sizes"),
    *("find_unused_parameters", "unused_parameter_size", "gradient_as_bucket_view"),
    *("broadcast_buffers", "has_sync_bn", "static_graph", "comm_hook", "device_ids"),
)
CPU = torch.autograd.DeviceType.CPU
RANGE_S = 0.1  # gloo's threads complete a collective, and end its range in the trace a moment later
NOTED = 64  # updates of a run to keep rates and settings of
SEEN = 8  # pixels of an image, and numbers of a weight, in a short run
# Steps after the probe until compiling is over. On a GPU the first one compiles, the
# second warms a CUDA graph up, and the third records it.
COMPILES_IN = {"cpu": 2, "cuda": 3}


def watch(run, training, loader, args) -> "Witness":
    """Watch a training run that is about to begin, and write the evidence to `run`, its log.

    training: as `build_training` returned it; loader: that of the training images.
    """
    return Witness(run, training, loader, args)


_noted = []  # the folders of the runs watched in this process


@atexit.register  # at import, to be called after the trainer's own functions
def _note_group():
    """Leave a file if the process is still in its group: the log has its end already."""
    if distributed.are_joined():
        for folder in _noted:
            with suppress(OSError):  # a full disk
                group_file(folder, idr_torch.rank).touch()


class Witness:
    """The hooks and the profiler of one run; the Chronometer announces its last step."""

    def __init__(self, run, training, loader, args):
        self._run, self._training, self._loader = run, training, loader
        self._model, self._args = training.model, args
        distributed.keep_group()
        if distributed.are_joined():
            _noted.append(run.folder)
        steps = min(args.test_nsteps, len(loader)) * args.epochs
        self.last = steps - 1 if args.test and steps > 1 else None
        self._looked_at = None  # the step that is profiled, or was last
        self._inputs, self._losses = Counter(), Counter()
        self._val_dtypes = set()
        self._counts = Counter()
        self._layers, self._first = Counter(), {}
        self.chronometer = None  # set by the Chronometer
        self._phases, self._threads = {}, 0
        self._rates, self._updates = [], Counter()
        self._loss_gradient = self._logits_gradient = None
        self._canary, self._stale = None, 0  # steps with old casts: a tensor on their device
        self._skipped = 0  # updates skipped by a fused optimizer: a tensor on its device
        self._deterministic = torch.get_deterministic_debug_mode()
        self._parameters = [*self._model.parameters()]  # as FSDP keeps them: in shards
        self._weights = None  # before the first update
        self._pixels = {}
        self._profiler = self._first_profiler = None
        self._modes, self._inside = set(), []  # hooks of the layers, while a step is profiled
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
        self._auditor = auditor.begin(run, training, args, self, steps, loader)
        self.middle = self._auditor.middle(self.last) if self._auditor and self.last else None
        self._steps = Steps(self._model) if "epochs" in auditor.wished() else None
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
        if self._steps:
            self._stay += [
                self._training.optimizer.register_step_pre_hook(self._steps.begin),
                self._training.optimizer.register_step_post_hook(self._steps.end),
            ]
        weights = [p for p in self._model.parameters() if p.requires_grad]
        if weights:
            self._stay.append(weights[0].register_post_accumulate_grad_hook(self._on_gradient))
        self._probe = [
            *(calls.hook_layer(layer, self._on_layer) for layer in _leaves(self._model)),
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
        mode = "train" if calls.inner(self._model).training else "val"
        return mode, self._counts["forward"]

    def _on_input(self, model, args, kwargs):
        images = auditor.entered(args, kwargs)
        mode = "train" if model.training else "val"
        if self._steps:
            self._steps.enter(mode, images)
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
            self._pixels[mode] = _pixels(images)
        self._inputs[
            mode,
            tuple(images.shape),
            images.dtype,
            images.device,
            auditor.layout(images),
            torch.get_autocast_dtype(images.device.type) if casts.enabled(images.device) else None,
            torch.is_grad_enabled(),
        ] += 1

    def _on_val_output(self, model, args, logits):
        if not model.training and torch.is_tensor(logits):
            self._val_dtypes.add(logits.dtype)

    def _on_loss(self, criterion, args, kwargs, loss):
        logits, labels = auditor.given(args, kwargs)
        mode, _ = self._place()
        self._losses[mode, tuple(logits.shape), logits.dtype, labels.device, loss.dtype] += 1
        if self._steps:
            self._steps.label(mode, labels)
        if self._probe and loss.requires_grad and not self._first:
            self._first = {
                "labels": _crc(_classes(labels)),
                "logits": _tensor(logits),
                "loss": _tensor(loss),
            }
            of_mean = len(logits) if auditor.sums(criterion) else 1
            loss.register_hook(lambda gradient: self._on_loss_gradient(gradient, of_mean))

    def _on_gradient(self, weight):
        self._counts["backward"] += 1
        self._note_modes()
        self._note_phase("backward")
        self._note_threads()

    def _note_modes(self, *of_a_layer):
        """Note the active dispatch modes, which run Python between an operation and its kernel."""
        self._modes |= private.dispatch_modes()

    def _note_threads(self):
        """Note the number of threads for an operation, in each phase of a step."""
        self._threads = max(self._threads, torch.get_num_threads())

    def _on_update(self, optimizer, args, kwargs):
        if self._probe:
            torch.set_deterministic_debug_mode(self._deterministic)
        self._counts["optimizer_steps"] += 1
        self._note_phase("update")
        self._canary = casts.Canary(self._device) if casts.enabled(self._device) else None
        self._note_update(optimizer)
        self._note_threads()
        skipped = _found_inf(optimizer)
        if skipped is not None:
            self._skipped = self._skipped + skipped  # 0 or 1
        if self._probe and not skipped:
            self._end_probe()

    def _note_update(self, optimizer):
        """Note the number of weights that one of the first updates moves, and its settings."""
        if len(self._rates) == NOTED:
            return
        groups = optimizer.param_groups
        rates = {group["lr"] for group in groups}
        known = not any(torch.is_tensor(rate) and rate.is_cuda for rate in rates)
        self._rates.append(max(map(float, rates)) if known else None)
        moved = sum(p.grad is not None for group in groups for p in group["params"])
        settings = sorted({str(auditor.settings(group, optimizer)) for group in groups})
        self._updates[moved, "; ".join(settings)] += 1

    def _note_phase(self, work):
        """Note the Chronometer's phase in which this work is done."""
        self._phases.setdefault(work, set()).add(getattr(self.chronometer, "phase", None))

    # The probe: the first step that changes the weights ----------------------------------------

    def _count_work(self):
        """Begin to profile as the first batch enters the model, and stop at the next one.

        Nothing is compiled yet, so all of its convolutions and products are visible.
        """
        if self._first_profiler:
            self._work = workload.counted(stop_profiler(self._first_profiler))
            self._first_profiler = None
        elif self._counts_first:
            self._counts_first = False
            self._first_profiler = start_profiler([torch.profiler.ProfilerActivity.CPU])

    def _on_layer(self, layer, inputs, output):
        self._counts["again"] += bool(self._first)  # after the loss: the backward pass needs it
        if self._first or not layer.training or not torch.is_tensor(output):
            return  # the first forward pass is enough
        entered = inputs[0] if inputs and torch.is_tensor(inputs[0]) else output
        self._layers[
            type(layer).__name__,
            entered.dtype,
            output.dtype,
            output.device,
            auditor.layout(entered),
            auditor.layout(output),
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
            self._weights = _checksum(self._parameters)
        if _found_inf(optimizer):
            return
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        self._first["gradients"] = records.Gradients(
            dtypes=_dtypes(gradients),
            missing=sum(p.grad is None for p in self._model.parameters() if p.requires_grad),
            norm=_norm(gradients, getattr(optimizer, "grad_scale", None)),
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
                alive_bytes=_alive_bytes() if _is_sharded(self._model) else None,
                again=self._counts["again"],
            )
        )
        self._run.evidence(
            records.Probe(
                weights=self._weights or digest(self._model),  # without an update: as they are
                parameters=_parameters(self._model),
                metrics_devices=_devices(self._training),
                layers=_rows(self._layers, "layer in out device in_layout out_layout"),
                **self._first,
                loss_gradient=_value(self._loss_gradient),
                logits_gradient=_value(self._logits_gradient),
                optimizer_state=_dtypes(states),
                states_finite=_finite(states),
                numerics=_numerics(),
                loader=_loader(self._loader),
                work=self._work,
                compiles_in=self._to_compile,
                batches=self._counts["forward"],
                made_bytes=models.made_bytes(),
            )
        )

    # The last step, and one in the middle: under the profiler ------------------------------------

    def begins(self, step: int):
        """Begin to profile a step, after the device has finished the earlier ones."""
        with self._auditor.pause() if self._auditor else nullcontext():
            self._end_probe()
            if self._looked_at is None:
                self._run.note_memory()
            self._looked_at = step
            if not self._compiles:  # or it would be compiled again, with these hooks
                call = self._note_modes
                self._inside = [layer.register_forward_hook(call) for layer in _leaves(self._model)]
            self._profiler = start_profiler()

    def ends(self):
        """Stop the profiler at the end of the step, and log its record."""
        if self._profiler is None:
            return
        events = stop_profiler(self._profiler)
        self._profiler = None
        for hook in self._inside:
            hook.remove()
        seen = _profile(events) | _distributed(self._model)  # by now DDP has its final buckets
        seen["modes"] = sorted(self._modes)
        kind = records.MiddleStep if self._looked_at == self.middle else records.LastStep
        alive = {"graphs_alive": _graphs_alive(), "batches_alive": self._batches_alive()}
        self._run.evidence(kind(step=self._looked_at, **seen, **alive))

    def _batches_alive(self):
        shapes = {entry[1] for entry in self._inputs if entry[0] == "train"}
        return sum(tuple(t.shape) in shapes for t in _tensors())

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
            if (compiled := self._compilations.seen()) != records.Compilation():
                self._run.evidence(compiled)
            if self._auditor:
                self._auditor.finish()
        self._loader = None
        private.end_workers()

    def _whole(self):
        after = digest(self._model)
        return records.WholeRun(
            inputs=_rows(self._inputs, "mode shape dtype device layout autocast grad"),
            val_dtypes=sorted(map(_word, self._val_dtypes)),
            losses=_rows(self._losses, "mode logits logits_dtype labels_device dtype"),
            drawn=self._drawn(),
            backward=self._counts["backward"],
            optimizer_steps=self._counts["optimizer_steps"] - int(self._skipped),
            phases={work: sorted(map(str, phases)) for work, phases in self._phases.items()},
            threads=self._threads or None,
            rates=self._rates,
            updates=_rows(self._updates, "weights settings"),
            **(self._steps.found() if self._steps else {}),
            scale=self._scale(),
            stale_casts=int(self._stale),
            weights_changed=self._weights not in (None, after),  # None: no update has begun
            weights_after=after,
            buffers_after=_checksum(self._model.buffers()),
            saves=len(checkpoint.saves),
            own_state=next(iter(checkpoint.own_states), None),
            pixels=self._pixels,
            **self._saved(),
        )

    def _saved(self):
        """Return the facts of the checkpoints, as fields of the run's record."""
        if not checkpoint.saves:
            return {}
        first, last = checkpoint.saves[0], checkpoint.saves[-1]
        names = not last.names or last.names == list(self._training.model.state_dict())
        return {
            "saved_states": first.states,
            "saved_names": names,
            "saved_bytes": last.nbytes,
        }

    def _drawn(self):
        """Return checksums of the batches of all epochs, as many as each has steps.

        A loop left by `break` has drawn one more.
        """
        drawn = getattr(self._loader.batch_sampler, "drawn", None)
        steps = self._args.test_nsteps if self._args.test else None
        return drawn and [*chain(*(each[:steps] for each in drawn))][:CHECKED_BATCHES]

    def _scale(self):
        """Return the gradient scaler's final scale; None if there is none, or it is disabled."""
        scaler = getattr(self._training, "scaler", None)
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None


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
        classes = _classes(labels)
        places = torch.arange(1, len(classes) + 1, device=classes.device)
        self._labels.append((mode, (places * classes).sum()))

    def begin(self, optimizer, args, kwargs):
        """Note the gradients of an update, and compare its state with the previous one's result."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [auditor.own(p.grad) for p in weights if p.grad is not None]
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
        found, names = {}, auditor.states_of(optimizer)
        for place in {0, len(weights) // 2, len(weights) - 1}:
            weight = weights[place]
            states = {key: optimizer.state.get(weight, {}).get(key) for key in names}
            for key, tensor in ({"weight": weight} | states).items():
                if tensor is not None and not tensor.is_meta:
                    found[place, key] = auditor.own(tensor.detach()).reshape(-1)[:SEEN]
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


def digest(model) -> str | None:
    """Return a checksum of all weights, equal for any device and layout; None on the meta device.

    Buffers are left out, because a forward pass changes them.
    """
    return _checksum(model.parameters())


def _checksum(tensors) -> str | None:
    total = 0
    for tensor in tensors:
        if tensor.is_meta:
            return None
        total = _crc(tensor, total)
    return f"{total:08x}"


def _classes(labels):
    """Return the classes of a batch; labels: class indices, or probabilities [N, classes]."""
    return labels if labels.ndim == 1 else labels.argmax(1)


def _crc(tensor, start=0):
    if tensor.is_meta:
        return None
    flat = sharding.own(tensor.detach()).contiguous().cpu().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy(), start)


def _pixels(images):
    images = normalize(images).float()  # in case the model does it
    found = (f(images, (0, 2, 3)) for f in (torch.mean, torch.std))
    return [[round(v, 4) for v in values.tolist()] for values in found]


def _found_inf(optimizer):
    """Return whether a fused optimizer skips this update, as a tensor; None for any other one.

    A gradient scaler always calls a fused optimizer, which decides itself.
    """
    return getattr(optimizer, "found_inf", None)


def _norm(gradients, scale):
    """Return the gradients' norm, without the factor that a fused optimizer removes itself."""
    if not gradients:
        return None
    # One call takes no mixture, and a trainee's model may mix shards and whole tensors.
    parts = [[g for g in gradients if isinstance(g, DTensor) == it] for it in (True, False)]
    norms = [_value(torch.nn.utils.get_total_norm(part)) for part in parts if part]
    if None in norms:
        return None
    return math.hypot(*norms) / (1.0 if scale is None else float(scale))


def _value(tensor):
    if isinstance(tensor, DTensor):  # each process has a part of the norm
        tensor = tensor.full_tensor()
    return None if tensor is None or tensor.is_meta else float(tensor)


def _word(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, bool | int | str | tuple | None) else str(value)


def _rows(counter, names):
    return [
        dict(zip(names.split(), map(_word, key), strict=True)) | {"count": count}
        for key, count in counter.items()
    ]


def _tensor(tensor):
    return records.Tensor(_word(tensor.dtype), str(tensor.device))


def _finite(tensors):
    """Return whether all values are finite; None without values, as on the meta device."""
    there = [t for t in tensors if not t.is_meta]
    return bool(torch.stack([t.isfinite().all() for t in there]).all()) if there else None


def _dtypes(tensors):
    return dict(Counter(_word(t.dtype) for t in tensors))


def _parameters(model):
    weights = list(model.parameters())
    return records.Parameters(
        dtypes=_dtypes(weights),
        devices=dict(Counter(str(p.device) for p in weights)),
        layouts=dict(Counter(auditor.layout(p) for p in weights)),
    )


def _devices(training):
    metrics = getattr(training, "metrics", {})
    each = metrics.values() if hasattr(metrics, "values") else [metrics]  # one for all, or several
    found = Counter()
    for metric in each:
        values = metric.buffers() if isinstance(metric, torch.nn.Module) else [metric]
        found.update(str(value.device) for value in islice(filter(torch.is_tensor, values), 1))
    return dict(found)


def _numerics():
    cuda, cudnn, cpu = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    on_cpu = cpu.matmul.fp32_precision, cpu.conv.fp32_precision
    return records.Numerics(
        matmul_fp32=_float32(cuda.fp32_precision),
        conv_fp32=_float32(cudnn.conv.fp32_precision),
        cpu_fp32=[_float32(word) for word in on_cpu],
        fp16_reduction=cuda.allow_fp16_reduced_precision_reduction,
        bf16_reduction=cuda.allow_bf16_reduced_precision_reduction,
        cudnn=cudnn.enabled,
        cudnn_benchmark=cudnn.benchmark,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _leaves(model):
    return [layer for layer in model.modules() if not any(True for _ in layer.children())]


def _float32(word):
    """Return torch's float32 precision; "none", as after `allow_tf32 = False`, is ieee."""
    return "ieee" if word == "none" else word


def _loader(loader):
    names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
    return records.Loader(
        **{name: getattr(loader, name, None) for name in names},
        resident=getattr(loader.dataset, "resident", None),
    )


def start_profiler(activities=()):
    """Return a profiler that has started; `stop_profiler` stops it.

    activities: by default the host's work, and a GPU's if there is one.
    """
    kinds_of = torch.profiler.ProfilerActivity
    on_gpu = [kinds_of.CUDA] if torch.cuda.is_available() else []
    activities = list(activities) or [kinds_of.CPU, *on_gpu]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    profiler.start()
    # True only avoids a warning. At the end it would spend seconds on Python objects that nothing
    # reads.
    profiler.profiler.acc_events = False
    return profiler


def stop_profiler(profiler) -> list:
    """Stop the profiler, which waits for the device; return its events."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        time.sleep(RANGE_S)
    profiler.stop()
    return profiler.profiler.kineto_results.events()


def profiled(call) -> list:
    """Return the profiler's events of `call()`, and of the kernels that it launches."""
    profiler = start_profiler()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return stop_profiler(profiler)


def counts(events) -> dict[str, int]:
    """Return the numbers of operations, kernels, and reads of a value, which make the host wait."""
    names = [e.name() for e in events if e.device_type() == CPU]
    return {
        "operations": sum(name.startswith("aten::") for name in names),
        "kernels": sum(_ran_on_gpu(e) for e in events),
        "reads": sum(name in kinds.READS for name in names),
    }


def _profile(events):
    matrix, calls, copies, kernels = Counter(), Counter(), Counter(), Counter()
    fused = 0
    hosts = [e for e in events if e.device_type() == CPU]  # ranges are repeated on the GPU
    own = [e for e in hosts if kinds.OWN_READS.match(e.name())]
    aside = [e for e in hosts if e.name() == kinds.ASIDE]
    waits_of_ddp, forward = kinds.OWN_WAITS
    ddp = [e for e in hosts if e.name() == forward]
    for event in events:
        name = event.name()
        if kind := kinds.MATRIX_OPS.get(name):
            matrix[kind, workload.dtype(next((d for d in event.dtypes() if d), "?"))] += 1
        elif kinds.FUSED.match(name):
            fused += 1
        elif name == "aten::_local_scalar_dense":
            calls["item"] += not any(_within(event, other) for other in own + aside)
        elif kinds.WAITS.match(name):
            others = aside + ddp * bool(waits_of_ddp.match(name))
            calls[name] += not any(_during(event, other) for other in others)
        elif name.startswith("Memcpy"):
            copies[name] += 1
        elif _ran_on_gpu(event):
            kernels[name[:120]] += event.duration_ns()
    return {
        **communication(events),
        **compilation.coverage(events),
        "work": workload.counted(events),
        "matrix_ops": [{"op": op, "dtype": d, "count": n} for (op, d), n in matrix.items()],
        "fused_updates": fused,
        "calls": dict(calls),
        "copies": dict(copies),
        "non_blocking": sum(map(_asks_not_to_wait, events)),
        "kernels_us": {name: ns / 1000 for name, ns in kernels.most_common(12)},
    }


def _within(event, other) -> bool:
    return event.start_thread_id() == other.start_thread_id() and _during(event, other)


def _during(event, other) -> bool:
    return 0 <= event.start_ns() - other.start_ns() < other.duration_ns()


def _asks_not_to_wait(event) -> bool:
    # Tensor.to(dtype, layout, device, pin_memory, non_blocking, copy, memory_format), after self
    inputs = event.concrete_inputs() if event.name() == "aten::to" else ()
    return len(inputs) == 8 and inputs[5] is True


def _ran_on_gpu(event) -> bool:
    # The profiler repeats the host's annotations on the GPU, around their kernels.
    return event.device_type() != CPU and not event.is_user_annotation()


def communication(events):
    """Return the communication between the processes in a step; {} if there was none.

    Each collective has the size of its operand, its duration and its begin, counted from the step's
    first record; the span of the backward pass is beside it. On a GPU with a kernel for each
    collective, these are the kernels' times. The kernels' total time, and its part that did not
    overlap with other work, are added.
    """
    begin = min((e.start_ns() for e in events), default=0)
    collectives, kernels, others = [], [], []
    for event in events:
        if _ran_on_gpu(event):
            (kernels if kinds.NCCL_KERNEL.match(event.name()) else others).append(event)
        elif kinds.COLLECTIVE.fullmatch(event.name()) and event.device_type() == CPU:
            collectives.append(event)
    if not collectives:
        return {}
    collectives.sort(key=lambda e: e.start_ns())
    kernels.sort(key=lambda e: e.start_ns())
    one_each = len(kernels) == len(collectives)  # then both are in the same order
    times = [_span(event, begin) for event in (kernels if one_each else collectives)]
    found = {
        "collectives": [_collective(e, s) for e, s in zip(collectives, times, strict=True)],
        "timed_on": "gpu" if one_each else "host",
    }
    if backward := _backward(events, others if one_each else []):
        ends = [_span(event, begin) for event in backward]
        found["backward_ms"] = [round(f, 3) for f in (min(ends)[0], max(e for _, e in ends))]
    if kernels:
        ours, rest = (spans.union(_span(e, begin) for e in part) for part in (kernels, others))
        found["communication_ms"] = round(spans.length(ours), 3)
        found["exposed_ms"] = round(spans.length(spans.without(ours, rest)), 3)
    return found


def _span(event, begin):
    """Return an event's begin and end, in milliseconds since `begin`."""
    start = (event.start_ns() - begin) / 1e6
    return start, start + event.duration_ns() / 1e6


def _collective(event, span):
    backend, op = kinds.COLLECTIVE.fullmatch(event.name()).groups()
    dtype = workload.dtype(next(iter(event.dtypes()), "?"))
    return {
        "backend": backend,
        "op": op,
        "bytes": math.prod(next(iter(event.shapes()), [])) * ITEM_BYTES.get(dtype, 4),
        "dtype": dtype,
        "begin_ms": round(span[0], 3),
        "ms": round(span[1] - span[0], 3),
    }


def _backward(events, on_device):
    """Return the records of the backward pass: its kernels on the GPU, or its own."""
    host = [e for e in events if e.name().startswith("autograd::engine::evaluate_function")]
    if not host or not on_device:
        return host
    begin = min(e.start_ns() for e in host)
    end = max(e.start_ns() + e.duration_ns() for e in host)
    # Operations only: CUDA calls have numbers of their own, which may coincide.
    launched = {
        e.correlation_id()
        for e in events
        if e.device_type() == CPU and not e.name().startswith("cu") and begin <= e.start_ns() < end
    }
    return [e for e in on_device if e.linked_correlation_id() in launched] or host


def _distributed(model):
    found = private.ddp_facts(model)
    facts = {k: found[k] for k in DDP_FACTS if k in found}
    return {"wrapper": type(model).__name__} | facts if found else {}


def _is_sharded(model):
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def _tensors():
    """Return all tensors of this process, without torch.compile's traced ones."""
    found = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return [t for t in found if not private.has_no_values(t)]


def _alive_bytes():
    """Return the bytes of all tensors of this process; each piece of memory counts once."""
    whole = (t for t in _tensors() if not isinstance(t, DTensor) and not t.is_meta)
    storages = (t.untyped_storage() for t in whole if t.layout == torch.strided)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _graphs_alive():
    """Return the number of tensors that still hold an autograd graph after the step."""
    return sum(t.grad_fn is not None for t in _tensors())
