"""The errors of `dlojz estimate`: predicted, beside what GPUs have recorded.

    python tools/estimate.py reference/h100 reference/h200 --models resnet50 resnet152

It takes each recorded run of these models that was not out of memory. In float32, cuDNN's autotuner
tries algorithms in the first steps whose workspaces take gigabytes: those runs have a note, and no
bound. All others are held by tests/test_estimate.py.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from dlojz.figures import memory as figures
from dlojz.training import estimate
from dlojz.training.worth import imported

MODELS = ("resnet50", "resnet152")
TRAINERS = ("solutions/dlojz_01_gpu.py", "solutions/dlojz_06_ddp.py")  # without and with precisions
WITHIN, WITHIN_BYTES = 0.05, 64e6  # whichever is more
AUTOTUNED = "autotuned in float32"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+", help="of recordings")
    parser.add_argument("--models", nargs="+", default=MODELS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    files = [file for folder in args.folder for file in recordings(folder, args.models)]
    rows = [compare(file) for file in files]
    print(figures.errors(rows))
    bound = [row for row in rows if not row["note"]]
    far = [row["name"] for row in bound if not within(row)]
    print(f"{len(bound) - len(far)} of {len(bound)} within 5 % or 64 MB; not: {far or 'none'}")


def recordings(folder: Path, names) -> Iterator[Path]:
    """Yield the logs of training runs of these models on a GPU, which ended well."""
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*/events.jsonl")]):
        start, memory, *_ = read(file)
        model = start.get("arguments", {}).get("model")
        total = memory.get("device_total_bytes", 0)
        if model in names and 0 < memory.get("device_peak_bytes", 0) < 0.95 * total:
            yield file


def read(file: Path) -> tuple[dict, dict, dict]:
    """Return the events "start", "memory" and the probe's evidence of a log, {} if it has none."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    first = {event.get("event"): event for event in reversed(events)}
    probe = next((event for event in events if event.get("when") == "probe"), {})
    return first.get("start", {}), first.get("memory", {}), probe


def compare(file: Path) -> dict:
    """Return the recorded and the predicted peak of a run."""
    start, memory, probe = read(file)
    run = start["arguments"]
    precision, channels_last = run.get("precision"), run.get("channels_last")
    flags = () if channels_last else ("--no-channels-last",)
    plan = estimate.Plan(
        model=run["model"],
        gpus=start["size"],
        sharding="ddp",
        batch=run["batch_size"],
        image_size=run["image_size"],
        checkpointing="off",
        precision=precision or "fp32",
        flags=flags if precision else (),
    )
    trainer = imported(Path(__file__).parent.parent / TRAINERS[bool(precision)])
    tuned = probe.get("numerics", {}).get("cudnn_benchmark") and plan.precision in ("fp32", "tf32")
    found = estimate.result(trainer, plan)
    return {
        "name": file.parent.name if file.stem == "events" else file.stem,
        "predicted": figures.highest(found)[1].bytes,
        "recorded": memory["device_peak_bytes"],
        "note": AUTOTUNED if tuned else "",
    }


def within(row: dict) -> bool:
    """Return whether a prediction is as near as it must be."""
    error = abs(row["predicted"] - row["recorded"])
    return error <= max(WITHIN * row["recorded"], WITHIN_BYTES)


if __name__ == "__main__":
    main()
