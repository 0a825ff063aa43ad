"""The damaged files of a job: it is shown as damaged, the file is named, the others are shown."""

import json
import os
import shutil
import sys
import time
import tracemalloc

import pytest
from made import DAMAGED

from dlojz import cli, course, launch
from dlojz.figures.report import compare_runs
from dlojz.jobs import several
from dlojz.jobs.keeper import Cause
from dlojz.launch import QUEUE, find, follow, jobs, latest, queue
from dlojz.launch import job as job_module
from dlojz.runs import log
from dlojz.runs.folder import new_run

follow_module = sys.modules["dlojz.launch.follow"]  # its name is that of a function, too
JOB = {"command": ["t.py"], "name": "mine", "submitted": 1.0}
ENDED = {"state": "COMPLETED", "started": 1.0, "ended": 2.0}


@pytest.fixture
def runs(course_folder):
    """Three jobs that ended."""
    for i in range(1, 4):
        run = course_folder / "runs" / f"{i:04d}"
        run.mkdir(parents=True)
        (run / "job.json").write_text(json.dumps(JOB))
        (run / "state.json").write_text(json.dumps(ENDED))
    return course_folder / "runs"


def rows():
    """The queue's rows, by job: (state, note)."""
    shown = [dict(zip(QUEUE, row, strict=True)) for row in queue(last=99).rows]
    return {row["job"]: (row["state"], row["note"]) for row in shown}


def damaged(runs, file):
    """One more job for each fault, with that fault in place of this file: {id: what is said}."""
    told = {}
    for number, (make, why) in enumerate(DAMAGED.values(), 4):
        shutil.copytree(runs / "0001", run := runs / f"{number:04d}")
        (run / file).unlink(missing_ok=True)
        make(run / file)
        told[run.name] = why
    return told


@pytest.mark.parametrize("file", ["job.json", "state.json"])
def test_a_damaged_file_hides_no_other_job(file, runs):
    told = damaged(runs, file)
    found = rows()
    for number, why in told.items():
        state, note = found.pop(number)
        assert state == "FAILED"
        assert note.startswith(f"its files are damaged: {file} can't be read")
        assert why in find(number).explain()
    assert found == dict.fromkeys(("0001", "0002", "0003"), ("COMPLETED", ""))


@pytest.mark.parametrize("file", ["sweep.json", "plan.json"])
def test_a_damaged_file_beside_them_hides_no_job(file, runs):
    told = damaged(runs, file)
    assert sorted(rows()) == ["0001", "0002", "0003", *told]
    for number in reversed(told):
        assert latest().id == (number if file == "sweep.json" else latest().id)
        shutil.rmtree(runs / number)
        queue()


def test_a_damaged_index_is_made_again(runs):
    for make, _ in DAMAGED.values():
        index = runs / job_module.INDEX
        index.rmdir() if index.is_dir() else index.unlink(missing_ok=True)
        make(index)
        assert sorted(rows()) == ["0001", "0002", "0003"]


def test_a_report_of_all_has_a_row_for_each(runs, capsys):
    damaged(runs, "events.jsonl")
    assert cli.main(["report", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 + len(DAMAGED)


@pytest.mark.parametrize("file", ["events.jsonl", "stderr.txt", "slurm.txt"])
def test_what_is_no_file_is_named_where_a_text_is_expected(file, runs, capsys):
    for number, fault in enumerate(("pipe", "link to itself", "folder", "device"), 4):
        shutil.copytree(runs / "0001", run := runs / f"{number:04d}")
        DAMAGED[fault][0](run / file)
        if file != "events.jsonl":
            assert file in find(number).explain()
        assert [now.state for now in follow(find(number), every_s=0)] == ["COMPLETED"]
        assert cli.main(["report", str(number)]) == 0
        assert str(run) in capsys.readouterr().out
    assert len(rows()) == 7


@pytest.mark.parametrize(
    "fault", [lambda run: run.symlink_to(run), lambda run: run.write_text(""), os.mkfifo]
)
def test_what_is_no_folder_hides_no_job(fault, runs):
    fault(runs / "0004")
    assert sorted(rows()) == ["0001", "0002", "0003"]
    assert new_run().name == "0005"


@pytest.mark.parametrize("reason", ["ended early: it told enough", "reworded"])
@pytest.mark.parametrize(("cause", "state"), [(Cause.ENOUGH, "COMPLETED"), (None, "CANCELLED")])
def test_what_a_job_was_cancelled_for_is_told_by_its_cause_alone(reason, cause, state, runs):
    kept = ENDED | {"state": "CANCELLED", "reason": reason, "cause": cause}
    (runs / "0002" / "state.json").write_text(json.dumps(kept))
    assert rows()["0002"] == (state, reason)


@pytest.mark.parametrize("cause", [Cause.LOST, None])
def test_only_a_job_that_is_lost_is_looked_at_again(cause, runs):
    """A keeper may still find out more."""
    lost = ENDED | {"state": "FAILED", "reason": "reworded", "cause": cause}
    (runs / "0001" / "state.json").write_text(json.dumps(lost))
    (runs / "0001" / "job.json").write_text(json.dumps(JOB | {"submitted": time.time()}))
    mark = os.stat(runs / "0001")
    assert rows()["0001"] == ("FAILED", "reworded")
    (runs / "0001" / "state.json").write_text('{"state": "RUNNING"}')
    os.utime(runs / "0001", ns=(mark.st_atime_ns, mark.st_mtime_ns))
    assert ("0001" in [row[0] for row in queue(last=1).rows]) == (cause == Cause.LOST)


LONGEST = "16666666:40"


@pytest.mark.parametrize(
    ("started", "ended", "shown"),
    [
        *((2.0, 1.0, "0:00"), (1e308, -1e308, "0:00"), (10**300, None, "0:00")),
        *((-1e308, 1e308, LONGEST), (0, 1e300, f"waits {LONGEST}")),
    ],
)
def test_times_may_be_any_numbers(started, ended, shown, runs):
    kept = ENDED | {"started": started, "ended": ended}
    (runs / "0002" / "state.json").write_text(json.dumps(kept))
    assert [row[QUEUE.index("time")] for row in queue().rows] == ["0:01", shown, "0:01"]


ODD = {  # by file: well-formed, and not what a table of jobs can show
    "job.json": [{"name": "x"}, {"command": 5, "name": "x"}, {"command": [5], "name": 5}]
    + [JOB | {field: [1]} for field in ("reason", "started", "slurm")],
    "state.json": [{}, {"state": "ODD"}, {"state": "FAILED", "started": "x"}]
    + [ENDED | {field: [1]} for field in ("state", "reason", "started", "slurm")],
}


@pytest.mark.parametrize("file", ODD)
def test_a_file_with_a_field_of_another_type_damages_one_job_only(file, runs):
    for number, content in enumerate(ODD[file], 4):
        shutil.copytree(runs / "0001", run := runs / f"{number:04d}")
        (run / file).write_text(json.dumps(content))
        assert repr(find(number))
    found = rows()
    assert [found.pop(number)[0] for number in ("0001", "0002", "0003")] == ["COMPLETED"] * 3
    assert {state for state, _ in found.values()} <= {"FAILED"}
    assert all(note.startswith("its files are damaged") for _, note in found.values()), found


LOGS = {  # of a run by hand
    "": "RUNNING",
    "\0\0\0": "RUNNING",
    '{"event": "end"}\n': "FAILED",
    '{"event": "start", "schema": 9}\n': "RUNNING",
    '{}\n{"event": "end", "outcome": [], "error": 5}\n': "FAILED",
}


def test_a_damaged_log_hides_no_other_job(runs):
    (runs / "0004").mkdir()
    for text, state in LOGS.items():
        (runs / "0004" / "events.jsonl").write_text(text)
        (runs / job_module.INDEX).unlink(missing_ok=True)
        found = rows()
        assert (found.pop("0004")[0], len(found)) == (state, 3), text


def test_a_name_of_megabytes_is_cut(runs):
    long = "\x1b" * (1 << 20)
    about = JOB | {"name": long, "command": ["t.py", long], "n_gpu": long}
    (runs / "0002" / "job.json").write_text(json.dumps(about))
    (runs / "0002" / "state.json").write_text(json.dumps(ENDED | {"reason": long}))
    rows = compare_runs(jobs())
    shown = (repr(queue()), queue()._repr_html_(), repr(find(2)), find(2).explain(), repr(rows))
    assert [text for text in shown if len(text) > 50_000] == []


@pytest.mark.parametrize("name", ["9" * 200, "9" * 9, "²", "٣"])
def test_a_folder_with_no_number_of_ours_does_not_set_the_next(name, runs):
    (runs / name).mkdir()
    assert [new_run().name, new_run().name] == ["0004", "0005"]
    assert [job.id for job in jobs()] == ["0001", "0002", "0003"]
    with pytest.raises(LookupError, match=r"^no job '.{1,60}' in"):
        find("9" * 300)


def test_a_hostile_answer_of_squeue_is_asked_for_again(tmp_path, monkeypatch):
    from dlojz.launch import asking

    monkeypatch.setenv("DLOJZ_ROOT", str(tmp_path))
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(asking, "_squeue", dict)
    now = {"asked": time.time(), "answered": time.time(), "jobs": {"7": {}}, "error": None}
    for wrong in ({"answered": "now"}, {"asked": None}, {"jobs": []}, {"answered": 1.0}):
        (tmp_path / "runs/.squeue.json").write_text(json.dumps(now | wrong))
        assert asking.listing()[0] == {}


def test_a_damaged_plan_is_named(runs):
    for text in ("[1]", "", '{"name": 1}', '[{"name": 5}]', '[{"nam": "a"}]'):
        (runs / "0002" / several.PLAN).write_text(text)
        with pytest.raises(ValueError, match=r"0002/plan\.json can't be read, expected the runs"):
            launch.series.folders(find(2))


def test_a_log_of_one_long_line_is_not_kept_in_memory(runs, monkeypatch):
    monkeypatch.setattr(course, "SMALL", 1 << 20)
    monkeypatch.setattr(follow_module, "SMALL", 1 << 20)
    with (runs / "0002" / "events.jsonl").open("wb") as file:
        file.truncate(1 << 26)
    tracemalloc.start()
    assert [now.done for now in follow(find(2), every_s=0)][-1] == 0
    with pytest.raises(log.LogError, match=r"events\.jsonl:1: not a JSON object"):
        log.read(find(2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 25
