"""A race's files: its rules, its entries, its results, and the places that follow from them."""

import json
import math
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from made import DAMAGED

from dlojz import cli, course, race
from dlojz.chapters import n14_race as n14
from dlojz.images import DataError
from dlojz.race import entering, leaderboard, organiser, ranking, results, rules
from dlojz.runs import source

STARTER = "dlojz/dlojz.py --model resnet18 -e 2"
MODEL = {"flops_per_image": 1e9, "parameter_bytes": 1e9, "flops_per_s": 1e12, "classes": 10}
MODEL |= {"bytes_per_s": 1e12, "cache_bytes": 5e7, "peak": "1 TFLOP/s, as sold"}
RUN = {"images": 5000, "updates": 1000, "seconds": 20.0, "joules": 2000.0}


@pytest.fixture
def mine(course_folder):
    return race.new("races/mine", runs=3)


# The rules and the entries ------------------------------------------------------------------------


def test_a_race_is_read_as_it_was_made(mine):
    assert race.open_race("races/mine") == mine
    assert (mine.classes, mine.seconds, mine.joules, mine.level) == (4, 20, None, 0.05)
    other = race.new("races/joules", joules=3000)
    assert race.open_race("races/joules") == other
    assert other.joules == 3000
    with pytest.raises(race.RaceError, match="holds a race already"):
        race.new("races/mine")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seconds = 20", "seconds = 0", "seconds is 0, expected 1 to 86,400"),
        ("seconds = 20", 'seconds = "20"', "seconds is '20', expected 1"),
        ("runs = 3", "runs = true", "runs is True, expected 2 to 100"),
        ("runs = 3", "runs = 1", "runs is 1, expected 2 to 100"),
        ("runs = 3", "", "missing rule 'runs'"),
        ("level = 0.05", "level = 0.5", "level is 0.5, expected a risk"),
        ("level = 0.05", "levels = 0.05", "unknown rule 'levels'"),
        ("runs = 3", "runs = = 3", "can't be read: "),
        ("data = ", "data = 3 #", "data is 3, expected a folder"),
    ],
)
def test_a_rule_that_cannot_be_is_named(mine, old, new, told):
    file = mine.folder / rules.RULES
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(race.RaceError, match=told):
        race.open_race(mine.folder)


def test_a_folder_without_a_race_or_images_says_what_to_type(course_folder):
    with pytest.raises(race.RaceError, match=r"no race in nothing: .* `dlojz race new nothing`"):
        race.board("nothing")
    with pytest.raises(DataError, match=r"empty holds no set of `dlojz data` .* Type dlojz data"):
        race.new("races/mine", data="empty")


def test_an_entry_is_a_snapshot(mine, course_folder):
    made = race.enter(mine, "my-net", STARTER, by="quick-otter-27")
    ((found,), damaged) = race.entries(mine)
    assert (found, damaged) == (made, {})
    assert found.flags == ("--model", "resnet18", "-e", "2")
    trainer = course_folder / "dlojz/dlojz.py"
    before = trainer.read_bytes()
    trainer.write_text("later")
    assert race.entries(mine)[0][0].files == {"trainer.py": before}
    assert oct((made.folder / "trainer.py").stat().st_mode)[-3:] == "444"
    assert not [path for path in made.folder.parent.iterdir() if path.name.startswith(".")]


def test_the_modules_beside_a_trainer_are_in_its_entry(mine, course_folder):
    solved = course_folder / "solutions"
    found = race.enter(mine, "fast", "solutions/dlojz_08_large_batch.py --optimizer lamb")
    assert found.files["optimizers.py"] == (solved / "optimizers.py").read_bytes()
    assert race.entries(mine)[0] == [found]


@pytest.mark.parametrize(
    ("name", "command", "by", "told"),
    [
        ("a'; echo foo", STARTER, "", r"\"a'; echo foo\" is not a name"),
        ("../up", STARTER, "", "is not a name"),
        (".hidden", STARTER, "", "is not a name"),
        ("", STARTER, "", "is not a name"),
        ("x" * 31, STARTER, "", "at most 30 small letters"),
        ("a\n", STARTER, "", "is not a name"),
        ("a", STARTER, "\x1b[2J", "is no pseudonym"),
        ("a", "nothing.py", "", "no trainer 'nothing.py'"),
        ("a", "t.py", "", "as it has no parse_args, .*: expected the functions"),
        ("a", "torn.py", "", "torn.py, line 1"),
        ("a", "bare.py", "", "bare.py has no decode, with which the judge loads your weights"),
        ("a", "long.py", "", "bytes, expected at most 300,000: an entry is a program"),
        ("a", f"{STARTER} --data elsewhere", "", "leave out --data: the organiser chooses"),
        ("a", f"{STARTER} --see=3", "", "leave out --see: the organiser"),
        ("a", f"{STARTER} --resume x.pt", "", "leave out --resume"),
        ("a", f"{STARTER} --test", "", "leave out --test"),
        ("a", f"{STARTER} --epoch-s 3", "", "no flag --epoch-s: did you mean --epochs?"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(mine, course_folder, name, command, by, told):
    starter = (course_folder / "dlojz/dlojz.py").read_text()
    (course_folder / "t.py").write_text("print('not run')")
    (course_folder / "torn.py").write_text("def")
    (course_folder / "bare.py").write_text(starter.replace("def decode(", "def decoded("))
    (course_folder / "long.py").write_text(starter + "# long\n" * 50_000)
    with pytest.raises(ValueError, match=told):
        race.enter(mine, name, command, by)
    assert not [*(mine.folder / "entries").iterdir()]


def test_a_name_is_given_once_whoever_is_first(mine):
    told, start = [], threading.Barrier(4)

    def enter(i):
        start.wait()
        try:
            told.append(race.enter(mine, "same", f"{STARTER} --seed-{i}"[:-7]).name)
        except race.RaceError as error:
            told.append(str(error))

    threads = [threading.Thread(target=enter, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, told))[0] == len("same")
    assert sum("is entered already" in text for text in told) == 3
    assert len(race.entries(mine)[0]) == 1


def test_what_is_no_entry_is_named_and_never_run(mine, course_folder):
    good, folder = race.enter(mine, "good", STARTER), mine.folder / "entries"
    for name, (make, _) in DAMAGED.items():
        made = folder / f"damaged-{len([*folder.iterdir()])}"
        made.mkdir()
        make(made / entering.ENTRY)
        assert name
    (folder / "link").symlink_to(good.folder)
    (folder / "a file").write_text("")
    (folder / "a'; echo foo").mkdir()
    for name, changes in {
        "up": {"files": ["trainer.py", "../../../dlojz/dlojz.py"]},
        "root": {"files": ["trainer.py", "/etc/passwd"]},
        "none": {"files": []},
        "by": {"by": "\x1b[2J"},
        "flags": {"flags": [1]},
        "resume": {"flags": ["--resume=weights.pt"]},
        "changed": {"flags": ["--lr", "1"]},
        "when": {"entered": "now"},
    }.items():
        (folder / name).mkdir()
        about = json.loads((good.folder / entering.ENTRY).read_text()) | changes
        (folder / name / entering.ENTRY).write_text(json.dumps(about))
        (folder / name / "trainer.py").write_bytes(good.files["trainer.py"])
    (folder / "linked").mkdir()
    (folder / "linked" / entering.ENTRY).write_text((good.folder / entering.ENTRY).read_text())
    (folder / "linked" / "trainer.py").symlink_to(course_folder / "dlojz/dlojz.py")
    found, damaged = race.entries(mine)
    assert found == [good]
    assert len(damaged) == len([*folder.iterdir()]) - 1
    assert damaged["changed"] == (
        "its files have changed since it was entered: enter it under another name"
    )
    assert damaged["resume"].startswith("leave out --resume: the organiser chooses")
    assert "\x1b" not in repr(race.board(mine))


# Results ------------------------------------------------------------------------------------------


def test_the_sample_lines_are_read(mine):
    lines = [line for line in results.__doc__.splitlines() if line.startswith("{")]
    (mine.folder / results.FILE).write_text("\n".join(lines) + "\n")
    (one,) = results.read(mine)
    assert (one.number, one.seeds, one.drawn) == (1, [7, 8, 9], 2026)
    assert one.due() == [("starter", 8), ("starter", 9)]
    assert one.judged["starter", 7]["accuracy"] == 0.512


def test_entries_take_turns(mine):
    begin(mine, 1, "abc", [1, 2, 3])
    (one,) = results.read(mine)
    assert "".join(name for name, _ in one.due()) == "abccbaabc"
    assert [seed for _, seed in one.due()] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_torn_last_line_was_never_a_result_and_is_replaced(mine):
    begin(mine, 1, "ab", [1, 2, 3])
    file = mine.folder / results.FILE
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"event": "run", "rou')
    assert results.read(mine)[0].runs == {}
    results.append(mine, "draw", 1, seed=5)
    assert file.read_bytes().startswith(whole)
    assert results.read(mine)[0].drawn == 5


def test_a_damaged_line_is_named(mine):
    begin(mine, 1, "ab", [1, 2, 3])
    with (mine.folder / results.FILE).open("a") as file:
        file.write('{"event": "draw", "round": 1, "seed": "x"}\n')
    with pytest.raises(race.RaceError, match=r"results.jsonl:2: damaged \(seed is 'x'\)"):
        results.read(mine)


def test_a_line_is_written_whole_or_not_at_all(mine, monkeypatch):
    begin(mine, 1, "ab", [1, 2, 3])
    before = (mine.folder / results.FILE).read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(course.NoRoomError, match="the disk is full"):
        results.append(mine, "draw", 1, seed=5)
    assert (mine.folder / results.FILE).read_bytes() == before


# Places -------------------------------------------------------------------------------------------


def begin(mine, number, names, seeds):
    about = {"entries": dict.fromkeys(names, "sum"), "seeds": seeds, "rules": mine.rules}
    results.append(mine, "round", number, **about, place="here", time=0.0)


def judge(mine, number, name, accuracies, joules=None, **more):
    for seed, accuracy in enumerate(accuracies):
        about = {"entry": name, "seed": seed, "why": ""}
        run = {"seconds": 10.0 + seed, "joules": joules, "images": 100, "updates": 10}
        run["disturbed"] = "others kept 1.5 of 2 CPUs busy: repeat it" * (name == "c")
        results.append(mine, "run", number, **about, **run)
        judged = {"accuracy": accuracy, "of": 1000, "floor_s": 0.5} | more
        results.append(mine, "judged", number, **about | judged)


def put(mine, number, **accuracies):
    """Write a round, with the accuracies of each entry by seed."""
    begin(mine, number, accuracies, list(range(len(next(iter(accuracies.values()))))))
    for name, values in accuracies.items():
        judge(mine, number, name, values)


def words(mine, *names):
    return {place.name: place.word for place in ranking.standings(mine, names)}


def test_the_first_is_best_a_small_difference_ties_and_a_large_one_wins(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54), b=(0.51, 0.53, 0.55), c=(0.60, 0.62, 0.64), d=(0.4,) * 3)
    places = ranking.standings(mine, ("late",))
    assert [place.name for place in places] == ["c", "b", "a", "d", "late"]
    assert words(mine, "late") == {
        **{"c": ranking.BEST, "b": ranking.TIE, "a": ranking.BEHIND, "d": ranking.BEHIND},
        "late": ranking.WAITS,
    }
    found = next(place.margin for place in places if place.name == "b")
    # sd 2 points, 2 degrees of freedom: t(0.95) = 2.92, both means are noisy, three pairs
    assert found.gate == pytest.approx(2.92 * math.sqrt(2) * 2 / math.sqrt(3), rel=1e-3)
    assert (found.mean, found.best) == (pytest.approx(1.0), "a")
    told = repr(race.board(mine))
    assert "tie with a (+1.0 points, gate 4.8)\n" in told
    assert told.count("disturbed: others kept 1.5 of 2 CPUs busy") == 1


def test_more_runs_of_the_best_narrow_the_gate(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54))
    put(mine, 2, a=(0.50, 0.52, 0.54), b=(0.51, 0.53, 0.55))
    put(mine, 3, a=(0.50, 0.52, 0.54), c=(0.51, 0.53, 0.55))
    gates = {p.name: p.margin.gate for p in ranking.standings(mine) if p.margin}
    assert gates["c"] < gates["b"]
    assert ranking.quantile(0.05, 10**6) == pytest.approx(1.645, abs=1e-3)


def test_a_margin_knows_the_freedom_of_its_gate(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54))
    put(mine, 2, a=(0.50, 0.52, 0.54), b=(0.51, 0.53, 0.55))
    (found,) = [place.margin for place in ranking.standings(mine) if place.margin]
    assert found.freedom == 4
    assert n14.gates(found, mine.level)[3] == pytest.approx(found.gate)


def test_those_who_come_late_meet_the_best_so_far(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54))
    put(mine, 2, a=(0.30, 0.32, 0.34), b=(0.52, 0.54, 0.56))
    places = ranking.standings(mine)
    assert [place.word for place in places] == [ranking.BEST, ranking.BEHIND]
    assert places[0].name == "b"  # by the second round's images alone
    assert places[1].accuracy == pytest.approx(0.32)
    assert places[1].against == "b"


def test_one_that_fails_is_out_and_a_best_that_fails_again_is_too(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54), b=(0.50, 0.52, 0.54))
    begin(mine, 2, "acd", [0, 1, 2])
    results.append(mine, "run", 2, entry="a", seed=0, why="FAILED: oh")
    judge(mine, 2, "c", (0.2, 0.2, 0.2))
    judge(mine, 2, "d", (0.7, 0.7, 0.7))
    places = {place.name: place for place in ranking.standings(mine, "abcd")}
    assert places["a"].why == "run again, it failed: FAILED: oh"
    assert {n: p.word for n, p in places.items()} == {
        **{"a": ranking.OUT, "b": ranking.WAITS, "c": ranking.BEHIND, "d": ranking.BEST}
    }


def test_another_round_of_a_tie_counts_together_with_the_first(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54), b=(0.54, 0.56, 0.58), c=(0.1, 0.1, 0.1))
    (tie,) = (p for p in ranking.standings(mine) if p.word == ranking.TIE)
    assert tie.ties_with("a")
    put(mine, 2, a=(0.60, 0.62, 0.64), b=(0.64, 0.66, 0.68))
    places = ranking.standings(mine)
    assert [place.name for place in places] == ["b", "a", "c"]
    assert places[0].margin.points == pytest.approx((4.0,) * 6)
    assert places[0].margin.gate < tie.margin.gate / math.sqrt(2)


def test_a_round_that_is_not_over_changes_no_place(mine):
    put(mine, 1, a=(0.50, 0.52, 0.54))
    begin(mine, 2, "ab", [0, 1, 2])
    judge(mine, 2, "b", (0.9, 0.9, 0.9))
    assert words(mine) == {"a": ranking.BEST}


def test_equal_runs_do_not_make_a_gate_of_zero(mine):
    put(mine, 1, a=(0.5, 0.5, 0.5), b=(0.501, 0.501, 0.501))
    assert words(mine)["b"] == ranking.TIE  # by one image of a thousand


@pytest.mark.parametrize(
    ("run", "model", "accuracy", "idle_w", "told"),
    [
        ({}, {}, 0.5, None, ""),
        ({"images": 50_000}, {}, 0.5, None, r"too fast: the 50,000 images .* at least 50.0 s on"),
        ({"images": 0}, {}, 0.1, None, ""),
        ({"images": 0}, {}, 0.5, None, "its log has no image, and yet 50% are right"),
        ({"updates": 10_000}, {}, 0.5, None, "too fast: .* at least 30.0 s"),
        ({"updates": 10_000}, {"parameter_bytes": 1e7}, 0.5, None, ""),  # stays in the cache
        ({"updates": 10_000}, {"bytes_per_s": None}, 0.5, None, ""),
        ({}, {}, 0.5, 100.0, ""),
        ({"joules": 1000.0}, {}, 0.5, 100.0, "too few joules: 1000 J in 20.0 s, and the idle"),
        ({"joules": None}, {}, 0.5, 100.0, ""),
    ],
)
def test_faster_than_physics_is_an_error(run, model, accuracy, idle_w, told):
    found = ranking.impossible(RUN | run, MODEL | model, accuracy, idle_w)
    assert bool(found) == bool(told), found
    assert re.match(told, found)


# The board ----------------------------------------------------------------------------------------


def title(ax):
    return ax.figure.get_suptitle()


def test_the_board_says_what_is_not_measured_and_how_many_lines_changed(mine, course_folder):
    race.enter(mine, "a", STARTER, by="otter")
    race.enter(mine, "b", "solutions/dlojz_02_amp.py -e 3")
    race.enter(mine, "waits", STARTER)
    begin(mine, 1, "ab", [0, 1, 2])
    judge(mine, 1, "a", (0.50, 0.52, 0.54))
    judge(mine, 1, "b", (0.70, 0.72, 0.74), joules=3000.0)
    rows = {row[0]: row[1:] for row in race.board(mine).rows}
    assert rows["a"][:5] == ("otter", "52.0 ± 5.0 %", "11.0", "not measured", "0")
    assert rows["b"][2:4] == ("11.0", "3,000")
    assert int(rows["b"][4]) > 10
    assert rows["b"][5].startswith("best so far (+20.0 points, gate 4.8, against a)")
    assert rows["a"][5] == "behind b"
    assert rows["waits"][5] == "waits for a run"
    assert title(race.plot_board(mine)[0]) == "b: 72.0 ± 5.0 % in 20 s"


def test_a_board_without_results_is_drawn(mine):
    assert repr(race.board(mine)) == leaderboard.EMPTY
    assert title(race.plot_board(mine)[0]) == "No entry has run yet"


def fail(mine, name):
    begin(mine, 1, [name], [0, 1, 2])
    run = {
        "why": "no weights: it saved none",
        "cut": True,
        "disturbed": "others kept 1.0 of 2 CPUs",
    }
    results.append(mine, "run", 1, entry=name, seed=0, **run)


def test_an_entry_that_is_out_is_listed_with_what_disturbed_it_and_what_to_do(mine):
    race.enter(mine, "a", STARTER)
    fail(mine, "a")
    told = race.told(mine)
    assert told.startswith("a: out: no weights: it saved none; 1 of its runs ended at the budget")
    assert (
        "; disturbed: others kept 1.0 of 2 CPUs\n  next: give it fewer epochs, or make a race"
        in told
    )
    assert title(race.plot_board(mine)[0]) == "All that have run are out: a"


@pytest.mark.parametrize(("disturbed", "tries"), [("others kept 1.0 of 2 CPUs busy", 2), ("", 1)])
def test_a_run_that_ran_out_of_time_beside_others_is_run_once_more(
    mine, monkeypatch, disturbed, tries
):
    race.enter(mine, "a", STARTER)
    tried = []

    def timed(*words):
        tried.append(words)
        return {"why": "no weights", "cut": True, "disturbed": disturbed}

    monkeypatch.setattr(organiser, "_timed", timed)
    (place,) = race.run(mine, progress=False)
    assert (place.word, place.disturbed, len(tried)) == (ranking.OUT, disturbed, tries)


def test_ctrl_c_says_that_the_run_was_cancelled(mine, monkeypatch, capsys):
    monkeypatch.setattr(organiser, "_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["race", "run", "races/mine"]) == 130
    assert "the run in progress was cancelled" in capsys.readouterr().err


def test_the_difference_is_shown_with_the_flags(mine):
    race.enter(mine, "a", STARTER)
    race.enter(mine, "b", "solutions/dlojz_01_gpu.py -e 3")
    shown = repr(race.diff(mine, "b"))
    assert shown.startswith("# b: -e 3\n--- starter/trainer.py")
    assert "+    device = idr_torch.device()" in shown
    assert "# a: --model resnet18 -e 2\n# b: -e 3\n--- a/" in repr(race.diff(mine, "b", "a"))
    assert repr(race.diff(mine, "a")) == "# a: --model resnet18 -e 2"
    with pytest.raises(race.RaceError, match="no entry 'c': expected one of a, b"):
        race.diff(mine, "c")


def test_the_command(course_folder, capsys):
    assert cli.main(["race", "new", "r"]) == 0
    assert "next: dlojz race enter r starter" in capsys.readouterr().out
    assert cli.main(["race", "enter", "r", "mine", STARTER, "--as", "otter"]) == 0
    assert cli.main(["race", "enter", "r", "mine", STARTER]) == 2
    assert "is entered already" in capsys.readouterr().err
    assert cli.main(["race", "board", "r", "--png", "b.png", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["entry"], row["by"], row["place"]) == ("mine", "otter", "waits for a run")
    assert os.path.getsize("b.png") > 1000
    assert cli.main(["race", "diff", "r", "mine"]) == 0
    assert cli.main(["race", "board", "nothing"]) == 2
    assert "`dlojz race new nothing` makes one" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["race"])
    with pytest.raises(SystemExit):
        cli.main(["race", "--help"])
    assert "chmod 1777" in capsys.readouterr().out


def test_rules_that_changed_in_a_round_are_refused(mine):
    race.enter(mine, "a", STARTER)
    begin(mine, 1, "a", [0, 1, 2])
    organiser._check_round(mine, replace(results.read(mine)[0], place=organiser._place()))
    file = mine.folder / rules.RULES
    file.write_text(file.read_text().replace("runs = 3", "runs = 4"))
    with pytest.raises(race.RaceError, match="has changed in round 1: put it back"):
        race.run(mine.folder, progress=False)


def test_a_round_is_finished_where_it_was_begun(mine):
    race.enter(mine, "a", STARTER)
    begin(mine, 1, "a", [0, 1, 2])
    with pytest.raises(race.RaceError, match=r"was begun on here, and this is .*: entries are"):
        race.run(mine, progress=False)


def test_the_class_board_shows_the_race(mine, course_folder, capsys):
    race.enter(mine, "a", STARTER, by="quick-otter-27")
    (course_folder / "class").mkdir()
    assert cli.main(["class", "class", "--race", "races/mine"]) == 0
    assert "a      quick-otter-27" in capsys.readouterr().out


def test_the_rules_page_names_the_commands_that_there_are():
    page = (Path(__file__).parents[1] / "docs/race.md").read_text()
    for action in re.findall(r"^dlojz race (\w+)", page, re.M):
        assert f'"{action}"' in (Path(cli.__file__).with_name("race.py")).read_text()
    assert f"{entering.LARGEST // 1000} kB" in page
    kept = {*entering.NEEDED, *source.FUNCTIONS}
    assert not [name for name in kept if f"`{name}`" not in page]
    assert len(kept) == 9
    assert "the names of nine functions" in page


def test_entries_of_other_users_are_run_only_if_they_were_read(mine, capsys, monkeypatch):
    race.enter(mine, "own", STARTER)
    theirs = race.enter(mine, "theirs", STARTER)
    read = entering._read

    def by_another(folder):
        entry = read(folder)
        return replace(entry, owner=entry.owner + 1) if folder.name == "theirs" else entry

    def only_begin(of_race, one, *_):
        raise RuntimeError(" ".join(one.entries))

    monkeypatch.setattr(entering, "_read", by_another)
    monkeypatch.setattr(organiser, "_run", only_begin)
    with pytest.raises(RuntimeError, match=r"^own$"):
        race.run(mine, progress=False)
    (mine.folder / results.FILE).unlink()
    with pytest.raises(RuntimeError, match=r"^own theirs$"):
        race.run(mine, read=[theirs.sha256], progress=False)
    (mine.folder / results.FILE).unlink()
    monkeypatch.setattr(organiser, "_begin", lambda *_: False)
    assert cli.main(["race", "run", "races/mine"]) == 0
    assert "of other users, and not run: theirs; read them" in capsys.readouterr().out
