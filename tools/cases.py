"""Record traces of planted faults under numbers: `python tools/cases.py reference/h200 --gpus 1`.

Each fault is planted at two strengths. Of the two recordings, drawn at random, one is called
04-trace-open-NN and the other 04-trace-sealed-NN. Only two files beside them name the faults,
04-trace-open.toml and 04-trace-sealed.toml: neither the output nor the logs do. The rules of
`dlojz.traces.suspects` are written with the open half only. Then

    python tools/confusion.py --only sealed

reads the other half for the first time. Recordings with two processes: --gpus 2, in a second call.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import record
import recordings
from tqdm import tqdm

from dlojz import course
from dlojz.chapters.n04_profiler.planted import UNSEEN
from dlojz.launch import Request, series
from dlojz.runs import log, stats

HALVES = ("open", "sealed")
# Sizes for which the host is a little faster than an H200, so that a delay of the host costs time.
SIZES = {
    "vit": "--model vit_b_16 -b 48 --precision bf16 --image-size 224",
    "swin": "--model swin_t -b 64 --precision bf16 --image-size 224",
    "convnext": "--model convnext_tiny -b 64 --precision bf16 --image-size 224",
    "efficientnet": "--model efficientnet_v2_s -b 96 --precision fp16 --image-size 192",
    "regnet": "--model regnet_y_1_6gf -b 128 --precision bf16 --image-size 192",
    "mobilenet": "--model mobilenet_v3_large -b 128 --precision fp16 --image-size 192",
    "resnet": "--model resnet50 -b 96 --precision tf32 --image-size 192",
}
# Each is recorded weak and strong, with these models. "functions": Python's are recorded, too.
ONE_GPU = (
    ("item", "vit", "functions"),
    ("item", "mobilenet", ""),
    ("unpinned", "swin", ""),
    ("one-worker", "convnext", ""),
    ("small-batch", "vit", ""),
    ("small-batch", "convnext", ""),
    ("nchw", "regnet", ""),
    ("print", "efficientnet", "functions"),
    ("print", "vit", ""),
    ("garbage", "convnext", "functions"),
    ("garbage", "resnet", ""),
    ("sleep", "swin", ""),
    ("python", "vit", "functions"),
    ("synchronize", "resnet", ""),
    ("ask", "convnext", ""),
    ("empty-cache", "regnet", ""),
    ("pin", "resnet", ""),
)
TWO_GPUS = (("straggler", "vit", ""), ("straggler", "regnet", ""), ("item", "swin", ""))


def cases(gpus: int) -> list[list[dict]]:
    """Return pairs of cases, one fault weak and strong, and each model once without a fault."""
    table = ONE_GPU if gpus == 1 else TWO_GPUS
    pairs = [
        [{"fault": fault, "model": model, "strength": how, "functions": bool(functions)}
         for how in ("weak", "strong")]
        for fault, model, functions in table
    ]  # fmt: skip
    used = sorted({(p[0]["model"], p[0]["functions"]) for p in pairs})
    healthy = [
        {"fault": "none", "model": model, "strength": "strong", "functions": functions}
        for model, functions in used
    ]
    return [*pairs, *([case] for case in healthy)]


def draw(pairs, gpus: int, rng) -> dict[str, dict]:
    """Return the cases by their numbered names; a random one of each pair is sealed."""
    halves = {half: [] for half in HALVES}
    for pair in pairs:
        for half, case in zip(rng.sample(HALVES, 2), pair, strict=False):
            halves[half].append(case)
    named = {}
    for half, drawn in halves.items():
        rng.shuffle(drawn)
        first = 1 if gpus == 1 else 51
        several = "" if gpus == 1 else f"-x{gpus}"
        for number, case in enumerate(drawn, first):
            named[f"04-trace-{half}-{number:02d}{several}"] = case
    return named


def command(case: dict) -> str:
    """Return the command of a case."""
    stack = " --stack" if case["functions"] else ""
    return (
        f"{recordings.at('faults.py')} {SIZES[case['model']]} --steps 1 --timed 6 "
        f"--fault {case['fault']} --strength {case['strength']}{stack}"
    )


def labelled(named: dict[str, dict], steps_ms: dict[str, float]) -> dict[str, dict]:
    """Return the cases with their slow-down against the same training without a fault."""
    healthy = {
        (c["model"], c["functions"]): steps_ms[name]
        for name, c in named.items()
        if c["fault"] == "none" and name in steps_ms
    }
    found = {}
    for name, case in named.items():
        usual = healthy.get((case["model"], case["functions"]))
        if name in steps_ms and usual:
            # A small batch is a smaller step; its fault is the device's low utilization.
            slower = steps_ms[name] / usual if case["fault"] != "small-batch" else UNSEEN
            found[name] = case | {"slower": round(slower, 3)}
    return found


def toml(labels: dict[str, dict]) -> str:
    """Return the labels as a file that `dlojz.chapters.n04_profiler.planted` reads."""
    tables = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in case.items())])
        for name, case in sorted(labels.items())
    ]
    return "\n\n".join(tables) + "\n"


def keep(name: str, run: Path, folder: Path) -> float:
    """Copy a run's traces and its log, without its command; return the ms of its step."""
    measured = [m.value for m in log.read(run).measures if m.what == "step"]
    record.keep(name, run, folder, "tools/cases.py")
    for file in (folder / name).glob("events*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        told = [e | ({"arguments": {}} if e["event"] == "start" else {}) for e in lines]
        text = "".join(json.dumps(e) + "\n" for e in told if e["event"] != "measure")
        course.write_atomically(file, text)
    return measured[0]


def last_line(file: Path) -> str:
    """Return the last line of a file, or the reason why there is none."""
    lines = file.read_text().split("\n") if file.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="such as reference/h200")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="processes of a run")
    parser.add_argument(
        "--minutes", type=float, default=9, help="minutes after which no new case begins"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    named = draw(cases(args.gpus), args.gpus, random.SystemRandom())
    # First those without a fault, with which all others are compared.
    order = sorted(named, key=lambda name: (named[name]["fault"] != "none", name.split("-")[3]))
    entries = []
    for name in order:
        trainer, *flags = command(named[name]).split()
        entries.append(series.Entry(name, course.course_root() / trainer, flags))
    limit = int(60 * args.minutes)
    job = series.submit(entries, Request(name="cases", time_max_s=limit, n_gpu=args.gpus))
    steps_ms, failed = {}, 0
    try:
        for name, run in tqdm(series.as_they_end(job), total=len(entries), unit="run"):
            if stats.summary(run).state == "COMPLETED":
                steps_ms[name] = keep(name, run, args.folder)
            else:
                failed += 1
                print(f"{name} failed: {last_line(run / 'stderr.txt')}", file=sys.stderr)
    except RuntimeError as error:
        print(f"the time is over: {error}", file=sys.stderr)
    labels = labelled(named, steps_ms)
    for half in HALVES:
        mine = {name: case for name, case in labels.items() if f"-{half}-" in name}
        file = args.folder / f"04-trace-{half}.toml"
        before = file.read_text() + "\n" if file.exists() else ""
        course.write_atomically(file, before + toml(mine))
        print(f"{len(mine)} recordings are {half}; their faults are in {file}")
    print(f"{failed} failed, {len(named) - len(steps_ms) - failed} were left out")


if __name__ == "__main__":
    main()
