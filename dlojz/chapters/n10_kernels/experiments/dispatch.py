"""The code that answers `x * 2`, for tensors of several kinds, and for a segment mean.

Submitted by a notebook: submit("dlojz/chapters/n10_kernels/experiments/dispatch.py").

torch's dispatcher looks at the keys of the operands: the device, the layout, and what else is to be
done, such as noting the operation for a backward pass. For each there is code, or there is none.
"""

import argparse

import torch

from dlojz.chapters import session
from dlojz.training import imports
from dlojz.watch import profile

ROWS, SEGMENTS = 12, 3


def tensors(device) -> dict[str, torch.Tensor]:
    """Return tensors that `x * 2` is asked of, by name."""
    x = torch.randn(ROWS, 4, device=device)
    return {
        "float32": x,
        "bfloat16": x.bfloat16(),
        "int8": x.to(torch.int8),
        "float8": x.to(torch.float8_e4m3fn),
        "with a gradient": x.clone().requires_grad_(),
        "sparse": x.to_sparse(),
        "without values": x.to("meta"),
    }


def twice(x):
    """Return x * 2."""
    return x * 2


def segment_mean(x):
    """Return the mean of each segment, by the operation that notebook 04b compares with others."""
    lengths = torch.full((SEGMENTS,), len(x) // SEGMENTS, device=x.device)
    return torch.segment_reduce(x, "mean", lengths=lengths)


def keys(x) -> list[str]:
    """Return the keys of a tensor, as the dispatcher sees them."""
    names = str(torch._C._dispatch_keys(x)).partition("(")[2].rstrip(")")
    return [name.strip() for name in names.split(",")]


def operations(call, x) -> list[str]:
    """Return the operations of a call, and on a GPU the kernels, in their order."""
    names = [event.name() for event in profile.profiled(lambda: call(x))]
    return [name for name in names if not name.startswith("cu")]


def answered(call, x) -> dict:
    """Return the fields of a call: its keys, its operations, its result or error."""
    found = {"keys": keys(x)}
    try:
        out = call(x)
    except (RuntimeError, NotImplementedError) as error:
        return found | {"operations": [], "result": imports.first_line(error), "answered": False}
    kind = str(out.dtype).removeprefix("torch.")
    layout = str(out.layout).removeprefix("torch.")
    result = f"{kind}, {layout}, on {out.device.type}"
    return found | {"operations": operations(call, x), "result": result, "answered": True}


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with session.begin(args) as (run, device):
        for name, x in tensors(device).items():
            run.case(f"x * 2, {name}", asked="x * 2", of=name, **answered(twice, x))
        for name in ("float32", "int8"):
            x = tensors(device)[name]
            of = f"segment mean, {name}"
            run.case(of, asked="segment mean", of=name, **answered(segment_mean, x))


if __name__ == "__main__":
    main()
