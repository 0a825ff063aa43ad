"""The predictions of `dlojz estimate` for recorded runs, and the operations of an image in each.

Submitted by a notebook: submit("dlojz/chapters/n11_fsdp/experiments/predicted.py").

No GPU is needed: the steps of the recorded trainer run on tensors without memory, for a compiled
run without compiling.
"""

import argparse
import time
import warnings

import torch

from dlojz import course, runs
from dlojz.chapters import session
from dlojz.chapters.n11_fsdp import operations
from dlojz.estimate import estimate
from dlojz.runs import log
from dlojz.training import imports


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recordings", default="h200/11-vit_*", help="(default: %(default)s)")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        warnings.filterwarnings("ignore")  # DDP's on tensors without values
        for path in runs.recordings(args.recordings):
            begin, start = time.perf_counter(), log.read(path).start
            trainer = imports.trainer(course.course_root() / start["command"].split()[0])
            plan = estimate.planned(start)
            found = estimate.result(trainer, plan)
            found["operations"] = operations.of_an_image(trainer, plan)
            seconds = round(time.perf_counter() - begin, 2)
            run.case(f"{path.parent.name}/{path.stem}", **found, seconds=seconds)
            most = max(sum(parts.values()) for parts in found["peaks"].values())
            run.measure(path.stem, most, "bytes on each GPU")


if __name__ == "__main__":
    main()
