"""The race, with real processes: a late joiner, a crash, a tie, a cheat, kills and a full disk."""

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from waiting import until

from conftest import fill
from dlojz import course, images, launch, race
from dlojz.race import organiser, ranking, results

TINY = "--model shufflenet_v2_x0_5 --image-size 32 -b 16 --num-workers 0"
SLOW = (
    "        chrono.validation()",
    "        __import__('time').sleep(1)\n        chrono.validation()",
)
STARTER = f"dlojz/dlojz.py {TINY}"


@pytest.fixture
def mine(course_folder):
    """A race with two runs of each entry, on the small images of the tests."""
    return race.new("races/mine", seconds=60, runs=2, judged=2)


def edited(course_folder, name, *replacements):
    """Write the starter with these replacements; return its file's name."""
    text = (course_folder / "solutions/dlojz_00_start.py").read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (course_folder / name).write_text(text)
    return name


def runs(mine):
    lines = (mine.folder / results.FILE).read_text().splitlines()
    found = (event for event in map(json.loads, lines) if event["event"] == "run")
    return Counter((event["round"], event["entry"], event["seed"]) for event in found)


@pytest.mark.slow
def test_a_race_with_a_crash_a_tie_a_late_joiner_and_a_cheat(course_folder, mine):
    crash = edited(course_folder, "crash.py", ("    chrono.stop()", "    raise RuntimeError('oh')"))
    saves = ("        if args.checkpoint:", "        if False:")
    race.enter(mine, "first", STARTER)
    race.enter(mine, "same", STARTER, by="quick-otter-27")
    race.enter(mine, "crash", f"{crash} {TINY}")
    places = {place.name: place for place in race.run(mine, progress=False)}
    assert not places["first"].why
    assert (places["first"].word, places["same"].word) == (ranking.BEST, ranking.TIE)
    assert places["same"].margin.points == (0.0, 0.0)  # the same program with the same seeds
    assert places["crash"].word == ranking.OUT
    assert places["crash"].why == "FAILED: RuntimeError: oh"
    assert max(runs(mine).values()) == 1
    assert sum(runs(mine).values()) == 5  # a crash is not run again
    assert not list(course_folder.glob("runs/*/checkpoint.pt"))
    # Those who come late meet the best so far, which runs again. The cheat says it does more.
    cheat = edited(course_folder, "cheat.py", ("images=len(images)", "images=10**9"))
    silent = edited(course_folder, "silent.py", saves)
    race.enter(mine, "cheat", f"{cheat} {TINY}")
    race.enter(mine, "silent", f"{silent} {TINY}")
    places = {place.name: place for place in race.run(mine, progress=False)}
    assert places["cheat"].why.startswith("too fast: the 4,000,000,000 images in its log need")
    assert places["silent"].why.startswith("no weights: it saved none in its budget")
    assert [number for number, name, _ in runs(mine) if name == "first"] == [1, 1, 2, 2]
    assert [number for number, name, _ in runs(mine) if name == "same"] == [1, 1]
    shown = repr(race.board(mine))
    assert "not measured" in shown
    assert "tie with first (+0.0 points, gate" in shown
    assert "out: too fast" in shown
    assert shown.splitlines()[1].split()[0] == "first"
    before = (mine.folder / results.FILE).read_bytes()
    race.run(mine, progress=False)  # nobody waits
    assert (mine.folder / results.FILE).read_bytes() == before
    places = {place.name: place for place in race.run(mine, again=True, progress=False)}
    assert [number for number, name, _ in runs(mine) if name == "same"] == [1, 1, 3, 3]
    assert len(places["same"].margin.points) == 4
    ax = race.plot_board(mine)[0]
    assert ax.figure.get_suptitle().endswith("and a tie with same")


@pytest.mark.slow
def test_a_run_is_ended_at_its_budget_and_its_last_weights_judged(course_folder, mine):
    slow = edited(course_folder, "slow.py", SLOW)
    race.enter(mine, "slow", f"{slow} {TINY} -e 1000")
    file = mine.folder / "race.toml"
    file.write_text(file.read_text().replace("seconds = 60", "seconds = 8"))
    (place,) = race.run(mine.folder, progress=False)
    assert (place.word, place.seconds) == (ranking.BEST, (8.0, 8.0))


@pytest.mark.slow
def test_a_run_that_is_ended_before_its_first_line_knows_that_others_were_busy(
    course_folder, mine, monkeypatch
):
    begin = "from itertools import islice"
    late = edited(course_folder, "late.py", (begin, f"import time\ntime.sleep(9)\n{begin}"))
    race.enter(mine, "late", f"{late} {TINY}")
    file = mine.folder / "race.toml"
    file.write_text(file.read_text().replace("seconds = 60", "seconds = 1"))
    monkeypatch.setattr(organiser.meters, "cpu_seconds_of_others", lambda _: 3 * time.monotonic())
    (place,) = race.run(mine.folder, progress=False)
    assert place.word == ranking.OUT
    assert place.disturbed.startswith("others kept ")
    assert len(list(course_folder.glob("runs/0*"))) == 2  # it had another try
    assert sum(runs(mine).values()) == 1


@pytest.fixture
def meter(monkeypatch):
    """A device that takes 100 W, busy or idle."""
    monkeypatch.setattr(organiser, "_meters", lambda: {"cpu": "handle"})
    monkeypatch.setattr(organiser.nvml, "energy_j", lambda _: 100 * time.monotonic())


@pytest.mark.slow
def test_joules_are_measured_and_end_a_run(course_folder, mine, meter):
    slow = edited(course_folder, "slow.py", SLOW)
    race.enter(mine, "slow", f"{slow} {TINY} -e 1000")
    file = mine.folder / "race.toml"
    file.write_text(file.read_text().replace("# joules = 3000", "joules = 700"))
    (place,) = race.run(mine.folder, progress=False)
    assert place.word == ranking.BEST, place.why
    assert all(700 <= joules < 850 for joules in place.joules)
    assert all(6 < seconds < 9 for seconds in place.seconds)
    (one,) = results.read(mine)
    assert {run["cut"] for run in one.runs.values()} == {True}
    assert all(90 < run["idle_w"] < 110 for run in one.runs.values())
    assert len(race.plot_board(mine.folder)) == 3


def test_a_budget_of_joules_needs_a_meter_and_a_race_one_machine(course_folder, monkeypatch):
    made = race.new("races/joules", joules=100)
    race.enter(made, "first", STARTER)
    with pytest.raises(race.RaceError, match="no GPU here measures its energy"):
        race.run(made, progress=False)
    monkeypatch.setenv("DLOJZ_LAUNCHER", "slurm")
    with pytest.raises(race.RaceError, match="with DLOJZ_LAUNCHER=local"):
        race.run(made, progress=False)


def test_the_images_of_a_race_stay_the_same(course_folder, mine):
    race.enter(mine, "first", STARTER)
    images.generate("other", 2, 1, 1, seed=3, workers=1, progress=False)
    file = mine.folder / "race.toml"
    data = json.dumps("../../other")
    file.write_text(file.read_text().replace(json.dumps(mine.data), data))
    with pytest.raises(race.RaceError, match="has 2 classes of seed 3, and the race 4 of seed 0"):
        race.run(mine.folder, progress=False)


def test_a_job_has_an_empty_home_and_finds_what_was_installed(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setattr(organiser.site, "ENABLE_USER_SITE", True)
    before = dict(os.environ)
    with organiser._clean_home():
        home = os.environ["HOME"]
        assert os.listdir(home) == []
        names = ("TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        assert {os.environ[name] for name in names} == {home}
        assert os.environ["PYTHONUSERBASE"] == organiser.site.getuserbase()
    assert dict(os.environ) == before
    assert not os.path.exists(home)


ORGANISER = "from dlojz import race; race.run('races/mine', progress=False)"


@pytest.mark.slow
def test_a_killed_organiser_and_two_at_once_lose_nothing(course_folder, mine):
    race.enter(mine, "first", STARTER)
    race.enter(mine, "second", STARTER)
    begin = lambda: subprocess.Popen([sys.executable, "-c", ORGANISER])  # noqa: E731
    begun = mine.folder / organiser.BEGUN
    killed = begin()
    until(lambda: begun.exists() and (mine.folder / results.FILE).exists(), 60)
    left = course.read_table(begun)["job"]
    killed.kill()
    killed.wait()
    both = [begin(), begin()]
    assert [each.wait(180) for each in both] == [0, 0]
    assert launch.find(left.rpartition("/")[2]).state.final
    assert set(runs(mine).values()) == {1}
    assert len(runs(mine)) == 4
    events = [json.loads(line) for line in (mine.folder / results.FILE).read_text().splitlines()]
    kinds = Counter(event["event"] for event in events)
    assert kinds == {"round": 1, "run": 4, "draw": 1, "judged": 4}
    assert not begun.exists()


@pytest.mark.slow
def test_only_what_was_entered_is_run_and_a_best_that_is_gone_is_out(course_folder, mine):
    """The owner of an entry can still write beside it."""
    begin = "from itertools import islice"
    optional = (begin, f"{begin}\ntry:\n    import later\nexcept ImportError:\n    pass")
    trainer = edited(course_folder, "t.py", optional)
    made = race.enter(mine, "first", f"{trainer} {TINY}")
    (made.folder / "later.py").write_text("raise RuntimeError('not read')")
    (place,) = race.run(mine, progress=False)
    assert place.word == ranking.BEST
    for file in made.folder.iterdir():
        file.unlink()
    made.folder.rmdir()
    race.enter(mine, "second", STARTER)
    places = {place.name: place for place in race.run(mine, progress=False)}
    assert places["second"].word == ranking.BEST
    assert places["first"].why.startswith("run again, it failed: its files are gone")


def test_an_interrupted_organiser_cancels_its_job(mine, monkeypatch):
    race.enter(mine, "first", STARTER)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(organiser, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        race.run(mine, progress=False)
    assert launch.latest().wait(30) == "CANCELLED"
    assert not runs(mine)


def test_on_a_full_disk_nothing_of_a_run_is_blamed_on_its_entry(small_disk, mine):
    race.enter(mine, "first", STARTER)
    fill(small_disk)
    with pytest.raises(ValueError, match="the disk is full"):
        race.run(mine, progress=False)
    assert not runs(mine)
    (small_disk / "filler").unlink()


def test_a_job_that_somebody_cancels_is_run_again(mine, monkeypatch):
    race.enter(mine, "first", STARTER)
    usual = organiser._watch

    def watch(found, job, idle):
        job.cancel()
        return usual(found, job, idle)

    monkeypatch.setattr(organiser, "_watch", watch)
    with pytest.raises(race.RaceError, match="Nothing is recorded of it"):
        race.run(mine, progress=False)
    assert not runs(mine)
