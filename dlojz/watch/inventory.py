"""Facts of a run's model, training and tensors, as its evidence logs them."""

import gc
import math
import zlib
from collections import Counter
from itertools import chain, islice

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dlojz.runs import records
from dlojz.training import checkpoint, private, sharding
from dlojz.training.data import CHECKED_BATCHES, normalize
from dlojz.watch import readings

# The keys of DDP's logging data to keep.
DDP_FACTS = (
    *("world_size", "find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"),
    *("static_graph", "comm_hook"),
)


def digest(model) -> str | None:
    """Return a checksum of all weights, equal for any device and layout; None on the meta device.

    Buffers are left out, because a forward pass changes them.
    """
    return checksum(model.parameters())


def checksum(tensors) -> str | None:
    total = 0
    for tensor in tensors:
        if tensor.is_meta:
            return None
        total = crc(tensor, total)
    return f"{total:08x}"


def crc(tensor, start=0):
    if tensor.is_meta:
        return None
    flat = sharding.own(tensor.detach()).contiguous().cpu().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy(), start)


def pixels(images):
    images = normalize(images).float()  # in case the model does it
    found = (f(images, (0, 2, 3)) for f in (torch.mean, torch.std))
    return [[round(v, 4) for v in values.tolist()] for values in found]


def found_inf(optimizer):
    """Return whether a fused optimizer skips this update, as a tensor; None for any other one.

    A gradient scaler always calls a fused optimizer, which decides itself.
    """
    return getattr(optimizer, "found_inf", None)


def norm(gradients, scale):
    """Return the gradients' norm, without the factor that a fused optimizer removes itself."""
    if not gradients:
        return None
    # One call takes no mixture, and a trainee's model may mix shards and whole tensors.
    parts = [[g for g in gradients if isinstance(g, DTensor) == it] for it in (True, False)]
    norms = [value(torch.nn.utils.get_total_norm(part)) for part in parts if part]
    if None in norms:
        return None
    return math.hypot(*norms) / (1.0 if scale is None else float(scale))


def value(tensor):
    if isinstance(tensor, DTensor):  # each process has a part of the norm
        tensor = tensor.full_tensor()
    return None if tensor is None or tensor.is_meta else float(tensor)


def word(value):
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, bool | int | str | tuple | None) else str(value)


def rows(counter, names):
    return [
        dict(zip(names.split(), map(word, key), strict=True)) | {"count": count}
        for key, count in counter.items()
    ]


def tensor(tensor):
    return records.Tensor(word(tensor.dtype), str(tensor.device))


def finite(tensors):
    """Return whether all values are finite; None without values, as on the meta device."""
    there = [t for t in tensors if not t.is_meta]
    return bool(torch.stack([t.isfinite().all() for t in there]).all()) if there else None


def dtypes(tensors):
    return dict(Counter(word(t.dtype) for t in tensors))


def parameters(model):
    weights = list(model.parameters())
    return records.Parameters(
        dtypes=dtypes(weights),
        devices=dict(Counter(str(p.device) for p in weights)),
        layouts=dict(Counter(readings.layout(p) for p in weights)),
    )


def devices(training):
    metrics = getattr(training, "metrics", {})
    each = metrics.values() if hasattr(metrics, "values") else [metrics]  # one for all, or several
    found = Counter()
    for metric in each:
        values = metric.buffers() if isinstance(metric, torch.nn.Module) else [metric]
        found.update(str(value.device) for value in islice(filter(torch.is_tensor, values), 1))
    return dict(found)


def numerics():
    cuda, cudnn, cpu = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    on_cpu = cpu.matmul.fp32_precision, cpu.conv.fp32_precision
    return records.Numerics(
        matmul_fp32=float32(cuda.fp32_precision),
        conv_fp32=float32(cudnn.conv.fp32_precision),
        cpu_fp32=[float32(word) for word in on_cpu],
        cudnn=cudnn.enabled,
        cudnn_benchmark=cudnn.benchmark,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def leaves(model):
    return [layer for layer in model.modules() if not any(True for _ in layer.children())]


def float32(word):
    """Return torch's float32 precision; "none", as after `allow_tf32 = False`, is ieee."""
    return "ieee" if word == "none" else word


def loader(loader):
    names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
    return records.Loader(
        **{name: getattr(loader, name, None) for name in names},
        resident=getattr(loader.dataset, "resident", None),
    )


def distributed(model):
    found = private.ddp_facts(model)
    facts = {k: found[k] for k in DDP_FACTS if k in found}
    wrapper = type(model).__name__ if found or isinstance(model, FullyShardedDataParallel) else None
    return {"wrapper": wrapper} | facts


def is_sharded(model):
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def tensors():
    """Return all tensors of this process, without torch.compile's traced ones."""
    found = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return [t for t in found if not private.has_no_values(t)]


def alive_bytes():
    """Return the bytes of all tensors of this process; each piece of memory counts once."""
    whole = (t for t in tensors() if not isinstance(t, DTensor) and not t.is_meta)
    storages = (t.untyped_storage() for t in whole if t.layout == torch.strided)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def graphs_alive():
    """Return the number of tensors that still hold an autograd graph after the step."""
    return sum(t.grad_fn is not None for t in tensors())


def saved(model) -> dict:
    """Return the facts of the checkpoints, as fields of the run's record."""
    if not checkpoint.saves:
        return {}
    first, last = checkpoint.saves[0], checkpoint.saves[-1]
    names = not last.names or last.names == list(model.state_dict())
    return {
        "saved_states": first.states,
        "saved_names": names,
        "saved_bytes": last.nbytes,
    }


def drawn(loader, args) -> list | None:
    """Return checksums of the batches of all epochs, as many as each has steps.

    A loop left by `break` has drawn one more.
    """
    found = getattr(loader.batch_sampler, "drawn", None)
    steps = args.test_nsteps if args.test else None
    return found and [*chain(*(each[:steps] for each in found))][:CHECKED_BATCHES]


def scale(training) -> float | None:
    """Return the gradient scaler's final scale; None if there is none, or it is disabled."""
    scaler = readings.scaler(training)
    return None if scaler is None else scaler.get_scale()
