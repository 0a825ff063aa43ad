"""What sets runs apart."""

import json

from dlojz.runs import recorded
from dlojz.runs.labels import apart, command, labels, name


def submitted(folder, command, name="dlojz"):
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"name": name, "command": command.split()}))
    return folder


def test_several_runs_are_told_apart_by_name_or_by_their_own_flags(tmp_path):
    before, after = (submitted(tmp_path / n, "t.py -b 8", n) for n in ("before", "after"))
    commands = ("t.py --test -b 8 --lr 1", "t.py --test -b 16 --lr 1 --x -1")
    sweep = [submitted(tmp_path / str(i), c) for i, c in enumerate(commands)]
    assert labels([before, after]) == ["before", "after"]
    assert labels(sweep) == ["-b 8", "-b 16 --x -1"]
    assert labels([before]) == [""]
    other = submitted(tmp_path / "other", "dlojz/u.py -b 8", "before")
    assert labels([before, other]) == ["t.py", "u.py"]


def test_a_recording_kept_its_command_and_a_run_by_hand_has_none(tmp_path):
    recording = recorded("h100/01-resnet50-fp32-b0008")
    assert command(recording)[:3] == ["solutions/dlojz_01_gpu.py", "--model", "resnet50"]
    assert name(recording) == ""
    assert (name(tmp_path), command(tmp_path)) == ("", [])
    assert apart([command(recording), command(tmp_path)])[1] == []
