"""The time and the launches of mixing a batch: image by image, by masks, compiled, and by v2.

Submitted by a notebook: submit("dlojz/chapters/n07_augmentation/experiments/mixing.py").

The batch is on the device, in uint8. The first three take the same draws, a share and a box for
each image, and must give the same images and targets; v2 draws once for the whole batch. All ways
take turns, so that a disturbance affects all. The draws are copied to the device in each way.
"""

import argparse
import statistics
from functools import partial

import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import v2
from tqdm import tqdm

from dlojz import course
from dlojz.chapters import session
from dlojz.training import flags, mixing
from dlojz.watch import profile, replay

CLASSES = 1000
HOW = ("mixup", "cutmix")
V2 = {"mixup": v2.MixUp, "cutmix": v2.CutMix}
ON_GPU = {"image_size": 224, "batches": [16, 32, 64, 128, 256]}
ON_CPU = {"image_size": 64, "batches": [16, 64]}
KERNELS = ("async_compile.cpp", "async_compile.triton(")  # the begin of each in Inductor's source


class Operations(TorchDispatchMode):
    """The called operations, and those of them that read a value, which a GPU's host waits for."""

    count = reads = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        self.reads += operation.__name__.startswith("_local_scalar_dense")
        return operation(*args, **(kwargs or {}))


def looped(images, labels, draws, how, classes):
    """Return the batch mixed image by image, as it is written first.

    The numbers of the draws are Python's, so on a GPU the host must wait for each of them.
    """
    mixed, (height, width) = images.clone(), images.shape[-2:]
    own = torch.nn.functional.one_hot(labels, classes).float()
    targets = own.clone()
    for i in range(len(images)):
        partner, share = draws.partner[i].item(), draws.share[i].item()
        if how == "mixup":
            mixed[i] = (share * images[i] + (1 - share) * images[partner]).round().to(torch.uint8)
        else:
            top, left, bottom, right = draws.box[i].tolist()
            rows = slice(max(0, top), min(height, bottom))
            columns = slice(max(0, left), min(width, right))
            mixed[i, :, rows, columns] = images[partner, :, rows, columns]
            inside = (rows.stop - rows.start) * (columns.stop - columns.start)
            share = 1 - inside / (height * width)
        targets[i] = share * own[i] + (1 - share) * own[partner]
    return mixed, targets


def ways(how):
    """Return the ways to mix a batch, by name: each takes images, labels and draws."""
    torch.compiler.reset()  # each is compiled alone, for one size
    by_masks = replay.imported(course.solution("07")).mixed
    compiled = torch.compile(by_masks, dynamic=False)
    of_v2 = V2[how](num_classes=CLASSES)
    return {
        "loop": partial(looped, how=how, classes=CLASSES),
        "masks": partial(by_masks, how=how, classes=CLASSES),
        "compiled": partial(compiled, how=how, classes=CLASSES),
        # v2.MixUp multiplies in place, which uint8 cannot hold.
        "v2": lambda images, labels, _: of_v2(images.float() if how == "mixup" else images, labels),
    }


def main():
    device = session.idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, positive = parser.add_argument, flags.at_least(1)
    add("--batches", type=flags.at_least(2), nargs="+", help="images in a batch")
    add("--image-size", type=positive, help="pixels")
    add("--rounds", type=positive, default=11, help="timings of each case")
    add("--times", type=positive, default=3, help="calls in a timing")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        cases = [(how, batch) for batch in args.batches for how in HOW]
        for how, batch in tqdm(cases, unit="case"):
            measure(run, how, batch, args, device)


def measure(run, how, batch, args, device):
    """Log the time, the launches and the shares of each way to mix a batch of this size."""
    size = args.image_size
    generator = torch.Generator().manual_seed(batch)
    images = torch.randint(256, (batch, 3, size, size), generator=generator).to(torch.uint8)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    drawn = mixing.draws_of(0, 0, 0, batch, size)
    images, labels = images.to(device), labels.to(device)
    calls = {
        name: lambda way=way: way(images, labels, drawn.to(device))
        for name, way in ways(how).items()
    }
    launches = {name: launched(call, name, device) for name, call in calls.items()}
    found = {name: call() for name, call in calls.items()}
    for name in ("loop", "compiled"):
        same(found[name], found["masks"], f"{how}, {name}")
    spent = session.in_turn(calls, device, args.rounds, args.times, warm_up=2)
    for name, ms in spent.items():
        run.measure(f"{how}, {name}", statistics.median(ms), "ms", x=batch, variant=name)
        shares = {round(share, 4) for share in found[name][1].amax(1).tolist()}
        about = {"how": how, "way": name, "images": batch, "ms": ms, "shares": len(shares)}
        run.case(f"{how}, {name}, {batch} images", **about, **launches[name])


def same(found, expected, where):
    """Raise AssertionError unless both ways give the same images and targets, but for rounding."""
    (images, targets), (other_images, other_targets) = found, expected
    away = (images.int() - other_images.int()).abs()
    assert away.max() <= 1, f"{where}: an image differs by {away.max()}"
    assert (away > 0).float().mean() < 0.01, f"{where}: {(away > 0).float().mean():.1%} differ"
    torch.testing.assert_close(targets, other_targets, rtol=0, atol=1e-5)


def launched(call, name, device) -> dict:
    """Return the launches of a call: a GPU's kernels and copies, or the operations of a processor.

    Of compiled code on a processor, its kernels.
    """
    sources = run_and_get_code(call)[1] if name == "compiled" else []
    with Operations() as operations:
        if name != "compiled":
            call()
    counted = operations.count or sum(source.count(k) for source in sources for k in KERNELS)
    if device.type == "cuda":
        call()
        counted = profile.counts(profile.profiled(call))["kernels"]
    return {"launches": counted, "reads": operations.reads}


if __name__ == "__main__":
    main()
