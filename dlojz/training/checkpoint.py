"""Save a training and go on from it, to the bit.

A checkpoint holds the state of all parts of the training (model, criterion, optimizer, scheduler,
metrics, and whatever a step of the course adds), the generators of random numbers, the epoch and
the step in it, and what must not change in between. It is read with `weights_only=True`, so that a
file from elsewhere cannot run code.
"""

import os
import pickle
import signal
import threading
from pathlib import Path

import torch

from dlojz import course, idr_torch

# The flags that decide which images come when, at which learning rate.
SAME_FLAGS = ("model", "image_size", "batch_size", "drop_last", "lr", "wd", "mom", "seed")

LAST = "checkpoint.txt"  # in a run's folder; its last one's path, for slurm/job.sbatch

_SAVE_NOW = threading.Event()
_saves = []


class CheckpointError(Exception):
    """A checkpoint that can't be used, and why."""


def saves() -> int:
    """How many checkpoints this process has written."""
    return len(_saves)


def prepare(args, run):
    """Choose where this run keeps its checkpoint, and listen for the wish to save.

    From now on SIGUSR1 asks for a checkpoint after the present step: a time limit is near. A test
    run keeps none, unless --checkpoint says where.
    """
    if args.checkpoint is None and not args.test:
        args.checkpoint = run.folder / "checkpoint.pt"
    signal.signal(signal.SIGUSR1, lambda *_: _SAVE_NOW.set())
    (run.folder / LAST).touch()  # says that the signal may come: it would end other programs


def due(args, steps_done: int) -> bool:
    """Is it time to save, `steps_done` steps into the epoch?"""
    if args.checkpoint is None:
        return False
    asked = _SAVE_NOW.is_set()
    _SAVE_NOW.clear()  # in each process, whichever of them saves
    return asked or (args.checkpoint_every > 0 and steps_done % args.checkpoint_every == 0)


def save(training, args, epoch: int, step: int):
    """Write `args.checkpoint`: the next step to do is `step` of `epoch`. Waits for the device."""
    state = {name: part.state_dict() for name, part in vars(training).items()}
    state |= {"epoch": epoch, "step": step, "promises": _promises(training, args)}
    state |= {"cpu_rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state_all()}
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.checkpoint.with_name(f".{args.checkpoint.name}.{os.getpid()}")
    torch.save(state, temporary)
    temporary.replace(args.checkpoint)  # a reader, or a kill, finds the old file or the new one
    if folder := os.environ.get("DLOJZ_RUN"):  # a job that was stopped goes on from here
        course.write_atomically(Path(folder, LAST), str(args.checkpoint.resolve()))
    _saves.append(args.checkpoint)
    print(f"saved {args.checkpoint}: epoch {epoch}, step {step}", flush=True)


def load(training, args, device) -> tuple[int, int]:
    """Put `args.resume` into the parts of `training`; returns the epoch and the step to go on with.

    Raises CheckpointError where the file can't be read, or where this run would not go on with
    the same images at the same learning rates.
    """
    try:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        promised = state["promises"]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"--resume {args.resume}: no checkpoint of this trainer ({error})"
        ) from error
    for name, now in _promises(training, args).items():
        if promised[name] != now:
            raise CheckpointError(
                f"--resume {args.resume}: it was saved with {name} {promised[name]!r}, this run "
                f"has {now!r}; to go on where it stopped, use the same value"
            )
    for name, part in vars(training).items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["cpu_rng"].cpu())
    if len(state["cuda_rng"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
    return state["epoch"], state["step"]


def _promises(training, args):
    return {
        **{name: getattr(args, name) for name in SAME_FLAGS},
        "world_size": idr_torch.size,
        "total_steps": training.scheduler.total_steps,  # the length of the schedule
        "parts": sorted(vars(training)),
    }
