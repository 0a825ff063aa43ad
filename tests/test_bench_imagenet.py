"""The benchmark beside imagenet/main.py times what main.py prints."""

import bench_imagenet
import pytest


def lines(seconds_per_batch, until, every=5):
    yield 0.0, "=> creating model 'resnet50'\n"
    for done in range(1, until + 1, every):
        at = 30 + done * seconds_per_batch  # after a slow start
        yield at, f"Epoch: [0][{done:>5}/5005]\tTime  0.2 ( 0.3)\tData  0.0 ( 0.1)\n"


def test_the_clock_runs_between_two_lines_after_the_start():
    assert bench_imagenet.speed(lines(0.25, 101), batch=256, last=100) == pytest.approx(1024)


def test_a_run_that_ends_too_early_has_no_speed():
    with pytest.raises(EOFError):
        bench_imagenet.speed(lines(0.25, 90), batch=256, last=100)
    with pytest.raises(EOFError):
        bench_imagenet.speed([(0.0, "Traceback\n")], batch=256, last=100)
