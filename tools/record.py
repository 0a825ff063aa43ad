"""Make the recorded runs of `reference/` again: `python tools/record.py 01 reference/h100`.

    python tools/record.py 09 reference/h200 --only resnet152 b0064 --minutes 9

Runs a step's solution over models and batch sizes on this machine, as one job, and copies each log,
without the machine's name. Existing recordings are kept: to make one again, remove it first. A run
out of memory is a result and is kept. The recording of a name with -x4, a run of four processes, is
a folder with their logs. One with -trace- is a folder, too: the log and the profiler's trace.
"""

import argparse
import gzip
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

from recordings import RECORDINGS
from tqdm import tqdm

from dlojz import course
from dlojz.course import presets
from dlojz.figures import report
from dlojz.launch import Request, series
from dlojz.runs import stats
from dlojz.traces import trace

ARROWS = ("ac2g", "fwdbwd")  # drawn from a call to its kernel, from forward to backward
TOLD = ("correlation", "device", "stream")  # the fields of an event to keep
IDLE_CALLS = re.compile(  # calls of CUDA that neither launch nor wait, many for each kernel
    "^cuda(PeekAtLastError|GetErrorString|GetLastError|FuncGetAttributes|FuncSetAttribute"
    "|DeviceGetAttribute|StreamIsCapturing|OccupancyMaxActive.*)$"
)
MOST_S = 4 * 3600


def processes(name: str) -> int:
    """Return the number of processes of a recording, by its name."""
    found = re.search(r"-x(\d+)", name)
    return int(found[1]) if found else 1


def variables(command: str) -> str:
    """Return the variables at the begin of a command, as in a shell: "A=1 B=2 "."""
    return re.match(r"(\w+=\S* )*", command)[0]


def place(folder: Path, name: str) -> Path:
    """Return the path of a recording: a file, or a folder for several processes or a trace."""
    whole = processes(name) > 1 or "-trace-" in name
    return folder / (name if whole else f"{name}.jsonl")


def anonymous(log_text: str, command: str) -> str:
    """Return a log without the host's name and paths, with the command that makes it again."""
    lines = []
    for line in log_text.splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            event["hostname"] = "recorded"
            event["command"] = command
        if "folder" in event:  # of the measured storage
            event["folder"] = "recorded"
        lines.append(json.dumps(event))
    return "\n".join(lines) + "\n"


def anonymous_trace(packed: bytes) -> bytes:
    """Return a trace without its machine's paths and the events that `traces.trace` ignores."""
    text = gzip.decompress(packed).decode()
    text = text.replace(f"{course.course_root()}/", "")
    whole = json.loads(re.sub(r'[^"]*/(site|dist)-packages/', "", text))
    read = [event for event in whole["traceEvents"] if _is_read(event)]
    origin = min((event["ts"] for event in read if "ts" in event), default=0)
    whole["traceEvents"] = [_slim(event, origin) for event in read]
    return gzip.compress(json.dumps(whole, separators=(",", ":")).encode(), mtime=0)


def _is_read(event):
    """Return whether an event is needed: not Perfetto's arrows, nor functions inside torch."""
    kind, name = event.get("cat"), event["name"]
    own = kind != "python_function" or name == trace.GARBAGE or trace.tells(name)
    return kind not in ARROWS and own and not IDLE_CALLS.match(name)


def _slim(event, origin):
    """Return an event with the needed fields; times from 0, in hundredths of a microsecond."""
    if event.get("ph") != "X":  # names of processes and threads
        return {key: value for key, value in event.items() if key != "ts"}
    event = event | {"args": {k: v for k, v in event.get("args", {}).items() if k in TOLD}}
    times = {"ts": round(event["ts"] - origin, 2), "dur": round(event["dur"], 2)}
    return event | times if "ts" in event else event


def keep(recording: str, run: Path, folder: Path, command: str):
    """Copy the logs of a complete run."""
    target = place(folder, recording)
    if target.suffix == ".jsonl":
        text = anonymous((run / "events.jsonl").read_text(), command)
        course.write_atomically(target, text)
        return
    fresh = folder / f".{recording}"
    fresh.mkdir(exist_ok=True)
    for file in run.glob("events*.jsonl"):
        (fresh / file.name).write_text(anonymous(file.read_text(), command))
    for file in run.glob("trace*.json.gz"):
        (fresh / file.name).write_bytes(anonymous_trace(file.read_bytes()))
    fresh.rename(target)


def record(
    wanted: dict[str, str], folder: Path, name: str, n_gpu: int, most_s: float = MOST_S
) -> list[str]:
    """Run the commands as one job, and keep each log as soon as it is complete.

    most_s: the job's time limit. Return the failed ones; a failure does not stop the others.
    """
    with tempfile.TemporaryDirectory(prefix="dlojz-") as caches:
        entries = [_entry(recording, wanted[recording], caches) for recording in wanted]
        job = series.submit(entries, Request(name=name, time_max_s=math.ceil(most_s), n_gpu=n_gpu))
        failed = []
        for recording, run in tqdm(series.as_they_end(job), total=len(entries), unit="run"):
            state = stats.summary(run).state
            if state not in ("COMPLETED", "OUT_OF_MEMORY"):
                print(f"{recording}: {state}\n{(run / 'stderr.txt').read_text()[-2000:]}")
                failed.append(recording)
                continue
            keep(recording, run, folder, wanted[recording])
    return failed


def _entry(recording, command, caches):
    """Return a run with an empty cache of its own, because cached code would have no price.

    Runs repeated for their speed share one.
    """
    trainer, *flags = shlex.split(command.removeprefix(variables(command)))
    code = re.sub(r"(-compiled-.*)-\d$", r"\1", recording)
    own = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{code}"}
    return series.Entry(recording, course.course_root() / trainer, flags, environment=own)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=sorted(RECORDINGS))
    parser.add_argument("folder", type=Path, help="such as reference/h100; files there are kept")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of recordings' names")
    parser.add_argument("--minutes", type=float, default=MOST_S / 60, help="stop in time")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = {n: c for n, c in RECORDINGS[args.step].items() if any(part in n for part in args.only)}
    wanted = defaultdict(dict)  # by a job's processes, and variables that torch reads once
    for name, command in plan.items():
        if not place(args.folder, name).exists():
            wanted[processes(name), variables(command)][name] = command
    have, failed = len(presets.gpus()) or len(os.sched_getaffinity(0)), []
    for (n_gpu, given), commands in wanted.items():
        if n_gpu > have:
            what = f"this machine has {have}, not {n_gpu} GPUs or cores"
            print(f"left out: {', '.join(commands)}: {what}")
            continue
        if (left := end - time.monotonic()) < 1:
            sys.exit("the time is over: call again to go on")
        try:
            own = dict(word.split("=", 1) for word in given.split())
            with mock.patch.dict(os.environ, own):
                failed += record(commands, args.folder, f"record-{args.step}", n_gpu, left)
        except RuntimeError as error:
            sys.exit(f"{error}\nWhat is complete was kept: call again to go on")
    made = [place(args.folder, name) for name in plan]
    print(report.compare_runs([path for path in made if path.exists()]))
    if failed:
        sys.exit(f"not recorded: {', '.join(failed)}")


if __name__ == "__main__":
    main()
