"""Which tests `make quick` runs for what was changed."""

import subprocess

import pytest
import quick

TESTS = {
    "test_stats.py": "from dlojz.runs import stats",
    "test_report.py": "from dlojz.runs.stats import summary",
    "test_judge.py": "import dlojz.check.judge",
    "test_exercises.py": "from dlojz.check.exercise import ddp",
    "test_n02_amp.py": "",
    "test_cases.py": "from dlojz.chapters import n02_amp as n02",
    "test_modes.py": "def test():\n    from dlojz.chapters.n02_amp import figures",
    "test_steps.py": "import steps",
    "test_sites.py": "'job.sbatch'",
    "test_sizes.py": "",
}
OF_02 = ["test_n02_amp.py"], ["test_cases.py", "test_modes.py"]


@pytest.mark.parametrize(
    ("path", "own", "others"),
    [
        ("tests/test_stats.py", ["test_stats.py"], []),
        ("dlojz/runs/stats.py", ["test_stats.py"], ["test_report.py"]),
        ("dlojz/check/judge.py", ["test_judge.py"], []),
        ("dlojz/chapters/n02_amp/hints.toml", *OF_02),
        ("dlojz/chapters/n06_ddp/exercise.py", [], []),
        ("dlojz/chapters/n02_amp/quiz.toml", *OF_02),
        ("dlojz/chapters/n02_amp/experiments/sizes.py", *OF_02),
        ("tools/steps.py", ["test_steps.py"], []),
        ("slurm/job.sbatch", [], ["test_sites.py"]),
        ("LICENSE", [], []),
    ],
)
def test_a_file_has_the_tests_that_are_named_like_it_or_import_it(path, own, others):
    assert quick.tests_of(path, TESTS) == (own, others)


def test_a_module_that_many_import_has_its_own_test_and_the_others_are_listed():
    many = {f"test_{i}.py": "import dlojz.runs.stats" for i in range(quick.FEW + 1)}
    paths = ["dlojz/runs/stats.py", "dlojz/check/judge.py", "LICENSE"]
    whole, left, none = quick.plan(paths, TESTS | many)
    assert list(whole) == ["test_stats.py", "test_judge.py"]
    assert set(left) == {"test_report.py", *many}
    assert none == ["LICENSE"]


def test_an_answer_has_the_tests_of_its_step():
    own = ("exercise.py", "hints.toml")
    paths = ["solutions/dlojz_02_amp.py", "tests/wrong/02_amp/half-model.diff"]
    paths += [f"dlojz/chapters/n02_amp/{name}" for name in own]
    assert [quick.STEP.match(path)[1] for path in paths] == ["02_amp"] * 4
    others = ("dlojz/chapters/n02_amp/quiz.toml", "dlojz/runs/stats.py")
    assert not any(map(quick.STEP.match, others))


def test_changed_is_what_the_branch_did_what_is_not_committed_and_what_is_new(
    tmp_path, monkeypatch
):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(quick, "REPOSITORY", tmp_path)
    git("init")
    for branch, file in (("main", "old.py"), ("mine", "committed.py")):
        git("checkout", "-B", branch)
        (tmp_path / file).touch()
        git("add", "-A")
        git("commit", "-m", branch)
    (tmp_path / "new.py").touch()
    assert quick.changed() == ["committed.py", "new.py"]
    (tmp_path / "old.py").write_text("edited")
    assert quick.changed() == ["committed.py", "new.py", "old.py"]
