"""What a trainee shares, and what the class board makes of it."""

import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import made
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pupils
import pytest
from waiting import until

from conftest import fill
from dlojz import cli, course, launch, widgets
from dlojz.check import exercise, run
from dlojz.classroom import board, members, share, standing, summary
from dlojz.course import UserError, progress

REPOSITORY = Path(__file__).parent.parent
SECRETS = ("jdupont", "/home", "secret.py", "about 3 %", "0007")
ASKED = [
    *(("01_gpu", "predictions", "01 gpu"), ("01_gpu", "verdicts", "01_gpu")),
    *(("01_gpu", "quizzes", "gpu-where"), ("02_amp", "predictions", "02 amp")),
    *(("02_amp", "verdicts", "02_amp"), ("02_amp", "quizzes", "amp-tf32")),
    *(("03_channels_last", "verdicts", "03_channels_last"), ("04_profiler", "mysteries", "each")),
    *(("03_channels_last", "predictions", "03 layout"),),
    *(("03_channels_last", "quizzes", "layout-shape"),),
]


@pytest.fixture
def folder(tmp_path):
    """A folder that is shared: all may write, and remove only what is theirs."""
    path = tmp_path / "class"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def sharing(folder, course_folder):
    """A trainee who shares, as "ada"."""
    share.warned.clear()
    consent = share.plan(folder, "ada")
    share.begin(consent)
    return consent


def put(folder, name="ada", number=1, entries=(), runs=(), at=None):
    """Share as another trainee does; return the file."""
    now = (at or datetime.now(UTC)).isoformat(timespec="seconds")
    made = {"schema": 1, "as": name, "time": now, "entries": [*entries], "runs": [*runs]}
    file = folder / f"{number:016x}.json"
    file.write_text(summary.text(made))
    if at:
        os.utime(file, (at.timestamp(), at.timestamp()))
    return file


def ago(minutes):
    return (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat(timespec="seconds")


def entry(kind, key, minutes=0.0, **fields):
    """An entry that is this many minutes old."""
    return {"time": ago(minutes), "kind": kind, "key": key} | fields


def ran(state, submitted, started=None, ended=None):
    return {"state": state, "submitted": submitted, "started": started, "ended": ended}


def score(predicted, measured, how="measured"):
    """A row of a score, as `widgets` keeps it."""
    row = {"name": "step_ms", "unit": "ms", "predicted": predicted, "measured": measured}
    return row | {"word": "", "how": how}


def judged(step, passed, hint=None, ratio=None, minutes=0.0):
    speed = {"ratio": ratio, "low": None, "high": None}
    return entry("verdicts", step, minutes, passed=passed, hint=hint, **speed)


# What a trainee shares ---------------------------------------------------------------------------


def test_nothing_is_shared_by_default(folder, course_folder):
    progress.keep("quizzes", "gpu-where", 1, right=True)
    assert not any(folder.iterdir())
    assert share.consent_of() is None


def test_a_kept_change_is_shared_and_readable_as_it_was_kept(sharing, folder, monkeypatch):
    clock = (datetime.now(UTC) - timedelta(minutes=minutes) for minutes in range(60, 0, -1))
    monkeypatch.setattr(progress, "now", lambda: next(clock))
    progress.keep("quizzes", "gpu-where", 1, right=False)
    progress.keep("predictions", "01 gpu", {"step_ms": 90, "images_per_s": None})
    progress.keep("scores", "01 gpu", [score(90, 81.5)])
    progress.keep("verdicts", "01_gpu", pupils.verdict(False, "metrics"))
    progress.keep("hints", "01_gpu/metrics/0123abcd", 2)
    progress.keep("verdicts", "01_gpu", pupils.verdict(True, None, 11.0))
    progress.keep("answers", "01 what if", "about 3 %, says jdupont")
    [ada] = members.read(folder, ASKED).members
    assert ada.name == "ada"
    assert {e.notebook for e in ada.entries} == {"01_gpu"}
    assert [(e.kind, [e.fields[n] for n in summary.FIELDS[e.kind]]) for e in ada.entries] == [
        ("quizzes", [False]),
        ("predictions", ["step_ms", 90]),
        ("scores", ["step_ms", 90, 81.5, "measured"]),
        ("verdicts", [False, "metrics", None, None, None]),
        ("hints", ["metrics", 2]),
        ("verdicts", [True, None, 11.0, 0.97 * 11, 1.03 * 11]),
        ("answers", []),
    ]


def test_no_code_path_or_word_of_a_trainee_leaves(sharing, folder):
    pupil = {"passed": False, "hint": "/home/jdupont", "job": "0007"}
    progress.keep("verdicts", "01_gpu", pupils.verdict(False, "metrics") | {"notes": [*SECRETS]})
    progress.keep("verdicts", "01_gpu", pupil)
    progress.keep("predictions", "/home/jdupont/secret.py", {"step_ms": 3})
    progress.keep("scores", "01 gpu", [score(3, 3, how="/home/jdupont")])
    progress.keep("answers", "01 what if", "about 3 %, as jdupont says")
    assert '"key": "01 what if"' in sharing.path.read_text()
    progress.keep("predictions", "02 amp", {"step_ms": "/home/jdupont"})
    shared = sharing.path.read_text()
    assert '"hint": "metrics"' in shared
    assert not [secret for secret in SECRETS if secret in shared]
    assert set(json.loads(shared)) == {"schema", "as", "time", "entries", "runs"}


def test_the_preview_is_what_the_file_holds(folder, course_folder, monkeypatch):
    progress.keep("quizzes", "gpu-where", 1, right=True)
    consent = share.plan(folder, None)
    preview = share.preview(consent)
    share.begin(consent)
    without_time = re.compile(r'^ "time": .*$', re.M)
    assert without_time.sub("", preview) == without_time.sub("", consent.path.read_text())
    assert '"key": "gpu-where"' in preview


@pytest.mark.parametrize(
    ("mode", "file_mode", "readers", "dangers"),
    [
        (0o1777, 0o644, "everyone", []),
        (0o3773, 0o640, "the group ", []),
        (0o777, 0o644, "everyone", ["chmod +t"]),
    ],
)
def test_a_shared_file_names_nobody_and_who_may_read_it_is_said(
    mode, file_mode, readers, dangers, folder, course_folder
):
    folder.chmod(mode)
    consent = share.plan(folder, "ada")
    share.begin(consent)
    assert members.SHARED.fullmatch(consent.file)
    assert stat.S_IMODE(consent.path.stat().st_mode) == file_mode
    assert [p.name for p in folder.iterdir()] == [consent.file], "and no temporary file is left"
    assert share.readers(folder).startswith(readers)
    for said, danger in zip(share.dangers(folder), dangers, strict=True):
        assert danger in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("<b>me</b>", "give at most 24 letters"),
        ("", "give at most 24 letters"),
        ("a" * 25, "give at most 24 letters"),
        ("ann ", "give at most 24 letters"),
        ("ann  lee", "give at most 24 letters"),
        ("a\x1b[2J", "give at most 24 letters"),
        ("JDupont-2", "holds your login name"),
        ("Grace", "is taken"),
    ],
)
def test_a_pseudonym_is_short_free_and_not_the_login_name(name, told, folder, monkeypatch):
    monkeypatch.setenv("LOGNAME", "jdupont")
    put(folder, "grace")
    with pytest.raises(UserError, match=told):
        share.plan(folder, name)


def test_a_drawn_name_is_a_pseudonym_and_another_each_time(folder):
    drawn = {share.plan(folder, None).pseudonym for _ in range(20)}
    assert len(drawn) > 15
    assert all(map(summary.PSEUDONYM.fullmatch, drawn))


def test_a_drawn_name_is_neither_taken_nor_the_login_name(folder, monkeypatch):
    monkeypatch.setattr(share, "ADJECTIVES", "quick")
    monkeypatch.setattr(share, "ANIMALS", "robin fox")
    monkeypatch.setenv("LOGNAME", "robin")
    turns = iter([1, 2] * 99)
    monkeypatch.setattr(share.secrets, "randbelow", lambda n: next(turns))
    put(folder, "quick-fox-11")
    assert share.plan(folder, None).pseudonym == "quick-fox-12"


def test_stop_removes_the_file_and_ends_it(sharing, folder):
    assert share.stop() == sharing.path
    progress.keep("quizzes", "gpu-where", 1, right=True)
    assert not any(folder.iterdir())
    assert share.stop() is None


def test_what_is_shared_is_always_known_or_it_could_not_be_stopped(
    folder, course_folder, monkeypatch
):
    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(course, "write_atomically", fails)
    with pytest.raises(OSError, match="No space left"):
        share.begin(share.plan(folder, "ada"))
    assert not any(folder.iterdir())


def test_a_file_that_cannot_be_removed_is_no_longer_written(sharing, folder, monkeypatch, capsys):
    def refuse(path, **more):
        raise PermissionError(f"not {path}")

    before = sharing.path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert cli.main(["share", "--stop"]) == 2
    progress.keep("quizzes", "gpu-where", 1, right=True)
    assert sharing.path.read_text() == before
    assert cli.main(["share"]) == 2
    assert "may be there still: `dlojz share --stop` removes it" in capsys.readouterr().err
    assert share.stop() == sharing.path


@pytest.mark.parametrize("instead", ["nothing", "another folder", "a folder with an answer"])
def test_stop_never_says_that_nothing_is_shared_when_it_cannot_see(
    instead, sharing, folder, capsys
):
    away = folder.rename(folder.with_name("away"))
    if instead != "nothing":  # such as an empty mount point
        folder.mkdir()
    if instead == "a folder with an answer":
        progress.keep("quizzes", "gpu-where", 0, right=True)
    for _ in range(2):
        assert cli.main(["share", "--stop"]) == 2
        out, err = capsys.readouterr()
        assert "nothing is shared" not in out
        assert f"{sharing.path} may be shared still" in err
        assert str(progress.file().with_name("share.json")) in err
    before = (away / sharing.file).read_text()
    progress.keep("quizzes", "gpu-where", 1, right=True)
    if instead != "nothing":
        assert not any(folder.iterdir()), "nothing more is written"
        folder.rmdir()
    away.rename(folder)
    assert sharing.path.read_text() == before
    assert cli.main(["share", "--stop"]) == 0
    assert not any(folder.iterdir())


def test_a_shared_file_that_an_instructor_removed_is_no_obstacle(sharing):
    sharing.path.unlink()
    assert share.stop() == sharing.path
    assert share.consent_of() is None


DAMAGED = [
    "",
    "{broken",
    "[1]",
    '{"folder": 3}',
    '{"folder": "/class", "pseudonym": "ada", "file": "0123456789abcdef.json"',
    '{"folder": "/", "pseudonym": "a", "file": "/etc"}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_consent_is_named_and_its_file_found_in_the_folder(text, sharing, folder, capsys):
    kept = progress.file().with_name("share.json")
    kept.write_text(text)
    for words in (["share"], ["share", "--stop"]):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert f"{kept} is damaged" in err
        assert "`dlojz share --stop FOLDER`" in err
    other = put(folder, "grace", 1)
    if text == "":
        assert cli.main(["share", "--stop", str(folder)]) == 2
        assert f"several files are yours: remove the one that you shared: {other}" in (
            capsys.readouterr().err
        )
    other.unlink()
    assert cli.main(["share", "--stop", str(folder)]) == 0
    assert not any(folder.iterdir())
    assert not kept.exists()
    assert cli.main(["share", "--stop", str(folder)]) == 0
    assert f"no file of yours is shared in {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize("name", ["share.json", "progress.json", "share.lock", "progress.lock"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_named_at_once(
    make, name, folder, course_folder, capsys
):
    make(progress.file().with_name(name))
    told = ""
    for words in (["progress"], ["share", str(folder), "--yes"], ["share", "--stop"]):
        cli.main(words)
        told += capsys.readouterr().err
    try:
        progress.keep("quizzes", "gpu-where", 1, right=True)
    except (ValueError, OSError) as error:
        told += str(error)
    told += capsys.readouterr().err
    assert name in told or (make is os.mkfifo and "lock" in name)


def test_a_stopped_process_holds_up_no_answer(sharing, folder, course_folder, capsys, monkeypatch):
    """It holds both locks, and goes on later. No answer is lost, not even its own."""
    code = """
        import os, signal
        from dlojz import course; from dlojz.course import progress
        def stop(kept):
            if not kept:
                print("holds", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            kept.setdefault("answers", {})["late"] = []
        with course.locked(progress.file().with_name("share.lock")):
            progress.change(progress.file(), stop)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    monkeypatch.setattr("dlojz.course.files.LOCK_S", 0.1)
    other = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "holds\n"
    before = sharing.path.read_text()
    start = time.monotonic()
    progress.keep("quizzes", "gpu-where", 1, right=True)
    assert cli.main(["share", "--stop"]) == 2
    assert time.monotonic() - start < 2
    err = capsys.readouterr().err
    assert f"not updated (process {other.pid} is about to write it" in err
    assert f"Type `kill -CONT {other.pid}`, then again `dlojz share --stop`" in err
    assert sharing.path.read_text() == before
    other.send_signal(signal.SIGCONT)
    assert other.wait(30) == 0
    assert {*progress.load()} == {"quizzes", "answers"}
    assert share.stop() == sharing.path


def test_on_a_full_disk_of_the_class_nothing_is_shared_and_the_file_is_named(
    small_disk, course_folder
):
    consent = share.plan(small_disk, "ada")
    fill(small_disk)
    with pytest.raises(course.NoRoomError, match=rf"{consent.path} could not .* your instructor"):
        share.begin(consent)
    assert share.consent_of() is None


def test_on_a_full_disk_of_the_trainee_sharing_can_be_stopped(small_disk, folder, monkeypatch):
    monkeypatch.setenv("DLOJZ_PROGRESS", str(small_disk / "progress.json"))
    consent = share.plan(folder, "ada")
    share.begin(consent)
    fill(small_disk)
    assert share.stop() == consent.path
    assert not any(folder.iterdir())
    assert share.consent_of() is None


@pytest.mark.parametrize("fault", ["gone", "a file", "full", "consent", "jobs"])
def test_a_board_that_fails_is_reported_once_and_raises_nothing(
    fault, sharing, folder, monkeypatch, capsys
):
    def fails(*args, **more):
        raise OSError(28, "No space left on device")

    if fault in ("gone", "a file"):
        sharing.path.unlink()
        folder.rmdir()
    if fault == "a file":
        folder.write_text("")
    if fault == "consent":
        progress.file().with_name("share.json").write_text("{broken")
    if fault == "full":
        monkeypatch.setattr(share.os, "fchmod", fails)
    if fault == "jobs":
        monkeypatch.setattr(launch, "in_queue", fails)
    for answer in (0, 1, 2):
        progress.keep("quizzes", "gpu-where", answer, right=False)
    assert len(progress.load()["quizzes"]["gpu-where"]) == 3
    told = capsys.readouterr().err
    assert told.count("the class board was not updated") == 1
    assert "`dlojz share --stop`" in told
    assert fault != "full" or [p.name for p in folder.iterdir()] == [sharing.file]


def test_a_link_in_the_folder_leads_no_writer_astray(sharing, folder, tmp_path):
    """Another trainee puts a link where the shared file was."""
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    sharing.path.unlink()
    sharing.path.symlink_to(mine)
    progress.keep("quizzes", "gpu-where", 1, right=True)
    assert mine.read_text() == "precious"
    assert not sharing.path.is_symlink()


def test_jobs_are_shared_as_they_wait_run_and_end(sharing, folder, course_folder):
    (course_folder / "t.py").write_text("import time; time.sleep(99)")
    first, second = launch.submit(["t.py", "t.py"])
    until(lambda: first.state == "RUNNING")
    progress.share_state(second, second.state)
    [ada] = members.read(folder, ASKED).members
    assert [run.state for run in ada.runs] == ["RUNNING", "QUEUED"]
    assert 0 <= time.time() - ada.runs[1].submitted < 60
    for job in (second, first):
        job.cancel()
        progress.share_state(job, job.wait(30))
    [ada] = members.read(folder, ASKED).members
    assert [run.state for run in ada.runs] == ["CANCELLED", "CANCELLED"]
    assert ada.runs[0].ended >= ada.runs[0].started


def test_a_monitor_shares_how_its_job_fares(sharing, folder, course_folder, monkeypatch):
    monkeypatch.setattr(sys.modules["dlojz.widgets.monitor"], "display", lambda box: None)
    (course_folder / "t.py").write_text("")
    job = launch.submit("t.py")
    widgets.monitor(job)
    job.wait(30)
    [t.join(10) for t in threading.enumerate() if t.name.endswith("(_move)")]
    [ada] = members.read(folder, ASKED).members
    assert [run.state for run in ada.runs] == ["COMPLETED"]


def test_a_check_shares_how_its_job_fares(monkeypatch):
    class Job:
        directory = Path("runs/none")
        states = iter(["QUEUED", "RUNNING", "COMPLETED", "COMPLETED"])

        @property
        def state(self):
            return launch.State(next(self.states))

    shared = []
    monkeypatch.setattr(progress, "share_state", lambda job, state: shared.append(str(state)))
    monkeypatch.setattr(run.series, "entries", lambda job: [made.entry("solution")])
    monkeypatch.setattr(run.series, "unfinished", lambda job: ["solution"])
    planned = SimpleNamespace(exercise=SimpleNamespace(step="01_gpu"), compile_s=0.0)
    run._wait(Job(), planned, lambda: {}, lambda: [])
    assert shared == ["QUEUED", "RUNNING"], "its end comes with the verdict"


def test_a_state_is_shared_when_it_is_new_and_once_a_minute(monkeypatch):
    shared, clock = [], [1000.0]
    monkeypatch.setattr(progress, "share", lambda: shared.append(1))
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    job = launch.Job(Path("runs/none"))
    for now, state in ((0, "QUEUED"), (1, "QUEUED"), (2, "RUNNING"), (61, "RUNNING")):
        clock[0] = 1000.0 + now
        progress.share_state(job, state)
    assert len(shared) == 2
    clock[0] += 10
    progress.share_state(job, "RUNNING")
    assert len(shared) == 3


def test_a_trainee_is_asked_in_a_terminal_only(folder, course_folder, monkeypatch, capsys):
    words = ["share", str(folder), "--as", "ada"]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert '"as": "ada"' in out
    assert "you own the file" in out
    assert "Not shared: code, paths" in out, "of what comes later, too"
    assert "Nothing is shared" in out
    assert not any(folder.iterdir())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, status, files in (("", 1, 0), ("yesterday", 1, 0), ("Yes ", 0, 1)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert cli.main(words) == status
        assert len([*folder.iterdir()]) == files
    assert cli.main(words) == 2
    assert "you share already, as ada" in capsys.readouterr().err
    assert cli.main(["share"]) == 0
    assert "is shared, as ada" in capsys.readouterr().out
    assert cli.main(["share", "--stop"]) == 0
    assert cli.main(["share"]) == 0
    assert "nothing is shared" in capsys.readouterr().out


# What the board reads ----------------------------------------------------------------------------


def test_what_is_not_a_small_regular_file_is_skipped_and_counted(folder, tmp_path):
    good = put(folder, "grace", 1)
    (folder / "note.txt").write_text("hello")
    (folder / f"{2:016x}.json").symlink_to(good)
    os.mkfifo(folder / f"{3:016x}.json")
    (folder / f"{4:016x}.json").mkdir()
    (folder / f"{5:016x}.json").write_bytes(b" " * (summary.LARGEST + 1))
    (folder / f"{6:016x}.json").write_text("{broken")
    (folder / f"{7:016x}.json").write_text("[" * 100_000)
    (folder / f"{8:016x}.json").write_bytes(b"\xff\xfe")
    (folder / f"{9:016x}.json").write_text('{"schema": 99}')
    os.link(put(folder, "twin", 10), folder / f"{11:016x}.json")
    found = members.read(folder, ASKED)
    assert [m.name for m in found.members] == ["grace", "twin"]
    wanted = {"not a shared file": 1, "a link": 1, "too large": 1, "damaged": 4}
    assert found.skipped == wanted | {"not a regular file": 2, "a second name of a file": 1}
    assert "skipped: 4 (damaged)" in board.notes(found)


WRONG = [
    *({"key": key} for key in ("<script>alert(1)</script>", "\x1b[2J", "99 unknown")),
    *({"kind": kind} for kind in ("secrets", ["verdicts"])),
    *({"time": time} for time in ("9999-01-01T00:00:00+00:00", "2026-01-01T00:00:00", 12)),
    *({"hint": hint} for hint in ("<img src=x>", "a" * 41)),
    *({"ratio": ratio} for ratio in (-1, 1e300, "fast", True)),
    {"passed": "yes"},
]


def test_an_entry_of_another_form_is_left_out(folder):
    wrong = [judged("01_gpu", False) | changed for changed in WRONG]
    put(folder, entries=[judged("01_gpu", True, ratio=2.0), *wrong])
    found = members.read(folder, ASKED)
    assert [e.fields["ratio"] for e in found.members[0].entries] == [2.0]
    assert found.left_out == len(WRONG)


def test_a_number_that_is_none_spoils_nothing(folder):
    for name, number in enumerate(("NaN", "Infinity", "1e999", "9" * 5000)):
        file = put(folder, f"n{name}", name, [judged("01_gpu", True, ratio=123456)])
        file.write_text(file.read_text().replace("123456", number))
    assert standing.speedups(members.read(folder, ASKED)) == {}


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"ada": 0x1111 << 48, "ADA": 0x2222 << 48}, ["ada (1111)", "ADA (2222)"]),
        (
            {"ann": 0xABCD << 48, "ANN": 0xABCD01 << 40, "Ann": 0xABCD02 << 40},
            ["ann (abcd00)", "ANN (abcd01)", "Ann (abcd02)"],
        ),
    ],
)
def test_who_takes_the_name_of_another_is_told_apart_and_counted(files, names, folder):
    for name, number in files.items():
        put(folder, name, number, [judged("01_gpu", False, "metrics")])
    found = members.read(folder, ASKED)
    assert {m.name for m in found.members} == {*names}
    assert standing.failing(found)[0].stuck == len(names)


def test_no_table_lets_a_control_character_or_a_tag_through(folder):
    put(folder, "ada", 1, [judged("01_gpu", False, "metrics")])
    found = board.open_class(folder)
    bad = members.Member("<b>\x1b[2J", found.time, found.members[0].entries, [])
    hostile = members.Classroom([bad], found.skipped, 0, found.notebooks, found.time)
    for table in (board.overview(hostile), board.parts(hostile)):
        assert "\x1b" not in repr(table)
        assert "<b>" not in table._repr_html_()


def test_a_file_that_the_instructor_may_not_read_is_counted(folder, monkeypatch):
    put(folder)

    def refuse(*args, **more):
        raise PermissionError

    monkeypatch.setattr(members, "read_small", refuse)
    assert members.read(folder, ASKED).skipped == {"not readable by you": 1}


@pytest.mark.parametrize("limit", [("MOST", 3), ("MOST_BYTES", 330)])
def test_a_thousand_files_of_one_trainee_hide_no_other(limit, folder, monkeypatch):
    monkeypatch.setattr(members, *limit)
    for number in range(9):
        put(folder, f"flood{number}", number)
    for number, name in ((10, "ada"), (11, "grace")):
        file = put(folder, name, number)
        if os.geteuid() == 0:  # who alone can give a file away
            os.chown(file, 1000 + number, 1000 + number)
    found = members.read(folder, ASKED)
    assert os.geteuid() or {m.name for m in found.members} >= {"ada", "grace"}
    assert (len(found.members), found.skipped["too many files"]) == (3, 8)


@pytest.mark.parametrize("off", [60, -60])
def test_a_clock_that_differs_is_named_and_its_times_are_corrected(off, folder):
    answers = [entry("quizzes", "gpu-where", 2 - off, right=True)]
    modified = put(folder, "ada", 1, answers, [ran("QUEUED", ago(5 - off))])
    own = re.sub(r'^ "time": .*$', f' "time": "{ago(-off)}",', modified.read_text(), flags=re.M)
    modified.write_text(own)
    found = members.read(folder, ASKED)
    assert found.left_out == 0
    assert found.time - found.members[0].entries[0].time == pytest.approx(120, abs=3)
    assert board.jobs(found).rows == [("ada", "waits", "5 min")]
    assert f"clocks differ, and times are corrected: ada by {off:+} min" in board.notes(found)


def test_a_copied_folder_keeps_its_times(folder):
    then = datetime.now(UTC) - timedelta(days=400)
    file = put(folder, "ada", 1, [entry("quizzes", "gpu-where", 401 * 1440, right=True)], at=then)
    file.touch()
    found = members.read(folder, ASKED)
    assert (found.left_out, found.members[0].ahead) == (0, 0)
    assert board.overview(found).rows[0][4] == "long ago"


def test_a_job_that_nobody_can_have_waited_for_is_left_out(folder):
    years = ("0001", "1970", "2024")
    put(folder, runs=[ran("QUEUED", f"{year}-01-01T00:00:00+00:00") for year in years])
    found = members.read(folder, ASKED)
    assert (board.jobs(found).rows, found.left_out) == ([], 3)


# What the board says -----------------------------------------------------------------------------


def test_where_trainees_are_and_what_they_passed(folder):
    first = [judged("01_gpu", True, ratio=10, minutes=50), entry("answers", "01 what if", 45)]
    put(folder, "ada", 1, [*first, entry("quizzes", "amp-tf32", 5, right=True)])
    put(folder, "grace", 2, [judged("01_gpu", False, "metrics", minutes=3)])
    put(folder, "new", 3)
    found = board.open_class(folder)
    ada, grace, _ = found.members
    assert standing.state(ada, "01_gpu") == standing.PASSED
    assert standing.state(ada, "02_amp") == standing.BEGUN
    assert standing.state(grace, "01_gpu") == standing.TRIED
    assert standing.state(grace, "02_amp") is None
    rows = [row[:4] for row in board.overview(found).rows]
    assert rows == [
        ("ada", "02_amp", "a quiz", "1"),
        ("grace", "01_gpu", "a check", "0"),
        ("new", "", "", "0"),
    ]


def test_the_check_that_keeps_most_trainees_comes_first_with_its_hint(folder):
    stuck = [judged("02_amp", False, "scaler-update", minutes=m) for m in (9, 5)]
    put(folder, "a", 1, [judged("01_gpu", False, "metrics", minutes=20), *stuck])
    put(folder, "b", 2, [judged("02_amp", False, "no-autocast", minutes=2)])
    put(folder, "c", 3, [*stuck, judged("02_amp", True, ratio=2.0)])
    found = board.open_class(folder)
    amp, gpu = standing.failing(found)
    assert (amp.step, amp.stuck, amp.tried, amp.failed, amp.attempts) == ("02_amp", 2, 3, 3, 5)
    assert amp.hints == [("scaler-update", 2), ("no-autocast", 1)], "by trainees, not verdicts"
    assert (gpu.step, gpu.stuck) == ("01_gpu", 1)
    row = board.failing(found, {("02_amp", "scaler-update"): "update it"}).rows[0]
    assert row == ("02_amp", "2 of 3", "5", "scaler-update (2)", "update it")


def test_every_hint_of_an_exercise_has_its_words():
    found = exercise.nudges()
    for step in exercise.STEPS:
        for key, hint in exercise.find(step).hints.items():
            assert found[step, key] == hint.nudge


def test_a_job_waits_until_it_is_not_heard_of(folder):
    run = ran("QUEUED", ago(30))
    put(folder, "ada", 1, runs=[run, ran("RUNNING", ago(40), ago(30))])
    long_ago = datetime.now(UTC) - timedelta(seconds=standing.FRESH_S + 60)
    put(folder, "gone", 2, runs=[run], at=long_ago)
    found = board.open_class(folder)
    table = board.jobs(found)
    assert table.rows == [("ada", "waits", "30 min"), ("ada", "runs", "30 min")]
    assert board.overview(found).rows[0][-1] == "1 waits 30 min, 1 runs 30 min"
    assert board.notes(found).startswith("2 trainees, 1 job waiting")


def test_speed_ups_and_calibration_take_the_last_of_each_trainee(folder):
    def scored(predicted, minutes, **how):
        return entry("scores", "01 gpu", minutes, **score(predicted, 50, **how))

    slow, fast = (judged("01_gpu", True, ratio=r, minutes=m) for r, m in ((8.0, 9), (10.0, 1)))
    put(folder, "ada", 1, [slow, fast, scored(500, 9), scored(100, 5)])
    put(folder, "grace", 2, [judged("01_gpu", False, "metrics", 1.1), scored(55, 5), scored(0, 1)])
    put(folder, "mary", 3, [scored(50, 1, how="estimated")])
    put(folder, "old", 4, [scored(100, 5, how=None)])
    found = board.open_class(folder)
    assert standing.speedups(found) == {"01_gpu": [10.0]}, "a speed that did not pass is none"
    assert standing.calibration(found) == {
        ("step_ms", "measured"): [(100, 50), (100, 50)],  # 0 is on no logarithmic axis
        ("step_ms", "estimated"): [(50, 50)],
    }
    assert board.calibration(found).rows == [
        ("step_ms", "measured", "2", "0%", "2", "0", "2"),
        ("step_ms", "estimated", "1", "100%", "0", "0", "1"),
    ]
    assert [ax.get_xlabel() for ax in board.plot_calibration(found)] == ["measured", "estimated"]


EXTREME = (0, 5e-324, 1e-300, 1.1e-15, 1e-9, 1, 9.9e14, 1e15, 1e300, 10**14, 10**300, -1, True)


def test_no_number_hides_the_board(folder, recwarn):
    """Any two numbers, as a prediction and what was measured, and as a speed-up."""
    for place, one in enumerate(EXTREME):
        rows = [score(one, x) | {"name": f"n{n % 3}"} for n, x in enumerate(EXTREME)]
        scores = [entry("scores", "01 gpu", 1, **row) for row in rows]
        put(folder, "ada", place, [*scores, judged("01_gpu", True, ratio=one)])
    put(folder, "nan", 99, [judged("01_gpu", True, ratio=math.nan)])
    found = board.open_class(folder)
    assert "inf" not in json.dumps(board.to_dict(found))
    assert np.isfinite(board.plot_speedups(found).get_xlim()).all()
    assert np.isfinite([ax.get_xlim() for ax in board.plot_calibration(found)]).all()
    assert found.skipped == {"damaged": 1}
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_the_time_in_a_notebook_is_split_into_waiting_and_work(folder):
    run = ran("COMPLETED", ago(50), ago(44), ago(41))
    before = ran("COMPLETED", ago(3000), ago(2999), ago(2990))
    done = [
        entry("quizzes", "amp-tf32", 3000, right=True),  # another day
        entry("predictions", "02 amp", 60, name="step_ms", predicted=3),
        judged("02_amp", False, "no-autocast", minutes=40),
        judged("02_amp", True, ratio=2.0, minutes=25),
        entry("answers", "02 what if", 20),
        judged("01_gpu", True, minutes=10),
    ]
    put(folder, "ada", 1, done, [before, run])
    found = board.open_class(folder)
    [sitting] = standing.sittings(found, "02_amp")
    reached = [(sitting.reached(part) - sitting.begin) / 60 for part in standing.PARTS]
    assert reached == pytest.approx([0, 20, 35, 40], abs=0.1)
    assert (sitting.end - sitting.begin) / 60 == pytest.approx(40, abs=0.1), "then it was over"
    [queued], [running] = sitting.queued, sitting.running
    assert (queued[1] - queued[0]) / 60 == pytest.approx(6, abs=0.1)
    assert (running[1] - running[0]) / 60 == pytest.approx(3, abs=0.1)
    assert not sitting.waits
    rows = board.parts(found, "02_amp").rows
    assert ("checked", "1 of 1", "20 min", "20 min, ada") in rows
    assert ("in the queue", "1 of 1", "6 min", "") in rows


def test_a_hundred_trainees_with_fifty_runs_each_are_read_in_a_second(folder):
    runs = [ran("QUEUED", ago(300), ago(300), ago(299))] * 50
    done = [judged("01_gpu", i % 5 == 0, "metrics", 2.0, minutes=i) for i in range(50)]
    done += [entry("scores", "01 gpu", i, **score(3, 4)) for i in range(50)]
    for number in range(100):
        put(folder, f"n{number}", number, done, runs)
    start = time.process_time()  # the machine may be busy with something else
    found = board.open_class(folder)
    told = board.to_dict(found)
    seconds = time.process_time() - start
    assert len(told["overview"]) == len(found.members) == 100
    assert sum(len(m.runs) for m in found.members) == 5000
    assert seconds < 1


# The board itself --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A class of 12, who share by the code that a notebook calls."""
    folder = tmp_path_factory.mktemp("class")
    pupils.make_class(folder, tmp_path_factory.mktemp("homes"), 12)
    return folder


def test_a_simulated_class_shares_nothing_but_its_summaries(room):
    found = board.open_class(room)
    assert len(found.members) == 12
    assert (found.skipped, found.left_out) == ({}, 0)
    for file in room.iterdir():
        assert not [secret for secret in SECRETS if secret in file.read_text()]


def test_each_figure_is_drawn_from_the_class(room):
    found = board.open_class(room)
    assert "12 trainees" in board.plot_places(found).get_title("left")
    assert len(board.plot_failing(found).get_yticks()) == len(standing.failing(found))
    bars = board.plot_speedups(found).patches
    drawn = sum(bar.get_height() for bar in bars)
    assert drawn == sum(map(len, standing.speedups(found).values()))
    axes = board.plot_calibration(found)
    assert [ax.get_title("left") for ax in axes] == [n for n, _ in standing.calibration(found)]
    ax = board.plot_stop_and_go(found)
    assert standing.busiest(found) in ax.get_title("left")
    assert len(ax.get_yticks()) == len(standing.sittings(found, standing.busiest(found)))


def test_one_absurd_value_leaves_the_figures_readable(folder):
    done = [judged("01_gpu", True, ratio=1e14), entry("scores", "01 gpu", 1, **score(1e14, 1e-3))]
    put(folder, "hostile", 1, [*done, entry("quizzes", "gpu-where", 9e5, right=True)])
    for number in (2, 3):
        fair = entry("scores", "01 gpu", 1, **score(3, 4))
        put(folder, "ada", number, [judged("01_gpu", True, ratio=2.0), fair])
    found = board.open_class(folder)
    assert board.plot_speedups(found).get_xlim()[1] < 60
    low, high = board.plot_calibration(found)[0].get_xlim()
    assert 0.01 < low < high < 1000
    assert board.plot_stop_and_go(found).get_xlim()[1] <= board.LONGEST_MIN


def test_an_empty_folder_says_how_to_share(folder, capsys, tmp_path):
    assert cli.main(["class", str(folder)]) == 0
    assert "nobody shares here yet" in capsys.readouterr().out
    assert cli.main(["class", str(folder), "--png", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "b.png").stat().st_size > 5_000
    assert cli.main(["class", str(tmp_path / "none")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_the_command_shows_the_board(room, capsys, tmp_path):
    assert cli.main(["class", str(room)]) == 0
    out = capsys.readouterr().out
    for heading in ("most frequent hint", "last did", "median of the factors", "slowest"):
        assert heading in out
    assert cli.main(["class", str(room), "--json", "--png", str(tmp_path / "b.png")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["overview"]) == 12
    assert (tmp_path / "b.png").stat().st_size > 50_000


def test_watching_looks_again(room, monkeypatch, capsys):
    def sleep(seconds):
        if len(looks) == 2:
            raise KeyboardInterrupt
        looks.append(seconds)

    looks = []
    monkeypatch.setattr(cli.classes.time, "sleep", sleep)
    assert cli.main(["class", str(room), "--watch"]) == 130
    assert capsys.readouterr().out.count("12 trainees") == 3


def test_the_instructors_notebook_shows_the_class(room):
    path = REPOSITORY / "solutions" / "instructor.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    source = "\n".join(code).replace("folder = None", f"folder = {str(room)!r}")
    names = {}
    exec(source, names)
    assert len(names["found"].members) == 12
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    shown = {call for call in re.findall(r"plot_\w+(?=\(found\);)", source)}
    assert len(drawn) == len(shown) == 5
