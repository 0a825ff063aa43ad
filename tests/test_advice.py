"""Errors of torch and Python get a sentence that says what to do."""

import multiprocessing.synchronize
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dlojz import course
from dlojz.runs import log
from dlojz.runs.advice import advice

FULL = (28, "No space left on device")
WORKER = (
    "Caught RuntimeError in DataLoader worker process 0.\nunable to allocate shared memory(shm)"
)
BUS = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "


def full_shared_memory():
    with mock.patch("_multiprocessing.SemLock", side_effect=OSError(*FULL)):
        multiprocessing.Lock()


def one_image():
    torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))


def no_step():
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 0)


def one_update_of_warm_up():
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, pct_start=0.1)


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (full_shared_memory, "/dev/shm is full"),
        (lambda: fail(RuntimeError(WORKER)), "/dev/shm is full"),
        (lambda: fail(RuntimeError(BUS + "workers are out of shared memory")), "fewer --num-work"),
        (lambda: fail(OSError(*FULL)), "the disk is full"),
        (one_image, "use --drop-last"),
        (no_step, "--batch-size must not exceed"),
        (one_update_of_warm_up, "take another --warm-up, or more updates"),
        (lambda: fail(ZeroDivisionError("of one's own")), ""),
        (lambda: fail(ValueError("any other")), ""),
    ],
)
def test_the_advice_on_an_error(call, expected):
    with pytest.raises((OSError, RuntimeError, ValueError, ZeroDivisionError)) as caught:
        call()
    assert expected in advice(caught.value)
    assert bool(advice(caught.value)) == bool(expected)


def test_a_run_that_fails_says_what_to_do_on_stderr_and_in_its_log(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    run = log.RunLog(tmp_path, SimpleNamespace())
    run._on_error(OSError, OSError(*FULL), None)
    assert "No space left on device" in (err := capsys.readouterr().err)
    assert err.endswith("make room, submit again\n")
    assert (
        "OSError: [Errno 28] No space left on device\nthe disk is"
        in log.read(tmp_path).end["error"]
    )


def test_a_last_batch_of_one_image_names_the_flag(tmp_path, images):
    flags = "--model resnet18 --image-size 32 -b 63 --num-workers 0 --no-drop-last".split()
    words = [os.environ["DLOJZ_PYTHON"], str(course.solution("00")), *flags, "--data", str(images)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "What to do: batch norm cannot train on a batch of one image" in done.stderr
