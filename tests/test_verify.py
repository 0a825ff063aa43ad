"""The tool that tests the verdicts keeps each one, goes on where it stopped, and adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import verify
import wrong

from dlojz.check import exercise

HERE = "processor"
SAID = {"passed": True, "hint": None, "text": "", "seconds": 10.0, "commit": "abc"}
SAID |= {"hardware": "2 x AMD EPYC"}


class Verdicts:
    """In place of trainings: every verdict passes, and takes four minutes."""

    def __init__(self):
        self.made, self.minutes = [], 0

    def make(self, case):
        self.made.append(case)
        self.minutes += 4
        return SAID

    def clock(self):
        return 60 * self.minutes


def row(**changes):
    """A row as the file holds it: a solution that passed."""
    case = verify.solutions(["01_gpu"], 1, False, HERE)[0]
    return verify.asdict(case) | SAID | changes


def test_no_verdict_begins_when_the_time_is_over_and_a_later_call_goes_on(tmp_path):
    file, verdicts = tmp_path / "new" / "verify.jsonl", Verdicts()
    cases = verify.solutions(["01_gpu", "02_amp"], 3, False, HERE)
    assert verify.go_on(cases, file, 9, verdicts.make, verdicts.clock) == 3
    with file.open("a") as stream:
        stream.write('{"step": "01_gpu", "kind"')  # cut off
    assert verify.go_on(cases, file, 9, verdicts.make, verdicts.clock) == 0
    assert verify.go_on(cases, file, 9, verdicts.make, verdicts.clock) == 0
    assert verdicts.made == cases
    assert len(verify.read(file)) == 6


def test_the_verdicts_of_a_processor_do_not_count_on_a_gpu(tmp_path):
    file, verdicts = tmp_path / "verify.jsonl", Verdicts()
    for here in ("processor", "1 x NVIDIA H200", "processor"):
        cases = verify.solutions(["01_gpu"], 1, False, here)
        verify.go_on(cases, file, 9, verdicts.make, verdicts.clock)
    assert len(verdicts.made) == 2


def test_thirty_verdicts_have_all_seeds_models_and_sizes():
    cases = verify.solutions(["03_channels_last"], 30, False, HERE)
    assert len({(case.seed, case.model, case.sizes) for case in cases}) == 30
    assert len({case.seed for case in cases}) == 5
    assert len({case.model for case in cases}) == 3
    assert len({case.sizes for case in cases}) == 2


def test_on_a_gpu_the_notebooks_batch_comes_first_and_small_ones_after_it():
    first, second = verify.solutions(["02_amp"], 2, True, HERE)
    assert {"resnet50", "256", "fp16"} <= set(first.flags)
    assert {"shufflenet_v2_x0_5", "8", "fp16"} <= set(second.flags)
    assert first.flags.count("--model") == 1


def test_on_a_gpu_those_wrong_answers_are_judged_whose_hint_depends_on_it():
    steps = list(verify.exercise.STEPS)
    here, there = (
        {(c.step, c.name): c.expected for c in verify.wrong_answers(steps, on_gpu, HERE)}
        for on_gpu in (False, True)
    )
    assert ("01_gpu", "model-left-behind") in there
    assert ("05_dataloader", "no-mode") in here.keys() - there.keys()
    overwritten = ("09_compile", "mode-overwritten")
    assert (here[overwritten], there[overwritten]) == ("default", "not-asked")


@pytest.mark.parametrize(
    ("changes", "is_false"),
    [
        ({}, False),
        ({"passed": False, "hint": "speed"}, True),
        ({"kind": "wrong", "expected": "item"}, True),
        ({"kind": "wrong", "expected": "item", "passed": False, "hint": "item"}, False),
        ({"kind": "wrong", "expected": "item", "passed": False, "hint": "speed"}, True),
    ],
)
def test_a_solution_must_pass_and_a_wrong_answer_must_get_its_hint(changes, is_false):
    assert verify.is_false(row(**changes)) == is_false


def test_the_summary_adds_up_by_hardware_and_step():
    rows = [
        row(),
        row(passed=False, hint="losses", seconds=20.0),
        row(step="02_amp"),
        row(hardware="1 x NVIDIA H200", commit=None),
    ]
    assert verify.summary(rows).rows == [
        ("1 x NVIDIA H200", "solution", "01_gpu", "1", "0", "10", "unknown"),
        ("1 x NVIDIA H200", "solution", "all", "1", "0", "10", "unknown"),
        ("2 x AMD EPYC", "solution", "01_gpu", "2", "1", "15", "abc"),
        ("2 x AMD EPYC", "solution", "02_amp", "1", "0", "10", "abc"),
        ("2 x AMD EPYC", "solution", "all", "3", "1", "13", "abc"),
    ]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "no verdicts yet"),
        (json.dumps(row()) + "\n", 0, "2 x AMD EPYC  solution"),
        (json.dumps(row(passed=False, hint="speed")) + "\n", 1, "expected to pass, got speed"),
        ("not a verdict\n", 1, "name another with --file"),
    ],
)
def test_the_command_line_adds_up_a_file(text, code, said, tmp_path):
    file = tmp_path / "verify.jsonl"
    file.write_text(text)
    tool = Path(verify.__file__)
    command = [sys.executable, str(tool), "--summary", "--file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


def test_the_whole_museum_is_judged_on_a_processor_and_right_answers_everywhere():
    steps = list(exercise.STEPS)
    here, there = (verify.museum(steps, on_gpu, "x") for on_gpu in (False, True))
    names = {case.name for case in here if case.kind == "museum"}
    assert names == {a.name for a in wrong.museum() if not a.needs_gpu}
    assert {case.name for case in there if case.kind == "museum"}.isdisjoint(names)
    for cases in (here, there):
        right = [case for case in cases if case.kind == "right"]
        assert len(right) == len(wrong.right()) >= 10
        assert all(case.expected is None for case in right)


def test_too_few_images_are_told_before_the_first_verdict(tmp_path):
    found = verify.too_few_images(tmp_path)
    assert found.startswith(f"05 reads files: {tmp_path} has 0 training images, and 192 are needed")
    (tmp_path / "train" / "a").mkdir(parents=True)
    for i in range(192):
        (tmp_path / "train" / "a" / f"{i}.jpg").touch()
    assert verify.too_few_images(tmp_path) == ""
