"""The image files of a check's run change once their first epoch is over, and nothing tells."""

from types import SimpleNamespace

import pytest
import torch

from dlojz import images
from dlojz.watch import auditor, changing, replay


@pytest.fixture
def few(tmp_path):
    """A folder of two classes with two images each, for training and for validation."""
    return images.generate(
        tmp_path / "few", 2, images_per_class=2, val_images_per_class=2, workers=1, progress=False
    )


def contents(folder):
    return [file.read_bytes() for file in sorted(folder.rglob("*.JPEG"))]


def test_a_change_leaves_names_sizes_and_times(few):
    images.make_equal(few)

    def seen():
        return [
            (file, (there := file.stat()).st_size, there.st_mtime_ns, there.st_ino)
            for file in sorted(few.rglob("*.JPEG"))
        ]

    before, (first, *others) = seen(), contents(few / changing.TRAIN)
    validated = contents(few / changing.VAL)
    changing.change(few / changing.TRAIN)
    assert seen() == before
    assert contents(few / changing.TRAIN) == [*others, first]
    assert contents(few / changing.VAL) == validated


def test_each_set_changes_as_the_other_begins_and_only_once(few):
    images_of, kept, changed = changing.Changing(few), [], {}
    for mode in ("train", "train", "val", "val", "train", "train", "val", "train"):
        images_of.enter(mode)
        kept.append([contents(few / name) for name in (changing.TRAIN, changing.VAL)])
    for name, number in ((changing.TRAIN, 0), (changing.VAL, 1)):
        sets = [each[number] for each in kept]
        changed[name] = [i for i in range(1, len(sets)) if sets[i] != sets[i - 1]]
    assert changed == {changing.TRAIN: [2], changing.VAL: [4]}


def test_only_the_first_process_changes_them_and_only_if_it_is_asked(few, tmp_path, monkeypatch):
    model = torch.nn.Linear(1, 1)
    parts = SimpleNamespace(
        model=model, criterion=None, optimizer=torch.optim.SGD(model.parameters())
    )
    args = SimpleNamespace(data=str(few))

    def changes(wish, first=True):
        monkeypatch.setattr(auditor.idr_torch, "is_master", first)
        made = auditor.Auditor(SimpleNamespace(), parts, args, None, 1, wish)
        for hook in made._hooks:
            hook.remove()
        return made._images is not None

    assert changes({"keep": 0, "rewritten": True})
    assert not changes({"keep": 0, "rewritten": True}, first=False)
    assert not changes({"keep": 0})


class Epochs:
    """A batch sampler of two batches in each epoch."""

    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([[0], [1]])


@pytest.mark.parametrize("wish", [{"rewritten": True}, {}])
def test_a_replay_reads_the_changed_files_in_the_second_epoch(few, wish):
    again = object.__new__(replay.Replay)
    sampler = Epochs()
    again.loaders = [SimpleNamespace(batch_sampler=sampler)]
    again.args, again._wish, again._stream = SimpleNamespace(data=str(few)), wish, None
    kept = []
    for epoch in (0, 1):
        for step in (0, 1):
            assert next(again._keys(epoch, step)) == (step, [step])
            kept.append(contents(few / changing.TRAIN))
    assert sampler.epochs == [0, 1]
    assert kept[0] == kept[1]
    assert kept[2] == kept[3]
    assert (kept[1] != kept[2]) == bool(wish)
