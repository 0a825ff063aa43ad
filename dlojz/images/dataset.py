"""The generator of an image set with the shape of ImageNet, without a download.

    from dlojz.images import generate
    generate("data/imagenet-like")  # 10 classes, 100 + 20 images each: about 130 MB, half a minute

The folder has the layout that `torchvision.datasets.ImageFolder` and `ImageNet` read:

    root/train/n01440764/n01440764_0.JPEG           root/dataset.json: describes the set
    root/val/n01440764/ILSVRC2012_val_00000001.JPEG

`dlojz.images.draw` draws the images. Neither imports torch, so that worker processes start at once.
"""

import contextlib
import errno
import json
import multiprocessing
import multiprocessing.connection
import operator
import os
import pathlib
import secrets
import shlex
import signal
import threading
from concurrent import futures

from tqdm.auto import tqdm

from dlojz.images.draw import MAX_CLASSES, image_name, jpeg, wnid
from dlojz.machine import cpus

FORMAT_VERSION = 1  # increase it whenever a byte of any image changes
MARKER = "dataset.json"
MADE_BY = "dlojz.generate"  # in the marker: this module's first name
MAX_VAL_IMAGES = 19_999
COUNTS = ("classes", "images_per_class", "val_images_per_class")
CHUNK = 8  # images per task of a worker: about 0.2 s, which delay Ctrl-C


class DataError(ValueError):
    """An error that says why an image set cannot be made or read, and what to type next."""


def _is_temporary(name):
    return name.startswith(".dlojz-") and name.endswith(".tmp")


def _write(path, content):
    """Write a file under a temporary name, then rename it, so that `path` is whole or absent.

    Another process that starts in the same folder may take the temporary file for a leftover and
    remove it; then it is written again. Errors name `path`.
    """
    for _ in range(10):
        temporary = path.with_name(f".dlojz-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
            return
        except FileNotFoundError as error:
            failure = error
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
    raise OSError(failure.errno, failure.strerror, str(path)) from failure


def _names(folder):
    """Return the names in a folder, after removing a killed run's leftovers."""
    names = set(os.listdir(folder))
    leftovers = {name for name in names if _is_temporary(name)}
    for name in leftovers:
        (folder / name).unlink(missing_ok=True)
    return names - leftovers


def _call(root, wanted):
    """Return the command that makes `wanted`, ready to paste."""
    keys = [key for key in (*COUNTS, "seed", "judge") if wanted.get(key) is not None]
    flags = " ".join(f"{_flag(key)} {wanted[key]}" for key in keys)
    return " ".join(filter(None, ["dlojz data", flags, shlex.quote(str(root))]))


def _flag(key):
    return "--" + key.replace("_", "-")


def _read_marker(root):
    """Return the folder's marker, which says what it holds; None if it has none."""
    path = root / MARKER
    try:
        held = json.loads(path.read_bytes())
        if held["made_by"] != MADE_BY:
            raise ValueError(held["made_by"])
        [int(held[key]) for key in ("format_version", "seed", *COUNTS)]
        int(held.get("judge", 0))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} exists but is not a marker of `dlojz data` ({error!r}). An image set is made"
            f" in an empty folder, or in one that holds such a set. Type `dlojz data` with another"
            f" folder."
        ) from error
    return held


def unfinished(root) -> str | None:
    """Return the command that finishes the set in `root`; None if it is whole or not ours."""
    try:
        held = _read_marker(pathlib.Path(root))
    except (DataError, OSError):  # a file of another origin that has the same name
        return None
    return None if held is None or held.get("complete") else _call(root, held)


def about(root) -> dict:
    """Return the seed and the counts of the set in a folder. Raises DataError if it is none."""
    root = pathlib.Path(root)
    if (held := _read_marker(root)) is None:
        raise DataError(
            f"{root} holds no set of `dlojz data` (no {MARKER}). Type {_call(root, {})}, or give"
            f" the folder of such a set."
        )
    if not held.get("complete"):
        raise DataError(f"{root} is not finished. Type {_call(root, held)}.")
    return held


def _write_marker(root, wanted, complete):
    content = {"made_by": MADE_BY, **wanted, "complete": complete}
    _write(root / MARKER, (json.dumps(content, indent=2) + "\n").encode())


def _refuse_other_content(root, names):
    """Raise DataError unless a folder without our marker is empty: it may hold ImageNet."""
    if names:
        some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise DataError(
            f"{root} is not empty (found {some}) and was not made by `dlojz data` (no {MARKER});"
            f" nothing was written. Type `dlojz data` with a new or empty folder; if these are"
            f" images that you want to train on, there is nothing to generate: pass the folder to"
            f" --data."
        )


def _refuse_another_set(root, held, wanted):
    """Raise DataError if the folder's set would have to change: it can only go on or grow."""
    whats = {"format_version": "format version", "seed": "seed", "judge": "the judge's seed"}
    for key, what in whats.items():
        now, then = held.get(key, "none"), wanted.get(key, "none")
        if now != then:
            raise DataError(
                f"{root} holds images of {what} {now}, but {what} {then} was asked for, and the two"
                f" cannot be mixed. Type `dlojz data` with a new folder"
                + (f", or {_call(root, held)}." if key == "seed" else ".")
            )
    for key in COUNTS:
        if held[key] > wanted[key]:
            larger = wanted | {name: max(held[name], wanted[name]) for name in COUNTS}
            raise DataError(
                f"{root} holds a set of {key}={held[key]}, but {key}={wanted[key]} was asked for,"
                f" and images are never deleted. Type {_call(root, larger)}, or choose a new"
                f" folder."
            )


def _check_arguments(wanted, workers):
    limits = {
        "classes": (1, MAX_CLASSES),
        "images_per_class": (0, 10**9),
        "val_images_per_class": (0, MAX_VAL_IMAGES),
        "seed": (0, 2**32 - 1),
        "judge": (0, 2**32 - 1),
    }
    limits = {key: limit for key, limit in limits.items() if key in wanted}
    for key, (low, high) in limits.items():
        if not low <= wanted[key] <= high:
            raise DataError(
                f"{key} is {wanted[key]}, expected {low} to {high}."
                f" Give {_flag(key)} {min(max(wanted[key], low), high)}."
            )
    if workers < 1:
        raise DataError(f"workers is {workers}, expected 1 or more. Give --workers 1.")


def _missing(root, wanted):
    """Return (split, label, indices) of the images that are missing, and make the class folders."""
    tasks = []
    for split, key in (("train", "images_per_class"), ("val", "val_images_per_class")):
        for label in range(wanted["classes"]):
            folder = root / split / wnid(label)
            folder.mkdir(parents=True, exist_ok=True)
            names = _names(folder)
            missing = [i for i in range(wanted[key]) if image_name(split, label, i) not in names]
            for first in range(0, len(missing), CHUNK):
                tasks.append((split, label, missing[first : first + CHUNK]))
    return tasks


def _make(root, seed, judge, split, label, indices):
    """Make a few images of one class, and return how many."""
    for index in indices:
        path = root / split / wnid(label) / image_name(split, label, index)
        _write(path, jpeg(seed, split, label, index, judge))
    return len(indices)


# Processes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(workers):
    """Yield a pool of this many processes, which end with it.

    They are spawned, not forked: a notebook's threads, or torch's, do not survive a fork.
    """
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker():
    """Leave Ctrl-C to the parent, which stops its workers; exit when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel

    def follow():
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(root, seed, judge, tasks, workers):
    """Yield the number of images of each task, as it is done here or in `workers` processes."""
    if workers == 1:
        for task in tasks:
            yield _make(root, seed, judge, *task)
        return
    with processes(workers) as pool:
        made = [pool.submit(_make, root, seed, judge, *task) for task in tasks]
        for done in futures.as_completed(made):
            yield done.result()


def _explain(error, root, again):
    """Return the DataError for a failure of the system or of a worker."""
    if isinstance(error, futures.BrokenExecutor):
        return DataError(
            f"a worker process died while making images in {root}: out of memory, or killed, or"
            f" generate() was called at the top level of a script. Finished images are kept."
            f" Type {again} --workers 1."
        )
    hints = {
        errno.ENOSPC: "Free some space (an image takes about 110 kB)",
        errno.EDQUOT: "Free some of your quota (an image takes about 110 kB)",
    }
    hint = hints.get(error.errno, "Make it a folder that you can write to, or choose another one")
    return DataError(
        f"cannot write {error.filename or root}: {error.strerror or error}. Finished images are"
        f" kept. {hint}, then type {again}."
    )


def generate(
    root,
    classes=10,
    images_per_class=100,
    val_images_per_class=20,
    seed=0,
    workers=None,
    progress=True,
    judge=None,
) -> pathlib.Path:
    """Make, finish or enlarge the image set in the folder `root`, and return the folder.

    classes: 1 to 5000 (one is allowed, to look at images; learning needs two).
    images_per_class, val_images_per_class: images of each class in `train` and in `val`.
    workers: processes; by default, one per CPU that this process may use; 1 means this process.
    progress: show a bar, in images per second.
    judge: draw other images in `val`, of the same classes, by this seed: nobody has seen those, and
        a training cannot have been tuned to them. `train` is as without it.

    Raises DataError if an argument is out of range, if the folder holds something else (another
    seed, a larger set, files from elsewhere), or if it cannot be written. An interrupted call
    resumes where it stopped; several processes may make the same set in the same folder.
    """
    root = pathlib.Path(root)
    workers = cpus.count() if workers is None else workers
    wanted = {
        "format_version": FORMAT_VERSION,
        "seed": operator.index(seed),
        "classes": operator.index(classes),
        "images_per_class": operator.index(images_per_class),
        "val_images_per_class": operator.index(val_images_per_class),
    }
    wanted |= {} if judge is None else {"judge": operator.index(judge)}
    _check_arguments(wanted, workers)
    try:
        _fill(root, wanted, workers, progress)
    except (OSError, futures.BrokenExecutor) as error:
        raise _explain(error, root, _call(root, wanted)) from error
    return root


def make_equal(root):
    """Give all files of an image set the same size: decoders ignore bytes after an image's end."""
    files = sorted(pathlib.Path(root).rglob("*.JPEG"))
    most = max(file.stat().st_size for file in files)
    for file in files:
        os.truncate(file, most)  # fills with zeros


def _fill(root, wanted, workers, progress):
    """Bring the folder to `wanted`: marker, images, marker again with `complete`."""
    root.mkdir(parents=True, exist_ok=True)
    # Listed before the marker is read, so that another process's new files do not look foreign.
    names = {n for n in os.listdir(root) if not _is_temporary(n)}
    held = _read_marker(root)
    if held is None:
        _refuse_other_content(root, names)
    else:
        _refuse_another_set(root, held, wanted)
    _names(root)  # removes leftovers
    if held is None or any(held[key] != wanted[key] for key in COUNTS):
        _write_marker(root, wanted, complete=False)
    tasks = _missing(root, wanted)
    total = sum(len(indices) for _, _, indices in tasks)
    if total:
        description = f"making images in {root.name}"
        seeds = wanted["seed"], wanted.get("judge")
        counts = _run(root, *seeds, tasks, min(workers, len(tasks)))
        bar = tqdm(total=total, unit="image", desc=description, disable=not progress)
        with contextlib.closing(counts), bar:
            for count in counts:
                bar.update(count)
    elif progress:
        print(f"{root} is complete: nothing was made")
    # Another process may have begun a larger set in this folder meanwhile, and will complete it.
    now = _read_marker(root)
    ours = now is None or all(now[key] == wanted[key] for key in COUNTS)
    if ours and not (now and now["complete"]):
        _write_marker(root, wanted, complete=True)
