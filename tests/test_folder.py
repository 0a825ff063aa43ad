"""Runs' folders, and the recorded runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dlojz.runs import recorded, recordings
from dlojz.runs.folder import new_run


def test_runs_get_numbers_in_order_whoever_else_asks(course_folder):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run(), range(40)))
    assert sorted(f.name for f in folders) == [f"{i:04d}" for i in range(1, 41)]


def test_a_recording_is_a_log_or_the_folder_of_several_processes():
    assert recorded("h100/01-resnet50-fp32-b0256").name == "01-resnet50-fp32-b0256.jsonl"
    assert recorded("h200/06-unused-x2").is_dir()
    assert len(recordings("h100/01-resnet50-fp32-*")) == 8


@pytest.mark.parametrize("look", [recorded, recordings])
def test_a_missing_recording_names_the_folders_that_exist(look):
    with pytest.raises(FileNotFoundError, match=r"no recording.*folders .*h100"):
        look("a100/nothing")
