"""Several trainings in one job: in order, each with its own log; a failure ends only itself."""

import json
import os
import subprocess

import pytest
from endings import ENDINGS

from conftest import make_course_folder
from dlojz import course, launch
from dlojz.check import ending
from dlojz.jobs import keeper, several
from dlojz.launch import Request, series
from dlojz.runs import log

FLAGS = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 2"


def test_each_training_has_a_log_and_a_failure_ends_only_itself(course_folder):
    wrong = course_folder / "wrong.py"
    wrong.write_text("raise RuntimeError('planted')\n")
    entries = [
        series.Entry("first", course.solution(1), FLAGS.split()),
        series.Entry("wrong", wrong, []),
        series.Entry("last", course.solution(1), [*FLAGS.split(), "--seed", "1"]),
    ]
    job = series.submit(entries, Request(name="three", files={"note.txt": b"kept"}))
    wrong.unlink()  # what runs is what was submitted
    assert job.wait() == launch.State.COMPLETED, job.explain()
    folders = series.folders(job)
    codes = {name: (folder / "exit_code").read_text().strip() for name, folder in folders.items()}
    assert codes == {"first": "0", "wrong": "1", "last": "0"}
    assert series.unfinished(job) == []
    assert [name for name, _ in series.as_they_end(job)] == ["first", "wrong", "last"]
    (folders["last"] / "exit_code").unlink()  # as if the job had been killed before its end
    with pytest.raises(RuntimeError, match="ended before last"):
        list(series.as_they_end(job))
    first, last = (log.read(folders[name]) for name in ("first", "last"))
    assert first.start["arguments"]["seed"] == 0
    assert last.start["arguments"]["seed"] == 1
    assert first.steps.loss[0] != last.steps.loss[0]
    assert first.start["pid"] != last.start["pid"]
    assert "planted" in (folders["wrong"] / "stderr.txt").read_text()
    assert (job.directory / "note.txt").read_bytes() == b"kept"


@pytest.mark.parametrize("processes", [1, 2])
def test_small_runs_go_on_beside_others_and_the_rest_waits_for_both(script, processes):
    """Each of the first two waits for a file that the other one writes, then for a slow one."""
    meets = script(
        """
import sys, time
from pathlib import Path
from dlojz import idr_torch
mine, theirs, wait_s = sys.argv[1:]
Path(f"{mine}{idr_torch.rank}").touch()
while not Path(f"{theirs}{idr_torch.rank}").exists():
    time.sleep(0.01)
time.sleep(float(wait_s))
print(time.time())
""",
        "meets.py",
    )
    last = script("import time; print(time.time())", "last.py")
    large = series.Entry("large", meets, ["{job}/large", "{job}/small", "0"])
    small = series.Entry("small", meets, ["{job}/small", "{job}/large", "1"], aside=True)
    job = series.submit(
        [large, small, series.Entry("last", last, [])], Request(name="three", n_gpu=processes)
    )
    assert job.wait(60) == launch.State.COMPLETED, job.explain()
    folders = series.folders(job)
    assert all((folder / "exit_code").read_text() == "0\n" for folder in folders.values())
    at = {name: (folder / "stdout.txt").read_text().split() for name, folder in folders.items()}
    assert max(map(float, at["small"])) < min(map(float, at["last"]))


STANDS = """
import time
from dlojz import idr_torch
def gather():
    time.sleep(300)
def evaluate():
    time.sleep(300)
gather() if idr_torch.is_master else evaluate()
"""


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_stands_still_is_ended_and_says_where_each_process_stood(
    script, fresh, monkeypatch
):
    """As if a process had left out a collective. The next run is made all the same."""
    if fresh:  # our stand-in for Python would not pass on the signal
        monkeypatch.delenv("DLOJZ_PYTHON")
    stands, after = script(STANDS, "stands.py"), script("print('made')", "after.py")
    entries = [
        series.Entry("stands", stands, [], most_s=3.0, fresh=fresh),
        series.Entry("after", after, []),
    ]
    job = series.submit(entries, Request(name="two", n_gpu=2))
    assert job.wait(60) == launch.State.COMPLETED, job.explain()
    folders = series.folders(job)
    end = ending.of(folders["stands"], "mine.py")
    assert end.how == ending.How.FAILED
    stood = end.text.removeprefix("TIMEOUT: it took too long, and stood at ").split(" and ")
    assert sorted(stood) == ["mine.py:5 (gather)", "mine.py:7 (evaluate)"]
    assert (folders["after"] / "exit_code").read_text().strip() == "0"


SETS = """
import os
os.environ["TORCH_COMPILE_DISABLE"] = "1"
import torch
print(torch._dynamo.config.disable)
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folders of runs in forks and in fresh processes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        root, entries = make_course_folder(tmp_path_factory.mktemp("both"), patch), []
        patch.delenv("DLOJZ_PYTHON")
        for number, (name, code) in enumerate((ENDINGS | {"sets": SETS}).items()):
            own = root / f"t{number}.py"
            own.write_text(code)
            for fresh in (False, True):
                entries.append(series.Entry(f"{name}, {fresh}", own, ["--flag"], fresh=fresh))
        job = series.submit(entries, Request(name="both"))
        assert job.wait(60) == launch.State.COMPLETED, job.explain()
        found = series.folders(job)
        return {
            name: (found[f"{name}, False"], found[f"{name}, True"]) for name in (*ENDINGS, "sets")
        }


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_fresh_run_ends_as_any_other(ending, both):
    for file in ("exit_code", "stdout.txt", "stderr.txt"):
        forked, fresh = ((f / file).read_text().replace(str(f), "RUN") for f in both[ending])
        assert forked == fresh, file


def test_what_a_trainer_sets_before_it_imports_torch_acts_in_a_fresh_run(both):
    forked, fresh = ((folder / "stdout.txt").read_text() for folder in both["sets"])
    assert fresh == "True\n"
    assert forked == "False\n", "it was imported before"


def test_a_run_and_its_replay_have_their_own_copies_of_the_images(script, tmp_path):
    images = tmp_path / "few"
    images.mkdir()
    (images / "one.JPEG").write_text("as it was")
    changes = script("""
        import pathlib, sys
        file = pathlib.Path(sys.argv[1], "one.JPEG")
        print(file.read_text())
        file.write_text("changed")
    """)
    again = series.Entry(series.REPLAY, changes, ["{run}/images"], images=str(images))
    flags = [f"{{run}}/{several.IMAGES}"]
    run = series.Entry("run", changes, flags, audit={"keep": 0}, replay=again, images=str(images))
    job = series.submit([run], Request(name="images"))
    assert job.wait(60) == launch.State.COMPLETED, job.explain()
    folder = series.folders(job)["run"]
    for own in (folder, folder / series.REPLAY):
        assert (own / "stdout.txt").read_text() == "as it was\n"
        assert not (own / several.IMAGES).exists()
    assert (images / "one.JPEG").read_text() == "as it was"


def test_a_rehearsal_computes_on_meta_without_values(course_folder):
    job = series.submit(
        [series.Entry("dry", course.solution(1), FLAGS.split(), True)], Request(name="dry")
    )
    job.wait()
    run = log.read(series.folders(job)["dry"])
    assert run.end["outcome"] == "completed", job.explain()
    assert run.setup["device"] == "meta"
    assert {i["device"] for i in run.whole.inputs} == {"meta"}
    assert all(loss != loss for loss in run.steps.loss), "no values: NaN"


def test_each_run_has_its_own_environment(course_folder):
    trainer = course_folder / "words.py"
    trainer.write_text("import os\nprint(os.environ['WORD'], os.environ.get('OTHER'))\n")
    words = {"one": {"WORD": "a", "OTHER": "b"}, "two": {"WORD": "c"}}
    entries = [series.Entry(name, trainer, [], environment=own) for name, own in words.items()]
    job = series.submit(entries, Request(name="words"))
    job.wait()
    said = [(folder / "stdout.txt").read_text() for folder in series.folders(job).values()]
    assert said == ["a b\n", "c None\n"]


def test_a_series_that_goes_on_leaves_what_is_finished(course_folder):
    job = series.submit(
        [series.Entry("one", course.solution(1), FLAGS.split())], Request(name="again")
    )
    job.wait()
    plan = json.loads((job.directory / several.PLAN).read_text())
    assert [e["name"] for e in plan] == ["one"]
    log_file = series.folders(job)["one"] / "events.jsonl"
    before = log_file.read_bytes()
    environment = {**os.environ, "DLOJZ_RUN": str(job.directory)}
    subprocess.run(
        keeper.trainer_argv(job.info, job.directory),
        env=environment,
        check=True,
        capture_output=True,
    )
    assert log_file.read_bytes() == before


def test_a_series_of_several_processes(course_folder):
    """The trainings follow each other in all processes; a failure in one ends it in all."""
    fails = course_folder / "fails.py"
    text = course.solution("06").read_text()
    fails.write_text(
        text.replace("    chrono.start()\n", "    assert idr_torch.rank == 0\n    chrono.start()\n")
    )
    assert fails.read_text() != text
    flags = FLAGS.split()
    plan = [
        series.Entry("one", course.solution("06"), flags),
        series.Entry("fails", fails, flags),
        series.Entry("fails afresh", fails, flags, fresh=True),
        series.Entry("two", course.solution("06"), flags, fresh=True),
    ]
    job = series.submit(plan, Request(name="both", n_gpu=2))
    assert job.wait(240) == "COMPLETED", job.explain()
    codes = {n: int((f / "exit_code").read_text()) for n, f in series.folders(job).items()}
    assert codes["one"] == codes["two"] == 0
    assert 0 not in (codes["fails"], codes["fails afresh"])
    one, two = (log.read_ranks(series.folders(job)[n]) for n in ("one", "two"))
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert list(a.steps.loss) == list(b.steps.loss)
    assert list(one[0].steps.loss) != list(one[1].steps.loss)


def test_a_program_of_a_series_runs_as_by_hand(course_folder, monkeypatch):
    folder = course_folder.parent / "project"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import os, net\nprint(os.getcwd(), __file__, net.name, open('words.txt').read())"
    )
    (folder / "net.py").write_text("name = 'net'")
    (folder / "words.txt").write_text("words")
    monkeypatch.chdir(folder)
    entries = [series.Entry(name, folder / "train.py", (), fresh=name == "b") for name in "ab"]
    job = series.submit(entries, Request(name="two"))
    (folder / "net.py").write_text("raise ValueError('edited later')")
    assert job.wait(60) == "COMPLETED", job.explain()
    for name, run in series.folders(job).items():
        said = f"{folder} {run / 'program/train.py'} net words\n"
        assert (run / "stdout.txt").read_text() == said, name
        assert (run / "trainer.py").read_text().startswith("import os")
