"""A program is read before it is run: whether it is one of ours, and whether it writes a log."""

import sys

import pytest

from dlojz import cli, course
from dlojz.runs import source

OURS = "".join(f"def {name}(*_): pass\n" for name in source.FUNCTIONS)
COMMANDS = {
    "worth": ["worth", "compile", "mine.py"],
    "estimate": ["estimate", "--model", "resnet18", "--trainer", "mine.py"],
}
NOT_OURS = {
    "a script": ("", "mine.py was not run, as it has no parse_args, set_numerics, set_device, "),
    "its parser at module level": (
        "import argparse\nparse_args = argparse.ArgumentParser().parse_args\nargs = parse_args()",
        "was not run, as it has no set_numerics, ",
    ),
    "a function less": (OURS.replace("build_model", "model"), "has no build_model: expected"),
    "no guard": (f"{OURS}def main():\n  train_step()\nmain()", "mine.py, line 10: was not run"),
    "within a try": (f"{OURS}try:\n  x = train_step()\nexcept OSError: pass", "line 9: was not"),
    "in a loop": (f"{OURS}for loss in ():\n  loss.backward()", "line 9: was not run"),
    "no Python": ("x = 1\ny = (", "mine.py, line 2: '(' was never closed: mend it first"),
    "zeros": ("\0", "mine.py"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("code", "message"), NOT_OURS.values(), ids=NOT_OURS)
def test_a_program_that_is_not_ours_is_refused_and_never_run(
    command, code, message, course_folder, capfd
):
    (course_folder / "mine.py").write_text(f"{code}\nopen('{course_folder}/marker', 'w')\n")
    assert cli.main(COMMANDS[command]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "importing torch" not in err
    assert not (course_folder / "marker").exists()


@pytest.mark.parametrize("step", [None, *course.CHAIN])
def test_the_trainers_of_the_course_are_ours_and_write_a_log(step):
    file = course.solution(step) if step else course.course_root() / "dlojz/dlojz.py"
    source.must_be_trainer(file)
    assert source.writes_log(file)


@pytest.mark.parametrize(
    "code",
    [
        'if "__main__" == __name__: train_step()',
        "if __name__ == '__main__':\n  train_step()\nelse:\n  x = 1",
        "import torch\ntorch.set_float32_matmul_precision('high')",
        "def main():\n  train_step()\nsizes = [len('a') for _ in range(3)]",
    ],
)
def test_what_does_not_train_may_stand_beside_the_functions(code, tmp_path):
    (tmp_path / "mine.py").write_text(f"{OURS}{code}\n")
    source.must_be_trainer(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("from dlojz.training.chronometer import Chronometer", True),
        ("from dlojz.training import data, chronometer", True),
        ("def main():\n  import dlojz.runs.log as log", True),
        ("from dlojz.runs import log", True),
        ("from dlojz import idr_torch", False),
        ("from dlojz_chrono import Chronometer", False),
        ("from . import chronometer", False),
        ("# from dlojz.runs import log", False),
        ("x = (", False),
    ],
)
def test_a_program_with_our_chronometer_should_write_a_log(code, writes, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    assert source.writes_log(tmp_path / "mine.py") == writes


def test_a_program_that_removed_itself_is_not_ours(tmp_path):
    assert not source.writes_log(tmp_path / "gone.py")


def test_what_was_typed_steers_no_terminal(course_folder, capfd):
    red = "\x1b[31m"
    with pytest.raises(SystemExit):
        cli.main(["queue", f"--{red}"])
    assert cli.main(["estimate", "--model", "resnet18", "--trainer", red]) == 2
    says = [sys.executable, "-c", f"import sys; print('a'); sys.exit('dlojz: {red}')"]
    assert cli.tools._run_program(says, course_folder) == 1
    err = capfd.readouterr().err
    assert "\x1b" not in err
    assert err.count("\\x1b[31m") == 3
    assert "  importing torch ...\na\ndlojz: " in err


@pytest.mark.parametrize(
    ("command", "noted"),
    [("mine.py", True), ("dlojz1_0.py -b 8", False)],  # whatever they are called
)
def test_only_trainers_of_ours_get_a_note_on_their_flags(
    command, noted, course_folder, monkeypatch
):
    monkeypatch.setenv("DLOJZ_PRESET", "cpu")
    monkeypatch.setenv("DLOJZ_LAUNCHER", "local")
    (course_folder / "mine.py").write_text("args = flags.parse()\n")
    (course_folder / "dlojz1_0.py").write_text("import apex\n")
    assert bool(cli.jobs.too_large([command])) == noted
