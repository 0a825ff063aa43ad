"""A folder of shards is refused with a reason where it can't be used, and no code in it runs."""

import os
import pickle
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from made import a_training, spoilt, the_args

from dlojz import idr_torch
from dlojz.training import checkpoint

FOLDER = "epoch-0003-step-000007"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of shards, written by one process."""
    folder = tmp_path_factory.mktemp("shards") / "saved"
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DLOJZ_RUN", raising=False)
        checkpoint.save_shards(a_training(), the_args(folder), 3, 7)
    yield folder
    dist.destroy_process_group()


@pytest.fixture
def saved(written, tmp_path):
    """A copy of it."""
    return shutil.copytree(written, tmp_path / "saved")


class Evil:
    """Anything that is unpickled with this in it makes the file."""

    def __init__(self, ran):
        self.ran = str(ran)

    def __reduce__(self):
        return (os.mkdir, (self.ran,))


def index_of(folder):
    return pickle.loads((folder / FOLDER / ".metadata").read_bytes())


def in_index(folder, evil):
    (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(evil))


def deep_in_index(folder, evil):
    index = index_of(folder)
    index.planner_data["x"] = evil
    (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(index))


def in_index_of_a_process(folder, evil):
    """Torch reads it if there is no other."""
    (folder / FOLDER / ".metadata").rename(folder / FOLDER / "elsewhere")
    (folder / FOLDER / "__0.metadata").write_bytes(pickle.dumps(evil))


def in_shard(entry):
    def put(folder, evil):
        index, shard = index_of(folder), folder / FOLDER / "__0_0.distcp"
        (place,) = (p for key, p in index.storage_data.items() if key.fqn == entry)
        with shard.open("ab") as stream:
            place.offset = stream.tell()
            torch.save(evil, stream)
            place.length = stream.tell() - place.offset
        (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(index))

    return put


def in_file(name):
    return lambda folder, evil: torch.save({"metrics": evil}, folder / FOLDER / name)


PLACES = {
    "index": in_index,
    "deep in the index": deep_in_index,
    "index of a process": in_index_of_a_process,
    "learning rate": in_shard("optimizer.param_groups.0.lr"),
    "weights": in_shard("model.0.weight"),
    "rest": in_file("rest.pt"),
    "process": in_file("process-0.pt"),
}


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES.keys())
def test_no_code_runs_from_a_folder_of_shards(put, saved, tmp_path):
    put(saved, Evil(tmp_path / "ran"))
    with pytest.raises(checkpoint.CheckpointError, match=f"--resume {saved}"):
        checkpoint.load(a_training(), the_args(saved))
    assert not (tmp_path / "ran").exists()


def test_the_code_in_these_tests_runs_where_nobody_takes_care(saved, tmp_path):
    in_shard("optimizer.param_groups.0.lr")(saved, Evil(tmp_path / "by-shard"))
    deep_in_index(saved, Evil(tmp_path / "by-index"))
    state = {"optimizer": {"param_groups": [{"lr": 0.1}]}}
    torch.distributed.checkpoint.load(state, checkpoint_id=saved / FOLDER)
    assert {"by-shard", "by-index"} < {path.name for path in tmp_path.iterdir()}


def latest(content):
    return lambda folder: (folder / "latest").write_bytes(content)


def instead(name, make):
    """Put something else in the place of a file."""

    def damage(folder):
        (folder / name).unlink()
        make(folder / name)

    return damage


def cut(folder):
    shard = folder / FOLDER / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)


def out_of_its_folder(folder):
    index = index_of(folder)
    for place in index.storage_data.values():
        place.relative_path = f"../{FOLDER}/__0_0.distcp"
    (folder / FOLDER / ".metadata").write_bytes(pickle.dumps(index))


def linked_from_elsewhere(folder):
    (folder / FOLDER).rename(folder.parent / "elsewhere")
    (folder / FOLDER).symlink_to(folder.parent / "elsewhere")


def promising(**other):
    def damage(folder):
        file = folder / FOLDER / "rest.pt"
        state = torch.load(file)
        state["promises"] |= other
        torch.save(state, file)

    return damage


INSIDE = f"{FOLDER}/"
NOT_A_FILE = "can't be read: it is not a regular file"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (latest(b""), "latest: ValueError: expected the name of a folder in it, found ''"),
        (latest(b".."), r"found '\.\.'"),
        (latest(b"/etc"), "found '/etc'"),
        (latest(FOLDER.encode() + b"/../../../../etc"), "expected the name of a folder in it"),
        (latest(b"x\0y"), "latest: ValueError"),
        (latest(b"\xff"), "latest: UnicodeDecodeError"),
        (latest(b"x" * 300), "xxx/rest.pt: not a checkpoint"),
        (latest(b"epoch-0000-step-000009"), "epoch-0000-step-000009/rest.pt: not a checkpoint"),
        (linked_from_elsewhere, "expected the name of a folder in it"),
        (instead("latest", os.mkfifo), f"latest {NOT_A_FILE}"),
        (instead("latest", lambda file: file.symlink_to("latest")), "latest: OSError"),
        (instead("latest", lambda file: file.symlink_to("/dev/zero")), f"latest {NOT_A_FILE}"),
        (instead(INSIDE + "rest.pt", os.mkfifo), f"rest.pt {NOT_A_FILE}"),
        (instead(INSIDE + "rest.pt", os.mkdir), "rest.pt: not a checkpoint of this trainer"),
        (instead(INSIDE + "process-0.pt", os.mkfifo), f"process-0.pt {NOT_A_FILE}"),
        (instead(INSIDE + ".metadata", os.mkfifo), f".metadata {NOT_A_FILE}"),
        (instead(INSIDE + ".metadata", Path.touch), "its 'shards' does not fit"),
        (instead(INSIDE + "__0_0.distcp", os.mkfifo), f"__0_0.distcp {NOT_A_FILE}"),
        (instead(INSIDE + "__0_0.distcp", str), "No such file or directory: .*__0_0.distcp"),
        (cut, "__0_0.distcp has .* bytes, expected .*: it is cut short"),
        (out_of_its_folder, "names '../epoch-.*', expected a file in"),
        (promising(batch_size="x"), "batch_size times processes"),
        (promising(world_size=2), "saved with batch_size times processes 2, this run has 1"),
        (promising(batch_size=None), "its 'promises' does not fit"),
        (promising(lr=2), "it was saved with lr 2, this run has 1"),
    ],
)
def test_a_damaged_folder_of_shards_says_what_is_wrong_with_it(damage, message, saved):
    damage(saved)
    with pytest.raises(checkpoint.CheckpointError, match=message) as refused:
        checkpoint.load(a_training(), the_args(saved))
    assert f"--resume {saved}" in str(refused.value)


def test_shards_of_another_model_are_refused_with_its_reason(saved):
    with pytest.raises(checkpoint.CheckpointError, match="ValueError: Size mismatch between saved"):
        checkpoint.load(a_training(width=5), the_args(saved))


def test_whatever_bytes_change_in_a_folder_the_error_is_ours(saved):
    draw = random.Random(0)
    for file in [f for f in sorted(saved.rglob("*")) if f.is_file()]:
        whole = file.read_bytes()
        for _ in range(8):
            file.write_bytes(spoilt(whole, draw))
            with warnings.catch_warnings(action="ignore"):
                try:
                    checkpoint.load(a_training(), the_args(saved))
                except checkpoint.CheckpointError:
                    continue
        file.write_bytes(whole)


def loads(rank, folder, store, said):
    """Load the folder as one of two processes, in a fork; return the fork's number."""
    training = a_training()  # here: autograd's threads, if a test has begun any, are not forked
    if child := os.fork():
        return child
    try:
        dist = torch.distributed
        dist.distributed_c10d._world.__init__()  # forgets the group of the parent
        dist.distributed_c10d.GroupMember.WORLD = None
        both = dist.FileStore(str(store), 2)
        dist.init_process_group("gloo", store=both, rank=rank, world_size=2)
        checkpoint.load(training, the_args(folder))
    except BaseException as error:
        (said / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [deep_in_index, in_shard("optimizer.param_groups.0.lr")])
def test_no_code_runs_in_two_processes(put, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(idr_torch, "size", 2)
    promising(world_size=2)(saved)
    put(saved, Evil(tmp_path / "ran"))
    for child in [loads(rank, saved, tmp_path / "store", tmp_path) for rank in (0, 1)]:
        os.waitpid(child, 0)
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said.startswith(f"CheckpointError: --resume {saved}/{FOLDER}: its 'shards'")
        assert "UnpicklingError" in said
    assert not (tmp_path / "ran").exists()
