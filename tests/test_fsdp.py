"""A sharded model trains like a whole one, and its checkpoint goes on with any number of shards."""

import argparse
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from forking import BLOCKS
from made import in_one_job, stopping, torchrun
from torch.distributed.tensor import Shard

from dlojz import course, idr_torch
from dlojz.chapters.n11_fsdp import exercise
from dlojz.check import exercise as exercises
from dlojz.check import judge
from dlojz.check.ending import Ending, How
from dlojz.runs import log, records
from dlojz.training import flags, models
from dlojz.watch import solved

SOLUTION = course.solution("11")
SIZES = "--model vit_tiny --image-size 32 -e 2 --num-workers 0 --lr 0.01 --precision fp32"
RUNS = {
    "resnet": "--sharding fsdp --model resnet18 --no-channels-last",
    "resnet-ddp": "--sharding ddp --model resnet18 --no-channels-last",
    "accumulates": "--sharding fsdp --accumulate 2 --clip-norm 0.1",
    "accumulates-ddp": "--sharding ddp --accumulate 2 --clip-norm 0.1",
    "adamw": "--sharding fsdp --optimizer adamw --lr 1e-3 --deterministic",
    "adamw-ddp": "--sharding ddp --optimizer adamw --lr 1e-3",
    "lamb": "--sharding fsdp --optimizer lamb --lr 0.03 --schedule constant",
    "lamb-ddp": "--sharding ddp --optimizer lamb --lr 0.03 --schedule constant",
    "compiled": "--sharding fsdp --optimizer adamw --lr 1e-3 --checkpointing blocks "
    "--compile aot_eager",
}


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """The folder of each run, of two processes; "stopped" ends after its first checkpoint."""
    folder = tmp_path_factory.mktemp("fsdp")
    saved, common = folder / "saved", [*SIZES.split(), "-b", "8", "--data", images]
    wanted = {name: (SOLUTION, [*common, *flags.split()]) for name, flags in RUNS.items()}
    saves = ["--checkpoint", saved, "--checkpoint-every", 3]
    stopped = stopping(SOLUTION, folder)
    wanted["stopped"] = stopped, [*wanted["adamw"][1], *saves]
    wanted["resumed"] = SOLUTION, [*wanted["adamw"][1], "--resume", saved]
    saves[1] = folder / "lamb"
    wanted["lamb-stopped"] = stopped, [*wanted["lamb"][1], *saves]
    wanted["lamb-resumed"] = SOLUTION, [*wanted["lamb"][1], "--resume", saves[1]]
    return in_one_job(wanted, n_gpu=2, all_complete=False) | {"saved": saved}


def losses(folder):
    """The mean over the processes of each step's loss."""
    every = [list(run.steps.loss) for run in log.read_ranks(folder)]
    return [sum(step) / len(step) for step in zip(*every, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("compiled", "adamw"),
        ("resnet", "resnet-ddp"),
        ("accumulates", "accumulates-ddp"),
        ("adamw", "adamw-ddp"),
        ("lamb", "lamb-ddp"),
    ],
)
def test_shards_learn_what_the_whole_does(one, other, runs):
    mine, usual = losses(runs[one]), losses(runs[other])
    assert len(mine) == 8
    assert mine == pytest.approx(usual, rel=1e-4)
    assert usual[-1] != pytest.approx(usual[0], rel=0.01), "there is something to learn"


@pytest.mark.slow
def test_a_process_holds_its_share_and_what_was_not_kept_runs_again(runs):
    whole, own, again = (log.read(runs[name]).share for name in ("adamw-ddp", "adamw", "compiled"))
    assert whole.placements == {"whole": 8 + 12 * BLOCKS}
    assert own.placements == {"Shard(dim=0)": 6 + 12 * BLOCKS, "Shard(dim=2)": 2}
    assert own.units == 1 + BLOCKS
    for part, nbytes in whole.held.items():
        assert own.held[part] == pytest.approx(nbytes / 2, rel=0.01)
    assert (own.again, again.again) == (0, 6 * BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "rest"), [("adamw", "resumed"), ("lamb", "lamb-resumed")])
def test_a_resume_of_shards_is_identical_to_the_bit(one, rest, runs):
    whole, rest = log.read(runs[one]), log.read(runs[rest])
    assert len(rest.steps) == 5
    assert list(rest.steps.loss) == list(whole.steps.loss)[3:]
    assert rest.epochs[-1] == whole.epochs[-1]


@pytest.mark.slow
def test_each_process_writes_its_shards(runs):
    latest = runs["saved"] / (runs["saved"] / "latest").read_text()
    assert latest.name == "epoch-0000-step-000003"
    files = {file.name for file in latest.iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp", "process-0.pt", "process-1.pt",
                     "rest.pt"}  # fmt: skip
    state = 3 * log.read(runs["adamw"]).setup["parameter_bytes"]
    sizes = [(latest / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert sizes == pytest.approx([state / 2, state / 2], rel=0.05)  # and their names


@pytest.mark.slow
def test_four_processes_go_on_where_two_stopped(runs, images, tmp_path):
    words = [*SIZES.split(), *RUNS["adamw"].split(), "-b", "4", "--data", images]
    command = torchrun(SOLUTION, [*words, "--resume", runs["saved"]], 4)
    environment = os.environ | {"DLOJZ_RUN": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(runs["adamw"])[3:], rel=1e-4)
    mine, usual = (log.read(f).epochs[0] for f in (tmp_path, runs["adamw"]))
    assert mine["train_loss"] == pytest.approx(usual["train_loss"], rel=1e-4)


# Without processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "kept"), [("sgd", 1.0), ("adamw", 0.0)])
def test_adamw_begins_without_momenta_of_sgd(optimizer, kept, monkeypatch):
    trainer = solved.imported(SOLUTION)
    words = f"dlojz.py --model resnet18 --image-size 32 --optimizer {optimizer}"
    monkeypatch.setattr("sys.argv", words.split())
    training = trainer.build_training(trainer.parse_args(), torch.device("cpu"), 10, 100)
    states = [s for state in training.optimizer.state.values() for s in state.values()]
    weights = sum(map(torch.numel, training.model.parameters()))
    assert sum(map(torch.numel, states)) == kept * weights


def test_a_sharded_training_needs_two_processes(capsys):
    parser = argparse.ArgumentParser()
    args = argparse.Namespace(
        model="vit_tiny", checkpoint=None, resume=None, num_workers=1, sharding="fsdp"
    )
    with pytest.raises(SystemExit):
        flags.check(parser, args)
    assert "needs at least two processes: submit it with n_gpu=2" in capsys.readouterr().err


def test_muon_is_refused_in_shards(capsys, monkeypatch):
    asked = {"model": "vit_tiny", "checkpoint": None, "resume": None, "num_workers": 1}
    args = argparse.Namespace(**asked, sharding="fsdp", optimizer="muon")
    monkeypatch.setattr(flags, "idr_torch", SimpleNamespace(size=2))
    with pytest.raises(SystemExit):
        flags.check(argparse.ArgumentParser(), args)
    assert "muon needs whole matrices: with --sharding fsdp take" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "processes", "dimension"),
    [((1, 5, 192), 2, 2), ((1, 1, 192), 5, None), ((192, 3, 16, 16), 2, None), ((1,), 2, None)],
)
def test_a_single_row_is_cut_along_its_columns_if_that_is_even(
    shape, processes, dimension, monkeypatch
):
    monkeypatch.setattr(idr_torch, "size", processes)
    expected = None if dimension is None else Shard(dimension)
    assert models.dimension(torch.empty(shape)) == expected


def drawn(name, seed=3):
    """A model that was built without values, and one that was built with them."""
    torch.manual_seed(seed)
    whole = models.build(name, 10, 32)
    torch.manual_seed(seed)
    with torch.device("meta"):
        empty = models.build(name, 10, 32)
    assert next(empty.parameters()).is_meta
    return models.draw(empty.to_empty(device="cpu")).state_dict(), whole.state_dict()


@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])
def test_a_weight_is_the_same_whoever_draws_it(name):
    found, whole = drawn(name)
    for key, value in whole.items():
        assert torch.equal(value, found[key]), key


def test_another_seed_draws_other_weights():
    _, whole = drawn("vit_tiny")
    other, _ = drawn("vit_tiny", seed=4)
    assert not torch.equal(whole["conv_proj.weight"], other["conv_proj.weight"])


def test_a_model_of_ones_own_is_not_drawn():
    with pytest.raises(ValueError, match="Linear is not of models"):
        models.draw(torch.nn.Linear(2, 2))


def test_no_weight_but_the_biases_begins_with_zeros():
    torch.manual_seed(0)
    model = models.build("vit_tiny", 10, 32)
    zeros = {name for name, p in model.named_parameters() if not p.any()}
    assert all(name.endswith(("bias", "class_token")) for name in zeros)
    assert model.encoder.layers[0].mlp[0].weight.detach().std() == pytest.approx(0.0456, rel=0.02)


# The memory that a verdict asks for --------------------------------------------------------------


def process(held, peak=None):
    """The log of a process that holds these bytes, with this peak on a GPU."""
    memory = {"device_peak_bytes": peak} if peak else {}
    run = SimpleNamespace(share=records.Share(held={"parameters": held}), memory=memory)
    run.ranks = [run, run]
    return run


@pytest.mark.parametrize(
    ("held", "peak", "full", "out_of_memory", "states"),
    [
        (50, None, None, False, ["passed"]),
        (70, None, None, False, ["failed"]),
        (50, 160, 200, False, ["passed", "passed"]),
        (50, 190, 200, False, ["passed", "failed"]),  # 25 of the 50 that are gone must be seen
        (50, 190, None, True, ["passed", "passed"]),
    ],
)
def test_a_process_holds_its_share_and_its_gpu_less_than_with_ddp(
    held, peak, full, out_of_memory, states
):
    whole = exercises.Beside(process(0 if out_of_memory else 100, full), out_of_memory)
    audited, job = process(held, peak and 2 * peak), process(held, peak)
    runs = exercises.Runs(audited, process(50, peak), beside={exercise.DDP: whole}, job=job)
    assert [finding.state for finding in exercise.smaller(runs)] == states


def test_without_the_run_with_ddp_the_memory_is_unmeasured():
    (finding,) = exercise.smaller(exercises.Runs(process(50), process(50)))
    assert finding.state == exercises.State.UNMEASURED


def test_a_trainer_that_crashes_is_told_that_memory_was_asked(tmp_path):
    text = repr(judge.crashed(exercises.find("11_fsdp"), tmp_path, Ending(How.FAILED, "no")))
    assert "? smaller" in text
    assert "faster" not in text
