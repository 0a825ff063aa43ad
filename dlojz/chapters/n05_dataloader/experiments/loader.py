"""The images per second of a trainer's loader without training, by number of workers.

Submitted by a notebook:

    dlojz/chapters/n05_dataloader/experiments/loader.py
    --trainer dlojz/dlojz.py --workers 0 1 2 -- -b 32


The loader is made by the trainer's `build_loaders`, from the flags behind the `--`. Its batches are
read as fast as possible, and dropped. The clock starts when each worker has delivered two of them;
the time to the first batch is logged apart.
"""

import argparse
import importlib.util
import sys
import time
from itertools import islice

import torch

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.machine import meters
from dlojz.runs import source


def module(path):
    """Return the trainer in this file as a module. Refuse another program."""
    source.must_be_trainer(path)
    spec = importlib.util.spec_from_file_location("trainer", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def loader(trainer, flags, workers):
    """Return the trainer's loader of the training images, and the trainer's arguments."""
    sys.argv = ["dlojz.py", *flags, "--num-workers", str(workers)]
    args = trainer.parse_args()
    return trainer.build_loaders(args)[0], args


def images_per_s(batches, warmup, count):
    """Return the seconds to the first batch, and the images per second after `warmup` batches."""
    begin = time.perf_counter()
    first, images, number = None, 0, 0
    for number, (batch, _) in enumerate(islice(batches, warmup + count), 1):
        now = time.perf_counter()
        first = first or now - begin
        if number == warmup:
            start = now
        elif number > warmup:
            images += len(batch)
    if not images:
        raise SystemExit(f"an epoch has {number} batches, and {warmup} are to warm up: give more")
    return first, images / (now - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer", default="dlojz/dlojz.py", help="its loader is measured")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="worker counts")
    parser.add_argument("--batches", type=int, default=12, help="timed in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="flags of the trainer, after a --")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, device):
        trainer = module(args.trainer)
        for wanted in dict.fromkeys(min(w, idr_torch.cpus_per_task) for w in args.workers):
            batches, arguments = loader(trainer, args.flags, wanted)
            found, sensors = [], meters.Sensors(device)
            for epoch in range(args.rounds):
                batches.batch_sampler.set_epoch(epoch)
                count = max(args.batches, 4 * wanted)  # some from each worker
                found.append(images_per_s(batches, max(1, 2 * wanted), count))
            run.case(
                f"{wanted} workers",
                num_workers=batches.num_workers,
                batch_size=arguments.batch_size,
                first_batch_s=found[0][0],
                images_per_s=[speed for _, speed in found],
                **sensors.window(),  # with other programs' CPUs
            )
            del batches  # its workers end


if __name__ == "__main__":
    main()
