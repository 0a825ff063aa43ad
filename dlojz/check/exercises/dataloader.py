"""05_dataloader: files become tensors of uint8, and the device does the rest."""

from dlojz.check.exercises import MECHANISM, SAME, Exercise, Finding, Hint, Runs
from dlojz.check.exercises.common import DOCS, hints, like, no_brake

VISION = "https://docs.pytorch.org/vision/stable/"
NEAR = 0.03  # of the file: as far apart as two ways of resizing put an edge
DETAIL = 0.04  # between a decoder and another, a hundredth of it was seen
PIXELS = 0.02  # of a standard deviation; between two decoders a hundredth of it was seen
KEPT_OBJECTS, KEPT_BYTES = 8, 2_000_000  # 16 images kept are an object each, or 9 MB

OWN_HINTS = {
    "files": Hint(
        "This run was given no files: there is nothing to load.",
        "Submit it with `--data data`, or the folder of your images.",
        DOCS + "data.html",
    ),
    "set": Hint(
        "The images do not come from the files of the folder, one for each index.",
        "`data.open_set(args, ...)` in `build_loaders`; what is yours are `decode` and the "
        "transforms.",
        VISION + "generated/torchvision.datasets.ImageFolder.html",
    ),
    "cached": Hint(
        "A file was changed, and your images still show the old one. Who reads it only once "
        "measures the memory of this machine: a whole ImageNet does not fit there.",
        "`decode` reads and decodes the file in each call: no `cache`, no dictionary of images.",
        DOCS + "data.html",
    ),
    "leak": Hint(
        "Something of each image is kept for ever. The memory of each worker grows until the "
        "system ends one of them.",
        "No list and no dictionary outside of `decode` that grows from call to call.",
        DOCS + "data.html#multi-process-data-loading",
    ),
    "dropped": Hint(
        "An epoch of yours has not as many images as the solution's: some are never shown, or "
        "twice.",
        "The last, smaller batch belongs to the epoch, unless `--drop-last` is asked for.",
        DOCS + "data.html#torch.utils.data.DataLoader",
    ),
    "order": Hint(
        "The images come in another order than the solution's.",
        "`DistributedSampler` shuffles, by the seed and the epoch: leave it as it was.",
        DOCS + "data.html#torch.utils.data.distributed.DistributedSampler",
    ),
    "labels": Hint(
        "The labels are not those of the images.",
        "A label is the number of the file's folder, in order of the names; leave it alone.",
        VISION + "generated/torchvision.datasets.ImageFolder.html",
    ),
    "decode": Hint(
        "PIL still decodes the files, and each later step copies.",
        '`torchvision.io.decode_image(path, mode="RGB")`.',
        VISION + "generated/torchvision.io.decode_image.html",
    ),
    "half": Hint(
        "`decode` gives a tensor now, and the transforms still expect an image of PIL, or floats.",
        "`transforms = torchvision.transforms.v2`, and `to_tensor = []`.",
        VISION + "transforms.html#v2-api-reference-recommended",
    ),
    "grey": Hint(
        "Some files of ImageNet are grey. Yours become images of one channel, which fit into no "
        "batch.",
        '`torchvision.io.decode_image(path, mode="RGB")`.',
        VISION + "generated/torchvision.io.decode_image.html",
    ),
    "smaller": Hint(
        "The images are not as large as `--image-size` says. Smaller ones are another training.",
        "`RandomResizedCrop(args.image_size)`.",
        VISION + "generated/torchvision.transforms.v2.RandomResizedCrop.html",
    ),
    "uint8": Hint(
        "The workers make floats: four times the bytes for the way to the device, and arithmetic "
        "that the device does in no time.",
        "No `ToTensor`, `ToDtype` or `Normalize`: `to_tensor = []`. `forward` normalizes uint8.",
        VISION + "transforms.html#v2-api-reference-recommended",
    ),
    "same-crop": Hint(
        "Each image is cut in the same way: what should be random is drawn from the same seed each "
        "time.",
        "No `torch.manual_seed` in `decode` or in a transform: the data set sets the seed of each "
        "image.",
        DOCS + "notes/randomness.html#dataloader",
    ),
    "augmentation": Hint(
        "The images are not cut and flipped as the solution's are. Without augmentation a step is "
        "faster, and the model learns less.",
        "In `train`: `RandomResizedCrop(args.image_size)`, and `RandomHorizontalFlip()`, with "
        "their defaults.",
        VISION + "transforms.html",
    ),
    "detail": Hint(
        "The images show more or less detail than the solution's: they were made smaller on the "
        "way, or resized without a filter.",
        "Decode the whole file, cut, resize once; `RandomResizedCrop` with its `antialias=True`.",
        VISION + "generated/torchvision.transforms.v2.RandomResizedCrop.html",
    ),
    "normalize": Hint(
        "What enters the model is not normalized as the solution's images are.",
        "`data.normalize(images)` in `forward` takes uint8 from 0 to 255; floats pass it as they "
        "are.",
        VISION + "generated/torchvision.transforms.v2.Normalize.html",
    ),
    "middle": Hint(
        "The images of the validation are not those of the solution: nothing is random there.",
        "In `val`: `Resize` and `CenterCrop`, as they were.",
        VISION + "transforms.html",
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """What the data set makes of a file of ours, beside what the solution's makes of it."""
    mine, reference = runs.mine, runs.reference
    if not reference.samples:
        text = str(runs.arguments["data"])
        return [Finding(MECHANISM, "images", False, text, "files", "files")]
    looks = (
        (SAME, "images in an epoch", _epoch, "dropped"),
        (SAME, "label of a file", lambda r: r.samples.label, "labels"),
        (MECHANISM, "data set", lambda r: r.samples.set, "set"),
        (MECHANISM, "files that PIL opens", lambda r: r.samples.pil, "decode"),
        (MECHANISM, "shape of an image", lambda r: r.samples.shape, "smaller"),
        (MECHANISM, "type of an image", lambda r: r.samples.dtype, "uint8"),
        (MECHANISM, "channels of a grey file", lambda r: r.samples.grey, "grey"),
    )
    found = [like(part, what, mine, reference, get, hint) for part, what, get, hint in looks]
    if mine.samples.boxes:
        found += _cuts(mine.samples, reference.samples)
    found += [_entered(mine, reference, mode) for mode in ("train", "val")]
    return [*found, *no_brake(mine, reference)]


def _epoch(run):
    return f"{run.setup.get('train_images')} in {run.setup.get('steps_per_epoch')} batches"


def _cuts(mine, reference):
    """What was cut, what is left of the detail, and whether each image is made anew."""
    cuts, expected = (len(_different(seen.boxes)) for seen in (mine, reference))
    away = max(map(_away, mine.boxes, reference.boxes))
    detail = mine.detail / reference.detail - 1
    count = len(mine.boxes)
    kept = f"{mine.kept_objects} objects, {mine.kept_bytes / 1e6:.1f} MB"
    leaks = mine.kept_objects > KEPT_OBJECTS or mine.kept_bytes > KEPT_BYTES
    which = f"{cuts} different, up to {away:.1%} of the file away from the solution's"
    return [
        Finding(
            *(SAME, f"cuts of {count} images", cuts == expected and away <= NEAR, which),
            *(
                f"{expected} different, at most {NEAR:.0%} away",
                _why(mine.boxes, reference.boxes),
            ),
        ),
        Finding(
            *(SAME, "detail of an image", abs(detail) <= DETAIL, f"{1 + detail:.0%}"),
            *(f"that of the solution's, within {DETAIL:.0%}", "detail"),
        ),
        Finding(
            *(MECHANISM, "a changed file shows", mine.fresh == reference.fresh),
            *(f"in {mine.fresh} images", f"in {reference.fresh}", "cached"),
        ),
        Finding(
            *(MECHANISM, f"kept of {count // 2} images", not leaks, kept),
            *(f"at most {KEPT_OBJECTS} objects, {KEPT_BYTES / 1e6:.1f} MB", "leak"),
        ),
    ]


def _why(boxes, expected):
    """The hint for cuts that are not the solution's."""
    if len(_different(boxes)) == 1:
        left, right, top, bottom = boxes[0]
        middle = left < right and max(abs(left + right - 1), abs(top + bottom - 1)) < NEAR
        return "augmentation" if middle else "same-crop"
    alike = [abs(_area(b) - _area(e)) < NEAR for b, e in zip(boxes, expected, strict=True)]
    # Most as large as the solution's, and elsewhere: cut from a file that had been resized before.
    return "detail" if sum(alike) > 0.75 * len(alike) else "augmentation"


def _area(box):
    """Of a cut, as a share of the file; negative where it is flipped."""
    left, right, top, bottom = box
    return (right - left) * (bottom - top)


def _away(box, other):
    return max(abs(a - b) for a, b in zip(box, other, strict=True))


def _different(boxes):
    """Those that no earlier one is near to."""
    found = []
    for box in boxes:
        if all(_away(box, other) > NEAR for other in found):
            found.append(box)
    return found


def _entered(mine, reference, mode):
    """Mean and standard deviation of what enters the model first, by colour."""
    what = {"train": "pixels that enter the model", "val": "pixels of the validation"}[mode]
    yours, expected = (r.whole.pixels.get(mode) for r in (mine, reference))
    near = bool(yours and expected) and all(
        _away(a, b) <= PIXELS for a, b in zip(yours, expected, strict=True)
    )
    text, wanted = (f"mean {p[0]}, deviation {p[1]}" if p else "unknown" for p in (yours, expected))
    return Finding(SAME, what, near, text, wanted, {"train": "normalize", "val": "middle"}[mode])


EXERCISE = Exercise(
    step="05_dataloader",
    own_flags={},
    mechanism=mechanism,
    # What is wrong with the loading comes before what follows from it.
    hints=OWN_HINTS | hints({}),
    errors=(
        (r"pic should be PIL|Input tensor should be a float", "half"),
        (r"found <class 'PIL", "decode"),
        (r"stack expects each tensor", "grey"),
    ),
    hint_of={
        "images drawn, by index": "order",
        "labels of the first batch, checksum": "labels",
    },
    of_files=True,
    recorded=("h100/05-resnet50-bf16-pil.jsonl", "h100/05-resnet50-bf16-files-1.jsonl"),
)
