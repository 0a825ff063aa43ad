"""Syllabi: days that add up, notebooks in order, and what is said of a syllabus that is wrong."""

import json

import pytest

from dlojz import cli, course
from dlojz.classroom import rehearse, syllabus
from dlojz.classroom.syllabus import Day, Part
from dlojz.course import UserError

SOLVED = sorted((course.course_root() / "solutions").glob("[0-9]*.ipynb"))


def is_optional(path):
    cells = json.loads(path.read_text())["cells"]
    return "".join(cells[0]["source"]).splitlines()[2].startswith("*Optional")


REQUIRED = [path.stem for path in SOLVED if not is_optional(path)]


@pytest.mark.parametrize("days", [1, 2, 4])
def test_the_days_add_up_and_each_notebook_finds_the_one_before(days):
    assert syllabus.problems(syllabus.of(days)) == []


@pytest.mark.parametrize("days", [2, 4])
def test_every_notebook_that_is_not_optional_is_there_once_and_in_order(days):
    # About accuracy, a kernel, large models, many trainings: in two days there is no hour for them.
    left_out = {"07_augmentation", "08_large_batch", "10_kernels", "11_fsdp", "12_model_parallel"}
    left_out |= {"13_search", "14_race"}
    left_out = left_out if days == 2 else set()
    there = [name for day in syllabus.of(days) for name in day.notebooks]
    assert [name for name in there if name in REQUIRED] == [
        name for name in REQUIRED if name not in left_out
    ]
    assert set(course.CHAIN) - left_out <= set(there), "all steps of the trainer"


@pytest.mark.parametrize("days", [2, 4])
def test_the_exercise_with_a_gain_on_a_laptop_is_there(days):
    assert "04c_slow" in {name for day in syllabus.of(days) for name in day.notebooks}


def test_two_hours_are_enough_for_one_without_a_gpu(capsys):
    assert 110 <= syllabus.laptop().teaching <= 125
    assert syllabus.laptop().notebooks == ["00_start", "01_gpu", "04c_slow", "05_dataloader"]
    assert cli.main(["syllabus", "--laptop"]) == 0
    assert "notebook  04c_slow, up to its heading 'Question'\n" in capsys.readouterr().out


def test_in_four_days_there_is_time_for_their_own_training():
    parts = [part for day in syllabus.of(4) for part in day.parts]
    own = [part for part in parts if part.kind == "work" or part.name == "15_your_own"]
    assert sum(part.minutes for part in own) >= 180


def test_the_minutes_of_a_notebook_are_those_of_its_card():
    (part,) = [p for p in syllabus.of(1)[0].parts if p.name == "02_amp"]
    assert f"about {part.minutes} minutes" in rehearse.find("02").read_text()


# What is wrong ------------------------------------------------------------------------------------

COFFEE = Part("break", "coffee", 15)


def day(*parts, end=17 * 60, most=390):
    return Day("A day", parts, 9 * 60, end, most)


def book(name, minutes=60, catch_up=False):
    return Part("notebook", name, minutes, catch_up)


@pytest.mark.parametrize(
    ("days", "said"),
    [
        ([day(book("00_start"), COFFEE)], []),
        ([day(book("00_start"), COFFEE, end=600)], ["day 1 ends at 10:15: expected 10:00"]),
        ([day(book("00_start"), COFFEE, most=59)], ["day 1 teaches 60 minutes: expected at most"]),
        ([day(book("01_gpu"))], ["01_gpu needs 00_start before it, or catch_up = true"]),
        ([day(book("01_gpu", catch_up=True))], []),
        ([day(book("02b_formats"))], ["02b_formats needs 02_amp before it"]),
        ([day(book("00_start")), day(book("01_gpu"))], []),
        ([day(book("00_start"), book("00_start"))], ["00_start is there twice"]),
        (
            [day(book("00_start"), book("01_gpu")), day(book("00_start"))],
            ["00_start comes after 01_gpu", "00_start is there twice"],
        ),
    ],
)
def test_what_does_not_fit_is_said(days, said):
    found = syllabus.problems(days)
    assert len(found) == len(said)
    for words, problem in zip(said, found, strict=True):
        assert words in problem


HEAD = "begin = 09:00:00\nend = 17:00:00\nteaching_minutes = 390\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("begin =", "can't be read as TOML"),
        (b'begin = "caf\xe9"', "can't be read as TOML: 'utf-8' codec"),
        (b"a = " + b"[" * 9000, "can't be read as TOML: maximum recursion"),
        (HEAD + "1 = 3", "expected days [[1]]"),
        (HEAD + '[[1]]\ntitle = "A"\nparts = [3]', "expected one of talk"),
        ("begin = 09:00:00", "expected begin, end, teaching_minutes, as in begin = 09:00:00"),
        (HEAD.replace("09:00:00", '"09:00"'), "as in begin = 09:00:00"),
        (HEAD.replace("17:00", "25:00"), "can't be read as TOML"),
        (HEAD + '[[2]]\ntitle = "A"\nparts = []', "there are 1 days [[2]]: expected 2"),
        (HEAD + '[[1]]\ntitle = "A"', "a day [[1]] has no parts"),
        (HEAD + '[[1]]\ntitle = "A"\nparts = [{talk = "B"}]', "with minutes, a whole number"),
        (HEAD + '[[1]]\ntitle = "A"\nparts = [{song = "B", minutes = 3}]', "expected one of talk"),
        (HEAD + '[[1]]\ntitle = "A"\nparts = [{notebook = "00", minutes = 3}]', "with catch_up"),
        (HEAD + '[[1]]\ntitle = "A"\nparts = [{notebook = "77"}]', "no notebook '77'"),
        (
            HEAD + '[[1]]\ntitle = "A"\nparts = [{notebook = "01", until = "Lunch"}]',
            "until = 'Lunch': expected a heading of 01_gpu.ipynb",
        ),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, said):
    path = tmp_path / "syllabi.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        syllabus.read(path)
    assert said in str(error.value)
    assert str(path) in str(error.value) or "no notebook" in said or "until" in said


# The commands -------------------------------------------------------------------------------------


def test_a_timetable_says_when_each_part_begins():
    table = str(
        syllabus.timetable(day(book("00_start", 40), COFFEE, book("04_profiler", 75, True)))
    )
    assert "09:00   40 min  notebook  00_start\n" in table
    assert "09:40   15 min  break     coffee\n" in table
    assert "09:55   75 min  notebook  04_profiler, after `dlojz catch-up 04`\n" in table
    assert "11:10" in table


def test_the_command_prints_all_syllabi_or_one(capsys):
    assert cli.main(["syllabus"]) == 0
    assert "Day 1 of 1: " in (out := capsys.readouterr().out)
    assert "Day 4 of 4: " in out
    assert cli.main(["syllabus", "--days", "2"]) == 0
    assert "of 4" not in (out := capsys.readouterr().out)
    assert "Day 2 of 2: " in out


def test_the_command_says_what_no_longer_fits(tmp_path, capsys, monkeypatch):
    path = tmp_path / "syllabi.toml"
    path.write_text(syllabus.file().read_text().replace("end = 17:", "end = 16:"))
    monkeypatch.setattr(syllabus, "file", lambda: path)
    assert cli.main(["syllabus", "--days", "2"]) == 1
    assert "2 days: day 1 ends at 16:55: expected 16:00 or before" in capsys.readouterr().out


def test_a_day_is_rehearsed(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(rehearse, "rehearsed", lambda path, *_: ran.append(path.stem))
    monkeypatch.setattr(rehearse, "report", lambda found: "")
    monkeypatch.setattr(rehearse, "problems", lambda found: [])
    assert cli.main(["rehearse", "--day", "2", "--of", "2"]) == 0
    assert ran == ["04c_slow", "05_dataloader", "06_ddp", "09_compile", "15_your_own"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rehearse"], "expected notebooks or a day"),
        (["rehearse", "01", "--day", "1", "--of", "2"], "expected notebooks or a day"),
        (["rehearse", "--day", "1"], "--day and --of go together"),
        (["rehearse", "--day", "3", "--of", "2"], "expected a day from 1 to 2"),
        (
            ["rehearse", "--day", "1", "--of", "3"],
            "no syllabus for 3 days: expected one of 1, 2, 4",
        ),
        (["syllabus", "--days", "0"], "no syllabus for 0 days"),
    ],
)
def test_a_day_that_is_not_there_is_explained(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
