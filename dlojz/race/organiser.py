"""The organiser of a race: runs the entries in turn, draws the images that judge, and judges.

Each step holds the race, so that two organisers take turns. What one has begun when it is killed is
cancelled by the next, and done again; results are kept.
"""

import json
import os
import secrets
import shutil
import site
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm.auto import tqdm

from dlojz import course, images, launch
from dlojz.course import presets
from dlojz.images import dataset
from dlojz.launch import State
from dlojz.machine import cpus, nvml
from dlojz.race import ranking, results
from dlojz.race.entries import RaceError, entries, open_race

BEGUN = "begun.json"  # the job of the organiser that holds the race
WEIGHTS = "checkpoint.pt"  # in a run's folder
LATE_S = 1.0  # after the budget, for the end of a run that saved in time
JUDGE_S = 600  # for a judgement
LOOK_S, TURN_S = 0.05, 1.0
OURS = (State.TIMEOUT, State.CANCELLED)  # how a run ends that was cut at its budget


def run(race, progress: bool = True) -> list[ranking.Standing]:
    """Run and judge the entries that wait, in rounds, and return the places of all.

    Each round is of the best so far and of the entries that came since. A call that was interrupted
    resumes where it stopped. Raises RaceError for what has to be mended first.
    """
    race = open_race(race)
    _check(race)
    bar = tqdm(unit="run", disable=not progress, desc=f"race {race.folder.name}")
    with bar:
        while _step(race, bar):
            pass
    return ranking.standings(race)


def _step(race, bar) -> bool:
    """Do the next step of a race; return whether there may be another one."""
    with results.turn(race) as free:
        if not free:
            bar.set_postfix_str("another organiser is at work")
        else:
            _cancel_what_was_left(race)
            rounds = results.read(race)
            one = rounds[-1] if rounds else None
            if one is None or one.done:
                return _begin(race, rounds)
            _check_round(race, one)
            bar.total, bar.n = len(one.entries) * len(one.seeds), len(one.runs)
            bar.refresh()
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
    if launch.launcher().name != "local":
        raise RaceError(
            "a race is run on one machine: in an allocation on a node, with DLOJZ_LAUNCHER=local"
        )
    held = dataset.about(race.data)
    if (held["classes"], held["seed"]) != (race.classes, race.seed):
        raise RaceError(
            f"{race.data} has {held['classes']} classes of seed {held['seed']}, and the race "
            f"{race.classes} of seed {race.seed}: put the race's images back"
        )
    if race.joules and not _joules():
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
    with suppress(nvml.NvmlError), nvml.session():
        if cards := [nvml.ask("DeviceGetName", handle) for handle in nvml.handles()]:
            return f"{socket.gethostname()}, {cards[0]}"
    return f"{socket.gethostname()}, {cpus.name()}"


def _begin(race, rounds) -> bool:
    """Begin a round of the best so far and of those that wait; return whether there are any."""
    there, damaged = entries(race)
    known = {entry.name: entry.sha256 for entry in there}
    places = {place.name: place.word for place in ranking.standings(race, known)}
    best = next((name for name, word in places.items() if word == ranking.BEST), "")
    new = [name for name in known if places[name] == ranking.WAITS]
    if not new:
        return False
    if best and best not in known:
        why = damaged.get(best, "its folder is gone")
        raise RaceError(f"{best}, the best so far, can't be run again: {why}")
    chosen = {name: known[name] for name in ([best] if best else []) + new}
    seeds = [secrets.randbelow(2**31) for _ in range(race.runs)]
    about = {"entries": chosen, "seeds": seeds, "rules": race.rules, "place": _place()}
    results.append(race, "round", len(rounds) + 1, **about, time=time.time())
    return True


# A run --------------------------------------------------------------------------------------------


def _run(race, one, name, seed):
    there, damaged = entries(race)
    entry = next((e for e in there if e.name == name), None)
    if entry is None or entry.sha256 != one.entries[name]:
        why = damaged.get(name, "its files have changed since the round began")
        results.append(race, "run", one.number, entry=name, seed=seed, why=why)
        return
    more = ["--data", race.data, "--seed", str(seed)]
    with _clean_home():
        job = _begin_job(race, [entry.trainer, *entry.flags, *more], f"race {name}", race.seconds)
        told = _watch(race, job)
    sources = {path: (job.directory / path).read_bytes() for path in entry.files}
    if sources != dict(entry.files):
        told["why"] = "its files changed while it was submitted"
    results.append(race, "run", one.number, entry=name, seed=seed, **told)
    _ended(race)


def _watch(race, job) -> dict:
    """Wait for a job, and end it at its budget; return what is recorded of the run."""
    idle_w, begin, used = None, {}, None
    if before := _joules():
        time.sleep(1)
        idle_w = min(now - before[card] for card, now in _joules().items())
    while not (state := job.state).final:
        begin = begin or (_joules() if state == State.RUNNING else {})
        used = _used(job, begin)
        if race.joules and used is not None and used >= race.joules:
            job.cancel("its joules are used up")
        time.sleep(LOOK_S)
    status = job.status
    cut = state in OURS
    seconds = status.get("ended", 0) - status.get("started", 0)
    told = {"why": _why(race, job, state, status), "seconds": round(seconds, 3), "cut": cut}
    told |= {"joules": _used(job, begin), "idle_w": idle_w, "run": str(job.directory)}
    if cut:
        told["seconds"] = min(told["seconds"], float(race.seconds))
    images, updates = _trained(job)
    return told | {"images": images, "updates": updates}


def _why(race, job, state, status) -> str:
    """Return why a run is out; "" if its weights can be judged."""
    if state not in (State.COMPLETED, *OURS):
        last = job.explain(1).splitlines()
        return f"{state}: {status.get('reason') or last[-1]}"[:500]
    weights = job.directory / WEIGHTS
    if not weights.exists():
        return "no weights: it saved none in its budget, so shorten it, or save at each epoch"
    if weights.stat().st_mtime > status["started"] + race.seconds + LATE_S:
        return "its weights were saved after the budget"
    return ""


def _trained(job) -> tuple[int, int]:
    """Return the images and updates in a run's log; 0 without a log."""
    from dlojz.runs import log

    with suppress(log.LogError):
        found = log.read(job)
        accumulate = found.start.get("arguments", {}).get("accumulate") or 1
        return sum(found.steps.images), len(found.steps) // accumulate
    return 0, 0


def _joules() -> dict[str, float]:
    """Return the energy counters of the GPUs, by their UUIDs; {} where none is measured."""
    found = {}
    with suppress(nvml.NvmlError), nvml.session():
        for card in presets.gpus():
            used = nvml.energy_j(nvml.ask("DeviceGetHandleByUUID", card))
            found |= {} if used is None else {card: used}
    return found


def _used(job, begin) -> float | None:
    """Return the joules that the job's devices have used since `begin`; None if not measured."""
    cards = job.status.get("devices") or []
    if not begin or any(card not in begin for card in cards):
        return None
    now = _joules()
    return round(sum(now[card] - begin[card] for card in cards), 1)


@contextmanager
def _clean_home() -> Iterator[None]:
    """Give jobs that are submitted meanwhile an empty home: no cache of compiled code, no state."""
    folder = tempfile.mkdtemp(prefix="dlojz-race-")
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    changed = dict.fromkeys(names, folder) | {"PYTHONUSERBASE": site.getuserbase()}
    kept = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


def _begin_job(race, words, name, seconds):
    """Submit a job, and note it, so that the next organiser can end it if this one is killed."""
    job = launch.submit(tuple(map(str, words)), name=name, time_max=_clock(seconds))
    course.write_atomically(race.folder / BEGUN, json.dumps({"job": str(job.directory)}))
    return job


def _clock(seconds):
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _ended(race):
    (race.folder / BEGUN).unlink(missing_ok=True)


def _cancel_what_was_left(race):
    """Cancel the job of an organiser that was killed: its result would lack the energy."""
    if left := course.read_table(race.folder / BEGUN).get("job"):
        job = launch.Job(Path(left))
        if job.directory.is_dir():
            job.cancel("its organiser was killed")
            with suppress(TimeoutError):
                job.wait(30)
        _ended(race)


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
    runs = [Path(one.runs[name, seed]["run"]) for seed in seeds]
    program = Path(__file__).with_name("judging.py")
    job = _begin_job(race, [program, "--images", folder, "--runs", *runs], f"judge {name}", JUDGE_S)
    state = job.wait()
    told = course.read_table(job.directory / "judged.json")
    if state != State.COMPLETED or not told:
        told = {"rows": [{"why": f"could not be judged: {job.explain(2)}"[:500]}] * len(runs)}
    idle = [run["idle_w"] for run in one.runs.values() if run.get("idle_w")]
    for seed, row in zip(seeds, told["rows"], strict=True):
        found = {"why": row["why"]}
        if not found["why"]:
            made, accuracy = one.runs[name, seed], row["right"] / row["of"]
            found["why"] = ranking.impossible(
                made, told["model"], accuracy, min(idle, default=None)
            )
            found |= {"accuracy": accuracy, "of": row["of"]}
            found["floor_s"] = ranking.floor_s(made, told["model"])
        results.append(race, "judged", one.number, entry=name, seed=seed, **found)
    _ended(race)
    for run in runs:  # megabytes each, and judged
        (run / WEIGHTS).unlink(missing_ok=True)
