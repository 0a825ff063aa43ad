"""Every solution trains, on 1 and on 2 processes; checkpoints go on to the bit."""

import json
import os
import re
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch
from made import in_one_job, stopping, torchrun
from programs import run_main

from dlojz import course
from dlojz.runs import log
from dlojz.runs.folder import events_file
from dlojz.runs.stats import summary
from dlojz.training import checkpoint, data

PYTHON = os.environ["DLOJZ_PYTHON"]
SMOKE = "--model shufflenet_v2_x0_5 --image-size 32 -b 8 --num-workers 0".split()
TOO_LARGE = ("--image-size", "100000", "-b", "64")  # terabytes
STEPS = [course.solution(s) for s in course.CHAIN]


@pytest.fixture(scope="module", params=[1, 2])
def folders(request, images):
    """(processes, folders of runs): all solutions, in one job."""
    flags = [*SMOKE, "--data", str(images), "--test", "--test-nsteps", "4", "-e", "2"]
    flags += ["--lr", "0.01"]  # with the default, eight images at a time may diverge
    wanted = STEPS if request.param == 1 else STEPS[-5:]  # notebook 06 begins with 05's
    return request.param, in_one_job({s.stem: (s, flags) for s in wanted}, request.param)


def test_every_solution_trains(folders, subtests):
    processes, found = folders
    for name, folder in found.items():
        with subtests.test(name):
            errors = (folder / "stderr.txt").read_text()
            assert (folder / "exit_code").read_text() == "0\n", errors
            ranks = log.read_ranks(folder)
            assert len(ranks) == processes
            for run in ranks:
                assert len(run.steps) == 8
                assert run.end["outcome"] == "completed"
                assert all(0 < loss < 20 for loss in run.steps.loss)
                assert [e["epoch"] for e in run.epochs] == [0, 1]
            assert not (folder / "checkpoint.pt").exists(), "a test run saves nothing unless asked"


@pytest.fixture(scope="module")
def usual(images, tmp_path_factory):
    """The folder of a run of two epochs, with its checkpoint."""
    folder = tmp_path_factory.mktemp("usual")
    return run_main(STEPS[0], folder, *SMOKE, "--data", images, "-e", 2, "--lr", 0.5)


def test_loss_and_accuracy_of_an_epoch_are_those_of_its_images(usual):
    run = log.read(usual)
    half = len(run.steps) // 2
    assert run.epochs[0]["train_loss"] == pytest.approx(sum(run.steps.loss[:half]) / half)
    assert 0 <= run.epochs[0]["val_accuracy"] <= 1
    assert sum(run.steps.images) == 2 * 64


def test_the_schedule_is_as_long_as_the_run(usual):
    lr = list(log.read(usual).steps.lr)
    assert len(lr) == 16
    assert max(lr) == pytest.approx(0.5, rel=0.05)
    assert lr[-1] < 0.01


def test_the_momentum_is_what_was_asked_for(images, tmp_path, train):
    """OneCycleLR cycles the momentum as well, unless that is switched off."""
    losses = {}
    for momentum in (0.0, 0.9):
        folder = tmp_path / str(momentum)
        train(STEPS[0], folder, *SMOKE, "--data", images, "--mom", momentum, "--lr", 0.01)
        losses[momentum] = list(log.read(folder).steps.loss)
    first = [run[:2] for run in losses.values()]
    assert first[0] == first[1], "the first update has no momentum yet"
    assert losses[0.0][2] != losses[0.9][2]


def test_a_batch_larger_than_the_set_is_refused(images, tmp_path, train):
    flags = [*SMOKE, "--data", images, "-b", 65, "--drop-last"]
    with pytest.raises(data.DataError, match="64 images, which make 0 batches of 65"):
        train(STEPS[0], tmp_path, *flags)


@pytest.fixture
def resumed(images, tmp_path, train, stop_at_first_save):
    """resumed(solution, *flags) -> the logs of a whole run, and of one that goes on in it."""

    def call(solution, *flags, every):
        common, file = [*SMOKE, "--data", images, "-e", 2, *flags], tmp_path / "half.pt"
        saves = ("--checkpoint", file, "--checkpoint-every", every)
        with pytest.raises(KeyboardInterrupt):
            train(solution, tmp_path / "first", *common, *saves)
        train(solution, tmp_path / "rest", *common, "--checkpoint", file, "--resume", file)
        train(solution, tmp_path / "whole", *common)
        whole, rest = log.read(tmp_path / "whole"), log.read(tmp_path / "rest")
        assert list(rest.steps.loss) == list(whole.steps.loss)[-len(rest.steps) :]
        assert rest.epochs[-1] == whole.epochs[-1]
        return whole, rest

    return call


@pytest.mark.parametrize(
    ("every", "model", "workers"),
    [(3, "mobilenet_v3_small", 1), (11, "shufflenet_v2_x0_5", 0)],
    ids=["in an epoch", "at its end"],
)
def test_a_resumed_run_is_identical_to_the_bit(every, model, workers, resumed):
    flags = ["--clip-norm", 1, "--model", model, "--num-workers", workers]  # mobilenet draws
    whole, rest = resumed(STEPS[-1], *flags, every=every)
    assert 0 < len(rest.steps) < len(whole.steps)
    assert whole.path.with_name("checkpoint.pt").exists()


@pytest.mark.parametrize("solution", [STEPS[0], STEPS[-1]], ids=lambda p: p.stem)
def test_a_resume_between_two_updates_loses_no_gradient(solution, resumed):
    """Eight batches, three for an update; asked for after step 4, so saved after step 6."""
    whole, rest = resumed(solution, "--accumulate", 3, "--lr", 0.01, every=4)
    assert len(rest.steps) == len(whole.steps) - 6 == 10
    assert rest.whole.weights_after == whole.whole.weights_after


def test_sigusr1_saves_after_the_step(images, tmp_path):
    file = tmp_path / "saved.pt"
    command = [PYTHON, STEPS[0], *SMOKE, "--data", images, "-e", "50", "--checkpoint", file]
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
        (("--lr", "0.1"), "lr 0.5, this run has 0.1"),
        (("--image-size", "64"), "image_size 32, this run has 64"),
        (("-e", "3"), "total_steps 16, this run has 24"),
        (("--seed", "1"), "seed 0, this run has 1"),
        (("--model", "resnet34"), "model 'shufflenet_v2_x0_5', this run has 'resnet34'"),
        (("--accumulate", "2"), "accumulate 1, this run has 2"),
        ((), "world_size 1, this run has 2"),
    ],
)
def test_resuming_with_something_else_is_refused(
    changed, message, images, usual, tmp_path, train, monkeypatch
):
    if not changed:
        monkeypatch.setattr(checkpoint, "idr_torch", SimpleNamespace(size=2))
    same = [*SMOKE, "--data", images, "-e", 2, "--lr", 0.5]
    with pytest.raises(checkpoint.CheckpointError, match=message):
        train(STEPS[0], tmp_path, *same, *changed, "--resume", usual / "checkpoint.pt")


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
        (("-b", "0"), "expected a whole number of at least 1"),
        (("--image-size", "big"), "invalid"),
        (("--num-workers", "-1"), "-1: expected a whole number of at least 0"),
        (("--checkpoint-every", "-5"), "-5: expected a whole number of at least 0"),
        (("--accumulate", "0"), "0: expected a whole number of at least 1"),
    ],
)
def test_bad_flags_say_what_is_wrong(flags, message, tmp_path, train, capsys):
    with pytest.raises(SystemExit) as ended:
        train(STEPS[0], tmp_path, *SMOKE, *flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def by_hand(*flags, **environment):
    """Run the starter without the launcher."""
    command = [PYTHON, STEPS[0], *SMOKE, *flags]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_folder_without_images_is_told_without_a_traceback(tmp_path):
    done = by_hand("--data", "a'; echo foo", DLOJZ_RUN=str(tmp_path))
    assert done.returncode != 0
    assert "no images in" in done.stderr
    assert "Traceback" not in done.stderr


def test_out_of_memory_is_logged_as_such(tmp_path):
    flags = ("--test", "--data", "synthetic", *TOO_LARGE)
    assert by_hand(*flags, DLOJZ_RUN=str(tmp_path)).returncode == 1
    assert summary(tmp_path).state == "OUT_OF_MEMORY"


def test_several_processes_by_hand_need_a_folder(monkeypatch):
    monkeypatch.delenv("DLOJZ_RUN", raising=False)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert "set DLOJZ_RUN" in by_hand("--test", "--data", "synthetic", **environment).stderr


# Several processes: from step 06 on ------------------------------------------------------------

DDP = course.solution("06")
TWO_EPOCHS = "-e 2 --accumulate 2 --checkpoint-every 2".split()
AS_ONE = "--test -b 4 --precision fp32 --clip-norm 1".split()  # as one process that accumulates


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The checkpoint of the run "stopped", in the middle of an epoch."""
    return tmp_path_factory.mktemp("stopped") / "half.pt"


@pytest.fixture(scope="module")
def in_pairs(images, half):
    """Runs of 06 on two processes, in one job: {name: its logs, by rank}.

    The run "stopped" ends after it has saved in the middle of an epoch, "rest" goes on from there.
    """
    common = [*SMOKE, "--data", images]
    whole = [*common, *TWO_EPOCHS]
    wanted = {
        "two": (DDP, [*common, *AS_ONE, "--test-nsteps", 4]),
        "saves": (DDP, [*common, "--checkpoint", "{run}/end.pt"]),
        "whole": (DDP, whole),
        "stopped": (stopping(DDP, half.parent), [*whole, "--checkpoint", half]),
        "rest": (DDP, [*whole, "--resume", half]),
    }
    folders = in_one_job(wanted, n_gpu=2, all_complete=False)
    return {name: log.read_ranks(folder) for name, folder in folders.items()}


def test_two_processes_train_as_one_that_accumulates_the_same_batches(images, tmp_path, in_pairs):
    """The losses of each batch, pointwise: the same images, batch statistics and updates."""
    flags = [*SMOKE, "--data", images, *AS_ONE, "--accumulate", 2, "--test-nsteps", 8]
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun(DDP, flags, 1), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = log.read(tmp_path), in_pairs["two"]
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


def test_a_resume_on_two_processes_is_identical(in_pairs, half):
    """Losses to the bit, and what each process knows alone: its share of the epoch's mean."""
    saved = torch.load(half, weights_only=True)
    assert (saved["epoch"], saved["step"]) == (0, 2)
    metrics, statistics = (
        [process[part] for process in saved["processes"]] for part in ("metrics", "buffers")
    )
    assert metrics[0]["loss.total"] != metrics[1]["loss.total"]
    assert not statistics[0]["module.conv1.1.running_mean"].equal(
        statistics[1]["module.conv1.1.running_mean"]
    )
    for a, b in zip(in_pairs["whole"], in_pairs["rest"], strict=True):
        assert 0 < len(b.steps) < len(a.steps)
        assert list(b.steps.loss) == list(a.steps.loss)[-len(b.steps) :]
        assert b.epochs == a.epochs
        ends = [run.whole for run in (a, b)]
        for kept in ("weights_after", "buffers_after"):
            assert getattr(ends[0], kept) == getattr(ends[1], kept)


def test_a_signal_makes_all_processes_save_after_the_same_update(images, tmp_path):
    """Each of them gets it, as from Slurm; here some updates apart."""
    file = tmp_path / "saved.pt"
    flags = [*SMOKE, "--data", images, "-e", "50", "--accumulate", "2", "--checkpoint", file]
    command = torchrun(DDP, flags, 2)
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path), "OMP_NUM_THREADS": "1"}
    logs = [events_file(tmp_path, rank) for rank in (0, 1)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for rank, steps in ((0, 1), (1, 8)):
            while not logs[rank].exists() or logs[rank].read_text().count('"step"') < steps:
                assert process.poll() is None
            os.kill(json.loads(logs[rank].read_text().splitlines()[0])["pid"], signal.SIGUSR1)
        in_an_epoch = re.compile(r"saved .*: epoch \d+, step [1-9]")
        assert any(in_an_epoch.match(line) for line in process.stdout), "at epoch ends only"
        process.terminate()
    saved = torch.load(file, weights_only=True)
    seen = [process["metrics"]["loss.images"] for process in saved["processes"]]
    assert seen == [8 * saved["step"]] * 2
