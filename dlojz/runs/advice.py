"""Advice on errors of torch and Python whose own text does not say what to do."""

import re
import traceback

# Patterns searched for in the error ("OSError: its text") and in the names of the files of its
# traceback. The first match counts.
ADVICE = {
    r"shared memory|Errno 28\b(?s:.*)/multiprocessing/synchronize\.py": (
        "/dev/shm is full, through which the loader's workers hand over their batches: see `df -h "
        "/dev/shm`. Use fewer --num-workers (0 does not use it), or give the container more: "
        "docker run --shm-size=8g"
    ),
    r"Errno (28|122)\b": (
        "the disk is full, or your quota: see `df -h .` and `du -sh runs/*`, make room, "
        "submit again"
    ),
    r"Expected more than 1 value per channel": (
        "batch norm cannot train on a batch of one image, and the last batch of an epoch is that "
        "small: use --drop-last, or another --batch-size"
    ),
    r"ZeroDivisionError(?s:.*)/lr_scheduler\.py": (
        "OneCycleLR cannot warm up for one update only: take another --warm-up, or more updates"
    ),
    r"positive integer total_steps, but got 0": (
        "an epoch has no step: with --drop-last, --batch-size must not exceed the number of "
        "training images of a process"
    ),
}


def advice(error: BaseException) -> str:
    """Return advice on this error, or ""."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    text = "\n".join([f"{type(error).__name__}: {error}", *files])
    return next((tip for pattern, tip in ADVICE.items() if re.search(pattern, text)), "")
