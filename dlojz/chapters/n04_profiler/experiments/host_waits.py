"""Operations that make the host wait for a GPU, and similar ones that do not.

Submitted by a notebook: submit("dlojz/chapters/n04_profiler/experiments/host_waits.py").

On a GPU each one runs under `torch.cuda.set_sync_debug_mode("error")`, which raises where the host
waits. On any machine each one runs on tensors with a shape and no values, too: it fails if the host
needs a value, for a number or a size. These tensors show no copies.
"""

import argparse
import warnings

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from dlojz.chapters import session

OPERATIONS = {
    "x.sum().item()": lambda x, mask, host: x.sum().item(),
    "float(x[0])": lambda x, mask, host: float(x[0]),
    "x.tolist()": lambda x, mask, host: x.tolist(),
    "if x.sum() > 0:": lambda x, mask, host: bool(x.sum() > 0),
    "for value in x: float(value)": lambda x, mask, host: [float(value) for value in x],
    "torch.tensor([x[0], x[1]])": lambda x, mask, host: torch.tensor([x[0], x[1]]),
    "x[mask]": lambda x, mask, host: x[mask],
    "x.masked_select(mask)": lambda x, mask, host: x.masked_select(mask),
    "mask.nonzero()": lambda x, mask, host: mask.nonzero(),
    "torch.where(mask)": lambda x, mask, host: torch.where(mask),
    "x.unique()": lambda x, mask, host: x.unique(),
    "x.cpu()": lambda x, mask, host: x.cpu(),
    "host.to(device)": lambda x, mask, host: host.to(x.device),
    "torch.tensor([1.0], device=device)": lambda x, *_: torch.tensor([1.0], device=x.device),
    "torch.where(mask, x, 0.0)": lambda x, mask, host: torch.where(mask, x, 0.0),
    "(x * mask).sum()": lambda x, mask, host: (x * mask).sum(),
    "x.masked_fill(mask, 0.0)": lambda x, mask, host: x.masked_fill(mask, 0.0),
    "torch.stack([x[0], x[1]])": lambda x, mask, host: torch.stack([x[0], x[1]]),
    "torch.zeros(8, device=device)": lambda x, mask, host: torch.zeros(8, device=x.device),
}
COPIES = ("x.cpu()", "host.to(device)", "torch.tensor([1.0], device=device)")
SIZE = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    with session.begin(parser.parse_args()) as (run, device):
        for name, operation in OPERATIONS.items():
            found = {"needs": "a copy" if name in COPIES else needed(operation)}
            if device.type == "cuda":
                found["waits"] = waits(operation, device)
            run.case(name, **found)


def operands(device):
    """Return a tensor, a mask, and a tensor in pageable memory of the host."""
    x = torch.arange(SIZE, dtype=torch.float32, device=device)
    return x, x > 2, torch.zeros(SIZE)


def needed(operation) -> str:
    """Return the host's need of values: "a number", "a size" or "nothing"."""
    with FakeTensorMode():
        try:
            operation(*operands(torch.device("cpu")))
        except DataDependentOutputException:
            return "a number"
        except DynamicOutputShapeException:
            return "a size"
        except RuntimeError as error:  # torch.tensor reads its parts without an operation
            if "data is not allocated" not in str(error):
                raise
            return "a number"
    return "nothing"


def waits(operation, device) -> bool:
    """Return whether the host has waited, by torch's debug mode."""
    with_values = operands(device)
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        operation(*with_values)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


if __name__ == "__main__":
    main()
