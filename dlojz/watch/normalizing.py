"""A probe of the kernel beside a trainer: kernels.normalize, with images of our own.

cases    random images of odd sizes, views and formats: the distance from what torch computes in
         float32, in units in the last place of the output's format; values that were not written;
         writes outside of the output, which lies between canaries; a change of the images
again    other images in the memory of earlier ones
stream   a GPU computes the images meanwhile, on its present stream
timed    many images on a GPU, under the profiler: the kernels of each call and their time, beside
         torch's and those of a copy; these outputs are looked at, too
forward  the trainer's calls of `normalize`, and the images that enter its model

A trainer that normalizes elsewhere than in `forward` is not seen there.
"""

import math
import sys
from argparse import Namespace
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from dlojz.course import FileError, UserError
from dlojz.runs import records
from dlojz.training import data, imports, private
from dlojz.training.replaced import replaced
from dlojz.watch import auditor, interpreted, inventory, profile, readings

ODD, FEW, LARGE = (5, 3, 33, 31), (1, 3, 3, 5), (256, 3, 224, 224)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EDGE = 2**17  # values of canaries on either side: more than a program has
ROUNDING = 1e-6  # of float32, of terms up to 4
# Canaries. A NaN would not do: a kernel may compute one from what it reads outside.
FLOAT, BYTE = 12288.0, 170
ROUNDS, CALLS = 5, 4  # of the timed calls
SIZE, PRODUCTS = 4096, 40  # of matrices that keep a GPU busy for milliseconds
COARSE = 0.05  # the largest error of values that were rounded to 8 bits on the way
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def watch(run, training, args):
    """Log the probe of a run with --normalize triton that is not timed.

    Raise UserError for a kernel that writes outside of its output: a training would go on with
    other tensors damaged, or end somewhere else.
    """
    if getattr(args, "normalize", "torch") != "triton" or "timed" in auditor.wished():
        return
    found = look(training, args)
    run.evidence(records.Normalized(**found))
    outside = max((case.get("outside", 0) for case in found.get("cases", ())), default=0)
    if outside:
        raise UserError(
            f"kernels.normalize wrote {outside} values outside of its output, where other tensors "
            "are, so the training was not begun: give the store a mask"
        )


def look(training, args) -> dict:
    """Return the fields of `records.Normalized`. The run's random draws are left alone."""
    found = {"cases": []}
    device = next(training.model.parameters()).device
    with data.draws_of(0, 0, 0), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            kernels = imports.beside(sys.modules["__main__"].__file__, "kernels")
        except FileError:
            return {}  # the trainer does not import it
        except Exception as error:  # of any kind: it is the trainee's code
            return {"error": _words(error)}
        try:
            found["cases"] += (case(kernels.normalize, *how) for how in _ways(device))
            if any(case["outside"] for case in found["cases"]):
                return found  # the other calls are not between canaries
            found["again"] = _again(kernels.normalize, device)
            if device.type == "cuda":
                found["stream"] = _on_its_stream(kernels.normalize, device)
                if "keep" in auditor.wished():
                    found["timed"] = _timed(kernels.normalize, device)
            found["forward"] = _forward(kernels, training, args, device)
        except Exception as error:
            found["error"] = _words(error)
    return found


def _words(error):
    """Return an error in a line: Triton's begins with the kernel, and ends with the message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1]}"


# One call ----------------------------------------------------------------------------------------


def _ways(device):
    """Yield the images, their name, and the format of each call."""
    for dtype in DTYPES:
        yield _images(ODD, device), "channels_last", dtype
    yield _images(ODD, device, torch.contiguous_format), "NCHW", torch.float16
    yield _images((6, 3, 36, 34), device)[1:, :, 2:, 3:], "a view", torch.float16
    yield _images((8, 3, 16, 16), device)[::2], "every second image", torch.bfloat16
    yield _images(FEW, device), "fewer than a program has", torch.float16
    yield _images((8, 3, 64, 64), device), "whole programs", torch.float16


def _images(shape, device, layout=torch.channels_last):
    """Return random images between canaries, as a kernel may read beyond them."""
    images = torch.randint(0, 256, shape, dtype=torch.uint8).to(device, memory_format=layout)
    return _between_canaries(images).copy_(images)


def _between_canaries(tensor):
    """Return an empty tensor of this shape, format and layout, in a larger storage of canaries."""
    places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    how = {"dtype": tensor.dtype, "device": tensor.device}
    around = torch.full((2 * EDGE + places + 1,), _canary(tensor), **how)
    return around.as_strided(tensor.shape, tensor.stride(), EDGE)


def _canary(tensor) -> float:
    return FLOAT if tensor.is_floating_point() else BYTE


def case(normalize, images, name, dtype) -> dict:
    """Return the facts of one call."""
    before = images.clone()
    _wait(images)
    with interpreted.counted() as count, _watched() as seen:
        out = normalize(images, dtype)
    _wait(images)
    found = {
        "images": name,
        "dtype": inventory.word(dtype),
        "launches": count.launches if interpreted.is_used() else None,
        "read": [count.outside - count.outside_floats, count.outside_floats],
        "passes": [op for op, size in seen.passes if size >= images.numel()],
        "outside": sum(map(_overwritten, seen.made)),
        "changed": not torch.equal(images, before),
    }
    return found | compared(out, before, dtype)


def _wait(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()


def compared(out, images, dtype) -> dict:
    """Return the form of an output, its distance from the right values, and its likely mistake."""
    asked = f"{list(images.shape)} {inventory.word(dtype)} channels_last"
    found = {"form": type(out).__name__, "expected": asked}
    if not torch.is_tensor(out):
        return found | {"units": math.inf, "like": "form"}
    found["form"] = f"{list(out.shape)} {inventory.word(out.dtype)} {readings.layout(out)}"
    if out.shape != images.shape or not out.is_floating_point():
        return found | {"units": math.inf, "like": "form"}
    expected = data.normalize(images)
    found["units"] = units(out, expected, dtype)
    found["unwritten"] = int((out == FLOAT).sum())
    return found | {"like": "" if found["units"] <= 1 else _likely(out, images, expected)}


def units(out, expected, dtype) -> float:
    """Return the largest distance from float32 values, in units in the last place of a format."""
    halves = torch.full_like(expected, 0.5)
    unit = torch.finfo(dtype).eps * torch.ldexp(halves, torch.frexp(expected).exponent)
    off = ((out.double() - expected.double()).abs() - ROUNDING).clamp(min=0) / unit
    return float(off.nan_to_num(nan=math.inf).max())


def _likely(out, images, expected):
    """Return the mistake that gives this output; "" for another one."""
    out = out.float()
    if (out == FLOAT).any():
        return "unwritten"
    if (out - expected).abs().max() <= COARSE:
        return "rounded"
    shift, scale = data.line(images.device)
    mean, std = (
        torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (data.MEAN, data.STD)
    )
    levels = images.float()
    n, _, height, width = images.shape
    places = torch.arange(images.numel(), device=images.device).view(n, height, width, 3)
    wrong = (places.permute(0, 3, 1, 2) // (height * width)) % 3  # channels as in NCHW
    others = {
        "channels": shift.flatten()[wrong] + levels * scale.flatten()[wrong],
        "reversed": shift.flip(1) + levels * scale.flip(1),
        "one-channel": shift[:, :1] + levels * scale[:, :1],
        "std": levels / 255 - mean,
        "mean": levels * scale,
        "levels": (levels - mean) / std,
        "plain": levels / 255,
    }
    for name, other in others.items():
        if ((out - other).abs() <= COARSE * (1 + other.abs())).float().mean() > 0.99:
            return name
    return ""


@contextmanager
def _watched():
    """Watch a call: canaries around the tensors that it makes, and passes of torch over them.

    Yields made, the tensors; and passes, the operations of torch that compute, with their sizes.
    """
    seen = SimpleNamespace(made=[], passes=[])

    class Watch(private.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            if not torch.is_tensor(out):
                return out
            given = [leaf for leaf in private.tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
            if name in ALLOCATES:
                seen.made.append(_between_canaries(out))
                return seen.made[-1]
            if _is_new(out, given) or name.endswith("_"):
                seen.passes.append((name, out.numel()))
            if _is_new(out, given):
                seen.made.append(_between_canaries(out).copy_(out))
                return seen.made[-1]
            return out

    with Watch():
        yield seen


def _is_new(out, given):
    there = {t.untyped_storage().data_ptr() for t in given}
    return out.untyped_storage().data_ptr() not in there


def _overwritten(tensor) -> int:
    """Return the number of canaries around a tensor that are gone."""
    around = tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    edges = torch.cat([around[:EDGE], around[-EDGE:]])
    return int((edges != _canary(edges)).sum())


# Several calls -----------------------------------------------------------------------------------


def _again(normalize, device) -> bool:
    """Return whether the output stays the same after others have come into the images' memory."""
    images, others = _images(ODD, device), _images(ODD, device)
    before = normalize(images, torch.float16).clone()
    images.copy_(others)
    _wait(images)
    out = normalize(images, torch.float16)
    _wait(images)
    return torch.equal(out, before)


def _on_its_stream(normalize, device) -> bool:
    """Return whether the output is that of images which the GPU was still to replace."""
    images, others = _images(ODD, device), _images(ODD, device)
    before = images.clone()
    matrix = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    _wait(images)
    for _ in range(PRODUCTS):
        matrix = (matrix @ matrix).clamp(-1, 1)
    images.copy_(others)
    out = normalize(images, torch.float16).clone()
    _wait(images)
    return _is_of(out, before)


def _is_of(out, images) -> bool:
    """Return whether an output is mostly that of these images."""
    near = (out.float() - data.normalize(images)).abs() <= COARSE
    return bool(near.float().mean() > 0.5)


def _timed(normalize, device) -> dict:
    """Return the time of a call's kernels, of torch's and of a copy, and the outputs' distance.

    Times are seconds for a call, one for each round. {} where the GPU has no room.
    """
    try:
        return _rounds(normalize, device)
    except torch.OutOfMemoryError:
        return {}
    finally:  # the memory of the training is what a run reports
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _rounds(normalize, device) -> dict:
    shape, dtype = LARGE, torch.float16
    seeds = torch.Generator(device).manual_seed(0)
    like = {"dtype": torch.uint8, "device": device, "generator": seeds}
    batches = [torch.randint(0, 256, shape, **like) for _ in range(CALLS)]
    batches = [images.to(memory_format=torch.channels_last) for images in batches]
    size = batches[0].numel() * (1 + dtype.itemsize)  # bytes, read and written
    copies = [torch.randint(0, 256, (size // 2,), **like) for _ in range(2)]
    ways = {
        "kernel": lambda images: normalize(images, dtype),
        "torch": lambda images: data.normalize(images).to(dtype),
        "copy": lambda _: copies[0].copy_(copies[1]),
    }
    found = {"bytes": size, "calls": CALLS} | {name: [] for name in ways}
    for name, call in ways.items():
        for number in range(1 + ROUNDS):
            outputs = []
            kernels = _kernels(outputs, call, batches)
            if number:  # the first one warms up
                found[name].append(sum(seconds for _, seconds in kernels) / CALLS)
            if name == "kernel" and number == ROUNDS:
                found["kernels"] = [each for each, _ in kernels]
                pairs = zip(batches, outputs, strict=True)
                found["worst"] = max(compared(out, of, dtype)["units"] for of, out in pairs)
    # Fresh images, and another number of them: a tuner that tries its choices again is seen.
    fresh, outputs = torch.randint(0, 256, (shape[0] // 2 + 1, *shape[1:]), **like), []
    fresh = fresh.to(memory_format=torch.channels_last)
    found["fewer"] = [each for each, _ in _kernels(outputs, ways["kernel"], [fresh])]
    return found | {"worst": max(found["worst"], compared(*outputs, fresh, dtype)["units"])}


def _kernels(outputs, call, batches) -> list[tuple[str, float]]:
    """Return the kernels of calls, one for each batch, with their seconds; keep the outputs."""
    return profile.on_device(profile.profiled(lambda: outputs.extend(map(call, batches))))


# The trainer's forward ---------------------------------------------------------------------------


def _forward(kernels, training, args, device) -> dict:
    """Return the calls of `normalize` by the trainer's `forward`, and the format of its images."""
    forward = getattr(sys.modules["__main__"], "forward", None)
    if not forward:
        return {}
    asked, usual = [], kernels.normalize

    def counting(images, dtype):
        asked.append(inventory.word(dtype))
        return usual(images, dtype)

    def formats(trains, **own):
        asked.clear()
        entered = _entered(forward, training, Namespace(**vars(args) | own), trains, device)
        last = asked[-1] if asked else None
        return {"calls": len(asked), "asked": last, "dtype": entered and inventory.word(entered)}

    with replaced(kernels, normalize=counting):
        ways = {how: formats(True, precision=how) for how in PRECISIONS}
        how = {"precision": "bf16"}
        ways |= {"validation": formats(False, **how)}
        return ways | {"torch": formats(True, **how, normalize="torch")}


def _entered(forward, training, args, trains, device):
    """Return the format of the images that enter the model."""
    entered = []

    class Model:
        training = trains

        def __call__(self, images):
            entered.append(images.dtype)
            return torch.zeros(len(images), 2, device=device, requires_grad=True)

    def criterion(logits, *labels, **more):
        return logits.float().mean()

    names = getattr(training, "__slots__", None) or vars(training)
    parts = {name: getattr(training, name) for name in names}
    own = SimpleNamespace(**parts | {"model": Model(), "criterion": criterion})
    images = _images(ODD, device)
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    forward(own, images, labels, Namespace(**vars(args) | {"mix": "off"}))
    return entered[-1] if entered else None
