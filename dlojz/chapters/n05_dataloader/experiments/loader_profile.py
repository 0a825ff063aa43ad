"""A profile of a loader: by cProfile from inside, by py-spy from outside.

Submitted by a notebook: submit("dlojz/chapters/n05_dataloader/experiments/loader_profile.py").

cProfile sees one process, so its loader has no workers, and prepares the images itself. py-spy
sees all processes, so a second loader has workers. Both load the trainer's images.
"""

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
from torchvision import transforms

from dlojz.chapters import session
from dlojz.chapters.n05_dataloader import spy
from dlojz.training import data

BATCH = 32
KEPT = 200  # functions: the others take almost no time
WORKER = "_worker_loop"  # torch's main function of a worker


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = os.environ.get("DLOJZ_DATA") or "data"
    parser.add_argument("--data", default=folder, help="a folder of images, as the trainer's")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--batches", type=int, default=12, help=f"batches of {BATCH} images")
    parser.add_argument("--num-workers", type=int, default=2, help="workers that py-spy watches")
    parser.add_argument("--watched", action="store_true", help="only load: py-spy watches")
    args = parser.parse_args()
    torch.set_num_threads(1)  # like a worker
    if args.watched:
        load(build_loader(args, args.num_workers), args.batches)
        return
    with session.begin(args, torch.device("cpu")) as (run, _):
        run.case("cProfile", **inside(args))
        run.case("py-spy", **outside(run.folder / "stacks.txt"))


def build_loader(args, num_workers):
    """Return a loader of the trainer's batches."""
    crop = [transforms.RandomResizedCrop(args.image_size), transforms.RandomHorizontalFlip()]
    to_tensor = [transforms.ToTensor(), transforms.Normalize(data.MEAN, data.STD)]
    transform = transforms.Compose(crop + to_tensor)
    images = data.Images(args.data, "train", seed=0, transform=transform)
    sampler = torch.utils.data.DistributedSampler(images, num_replicas=1, rank=0)
    batches = data.Batches(sampler, min(BATCH, len(images)), drop_last=True)
    return torch.utils.data.DataLoader(
        images, batch_sampler=batches, collate_fn=images.collate, num_workers=num_workers
    )


def load(loader, batches):
    """Load this many batches, and drop them."""
    for _ in islice(loader, batches):
        pass


def inside(args):
    """Return cProfile's rows: each function's name, calls and own seconds, the longest first."""
    loader, profile = build_loader(args, 0), cProfile.Profile()
    batches = min(args.batches, len(loader))
    profile.runcall(load, loader, batches)
    stats = pstats.Stats(profile)
    rows = [
        [function if file == "~" else f"{Path(file).name}: {function}", calls, own_s]
        for (file, _, function), (_, calls, own_s, _, _) in stats.stats.items()
    ]
    rows.sort(key=lambda row: -row[-1])
    images = batches * loader.batch_sampler.batch_size
    return {"images": images, "seconds": stats.total_tt, "functions": rows[:KEPT]}


def outside(output):
    """Return the workers' stacks by py-spy, or the reason why there are none."""
    if (program := spy.program()) is None:
        return {"trouble": spy.missing()}
    watched = [sys.executable, *sys.argv, "--watched"]
    command = spy.command(program, output, watched)
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    seen = spy.innermost(output.read_text("utf-8"), WORKER) if output.exists() else []
    output.unlink(missing_ok=True)  # megabytes
    return {"seen": seen} if seen else {"trouble": spy.trouble(done.stderr)}


if __name__ == "__main__":
    main()
