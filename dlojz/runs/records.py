"""The records that a log holds besides steps: the evidence of a training run, and measures.

Logging one more thing takes one line here, a field with a default, and code that fills it. A record
that was never written has its defaults, and is false.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Self


@dataclass(frozen=True)
class Record:
    """The base of all records."""

    @classmethod
    def read(cls, event: Mapping) -> Self:
        """Return the record in an event, without the fields that are not known here.

        Raises KeyError for a missing field that has no default, and TypeError for a field that
        should be a list or an object and is not.
        """
        found = {}
        for f in fields(cls):
            if f.name in event:
                found[f.name] = _value(f, event[f.name])
            elif _default(f) is MISSING:
                raise KeyError(f.name)
        return cls(**found)

    def written(self) -> dict:
        """Return the fields that the log keeps: those that differ from their defaults."""
        found = {f.name: (getattr(self, f.name), _default(f)) for f in fields(self)}
        return {n: _written(value) for n, (value, default) in found.items() if value != default}

    def __bool__(self):
        return bool(self.written())


def _default(f):
    return f.default if f.default_factory is MISSING else f.default_factory()


def _written(value):
    if isinstance(value, list):
        return [_written(each) for each in value]
    return value.written() if isinstance(value, Record) else value


def _value(f, value):
    kind = f.default_factory
    if kind is MISSING:
        return value
    expected = Mapping if issubclass(kind, Record) else kind
    if not isinstance(value, expected):
        word = "a list" if kind is list else "an object"
        raise TypeError(f"{f.name} is {value!r}, expected {word}")
    if "of" in f.metadata:
        return [f.metadata["of"].read(each) for each in value]
    return kind.read(value) if issubclass(kind, Record) else value


# The evidence of a training run -----------------------------------------------------------------


@dataclass(frozen=True)
class Tensor(Record):
    """The dtype and the device of a tensor."""

    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Parameters(Record):
    """The numbers of weights, by dtype, by device and by layout."""

    dtypes: dict = field(default_factory=dict)
    devices: dict = field(default_factory=dict)
    layouts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Gradients(Record):
    """The gradients as the optimizer finds them."""

    dtypes: dict = field(default_factory=dict)
    missing: int | None = None  # weights without a gradient
    norm: float | None = None


@dataclass(frozen=True)
class Numerics(Record):
    """torch's switches for speed and for precision."""

    matmul_fp32: str | None = None
    conv_fp32: str | None = None
    cpu_fp32: list = field(default_factory=list)  # of matrix products and convolutions there
    cudnn: bool | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool | None = None


@dataclass(frozen=True)
class Loader(Record):
    """The loader of the training images."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    resident: bool | None = None  # its images are in memory


@dataclass(frozen=True)
class Probe(Record):
    """The first step that changed the weights, under hooks."""

    weights: str | None = None  # a checksum, before it
    parameters: Parameters = field(default_factory=Parameters)
    metrics_devices: dict = field(default_factory=dict)
    # Dicts of layer, in, out (dtypes), device, in_layout, out_layout, count.
    layers: list = field(default_factory=list)
    labels: int | None = None  # a checksum
    logits: Tensor = field(default_factory=Tensor)
    loss: Tensor = field(default_factory=Tensor)
    loss_gradient: float | None = None  # a gradient scaler's factor
    logits_gradient: float | None = None  # its norm, with that factor
    gradients: Gradients = field(default_factory=Gradients)
    optimizer_state: dict = field(default_factory=dict)  # how many tensors, by dtype
    states_finite: bool | None = None  # all of their values, after the update
    numerics: Numerics = field(default_factory=Numerics)
    loader: Loader = field(default_factory=Loader)
    work: list = field(default_factory=list)  # as of the last step; only if it will be compiled
    compiles_in: int = 0  # further steps that the measurement waits for, if the model is compiled
    batches: int = 0  # of the training, until the first update that was not skipped
    made_bytes: int = 0  # of weights that modules of this process were given whole, with values


@dataclass(frozen=True)
class LastStep(Record):
    """The last step of a test run, under the profiler."""

    step: int | None = None  # its number; None in a log of before this was noted
    matrix_ops: list = field(default_factory=list)  # dicts of op, dtype, count
    # Dicts of when (forward, backward, again), kind, of (the sizes), dtype, flop (of one), count.
    work: list = field(default_factory=list)
    fused_updates: int | None = None  # calls that update many weights in one kernel
    calls: dict = field(default_factory=dict)  # how often the host waited, by call, such as "item"
    copies: dict = field(default_factory=dict)  # how many, by the profiler's name
    non_blocking: int | None = None  # how many calls of `Tensor.to` asked for that
    kernels_us: dict = field(default_factory=dict)  # the longest, by name
    before_convolution: list | None = None  # a GPU's kernels, from the copy of the batch on
    launches: int = 0  # of kernels, by Triton's interpreter
    graphs_alive: int | None = None  # tensors that hold their graph after the step
    batches_alive: int | None = None  # tensors of a batch's shape after the step
    compiled_regions: int | None = None  # that torch.compile made, forward and backward
    uncompiled: dict = field(default_factory=dict)  # matrix products outside of them, by kind
    # Dicts of backend, op, bytes, dtype, begin_ms, ms.
    collectives: list = field(default_factory=list)
    timed_on: str | None = None  # the clock of these times: gpu, host
    backward_ms: tuple[float, float] = (0.0, 0.0)  # when the backward pass began and ended
    communication_ms: float | None = None  # on the GPU
    exposed_ms: float | None = None  # the part that other work does not overlap
    # DDP's own logging data.
    wrapper: str | None = None
    world_size: int | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    static_graph: bool | None = None
    comm_hook: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU communicated."""
        return self.communication_ms is not None

    @property
    def only_asked(self) -> bool:
        """Return whether the times are when the host launched, not when the GPU communicated."""
        return self.on_gpu and self.timed_on != "gpu"


@dataclass(frozen=True)
class MiddleStep(LastStep):
    """A step before the last one that a check has drawn, under the profiler."""


@dataclass(frozen=True)
class Share(Record):
    """The bytes that a process holds of the model and its training after the first update."""

    placements: dict = field(default_factory=dict)  # weights by how they are spread, or "whole"
    held: dict = field(default_factory=dict)  # bytes of parameters, gradients, optimizer, here
    alive_bytes: int | None = None  # of all tensors of the process, if the weights are spread
    units: int = 0  # modules that FSDP2 gathers one at a time
    again: int = 0  # calls of layers in the backward pass: their outputs were not kept


@dataclass(frozen=True)
class WholeRun(Record):
    """All steps of a run, from what the host knows without waiting."""

    # Dicts of mode, shape, dtype, device, layout, autocast, grad, count.
    inputs: list = field(default_factory=list)
    val_dtypes: list = field(default_factory=list)  # of the model's outputs in the validation
    # Dicts of mode, logits, logits_dtype, labels_device, dtype, count.
    losses: list = field(default_factory=list)
    # As the probe's, of all later passes; in a check's run that is watched.
    layers: list = field(default_factory=list)
    drawn: list | None = None  # a checksum of the images of each batch
    backward: int | None = None
    optimizer_steps: int | None = None
    phases: dict = field(default_factory=dict)  # of the Chronometer, by what was done in them
    threads: int | None = None  # of the processor, at most, for an operation
    rates: list = field(default_factory=list)  # of the first updates; None: on a GPU
    scale: float | None = None  # of the gradient scaler, at the end
    stale_casts: int = 0  # steps that computed with casts of the weights of an earlier one
    weights_changed: bool | None = None
    weights_after: str | None = None  # checksums
    buffers_after: str | None = None
    saves: int | None = None  # checkpoints that were written
    own_state: str | None = None  # a checksum of this process's state, as it was made first
    saved_states: list = field(default_factory=list)  # those in the first checkpoint, by rank
    saved_names: bool | None = None  # it has the names of this run's model, which a resume needs
    saved_bytes: int | None = None  # what this process wrote for it
    pixels: dict = field(default_factory=dict)  # {mode: [means, deviations]} of a batch, by colour


@dataclass(frozen=True)
class Compilation(Record):
    """The record of torch.compile in a run: its graphs, breaks and seconds."""

    # Dicts of id ("0/1": the second time of the first frame), why (dynamo, lazy_backward, ...),
    # mode (train, val), step (how many training steps had begun), seconds.
    seen: list = field(default_factory=list)
    graphs: int = 0
    operations: int = 0  # in these graphs
    breaks: dict = field(default_factory=dict)  # how many, by reason
    differentiated: int = 0  # graphs that AOTAutograd took: with the backend "eager", none
    generated: int = 0  # graphs for which Inductor made code, forward and backward
    # What the trainer asks torch.compile for, by word of --compile; in a short run that is off.
    words: dict = field(default_factory=dict)

    @property
    def in_training(self) -> list[dict]:
        return [c for c in self.seen if c["mode"] == "train"]

    @property
    def cached(self) -> bool:
        """Return whether the code for training came from a cache of an earlier process.

        With an empty cache the backward pass is compiled on its own, as it is first needed. What
        comes from the cache has its backward pass with it.
        """
        why = {c["why"] for c in self.in_training}
        return self.generated > 0 and bool(why) and "lazy_backward" not in why


@dataclass(frozen=True)
class Samples(Record):
    """The data set's output for image files that the probe made."""

    set: str | None = None
    pil: int | None = None  # how often PIL opened a file
    others: int | None = None  # files that Python opened beside the probe's
    label: int | None = None
    shape: list | None = None
    dtype: str | None = None
    grey: int | None = None  # channels of a grey file's image
    red: int | None = None  # the channel of this colour
    boxes: list = field(default_factory=list)  # the crop of each image
    detail: float | None = None
    fresh: int | None = None  # images that show the change of the file
    kept_objects: int | None = None
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Mixtures(Record):
    """The batches that the trainer's `forward` made of the probe's images and draws."""

    ways: list = field(default_factory=list)  # dicts, one per way: see dlojz.watch.mixtures
    unasked: bool | None = None  # with --mix off, images and labels stayed as they were
    validated: bool | None = None  # those of a validation did, too
    error: str | None = None


@dataclass(frozen=True)
class Normalized(Record):
    """The output of kernels.normalize for images of the probe: see dlojz.watch.normalizing."""

    cases: list = field(default_factory=list)  # dicts, one per call
    again: bool | None = None  # it stayed the same for other images in the same memory
    stream: bool | None = None  # it was that of images that the GPU was still to replace
    timed: dict = field(default_factory=dict)  # on a GPU, in a check
    # Dicts of calls, asked, dtype: by precision, and for validation and --normalize torch.
    forward: dict = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Begun(Record):
    """The state of a training as it begins, by an optimizer of its own or after a finder."""

    optimizer: str | None = None
    weights: str | None = None  # checksums
    buffers: str | None = None
    states: int = 0  # tensors of the optimizer that hold anything but zeros
    rates: list = field(default_factory=list)  # of the groups
    updates: int | None = None  # of the schedule, so far


@dataclass(frozen=True)
class MadeUp(Record):
    """The updates of made-up weights by each optimizer: see `dlojz.watch.optimizing`."""

    ways: dict = field(default_factory=dict)  # by optimizer: dicts of updates, mistakes
    error: str | None = None


@dataclass(frozen=True)
class Geometry(Record):
    """The geometry of the first updates of a check's audited run: see `dlojz.watch.geometry`."""

    optimizer: str | None = None
    updates: list = field(default_factory=list)  # dicts, by part of the model and kind of number


@dataclass(frozen=True)
class Profiling(Record):
    """The actions of the trainer's own profiler."""

    actions: list = field(default_factory=list)  # one per step, by torch's names


@dataclass(frozen=True)
class Audit(Record):
    """The facts of a check's audited run: see `dlojz.watch.auditor`."""

    images: list = field(default_factory=list)  # of each step: those whose gradient came back
    losses: list = field(default_factory=list)  # of each step, from the criterion
    # By mode, of each batch: its loss, its images, and how many of these were classified rightly.
    met: dict = field(default_factory=dict)
    same_buffers: bool | None = None  # as a validation begins: those of the step before
    kept_buffers: bool | None = None  # as the next epoch begins: those of the validation
    same_weights: bool | None = None  # in all validations: those that the last update left
    updates: int | None = None
    kept: list = field(default_factory=list)  # the updates that were written, to be replayed
    foreign: int = 0  # updates of weights that are not the model's


@dataclass(frozen=True)
class Stopwatch(Record):
    """The speed of a check's timed run: see `dlojz.watch.stopwatch`."""

    windows: list = field(default_factory=list)  # dicts of first_step, steps, images, wall_s


@dataclass(frozen=True)
class Update(Record):
    """An update's distance from the solution's, link by link, as shares of the solution's values.

    None: the solution skipped it, or its noise was not measured. The gradients are compared as a
    whole, and by the logarithms of the norms of each large tensor; an optimizer in roundings.
    """

    update: int
    gradients: float | None = None
    gradients_tensor: float | None = None
    gradients_worst: str | None = None  # of which weight
    gradients_noise: float | None = None
    gradients_tensor_noise: float | None = None
    missing: list = field(default_factory=list)  # weights without a gradient that should have one
    unexpected: list = field(default_factory=list)  # and with one that should have none
    buffers: float | None = None
    buffers_noise: float | None = None
    outputs: float | None = None  # None: they were not kept, either
    outputs_noise: float | None = None
    last: float | None = None  # of the last bias; None: of no linear layer, or sharded
    optimizer_roundings: float = 0.0
    optimizer_worst: str | None = None
    optimizer_share: float = 0.0

    @property
    def solved(self) -> bool:
        return self.gradients is not None


@dataclass(frozen=True)
class Settings(Record):
    """The settings of an update, and its weights."""

    update: int
    optimizer: str = ""
    lr: list = field(default_factory=list)  # of each group of weights
    lr_off: float = 0.0  # the furthest from the solution's, as a share of it
    settings: list = field(default_factory=list)  # dicts, one for each group
    missing: list = field(default_factory=list)  # weights without a gradient
    evaluating: int = 0  # layers that were not in training
    random: list = field(default_factory=list)  # a digest of each generator


@dataclass(frozen=True)
class Validation(Record):
    """The distance of all validations' batches from the solution's."""

    pixels: list = field(default_factory=list)
    labels: list = field(default_factory=list)  # whether they were the same; None: not seen
    buffers: float | None = None  # from those of process 0


@dataclass(frozen=True)
class Every(Record):
    """The comparison of every step and update of a run."""

    steps: list = field(default_factory=list)  # how many: the trainee's, and the solution's
    images: list = field(default_factory=list)  # with a gradient, of both, in each step
    pixels: list = field(default_factory=list)  # how far off, in each step
    criterion: list = field(default_factory=list)
    scales: list = field(default_factory=list)  # the loss's gradient, in times the solution's
    updates: list[Settings] = field(
        default_factory=list, metadata={"of": Settings}
    )  # the trainee's
    usual: list[Settings] = field(default_factory=list, metadata={"of": Settings})  # the solution's
    touched: list = field(default_factory=list)  # tensors that changed between two updates
    validation: Validation = field(default_factory=Validation)


@dataclass(frozen=True)
class Replay(Record):
    """The results of the replay of a check's run: see `dlojz.watch.replay`."""

    updates: list[Update] = field(
        default_factory=list, metadata={"of": Update}
    )  # that were replayed
    every: Every = field(default_factory=Every)


# How far the gradients of a single update may be off, as a share of their size and between the
# logarithms of one weight's two norms; or this many times the solution's own noise. A gradient in
# eight bits is 5 % off. One in fp16 is 2e-4 off, which is missed: a ReLU that turns does as much.
ONE_UPDATE, ONE_UPDATE_NOISES, ONE_WEIGHT, ONE_WEIGHT_NOISES = 5e-2, 10, 0.1, 3
# In float32 that of the middle one: this many times the noise, which counts as at least SAME_LINK.
# Right answers of another make are off by 1.1 times.
NOISES, SAME_LINK = 4, 1e-5


EVIDENCE = {  # by `when`, which is also the name in a log.Run
    "samples": Samples,
    "probe": Probe,
    "mixtures": Mixtures,
    "normalized": Normalized,
    "begun": Begun,
    "made_up": MadeUp,
    "geometry": Geometry,
    "share": Share,
    "middle": MiddleStep,
    "last": LastStep,
    "whole": WholeRun,
    "compilation": Compilation,
    "profiler": Profiling,
    "audit": Audit,
    "stopwatch": Stopwatch,
    "replay": Replay,
}


@dataclass(frozen=True)
class Rates(Record):
    """The table of a learning-rate finder; a loss is that before the update at its rate."""

    rates: list = field(default_factory=list)
    losses: list = field(default_factory=list)


# The measures of an experiment ------------------------------------------------------------------


@dataclass(frozen=True)
class Measure(Record):
    """One figure of an experiment; x: the size or step at which it was measured."""

    what: str
    value: float
    unit: str
    x: float | str | None = None
    variant: str = ""  # which way, where the same was measured in several

    @property
    def name(self) -> str:
        """Return the name of the measure, in words."""
        return f"{self.what}, {self.variant}" if self.variant else self.what
