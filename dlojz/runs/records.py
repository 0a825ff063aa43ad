"""What a log holds besides steps, as records: what was seen of a training, and what was measured.

To log one thing more takes one line here, a field with a default, and the place that fills it. A
record of which nothing was written has its defaults, and is false.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Self


@dataclass(frozen=True)
class Record:
    """What all records have in common."""

    @classmethod
    def read(cls, event: Mapping) -> Self:
        """Return the record that an event holds; fields that it does not know are left out.

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
        """Return what the log keeps of it: the fields that are not at their defaults."""
        found = {f.name: (getattr(self, f.name), _default(f)) for f in fields(self)}
        return {
            name: value.written() if isinstance(value, Record) else value
            for name, (value, default) in found.items()
            if value != default
        }

    def __bool__(self):
        return bool(self.written())


def _default(f):
    return f.default if f.default_factory is MISSING else f.default_factory()


def _value(f, value):
    kind = f.default_factory
    if kind is MISSING:
        return value
    expected = Mapping if issubclass(kind, Record) else kind
    if not isinstance(value, expected):
        word = "a list" if kind is list else "an object"
        raise TypeError(f"{f.name} is {value!r}, expected {word}")
    return kind.read(value) if issubclass(kind, Record) else value


# What was seen of a training: the evidence ------------------------------------------------------


@dataclass(frozen=True)
class Tensor(Record):
    """What a tensor is made of, and where it is."""

    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Parameters(Record):
    """How many weights there are, by dtype, by device and by layout."""

    dtypes: dict = field(default_factory=dict)
    devices: dict = field(default_factory=dict)
    layouts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Gradients(Record):
    """The gradients as the optimizer finds them."""

    dtypes: dict = field(default_factory=dict)
    missing: int | None = None  # weights that have none
    norm: float | None = None


@dataclass(frozen=True)
class Numerics(Record):
    """torch's switches for speed and for precision."""

    matmul_fp32: str | None = None
    conv_fp32: str | None = None
    fp16_reduction: bool | None = None
    bf16_reduction: bool | None = None
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
    # Each with layer, in, out (dtypes), device, in_layout, out_layout, count.
    layers: list = field(default_factory=list)
    labels: int | None = None  # a checksum
    logits: Tensor = field(default_factory=Tensor)
    loss: Tensor = field(default_factory=Tensor)
    loss_gradient: float | None = None  # a gradient scaler's factor
    gradients: Gradients = field(default_factory=Gradients)
    optimizer_state: dict = field(default_factory=dict)  # how many tensors, by dtype
    numerics: Numerics = field(default_factory=Numerics)
    loader: Loader = field(default_factory=Loader)


@dataclass(frozen=True)
class LastStep(Record):
    """The last step of a test run, under the profiler."""

    matrix_ops: list = field(default_factory=list)  # each with op, dtype, count
    calls: dict = field(default_factory=dict)  # how often the host waited, by call; "item"
    copies: dict = field(default_factory=dict)  # how many, by the profiler's name
    kernels_us: dict = field(default_factory=dict)  # the longest, by name
    graphs_alive: int | None = None  # tensors that hold their graph after the step
    # Each with backend, op, bytes, dtype, begin_ms, ms.
    collectives: list = field(default_factory=list)
    timed_on: str | None = None  # whose times these are: gpu, host
    backward_ms: tuple[float, float] = (0.0, 0.0)  # when the backward pass began and ended
    communication_ms: float | None = None  # of the GPU
    exposed_ms: float | None = None  # of these, not hidden by other work
    # What DDP logs of itself.
    wrapper: str | None = None
    backend_name: str | None = None
    world_size: int | None = None
    bucket_cap_bytes: int | None = None
    bucket_sizes: str | None = None
    rebuilt_bucket_sizes: str | None = None
    find_unused_parameters: bool | None = None
    unused_parameter_size: int | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    has_sync_bn: bool | None = None
    static_graph: bool | None = None
    comm_hook: str | None = None
    device_ids: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU communicated."""
        return self.communication_ms is not None

    @property
    def only_asked(self) -> bool:
        """Whether the times say when the host asked, and not when the GPU did it."""
        return self.on_gpu and self.timed_on != "gpu"


@dataclass(frozen=True)
class WholeRun(Record):
    """All steps, from what the host knows without waiting."""

    # Each with mode, shape, dtype, device, layout, autocast, grad, count.
    inputs: list = field(default_factory=list)
    # Each with mode, logits, logits_dtype, labels_device, dtype, count.
    losses: list = field(default_factory=list)
    drawn: list | None = None  # a checksum of the images of each batch
    backward: int | None = None
    optimizer_steps: int | None = None
    scale: float | None = None  # of the gradient scaler, in the end
    weights_changed: bool | None = None
    weights_after: str | None = None  # checksums
    buffers_after: str | None = None
    saves: int | None = None  # checkpoints that were written
    pixels: dict = field(default_factory=dict)  # {mode: [means, deviations]} of a batch, by colour


@dataclass(frozen=True)
class Samples(Record):
    """What the data set makes of a file of ours."""

    set: str | None = None
    pil: int | None = None  # how often PIL opened one
    label: int | None = None
    shape: list | None = None
    dtype: str | None = None
    grey: int | None = None  # channels of a file that has one
    boxes: list = field(default_factory=list)  # where each image was cut
    detail: float | None = None
    fresh: int | None = None  # images that show that the file has changed
    kept_objects: int | None = None
    kept_bytes: int | None = None


@dataclass(frozen=True)
class Profiling(Record):
    """What the training's own profiler did."""

    actions: list = field(default_factory=list)  # in each step, by the names of torch's actions


EVIDENCE = {  # by `when`, which is also the name in a log.Run
    "samples": Samples,
    "probe": Probe,
    "last": LastStep,
    "whole": WholeRun,
    "profiler": Profiling,
}


# What an experiment measured --------------------------------------------------------------------


@dataclass(frozen=True)
class Measure(Record):
    """One figure of an experiment; x: where it was measured, such as a size or a step."""

    what: str
    value: float
    unit: str
    x: float | str | None = None
    variant: str = ""  # where the same was measured in several ways: in which

    @property
    def name(self) -> str:
        """What was measured, in words."""
        return f"{self.what}, {self.variant}" if self.variant else self.what
