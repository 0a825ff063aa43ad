"""The cost of augmenting an image on one core, as a PIL image and as a tensor of uint8.

Submitted by a notebook: submit("dlojz/chapters/n07_augmentation/experiments/costs.py").

Each augmentation is timed twice: alone, on images of the training's size, and at the end of the
whole road from a JPEG file's bytes to a tensor, with decoding and crop. A third road decodes and
crops tensors, and makes PIL images of the crops only to augment them. All run in one thread, and
are timed in seconds of processor time, so that other users of the machine disturb them less. All
take turns, and draw the same random numbers in each round.
"""

import argparse
import io
import time
from itertools import product

import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from tqdm import tqdm

from dlojz.chapters import session
from dlojz.training import flags

OF, BOTH = ("PIL", "tensor"), "tensor, augmented as PIL"


def decoded(jpeg, kind):
    """Return the image of a JPEG file, as a PIL image or as uint8 [3, height, width]."""
    if kind == "PIL":
        return Image.open(io.BytesIO(jpeg)).convert("RGB")
    return decode_jpeg(torch.frombuffer(jpeg, dtype=torch.uint8), mode=ImageReadMode.RGB)


def augmentations(size):
    """Return the augmentations by name. The first does nothing; each takes images of any size."""
    return {
        "nothing": torch.nn.Identity(),
        "flip": v2.RandomHorizontalFlip(),
        "RandomResizedCrop": v2.RandomResizedCrop(size, antialias=True),
        "RandAugment(2, 9)": v2.RandAugment(2, 9),
        "TrivialAugmentWide": v2.TrivialAugmentWide(),
        "AugMix": v2.AugMix(),
    }


def roads(size, kind):
    """Return the ways from a file's bytes to a tensor of this size, by their augmentation.

    Without a random crop it is the middle of the image, as in validation. The last three come after
    a random crop and a flip, as in ImageNet's recipes.
    """
    middle = v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])
    named = augmentations(size)
    nothing, flip, crop = list(named.values())[:3]
    end = nothing if kind == "tensor" else v2.PILToTensor()
    as_pil = [v2.ToPILImage()] if kind == BOTH else []
    steps = {"nothing": [middle], "flip": [middle, flip], "RandomResizedCrop": [crop, flip]}
    added = {name: [crop, flip, *as_pil, named[name]] for name in list(named)[3:]}
    steps = added if kind == BOTH else steps | added

    def road(transforms):
        whole = v2.Compose([*transforms, end])
        return lambda jpeg: whole(decoded(jpeg, kind))

    return {name: road(transforms) for name, transforms in steps.items()}


def cases(jpegs, size, kind):
    """Return the timed calls for this size and kind, with their inputs, by (measured, name)."""
    found = {("road", name): (road, jpegs) for name, road in roads(size, kind).items()}
    if kind == BOTH:
        return found
    small = [v2.functional.resize(decoded(j, kind), [size, size], antialias=True) for j in jpegs]
    alone = {("alone", n): (call, small) for n, call in augmentations(size).items()}
    alone["decoded", "decoded only"] = (lambda jpeg: decoded(jpeg, kind)), jpegs
    return alone | found


def seconds(calls, rounds, clock=time.process_time):
    """Return the seconds of one image in each call by round, after a warm-up round.

    calls: by any key, (call, its inputs).
    """
    found = {key: [] for key in calls}
    for turn in tqdm(range(rounds + 1), unit="round"):
        for key, (call, inputs) in calls.items():
            torch.manual_seed(turn)  # the same draws for PIL images and tensors
            begin = clock()
            for image in inputs:
                call(image)
            found[key].append((clock() - begin) / len(inputs))
    return {key: spent[1:] for key, spent in found.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    session.add_images(parser, 64)
    positive = flags.at_least(1)
    parser.add_argument("--sizes", type=positive, nargs="+", default=[64, 224], help="pixels")
    parser.add_argument("--rounds", type=flags.at_least(2), default=6, help="timings of each case")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        torch.set_num_threads(1)
        jpegs = [bytearray(file.read_bytes()) for file in session.jpegs(args)]
        calls = {
            (size, kind, *key): case
            for size, kind in product(args.sizes, (*OF, BOTH))
            for key, case in cases(jpegs, size, kind).items()
        }
        for (size, kind, measured, name), spent in seconds(calls, args.rounds).items():
            about = {"size": size, "kind": kind, "measured": measured, "way": name}
            run.case(f"{measured}, {name}, {kind}, {size} px", **about, seconds=spent)


if __name__ == "__main__":
    main()
