"""The shared parts of the jobs that examine a trainee's repaired file."""

import argparse
import math
import secrets
from contextlib import contextmanager

import torch

from dlojz.course import UserError
from dlojz.training import imports


def parser(text: str) -> argparse.ArgumentParser:
    """Return the parser of a job whose module has this docstring, with --seed."""
    found = argparse.ArgumentParser(description=text.splitlines()[0])
    seed = secrets.randbits(32)  # each submission draws other cases
    found.add_argument("--seed", type=int, default=seed, help="seed of all random draws")
    return found


def complete(module, names):
    """Return a trainee's module. Raises UserError if one of these functions is missing."""
    if missing := [name for name in names if not callable(getattr(module, name, None))]:
        raise UserError(
            f"no function {', '.join(missing)} in your file: expected {', '.join(names)}; "
            "put it back, with the same arguments"
        )
    return module


def short_in(file, error: Exception) -> str:
    """Return an error in a few words, with the line of this file, if it has one."""
    line = imports.line_in(file, error)
    return (f"line {line}: " if line else "") + short(error)


def short(error: Exception) -> str:
    """Return a short text of an error in a trainee's lines."""
    return f"{type(error).__name__}: {error}"[:200]


def off(found, expected, scale=None) -> float:
    """Return the largest difference of a tensor, relative to the largest number expected.

    Infinity for another shape or no numbers. scale: another number to relate it to.
    """
    if found.shape != expected.shape:
        return math.inf
    if not found.numel():
        return 0.0
    scale = expected.abs().max().clamp(min=1e-6) if scale is None else scale
    error = ((found - expected).abs().max() / scale).item()
    return error if math.isfinite(error) else math.inf


@contextmanager
def one_thread(device):
    """Compute in one thread on a processor, where small operations would wait for other threads."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
