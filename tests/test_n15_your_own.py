"""The programs of notebook 15: each cause is named, cures are gains, and other changes are not."""

import json
import subprocess
import sys
import tomllib

import pytest
from programs import REPOSITORY, experiment_file

from dlojz import course
from dlojz.chapters import n15_your_own as n15
from dlojz.chapters.n15_your_own import gains
from dlojz.figures.diagnosis import diagnosis
from dlojz.pairing import accounts
from dlojz.pairing.steps import Steps, by_steps
from dlojz.runs import stats

STEP = "        optimizer.step()\n"
OPEN, LABELS = "Image.open(file)", "labels.to(device)"
GUESSES = "        guesses = model(text[:, :-1])\n"
STACKED = "            outputs.append(state[0])\n"
WRONG = {  # by program, then name: the hint, and what is replaced in the program as it ships
    "photos": {
        "half the batch": ("batch", {"photos, args.batch_size": "photos, args.batch_size // 2"}),
        "no weight decay": ("decay", {"weight_decay=1e-4": "weight_decay=0.0"}),
        "fewer updates": ("updates", {STEP: "        if labels[0] % 2:\n    " + STEP}),
        "a quick decoding": ("values", {OPEN: f"{OPEN}.resize((64, 64))"}),
        "no shuffling": ("order", {"shuffle=True": "shuffle=False"}),
        "another rate": ("settings", {"lr=0.02": "lr=0.05"}),
        "smoothed labels": ("losses", {LABELS: f"{LABELS}, label_smoothing=0.1"}),
    },
    "letters": {
        "shorter texts": ("batch", {"args.length + 1": "args.length // 2 + 1"}),
        "a narrow model": ("model", {"args.width)": "args.width // 2)"}),
        "16 bits": (
            "format",
            {GUESSES: f"        with torch.autocast(device, torch.bfloat16):\n    {GUESSES}"},
        ),
        "another optimizer": ("settings", {"AdamW": "SGD"}),
        "no gradient through time": (
            "losses",
            {STACKED: STACKED + "            state = tuple(each.detach() for each in state)\n"},
        ),
        "two passes": ("passes", {GUESSES: GUESSES + GUESSES}),
    },
}
RIGHT = {
    "photos": {"solution": {}, "two workers": {"shuffle=True": "shuffle=True, num_workers=2"}},
    "letters": {"solution": {}, "fused": {"lr=2e-3": "lr=2e-3, fused=True"}},
}
RUN = """
import json, os, sys
import numpy, torch
from PIL import Image
from dlojz.watch import program
for folder, file, flags, environment in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.environ |= environment | {"DLOJZ_RUN": folder}
        sys.argv = ["program", *flags]
        try:
            program.run(file)
        except SystemExit:
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""
STEPS = "3"
SMALL = ["--batch-size", "4", "--steps", "24"]
SHORT = {"letters": [*SMALL, "--length", "16"]}


def source(program, solved=False):
    name = f"{course.OWN}/{program}.py"
    return (REPOSITORY / "solutions" / name if solved else experiment_file(name)).read_text()


def replaced(text, changes):
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def runs(tmp_path_factory, images):
    """The folder of each run, by program and name: accounts, and one that is watched."""
    top, asked, folders = tmp_path_factory.mktemp("own"), [], {}

    def add(program, name, text, flags, **environment):
        folder = folders[program, name] = top / f"{program} {name}"
        (file := top / f"{program} {name}.py").write_text(text)
        asked.append((str(folder), str(file), flags, environment))

    account = {"DLOJZ_ACCOUNT": STEPS, "DLOJZ_STEPS": STEPS}
    for program in ("photos", "letters"):
        flags = SHORT.get(program, [*SMALL, "--data", str(images)])
        before = source(program)
        add(program, "before", before, flags, **account)
        add(program, "nudged", before, flags, DLOJZ_NUDGE="1", **account)
        for name, (_, changes) in WRONG[program].items():
            add(program, name, replaced(before, changes), flags, **account)
        for name, changes in RIGHT[program].items():
            add(program, name, replaced(source(program, True), changes), flags, **account)
    for program in ("photos", "letters", "thumbnails"):
        flags = [] if program == "letters" else ["--data", str(images)]
        add(program, "watched", source(program), [*flags, "--steps", "24"])
    command = [sys.executable, "-c", RUN]
    subprocess.run(command, input=json.dumps(asked), text=True, check=True, cwd=top, timeout=240)
    return folders


def gain(runs, program, name, word=stats.FASTER):
    account = accounts.compared(*(runs[program, n] for n in ("before", name, "nudged")))
    speed = word and stats.Comparison(2.0, 1.9, 2.1, 0.03, 3, word)
    commands = (f"'{runs[program, n]}.py'" for n in ("before", name))
    return n15.judged(Steps(commands=tuple(commands), account=account, speed=speed, parts=None))


@pytest.mark.parametrize("program", WRONG)
def test_a_change_of_the_training_is_no_gain_though_it_is_faster(program, runs, subtests):
    for name, (hint, _) in WRONG[program].items():
        with subtests.test(name):
            found = gain(runs, program, name)
            assert found.key == hint, found
            assert not found.passed


@pytest.mark.parametrize("program", RIGHT)
def test_a_cure_is_a_gain_if_it_is_faster(program, runs, subtests):
    for name in RIGHT[program]:
        with subtests.test(name):
            assert gain(runs, program, name).passed, gain(runs, program, name)
            assert gain(runs, program, name, stats.SLOWER).key == "slower"
            assert gain(runs, program, name, stats.NO_DIFFERENCE).key == "open"
            assert gain(runs, program, name, None).key == "short"


def test_the_same_program_is_no_gain(runs):
    found = gain(runs, "letters", "before")
    assert found.key == "nothing"
    assert found.hint in repr(found)
    assert "are the same program" in found._repr_html_()


def test_each_hint_is_given_to_somebody():
    hints = tomllib.loads((REPOSITORY / "dlojz/chapters/n15_your_own/hints.toml").read_text())
    named = {hint for wrong in WRONG.values() for hint, _ in wrong.values()}
    named |= {"gain", "nothing", "slower", "open", "short", "unseeded"}
    assert hints.keys() == named
    assert {*gains.DIFFERENCES.values()} - {""} <= hints.keys()


def test_a_diagnosis_names_the_cause(runs):
    _, suspect, cure = diagnosis(runs["photos", "watched"])
    assert "the loader has no workers" in suspect
    assert cure == "cure: notebook 05_dataloader"
    _, suspect, cure = diagnosis(runs["letters", "watched"])
    if "elsewhere" not in suspect and "something else" not in suspect:  # another process did that
        assert "Python between the operations" in suspect
        assert cure == "cure: notebook 09_compile"
    _, suspect, cure = diagnosis(runs["thumbnails", "watched"])
    assert "no known fault" in suspect
    assert cure == "cure: no notebook, for what was seen"


SEEN = {  # on an H100, with experiments/one_fault.py: what was suspected, and the cure
    "healthy": ("no known fault: the device computes for 87%", "no notebook, for what was seen"),
    "python": ("aten::mul_ asks for 1,288 of the 2,266 kernels", "notebook 09_compile"),
    "sync": ("in each step the host read a number 161 times", "notebook 04_profiler"),
    "precision": ("matrix products are not on tensor cores", "notebook 02_amp"),
    "optimizer": ("the optimizer launches kernels for each tensor on its own", "notebook 02_amp"),
    "layout": ("tensor cores get the layout NCHW", "notebook 03_channels_last"),
}


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_of_a_strangers_trainer_on_a_gpu_is_named_with_its_cure(fault):
    _, suspect, cure = diagnosis(REPOSITORY / f"reference/h100/15-trace-{fault}")
    evidence, notebook = SEEN[fault]
    assert evidence in suspect
    assert cure == f"cure: {notebook}"


def test_a_copy_is_watched_and_paired_from_the_courses_folder(course_folder):
    mine = course.own("15_letters")
    assert mine == "own/letters.py"
    solved = "solutions/own/letters.py"
    found = by_steps(mine, solved, pairs=1, steps=30)
    assert found.account.work == ()
    assert found.account.apart is None
    assert found.speed.ratio > 1.5


def test_each_program_is_short_and_knows_nothing_of_the_course():
    files = [*experiment_file("own/photos.py").parent.glob("*.py")]
    assert len(files) == 3
    for file in (*files, *(REPOSITORY / "solutions/own").glob("*.py")):
        text = file.read_text()
        assert 40 <= len(text.splitlines()) <= 70
        assert "dlojz" not in text
        assert "sleep" not in text
