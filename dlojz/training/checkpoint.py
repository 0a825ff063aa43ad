"""Checkpoints of a training run, from which a resume continues bit for bit.

A checkpoint is written at the end of an update of the weights. It holds the state of all parts of
the training (model, criterion, optimizer, scheduler, metrics, and whatever a step of the course
adds), the state of each process, the epoch and the step, and the settings that a resume must not
change. It is read so that a file from elsewhere cannot run code: see `shards`.

That of a sharded model is a folder: each process writes its shards, and any number of processes may
read them, if they take the same images for an update. `latest` names the complete one inside.
"""

import hashlib
import os
import shutil
import signal
import sys
import threading
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dlojz import course, idr_torch
from dlojz.training import mixing, private, shards

# The flags that decide the order of the images and the updates of the weights.
SAME_FLAGS = (
    *("model", "image_size", "batch_size", "drop_last", "accumulate", "lr", "wd", "mom"),
    *("clip_norm", "seed"),
)
# Those that a step adds, with the values of a trainer without them.
MORE_FLAGS = {"optimizer": "sgd", "schedule": "onecycle", "warm_up": 0.3}
LAST = "checkpoint.txt"  # in a run's folder: its latest checkpoint's path, for slurm/job.sbatch

LATEST = "latest"  # in a folder of shards: the name of the folder that is complete
SHARDED = ("model", "optimizer")
MADE_AGAIN = (type(None), int, mixing.Draws)

own_states = []  # checksums of this process's states, in the order in which they were made
saves = []  # a `Saved` for each checkpoint that this process has written


@dataclass(frozen=True)
class Saved:
    """The facts of a checkpoint that a check needs."""

    states: list[str]  # checksums of the processes' states, by rank; [] in shards
    names: list[str]  # the model's tensors; [] in shards
    nbytes: int  # written by this process


class CheckpointError(Exception):
    """A checkpoint that can't be used or written: its file, the fault, the remedy."""


def prepare(args, run):
    """Choose the file of this run's checkpoint, and save on SIGUSR1 from now on.

    The signal announces a time limit; the checkpoint follows the present update. A test run keeps
    none, unless --checkpoint names a file.
    """
    if args.checkpoint is None and not args.test:
        args.checkpoint = run.folder / "checkpoint.pt"
    signal.signal(signal.SIGUSR1, lambda *_: _WISH.heard.set())
    (run.folder / LAST).touch()  # the signal may be sent now: without a handler it kills


def due(args, steps_done: int) -> bool:
    """Return whether to save after `steps_done` steps of the epoch; all processes agree.

    That is only at the end of an update, because a checkpoint holds no gradients.
    """
    if args.checkpoint is None or steps_done % args.accumulate:
        return False
    every, before = args.checkpoint_every, steps_done - args.accumulate
    return _WISH.granted() or (every > 0 and steps_done // every > before // every)


class _Wish:
    """A signal's request for a checkpoint, which all processes grant after the same update.

    Each process receives the signal at an update of its own. It writes the number of that update to
    the store that they share, and saves two updates after the latest of these. Until then it waits
    for its device after every update: so it is at most one update ahead of the others, and when its
    turn to save comes it has read all their numbers.
    """

    def __init__(self):
        self.heard = threading.Event()
        self._updates = self._granted = 0
        self._announced = False

    def granted(self) -> bool:
        """Return whether to save after this update. Called once per update."""
        self._updates += 1
        if not self.heard.is_set():
            return False
        if torch.distributed.is_initialized() and not self._all_are_there():
            return False
        self._granted += 1
        self._announced = False
        self.heard.clear()
        return True

    def _all_are_there(self):
        store = private.default_store()
        key = f"dlojz/save/{self._granted}"
        keys = [f"{key}/{rank}" for rank in range(torch.distributed.get_world_size())]
        if not self._announced:
            self._announced = True
            store.set(keys[torch.distributed.get_rank()], str(self._updates))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not store.check(keys):
            return False
        return self._updates >= max(int(store.get(k)) for k in keys) + 2


_WISH = _Wish()


def own_state(training) -> dict:
    """Return this process's own state: random generators, metrics, buffers of the model.

    It is on the CPU, so that another process can read it. Waits for the device.
    """
    device = next(training.model.parameters()).device
    on_gpu = device.type == "cuda"
    found = {
        "cpu_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(device) if on_gpu else None,
        "metrics": {k: v.cpu() for k, v in training.metrics.state_dict().items()},
        "buffers": {k: v.cpu() for k, v in training.model.named_buffers()},
    }
    own_states.append(_checksum(found))
    return found


def _checksum(state) -> str:
    tensors = [state["cpu_rng"], *state["metrics"].values(), *state["buffers"].values()]
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def save(training, states: list[dict], args, epoch: int, step: int):
    """Write `args.checkpoint`, to resume at `step` of `epoch`. Waits for the device.

    states: the `own_state` of each process, by rank.
    """
    state = {name: part.state_dict() for name, part in parts(training).items()}
    state |= {"processes": states} | _facts(training, args, epoch, step)
    file = args.checkpoint
    if file.is_dir():
        raise CheckpointError(
            f"--checkpoint {file}: it is a folder, and a whole checkpoint is one file. Does `save` "
            "return once it has called save_shards? Or name another"
        )
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with _writing(file):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, temporary)
            temporary.replace(file)  # atomic: a kill leaves the old file or the new one
        finally:
            temporary.unlink(missing_ok=True)
    own = [_checksum(s) if isinstance(s, dict) else "" for s in states]
    _written(file, epoch, step, Saved(own, list(state["model"]), file.stat().st_size))


def save_shards(training, args, epoch: int, step: int):
    """Write the folder `args.checkpoint`: all processes together, each its own shards.

    The previous checkpoint stays until this one is complete.
    """
    folder, name = args.checkpoint, f"epoch-{epoch:04d}-step-{step:06d}"
    into, rank = folder / name, idr_torch.rank
    model, optimizer = get_state_dict(training.model, training.optimizer)
    rest = {n: p.state_dict() for n, p in parts(training).items() if n not in SHARDED}
    with _writing(folder):
        into.mkdir(parents=True, exist_ok=True)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=into)
        torch.save(own_state(training), into / f"process-{rank}.pt")
        if idr_torch.is_master:
            torch.save(rest | _facts(training, args, epoch, step), into / "rest.pt")
        torch.distributed.barrier()  # all have written
    if idr_torch.is_master:
        course.write_atomically(folder / LATEST, name)
        for old in folder.glob("epoch-*"):
            if old != into:
                shutil.rmtree(old)
    nbytes = sum(f.stat().st_size for f in into.glob(f"__{rank}_*"))
    _written(folder, epoch, step, Saved([], [], nbytes))


@contextmanager
def _writing(path):
    try:
        yield
    except (OSError, RuntimeError, dcp.CheckpointException) as error:  # torch's have no subclass
        raise CheckpointError(
            f"--checkpoint {path}: not written ({_first_line(error)}). Is the disk full? Free some "
            "space, or give --checkpoint another place; what was saved before is still there"
        ) from error


def _facts(training, args, epoch, step) -> dict:
    facts = {"promises": _promises(training, args), "trainer": _trainer_sha256()}
    return facts | {"epoch": epoch, "step": step}


def _written(path, epoch, step, saved):
    if idr_torch.is_master:
        if folder := os.environ.get("DLOJZ_RUN"):  # a requeued job resumes from here
            course.write_atomically(Path(folder, LAST), str(path.resolve()))
        print(f"saved {path}: epoch {epoch}, step {step}", flush=True)
    saves.append(saved)


def load(training, args) -> tuple[int, int]:
    """Load `args.resume` into the parts of `training`; return the epoch and step to begin at.

    Raises CheckpointError if the file can't be used, or if this run would not continue with the
    same images and the same updates.
    """
    if os.path.isdir(args.resume):
        return _load_shards(training, args)
    state = _read(args.resume, processes=list)
    _keep_promises(state["promises"], _promises(training, args), args.resume)
    processes = state["processes"]
    if len(processes) != idr_torch.size:
        raise CheckpointError(
            f"--resume {args.resume}: it holds the state of {len(processes)} of {idr_torch.size} "
            "processes; `save` must gather those of all (solution 06, paragraph 06d)"
        )
    for name, part in parts(training).items():
        with _fitting(args.resume, name):
            part.load_state_dict(state.get(name))
    with _fitting(args.resume, "processes"):
        _put_own(training, processes[idr_torch.rank])
    return _resumed(state, args)


def _load_shards(training, args) -> tuple[int, int]:
    """Load a folder of shards, with any number of processes."""
    folder = _latest(args.resume)
    state = _read(folder / "rest.pt")
    now = _together(_promises(training, args))
    with _fitting(args.resume, "promises"):
        _keep_promises(_together(state["promises"]), now, args.resume)
    for name, part in parts(training).items():
        if name not in SHARDED:
            with _fitting(args.resume, name):
                part.load_state_dict(state.get(name))
    with _fitting(folder, "shards"):
        model, optimizer = get_state_dict(training.model, training.optimizer)
        shards.read({"model": model, "optimizer": optimizer}, folder)
        both = {"model_state_dict": model, "optim_state_dict": optimizer}
        set_state_dict(training.model, training.optimizer, **both)
    with _fitting(folder, "processes"):
        _put_own(training, _own_of(folder, state))
    return _resumed(state, args)


def _own_of(folder, state) -> dict:
    """Return this process's own state: the sums of the processes that it continues.

    With more processes than before, the new ones begin with sums of zero.
    """
    written = state["promises"]["world_size"]
    mine = range(idr_torch.rank, written, idr_torch.size)
    states = [_tensors(folder / f"process-{i}.pt") for i in mine or [0]]
    found = dict(states[0])
    for key in found["metrics"]:
        found["metrics"][key] = sum(s["metrics"][key] for s in states) * bool(mine)
    return found


def _together(promises) -> dict:
    """Return the promises of a sharded training: the processes' batches count together."""
    own = {"batch_size", "world_size"}
    images = promises["batch_size"] * promises["world_size"]
    rest = {name: value for name, value in promises.items() if name not in own}
    return {"batch_size times processes": images} | rest


def _resumed(state, args):
    if state["trainer"] != _trainer_sha256() and idr_torch.is_master:
        print(
            f"note: --resume {args.resume}: the trainer's source has changed since it was saved, "
            "so this run may not be what the first one would have been"
        )
    return state["epoch"], state["step"]


def _latest(folder) -> Path:
    """Return the complete folder of shards inside `folder`."""
    try:
        name = course.read_small(folder / LATEST).decode().strip()
        found = folder / name
        if found.resolve().parent != folder.resolve():
            raise ValueError(f"expected the name of a folder in it, found {name[:60]!r}")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop, Python 3.11
        raise CheckpointError(
            f"--resume {folder}: no checkpoint of this trainer ({LATEST}: "
            f"{_first_line(error)}); give a folder that it has saved, with --sharding fsdp"
        ) from error
    return found


def _tensors(file):
    try:
        return shards.tensors(file)
    except Exception as error:  # a damaged file makes torch raise nearly anything
        empty = os.path.isfile(file) and os.path.getsize(file) == 0
        found = "it is empty" if empty else _first_line(error)
        raise CheckpointError(
            f"--resume {file}: not a checkpoint of this trainer ({found}); give one that it has "
            "saved, such as runs/0001/checkpoint.pt"
        ) from error


def _read(file, **more):
    state = _tensors(file)
    expected = {"epoch": int, "step": int, "promises": dict, "trainer": str} | more
    for name, kind in expected.items():
        found = state.get(name) if isinstance(state, dict) else None
        if type(found) is not kind:
            raise CheckpointError(
                f"--resume {file}: not a checkpoint of this trainer (expected {name!r} to be "
                f"{kind.__name__}, found {type(found).__name__}); one that another version of the "
                "course has saved can't be resumed: start again without --resume"
            )
    return state


def _keep_promises(promised, now, file):
    for name, value in now.items():
        if name not in promised or promised[name] != value:
            raise CheckpointError(
                f"--resume {file}: it was saved with {name} {promised.get(name)!r}, this run has "
                f"{value!r}; to go on where it stopped, use the same value"
            )


@contextmanager
def _fitting(file, name):
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # each part raises its own kinds
        cause = _cause(error)
        if isinstance(cause, (CheckpointError, torch.OutOfMemoryError, KeyboardInterrupt)):
            raise cause from None
        raise CheckpointError(
            f"--resume {file}: its {name!r} does not fit this trainer ({_first_line(error)}); use "
            "the trainer that saved it, or start again without --resume"
        ) from error


def _put_own(training, own):
    training.metrics.load_state_dict(own["metrics"])
    buffers = dict(training.model.named_buffers())
    if buffers.keys() != own["buffers"].keys():
        raise ValueError(f"expected the buffers {list(buffers)}, found {list(own['buffers'])}")
    for name, buffer in buffers.items():
        buffer.copy_(own["buffers"][name])
    torch.set_rng_state(own["cpu_rng"])
    device = next(training.model.parameters()).device
    if device.type == "cuda" and own["cuda_rng"] is not None:
        torch.cuda.set_rng_state(own["cuda_rng"], device)


def _promises(training, args):
    return {
        **{name: getattr(args, name) for name in SAME_FLAGS},
        **{name: getattr(args, name, usual) for name, usual in MORE_FLAGS.items()},
        "world_size": idr_torch.size,
        "total_steps": getattr(training.scheduler, "total_steps", None),  # of the schedule
        "parts": sorted(parts(training)),
    }


def parts(training) -> dict:
    """Return the parts of a training by name, without those that are made again.

    These are None, functions, such as a criterion, and 07's draws and number of classes. Any other
    part must have a state, which would be lost silently otherwise.
    """
    names = getattr(training, "__slots__", None) or vars(training)
    found = {name: getattr(training, name) for name in names}
    return {
        name: part
        for name, part in found.items()
        if hasattr(part, "state_dict") or not (isinstance(part, MADE_AGAIN) or callable(part))
    }


def _trainer_sha256():
    trainer = Path(sys.argv[0])
    return hashlib.sha256(trainer.read_bytes() if trainer.is_file() else b"").hexdigest()


def _cause(error):
    """Return one process's error, if torch has gathered the errors of several."""
    return next(iter(error.failures.values()))[0] if hasattr(error, "failures") else error


def _first_line(error):
    error = _cause(error)
    text = str(error).strip() or "no reason given"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"
