"""Every solution trains, on 1 and on 2 processes; checkpoints go on to the bit."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dlojz import course, launch
from dlojz.launch import Request, series
from dlojz.runs import log
from dlojz.runs.folder import events_file
from dlojz.runs.stats import summary
from dlojz.training import checkpoint

SMOKE = "--model resnet18 --image-size 32 -b 8 --num-workers 0".split()
TOO_LARGE = ("--image-size", "100000", "-b", "64")  # terabytes
STEPS = [course.solution(s) for s in course.CHAIN]


@pytest.fixture(scope="module", params=[1, 2])
def all_steps(request, images):
    """(processes, job): all solutions, in one job."""
    flags = [*SMOKE, "--data", str(images), "--test", "--test-nsteps", "4", "-e", "2"]
    flags += ["--lr", "0.01"]  # with the default, eight images at a time may diverge
    entries = [series.Entry(s.stem, s, flags) for s in STEPS]
    job = series.submit(entries, Request(name="all-steps", time_max_s=3600, n_gpu=request.param))
    assert job.wait() == launch.State.COMPLETED, job.explain()
    return request.param, job


@pytest.mark.parametrize("solution", STEPS, ids=lambda p: p.stem)
def test_every_solution_trains(solution, all_steps):
    processes, job = all_steps
    folder = series.folders(job)[solution.stem]
    assert (folder / "exit_code").read_text() == "0\n", (folder / "stderr.txt").read_text()
    ranks = log.read_ranks(folder)
    assert len(ranks) == processes
    for run in ranks:
        assert len(run.steps) == 8
        assert run.end["outcome"] == "completed"
        assert all(0 < loss < 20 for loss in run.steps.loss)
        assert [e["epoch"] for e in run.epochs] == [0, 1]
    assert not (folder / "checkpoint.pt").exists(), "a test run saves nothing unless asked"


def test_loss_and_accuracy_of_an_epoch_are_those_of_its_images(images, tmp_path, train):
    train(STEPS[0], tmp_path, *SMOKE, "--data", images, "--lr", 1e-9)
    run = log.read(tmp_path)
    assert run.epochs[0]["train_loss"] == pytest.approx(sum(run.steps.loss) / len(run.steps))
    assert 0 <= run.epochs[0]["val_accuracy"] <= 1
    assert sum(run.steps.images) == 64


def test_the_schedule_is_as_long_as_the_run(images, tmp_path, train):
    train(STEPS[0], tmp_path, *SMOKE, "--data", images, "-e", 2, "--lr", 0.5)
    lr = list(log.read(tmp_path).steps.lr)
    assert len(lr) == 16
    assert max(lr) == pytest.approx(0.5, rel=0.05)
    assert lr[-1] < 0.01


@pytest.mark.parametrize("every", [3, 11], ids=["in an epoch", "at its end"])
@pytest.mark.parametrize(("model", "workers"), [("resnet18", 0), ("mobilenet_v3_small", 1)])
def test_a_resumed_run_is_identical_to_the_bit(
    every, model, workers, images, tmp_path, train, stop_at_first_save
):
    flags = ("--checkpoint-every", every)
    common = [*SMOKE, "--data", images, "-e", 2, "--clip-norm", 1]
    common += ["--model", model, "--num-workers", workers]  # mobilenet drops out: it draws
    file = tmp_path / "half.pt"
    with pytest.raises(KeyboardInterrupt):
        train(STEPS[-1], tmp_path / "first", *common, "--checkpoint", file, *flags)
    train(STEPS[-1], tmp_path / "rest", *common, "--checkpoint", file, "--resume", file)
    train(STEPS[-1], tmp_path / "whole", *common)
    whole, rest = log.read(tmp_path / "whole"), log.read(tmp_path / "rest")
    assert 0 < len(rest.steps) < len(whole.steps)
    assert list(rest.steps.loss) == list(whole.steps.loss)[-len(rest.steps) :]
    assert rest.epochs[-1] == whole.epochs[-1]
    assert (tmp_path / "whole" / "checkpoint.pt").exists()


def test_sigusr1_saves_after_the_step(images, tmp_path):
    file = tmp_path / "saved.pt"
    command = [sys.executable, STEPS[0], *SMOKE, "--data", images, "-e", "50", "--checkpoint", file]
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        first = events_file(tmp_path)
        while not first.exists() or '"step"' not in first.read_text():
            assert process.poll() is None
        process.send_signal(10)
        line = next(line for line in process.stdout if line.startswith("saved"))
        process.kill()
    assert line.startswith(f"saved {file}: epoch")
    assert torch.load(file, weights_only=True)["promises"]["batch_size"] == 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("-b", "4"), "batch_size 8, this run has 4"),
        (("--lr", "0.5"), "lr 0.1, this run has 0.5"),
        (("--image-size", "64"), "image_size 32, this run has 64"),
        (("-e", "3"), "total_steps 8, this run has 24"),
        (("--seed", "1"), "seed 0, this run has 1"),
        (("--model", "resnet34"), "model 'resnet18', this run has 'resnet34'"),
    ],
)
def test_resuming_with_something_else_is_refused(changed, message, images, tmp_path, train):
    file = tmp_path / "saved.pt"
    train(STEPS[0], tmp_path / "a", *SMOKE, "--data", images, "--checkpoint", file)
    flags = [*SMOKE, "--data", images, *changed, "--resume", file]
    with pytest.raises(checkpoint.CheckpointError, match=message):
        train(STEPS[0], tmp_path / "b", *flags)


def test_resuming_with_another_world_size_is_refused(images, tmp_path, train, monkeypatch):
    file = tmp_path / "saved.pt"
    train(STEPS[0], tmp_path / "a", *SMOKE, "--data", images, "--checkpoint", file)
    monkeypatch.setattr(checkpoint, "idr_torch", SimpleNamespace(size=2))
    with pytest.raises(checkpoint.CheckpointError, match="world_size 1, this run has 2"):
        train(STEPS[0], tmp_path / "b", *SMOKE, "--data", images, "--resume", file)


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint", b"PK\x03\x04 torn"])
def test_an_unreadable_checkpoint_is_refused(content, images, tmp_path, train):
    file = tmp_path / "saved.pt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of this trainer"):
        train(STEPS[0], tmp_path, *SMOKE, "--data", images, "--resume", file)


def test_a_checkpoint_is_not_overwritten_silently(images, tmp_path, train, capsys):
    (tmp_path / "saved.pt").write_bytes(b"precious")
    with pytest.raises(SystemExit):
        train(STEPS[0], tmp_path, *SMOKE, "--checkpoint", tmp_path / "saved.pt")
    assert "exists: name another, or --resume from it" in capsys.readouterr().err
    assert (tmp_path / "saved.pt").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "resnet1"), "not in torchvision.models"),
        (("-b", "0"), "expected a whole number from 1"),
        (("--image-size", "big"), "invalid"),
    ],
)
def test_bad_flags_say_what_is_wrong(flags, message, tmp_path, train, capsys):
    with pytest.raises(SystemExit) as ended:
        train(STEPS[0], tmp_path, *SMOKE, *flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_images_is_told_without_a_traceback(tmp_path):
    command = [sys.executable, STEPS[0], *SMOKE, "--data", "a'; echo foo"]
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no images in" in done.stderr
    assert "Traceback" not in done.stderr


def test_out_of_memory_is_logged_as_such(tmp_path):
    command = [sys.executable, STEPS[0], *SMOKE, "--test", "--data", "synthetic", *TOO_LARGE]
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path)}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 1
    assert summary(tmp_path).state == "OUT_OF_MEMORY"


def test_several_processes_by_hand_need_a_folder(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "DLOJZ_RUN"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    command = [sys.executable, STEPS[0], *SMOKE, "--test", "--data", "synthetic"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "set DLOJZ_RUN" in done.stderr


# Several processes: from step 06 on ------------------------------------------------------------

DDP = course.solution("06")
AS_ONE = "--test -b 4 --precision fp32 --clip-norm 1".split()  # as one process that accumulates


@pytest.fixture(scope="module")
def in_pairs(images):
    """Runs of 06 on two processes, in one job: {name: its logs, by rank}."""
    common = [*SMOKE, "--data", str(images)]
    flags = {
        "two": [*common, *AS_ONE, "--test-nsteps", "4"],
        "saves": [*common, "--checkpoint", "{run}/end.pt"],
        "whole": [*common, "-e", "2", "--checkpoint-every", "3"],
    }
    entries = [series.Entry(name, DDP, words) for name, words in flags.items()]
    job = series.submit(entries, Request(name="in-pairs", n_gpu=2))
    assert job.wait() == launch.State.COMPLETED, job.explain()
    return {name: log.read_ranks(folder) for name, folder in series.folders(job).items()}


def train_with(processes, folder, *flags):
    """Run the solution of 06 on so many processes; their logs, by rank."""
    command = launch.trainer_argv(DDP, [str(f) for f in flags], processes)
    environment = {**os.environ, "DLOJZ_RUN": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_ranks(folder)


def test_two_processes_train_as_one_that_accumulates_the_same_batches(images, tmp_path, in_pairs):
    """The losses of each batch, pointwise: the same images, batch statistics and updates."""
    flags = [*SMOKE, "--data", images, *AS_ONE, "--accumulate", 2, "--test-nsteps", 8]
    (one,), two = train_with(1, tmp_path, *flags), in_pairs["two"]
    for rank in (0, 1):
        assert list(two[rank].steps.loss) == pytest.approx(list(one.steps.loss)[rank::2], rel=2e-4)
    assert one.whole.optimizer_steps == two[0].whole.optimizer_steps
    assert two[0].epochs[0]["train_loss"] == pytest.approx(one.epochs[0]["train_loss"], rel=1e-3)
    assert two[0].epochs == two[1].epochs, "averaged over the processes"


def test_processes_share_the_images_and_hold_the_same_weights(in_pairs):
    ranks = in_pairs["saves"]
    drawn = [r.whole.drawn for r in ranks]
    assert not set(drawn[0]) & set(drawn[1])
    assert len(ranks[0].steps) == 4, "64 images, 8 a batch, 2 processes"
    assert (ranks[0].path.parent / "end.pt").exists()
    ends = [r.whole for r in ranks]
    assert ends[0].weights_after == ends[1].weights_after
    assert [end.saves for end in ends] == [1, 0], "one process writes"


def test_a_resume_on_two_processes_is_identical(images, tmp_path, in_pairs):
    flags = [*SMOKE, "--data", images, "-e", 2]
    half = tmp_path / "half.pt"
    first = [*flags, "--checkpoint", half, "--checkpoint-every", 3]
    command = launch.trainer_argv(DDP, [str(f) for f in first], 2)
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path / "first"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not half.exists():
            assert process.poll() is None
        process.terminate()
    rest = train_with(2, tmp_path / "rest", *flags, "--checkpoint", half, "--resume", half)
    for a, b in zip(in_pairs["whole"], rest, strict=True):
        assert 0 < len(b.steps) < len(a.steps)
        assert list(b.steps.loss) == list(a.steps.loss)[-len(b.steps) :]
