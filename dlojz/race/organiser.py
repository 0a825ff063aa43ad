"""The organiser of a race: runs the entries in turn, draws the images that judge, and judges.

Each step holds the race, so that two organisers take turns. What one has begun when it is killed is
cancelled by the next, and done again; results are kept.
"""

import hashlib
import json
import os
import secrets
import shutil
import site
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tqdm.auto import tqdm

from dlojz import course, images, launch
from dlojz.course import presets
from dlojz.images import dataset
from dlojz.jobs import keeper
from dlojz.launch import State
from dlojz.machine import cpus, meters, nvml
from dlojz.race import ranking, results
from dlojz.race.entering import Entry, entries
from dlojz.race.rules import RaceError, open_race
from dlojz.runs import log, stats

BEGUN = "begun.json"  # the job of the organiser that holds the race
WEIGHTS = "checkpoint.pt"  # in a run's folder
LATE_S = 1.0  # after the budget, for the end of a run that saved in time
JUDGE_S = 1800  # for a judgement
LOOK_S, TURN_S = 0.05, 1.0


def run(race, again=False, read: Collection[str] = (), progress=True) -> list[ranking.Standing]:
    """Run and judge the entries that wait, in rounds, and return the places of all.

    Each round is of the best so far and of the entries that came since. A call that was interrupted
    resumes where it stopped. Raises RaceError for what has to be mended first.

    again: then have one more round of the best so far and its ties.
    read: checksums of entries that you have read: those of other users are not run without.
    """
    race = open_race(race)
    _check(race)
    bar = tqdm(unit="run", disable=not progress, desc=f"race {race.folder.name}")
    with bar:
        while _step(race, bar, read):
            pass
        if again:
            while _step(race, bar, read, again):
                again = False
    return ranking.standings(race, [entry.name for entry in entries(race)[0]])


def _step(race, bar, read, again=False) -> bool:
    """Take the next step of a race; return whether there may be another one."""
    with results.turn(race) as free:
        if not free:
            bar.set_postfix_str("another organiser is at work")
        else:
            _cancel_what_was_left(race, bar)
            rounds = results.read(race)
            one = rounds[-1] if rounds else None
            if one:  # runs of an entry that is out are no longer due
                bar.total, bar.n = len(one.runs) + len(one.due()), len(one.runs)
                bar.refresh()
            if one is None or one.done:
                return _begin(race, rounds, read, again)
            _check_round(race, one)
            if due := one.due():
                bar.set_postfix_str(f"round {one.number}: {due[0][0]}")
                _run(race, one, *due[0])
            else:
                bar.set_postfix_str(f"round {one.number}: judging")
                _judge(race, one)
            return True
    time.sleep(TURN_S)
    return True


def _check(race):
    if not os.access(race.folder, os.W_OK):
        raise RaceError(f"{race.folder} can't be written by you: its owner runs it")
    if launch.launcher().name != "local":
        raise RaceError(
            "a race is run on one machine: in an allocation on a node, with DLOJZ_LAUNCHER=local"
        )
    held = dataset.about(race.images)
    if (held["classes"], held["seed"]) != (race.classes, race.seed):
        raise RaceError(
            f"{race.images} has {held['classes']} classes of seed {held['seed']}, and the race "
            f"{race.classes} of seed {race.seed}: put the race's images back"
        )
    if race.joules and not _meters():
        raise RaceError("this race has a budget of joules, and no GPU here measures its energy")


def _check_round(race, one):
    if one.rules != race.rules:
        raise RaceError(f"{race.folder}/race.toml has changed in round {one.number}: put it back")
    if one.place != (here := _place()):
        raise RaceError(
            f"round {one.number} was begun on {one.place}, and this is {here}: entries are "
            "compared on one machine, so finish it there"
        )


def _place() -> str:
    """Return the name of this machine and of its device."""
    nvml.ask("Init")
    cards = [nvml.ask("DeviceGetHandleByUUID", card) for card in presets.gpus()]
    device = nvml.ask("DeviceGetName", cards[0]) if cards else cpus.name()
    mark = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]  # the board is for others
    return f"{device}, machine {mark}"


def _begin(race, rounds, read, again) -> bool:
    """Begin a round of the best so far and of those that wait; return whether there are any.

    again: of its ties, if nobody waits.
    """
    known = {entry.name: entry.sha256 for entry in entries(race)[0]}
    places = {place.name: place for place in ranking.standings(race, known)}
    best = next((name for name, place in places.items() if place.word == ranking.BEST), "")
    new = [e.name for e in waiting(race) if e.owner == os.getuid() or e.sha256 in read]
    if again and not new:
        new = [name for name in known if places[name].ties_with(best)]
    if not new:
        return False
    chosen = {name: known.get(name, "") for name in ([best] if best else []) + new}
    seeds = [secrets.randbelow(2**31) for _ in range(race.runs)]
    about = {"entries": chosen, "seeds": seeds, "rules": race.rules, "place": _place()}
    results.append(race, "round", len(rounds) + 1, **about, time=time.time())
    return True


def waiting(race) -> list[Entry]:
    """Return the entries that wait for a run."""
    there, _ = entries(race)
    places = {p.name: p.word for p in ranking.standings(race, [entry.name for entry in there])}
    return [entry for entry in there if places[entry.name] == ranking.WAITS]


# A run --------------------------------------------------------------------------------------------


def _run(race, one, name, seed):
    there, damaged = entries(race)
    entry = next((e for e in there if e.name == name), None)
    if entry is None or entry.sha256 != one.entries[name]:
        why = damaged.get(name, "its files are gone, or others than when the round began")
        results.append(race, "run", one.number, entry=name, seed=seed, why=why)
        return
    idle = _idle_watts()
    with _clean_home() as folder:
        trainer = entry.copied(folder / "entry")  # which its owner can no longer change
        words = [trainer, *entry.flags, "--data", race.images, "--seed", seed]
        told = _timed(race, words, name, idle)
    if told["why"] and told["cut"] and told["disturbed"]:  # by others, so it has another try
        with _clean_home() as folder:
            words[0] = entry.copied(folder / "entry")
            told = _timed(race, words, name, idle)
    results.append(race, "run", one.number, entry=name, seed=seed, **told)


def _timed(race, words, name, idle) -> dict:
    with _job(race, words, f"race {name}", race.seconds) as job:
        told = _watch(race, job, idle)
    if told["why"]:
        (job.directory / WEIGHTS).unlink(missing_ok=True)
    return told


def _watch(race, job, idle) -> dict:
    """Wait for a job, and end it at its budget; return what is recorded of the run."""
    begin, spent, crowd = {}, False, _Crowd()
    while not (state := job.state).final:
        begin = begin or (_joules() if state == State.RUNNING else {})
        if race.joules and (_used(job, begin) or 0) >= race.joules:
            spent = True
            job.cancel("its joules are used up")
        time.sleep(LOOK_S)
    joules, status = _used(job, begin), job.status
    cut = state == State.TIMEOUT or (spent and state == State.CANCELLED)
    seconds = status.get("ended", 0) - status.get("started", 0)
    watts = [idle.get(card) for card in status.get("devices") or []]
    told = {"why": _why(race, job, status, cut), "cut": cut}
    told["seconds"] = round(min(seconds, race.seconds) if cut else seconds, 3)
    told |= {"joules": joules, "idle_w": None if None in watts else round(sum(watts), 1)}
    told |= _logged(job)
    told["disturbed"] = told["disturbed"] or crowd.words(status.get("cpu_s", 0))
    return told | {"run": os.path.relpath(job.directory, race.folder)}


def _why(race, job, status, cut) -> str:
    """Return the reason why a run is out; "" if its weights can be judged."""
    if not cut and (failure := _failure(job)):
        return failure
    weights = job.directory / WEIGHTS
    if not weights.exists():
        return "no weights: it saved none in its budget, so shorten it, or save at each epoch"
    if weights.stat().st_mtime > status["started"] + race.seconds + LATE_S:
        return "its weights were saved after the budget"
    return ""


def _failure(job) -> str:
    """Return the reason of a failure; "" if there is none.

    Raises RaceError if the entry is not to blame.
    """
    status = job.status
    said = job.explain(1)
    if status.get("cause") == keeper.Cause.LOST or status["state"] == State.CANCELLED:
        raise RaceError(f"{said}\nNothing is recorded of it: `dlojz race run` runs it again")
    if status["state"] == State.COMPLETED:
        return ""
    if full := next((word for word in course.FULL.values() if word in said), None):
        raise RaceError(f"{full} ({job.directory}): make room, then `dlojz race run` again")
    return f"{status['state']}: {said.splitlines()[-2].strip(' |')}"[:500]


def _logged(job) -> dict:
    """Return the images and updates in a run's log, and what disturbed it; 0 without a log."""
    told = {"images": 0, "updates": 0, "disturbed": ""}
    with suppress(Exception):  # the entry may have written anything
        found = log.read(job)
        accumulate = found.start["arguments"]["accumulate"]
        told |= {"images": sum(found.steps.images), "updates": len(found.steps) // accumulate}
        told["disturbed"] = stats.summary(job).disturbance
    return told


class _Crowd:
    """The CPU time of others during a run, seen from outside: its log may be empty when it ends."""

    def __init__(self):
        self._begin = time.monotonic(), meters.cpu_seconds_of_others(os.getpid())

    def words(self, cpu_s: float) -> str:
        """Return the CPUs that others kept busy, in words; "" if few. cpu_s: of the run."""
        seconds = time.monotonic() - self._begin[0]
        now, count = meters.cpu_seconds_of_others(os.getpid()), cpus.count()
        if None in (now, self._begin[1]):
            return ""
        busy = (now - self._begin[1] - cpu_s) / seconds
        return stats.crowd_text(busy, count) if busy > stats.OTHERS_CPU * count else ""


@cache
def _meters() -> dict:
    """Return NVML's handles of the GPUs that measure energy, by UUID; {} where none does."""
    nvml.ask("Init")
    found = {card: nvml.ask("DeviceGetHandleByUUID", card) for card in presets.gpus()}
    return {card: handle for card, handle in found.items() if nvml.energy_j(handle) is not None}


def _joules() -> dict[str, float]:
    """Return the energy counters of the GPUs, by UUID."""
    return {card: nvml.energy_j(handle) for card, handle in _meters().items()}


def _idle_watts() -> dict[str, float]:
    """Return the power of the GPUs before a run, over a second, by UUID."""
    if not (before := _joules()):
        return {}
    time.sleep(1)
    return {card: joules - before[card] for card, joules in _joules().items()}


def _used(job, begin) -> float | None:
    """Return the joules that the job's devices have used since `begin`; None if not measured."""
    cards = job.status.get("devices") or []
    if not begin or any(card not in begin for card in cards):
        return None
    now = _joules()
    return round(sum(now[card] - begin[card] for card in cards), 1)


@contextmanager
def _clean_home() -> Iterator[Path]:
    """Give jobs that are submitted meanwhile an empty home: no cache of compiled code, no state.

    Yield a folder that holds it, and is removed afterwards.
    """
    folder = Path(tempfile.mkdtemp(prefix="dlojz-race-"))
    (folder / "home").mkdir()
    names = ["HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"]
    names += {"TRITON_CACHE_DIR", "CUDA_CACHE_PATH"} & os.environ.keys()  # else these are in HOME
    changed = dict.fromkeys(names, str(folder / "home"))
    if site.ENABLE_USER_SITE:  # packages that were installed into the usual HOME
        changed["PYTHONUSERBASE"] = site.getuserbase()
    kept = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield folder
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _job(race, words, name, seconds) -> Iterator[launch.Job]:
    """Submit a job, and note it, so that the next organiser ends it if this one is killed."""
    time_max = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    job = launch.submit(tuple(map(str, words)), name=name, time_max=time_max)
    try:
        course.write_atomically(race.folder / BEGUN, json.dumps({"job": str(job.directory)}))
        yield job
    except BaseException:
        job.cancel("its organiser was interrupted")
        raise
    (race.folder / BEGUN).unlink(missing_ok=True)


def _cancel_what_was_left(race, bar):
    """Cancel the job of an organiser that was killed: its joules were not measured."""
    if left := course.read_table(race.folder / BEGUN).get("job"):
        job = launch.Job(Path(left))
        if job.directory.is_dir():
            job.cancel("its organiser was killed")
            job.wait(30)
            if not bar.disable:
                bar.write(f"{job.directory.name} is ended, as its organiser was killed")
        (race.folder / BEGUN).unlink()


# The judge ----------------------------------------------------------------------------------------


def _judge(race, one):
    """Judge the runs of one entry on images that are drawn now, after all runs."""
    if one.drawn is None:
        results.append(race, "draw", one.number, seed=secrets.randbelow(2**32))
        return
    folder = race.folder / f"judge-{one.number}"
    images.generate(
        folder, race.classes, 0, race.judged, seed=race.seed, judge=one.drawn, progress=False
    )
    name, seeds = next(iter(one.to_judge().items()))
    runs = [(race.folder / one.runs[name, seed]["run"]).resolve() for seed in seeds]
    words = [Path(__file__).with_name("judging.py"), "--images", folder, "--runs", *runs]
    with _job(race, words, f"judge {name}", JUDGE_S) as job:
        job.wait()
        if why := _failure(job):
            told = {"rows": [{"why": f"could not be judged: {why}"}] * len(runs)}
        else:
            told = course.read_table(job.directory / "judged.json")
    idle = min((run["idle_w"] for run in one.runs.values() if run.get("idle_w")), default=None)
    for seed, row in zip(seeds, told["rows"], strict=True):
        found = {"why": row["why"]}
        if not found["why"]:
            made, accuracy = one.runs[name, seed], row["right"] / row["of"]
            why = ranking.impossible(made, told["model"], accuracy, idle)
            found = {"why": why, "accuracy": accuracy, "of": row["of"]}
            found["floor_s"] = ranking.floor_s(made, told["model"])
        results.append(race, "judged", one.number, entry=name, seed=seed, **found)
    for run in runs:  # megabytes each, and judged
        (run / WEIGHTS).unlink(missing_ok=True)
