"""A checkpoint that can't be used, or written, says which file, what is wrong, what to type."""

import dataclasses
import os
import random
import resource
import warnings
from types import SimpleNamespace

import pytest
import torch
from made import a_training, spoilt, the_args

from dlojz.training import checkpoint


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """(training, args): a checkpoint of this training is at args.resume."""
    monkeypatch.delenv("DLOJZ_RUN", raising=False)
    training, args = a_training(), the_args(tmp_path / "saved.pt")
    checkpoint.save(training, [checkpoint.own_state(training)], args, 3, 7)
    return training, args


def test_a_checkpoint_brings_everything_back(saved):
    training, args = saved
    expected = torch.rand(3)  # the generator is saved as it was before this draw
    other = a_training()
    assert checkpoint.load(other, args) == (3, 7)
    assert torch.equal(torch.rand(3), expected)
    for name, weight in training.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name


def holding(content):
    return lambda file: file.write_bytes(content)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda file: None, "FileNotFoundError"),
        (holding(b""), "it is empty"),
        (holding(b"not a checkpoint"), "not a checkpoint of this trainer"),
        (holding(b"PK\x03\x04 torn"), "not a checkpoint of this trainer.*runs/0001/checkpoint.pt"),
        (os.mkfifo, "it is not a regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda file: file.symlink_to(file), "OSError"),
        (os.mkdir, r"no checkpoint of this trainer \(latest: FileNotFoundError"),
    ],
)
def test_what_is_no_checkpoint_is_refused_at_once(place, message, tmp_path):
    args = the_args(tmp_path / "saved.pt")
    place(args.resume)
    with pytest.raises(checkpoint.CheckpointError, match=message) as refused:
        checkpoint.load(a_training(), args)
    assert f"--resume {args.resume}" in str(refused.value)


@pytest.mark.parametrize("name", ["x" * 300, "x\0y"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="not a checkpoint of this trainer"):
        checkpoint.load(a_training(), the_args(tmp_path / name))


def without(*names):
    return lambda state: [state.pop(name) for name in names]


def setting(name, value):
    return lambda state: state.update({name: value})


def in_process(name, value):
    return lambda state: state["processes"][0].update({name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("promises"), "expected 'promises' to be dict, found NoneType"),
        (setting("promises", [1]), "expected 'promises' to be dict, found list"),
        (lambda s: s["promises"].pop("lr"), "it was saved with lr None, this run has 1"),
        (setting("epoch", "x"), "expected 'epoch' to be int, found str"),
        (without("epoch"), "expected 'epoch' to be int, found NoneType"),
        (setting("step", 1.5), "expected 'step' to be int, found float"),
        (without("model"), "its 'model' does not fit this trainer"),
        (setting("model", {"0.weight": torch.zeros(9)}), "its 'model' does not fit"),
        (setting("optimizer", {"state": 5}), "its 'optimizer' does not fit"),
        (setting("scheduler", 5), "its 'scheduler' does not fit"),
        (without("metrics"), "its 'metrics' does not fit"),
        (setting("processes", 1), "expected 'processes' to be list, found int"),
        (setting("processes", []), "holds the state of 0 of 1 processes; `save` must gather"),
        (setting("processes", [3]), "its 'processes' does not fit"),
        (in_process("cpu_rng", torch.zeros(3)), "its 'processes' does not fit"),
        (in_process("buffers", {}), "its 'processes' does not fit"),
        (in_process("metrics", {}), "its 'processes' does not fit"),
    ],
)
def test_a_damaged_checkpoint_says_what_is_wrong_with_it(damage, message, saved):
    _, args = saved
    state = torch.load(args.resume, weights_only=True)
    damage(state)
    torch.save(state, args.resume)
    with pytest.raises(checkpoint.CheckpointError, match=message) as refused:
        checkpoint.load(a_training(), args)
    assert str(args.resume) in str(refused.value)


def test_whatever_bytes_change_the_error_is_ours(saved):
    _, args = saved
    whole, draw = args.resume.read_bytes(), random.Random(0)
    for _ in range(300):
        args.resume.write_bytes(spoilt(whole, draw))
        with warnings.catch_warnings(action="ignore"):  # torch wonders at what it finds
            try:
                checkpoint.load(a_training(), args)
            except checkpoint.CheckpointError:
                continue


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_runs_from_a_checkpoint(zipped, tmp_path):
    args, ran = the_args(tmp_path / "saved.pt"), tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    torch.save({"promises": Evil()}, args.resume, _use_new_zipfile_serialization=zipped)
    torch.load(args.resume, weights_only=False)["promises"].close()
    ran.unlink()  # so it would, without care
    with pytest.raises(checkpoint.CheckpointError, match="not a checkpoint of this trainer"):
        checkpoint.load(a_training(), args)
    assert not ran.exists()


def test_a_resume_with_a_changed_source_says_so(saved, tmp_path, monkeypatch, capsys):
    _, args = saved
    checkpoint.load(a_training(), args)
    assert "changed" not in capsys.readouterr().out
    edited = tmp_path / "trainer.py"
    edited.write_text("another loss")
    monkeypatch.setattr("sys.argv", [str(edited)])
    checkpoint.load(a_training(), args)
    assert f"--resume {args.resume}: the trainer's source has changed" in capsys.readouterr().out


def test_a_full_disk_leaves_the_old_checkpoint_and_no_other_file(saved):
    training, args = saved
    whole = args.checkpoint.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"not written .*Is the disk full"):
            checkpoint.save(training, [checkpoint.own_state(training)], args, 4, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert args.checkpoint.read_bytes() == whole
    assert [f.name for f in args.checkpoint.parent.iterdir()] == [args.checkpoint.name]


@pytest.mark.parametrize(
    ("accumulate", "every", "saved_after"),
    [(1, 3, [3, 6, 9, 12]), (2, 3, [4, 6, 10, 12]), (4, 1, [4, 8, 12]), (5, 7, [10]), (1, 0, [])],
)
def test_a_checkpoint_is_due_only_where_an_update_ends(accumulate, every, saved_after):
    args = SimpleNamespace(checkpoint="here", accumulate=accumulate, checkpoint_every=every)
    assert [n for n in range(1, 14) if checkpoint.due(args, n)] == saved_after


def test_a_signal_in_the_middle_of_an_update_is_kept_until_its_end(monkeypatch):
    monkeypatch.setattr(checkpoint, "_WISH", checkpoint._Wish())
    args = SimpleNamespace(checkpoint="here", accumulate=4, checkpoint_every=0)
    checkpoint._WISH.heard.set()
    assert [n for n in range(5, 14) if checkpoint.due(args, n)] == [8]


@pytest.mark.parametrize("criterion", [None, torch.nn.functional.cross_entropy])
def test_a_criterion_that_is_a_function_has_no_state(criterion, tmp_path):
    @dataclasses.dataclass(slots=True)
    class Parts:
        model: object
        optimizer: object
        scheduler: object
        metrics: object
        criterion: object

    parts, args = Parts(**vars(a_training()), criterion=criterion), the_args(tmp_path / "saved.pt")
    checkpoint.save(parts, [checkpoint.own_state(parts)], args, 3, 7)
    assert checkpoint.load(parts, args) == (3, 7)


def test_a_part_that_is_neither_is_no_function(tmp_path):
    """Or what it holds would be lost in silence."""
    training = a_training()
    training.best = 0.5
    with pytest.raises(AttributeError, match="state_dict"):
        checkpoint.save(training, [], the_args(tmp_path / "saved.pt"), 3, 7)
