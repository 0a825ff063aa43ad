"""The errors of `dlojz estimate`: predicted, beside what GPUs have recorded.

    python tools/estimate.py reference/h100 reference/h200 --models resnet50 vit_2b

It takes each recorded run of these models on a GPU, with its trainer. Two kinds have a note, and no
bound. In float32, cuDNN's autotuner tries algorithms in the first steps whose workspaces take
gigabytes. And a compiler decides what to keep: the prediction is that of the same run without it.
Of all others the tool lists those beyond 5 % and 64 MB, or out of memory and predicted to fit. It
is one in float32 on an H100, for a workspace of cuDNN's of 0.6 GB, without the autotuner.

Of several GPUs it takes the one that needed most. With DDP it may exceed the prediction by all
gradients: as the second step begins there are new buckets, and the first ones if NCCL still holds
them. "Next time we execute ProcessGroupNCCL's methods on main thread, we clear" them:
https://github.com/pytorch/pytorch/pull/150079. One of two H200 had both, the other had not.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from record import variables

from dlojz.estimate import estimate
from dlojz.figures import plans
from dlojz.figures.report import bytes_text
from dlojz.runs import log
from dlojz.table import Table
from dlojz.training import imports

ROOT = Path(__file__).parent.parent
MODELS = ("resnet50", "resnet152", "vit_600m", "vit_2b", "vit_6b")
WITHIN, WITHIN_BYTES = 0.05, 64e6  # the larger counts
AUTOTUNED, COMPILED = "autotuned in float32", "compiled, predicted without"
NEW_BUCKETS = "with DDP's first buckets"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+", help="folders of recordings")
    parser.add_argument("--models", nargs="+", default=MODELS, help="(default: %(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    files = [file for folder in args.folder for file in recordings(folder, args.models)]
    if not files:
        where = ", ".join(map(str, args.folder))
        sys.exit(f"{where}: no run of {', '.join(args.models)} on a GPU; try reference/h200")
    rows = [compare(file) for file in files]
    print(errors(rows))
    bound = [row for row in rows if row["note"] in ("", NEW_BUCKETS)]
    far = [row["name"] for row in bound if not within(row)]
    print(f"{len(bound) - len(far)} of {len(bound)} as near as they must be; not: {far or 'none'}")


def recordings(folder: Path, names) -> Iterator[Path]:
    """Yield the logs of training runs of these models on a GPU."""
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*/events.jsonl")]):
        run = log.read(file)
        model = run.start.get("arguments", {}).get("model")
        training = "optimizer" in run.setup  # an experiment has none
        if model in names and training and "device_peak_bytes" in run.memory:
            yield file


def compare(file: Path) -> dict:
    """Return the predicted and the recorded peak of a run; recorded: None if out of memory."""
    ranks = log.read_ranks(file.parent if file.stem == "events" else file)
    run, plan = ranks[0], estimate.planned(ranks[0].start)
    command = run.start["command"]
    trainer = imports.trainer(ROOT / command.removeprefix(variables(command)).split()[0])
    found = plans.highest(estimate.result(trainer, plan))[1]
    peak, why, more = max(rank.memory["device_peak_bytes"] for rank in ranks), note(run, plan), 0
    lost = run.end.get("outcome") == "out_of_memory"
    several = plan.sharding == "ddp" and plan.gpus > 1
    if several and not lost and peak > found.bytes + WITHIN * peak:
        why, more = why or NEW_BUCKETS, found.parts["gradients"]
    return {
        "name": file.parent.name if file.stem == "events" else file.stem,
        "predicted": found.bytes + more,
        "recorded": None if lost else peak,
        "limit": run.memory["device_total_bytes"],
        "note": why,
    }


def note(run, plan) -> str:
    """Return the reason why the prediction of a run has no bound; "" if it has one."""
    if run.start["arguments"].get("compile", "off") != "off":
        return COMPILED
    tuned = run.probe.numerics.cudnn_benchmark and plan.precision in ("fp32", "tf32")
    return AUTOTUNED if tuned else ""


def within(row: dict) -> bool:
    """Return whether a prediction is within its bound."""
    if row["recorded"] is None:
        return row["predicted"] > row["limit"]
    error = abs(row["predicted"] - row["recorded"])
    return error <= max(WITHIN * row["recorded"], WITHIN_BYTES)


def errors(rows: Sequence[Mapping]) -> Table:
    """Return a table of predictions beside recorded runs.

    rows: name, predicted and recorded bytes, and a note, of each. A run that was out of memory has
        recorded=None, and as limit the bytes of its GPU.
    """
    found = [(row["name"], bytes_text(row["predicted"]), *_error(row), row["note"]) for row in rows]
    return Table(("run", "predicted", "recorded", "error", "", ""), found, "<>>>><")


def _error(row):
    """Return the recorded memory, and the error of its prediction in bytes and as a share."""
    if row["recorded"] is None:
        fits = "fits" if row["predicted"] <= row["limit"] else "does not fit"
        return "out of memory", f"of {bytes_text(row['limit'])}", fits
    error = row["predicted"] - row["recorded"]
    share = f"{100 * error / row['recorded']:+.2f} %"
    return bytes_text(row["recorded"]), f"{error / 1e6:+,.0f} MB", share


if __name__ == "__main__":
    main()
