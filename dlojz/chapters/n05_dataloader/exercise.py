"""05_dataloader: files become tensors of uint8, and the device does the rest."""

import math

from dlojz.check.bars import CPU, Bar
from dlojz.check.common import alike, no_brake
from dlojz.check.exercise import MECHANISM, SAME, Exercise, Finding, Runs, Unseen, shown

NEAR = 0.03  # share of the file: the distance of an edge between two ways of resizing
DETAIL = 0.04  # two decoders differ by a hundredth of it
PIXELS = 0.02  # share of a standard deviation; two decoders differ by a hundredth of it
SPREAD = 1.5  # two deviations, at most; without normalization they are 4 times apart
KEPT_OBJECTS, KEPT_BYTES = 8, 2_000_000  # 16 kept images are an object each, or 9 MB


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the data set's images of a file of ours, against the solution's."""
    mine, reference = runs.mine, runs.reference
    if runs.arguments["data"] == "synthetic":
        return [Finding(MECHANISM, "files", "images", False, "synthetic", "files", "files")]
    looks = (
        (SAME, "epoch", "images in an epoch", _epoch, "dropped"),
        (MECHANISM, "set", "data set", _set, "set"),
        (MECHANISM, "workers", "workers of the loader", _workers, "workers"),
    )
    found = alike(mine, reference, *looks)
    if _set(mine) == _set(reference):  # of another one nothing is known
        found += _of_a_file(mine, reference)
    found += [_entered(mine, reference, mode) for mode in ("train", "val")]
    return [*found, *no_brake(mine, reference)]


def _of_a_file(mine, reference):
    colours = mine.samples.grey == 3
    grey = shown(mine.samples.grey)
    looks = (
        (SAME, "label", "label of a file", lambda r: r.samples.label, "labels"),
        (MECHANISM, "pil", "files that PIL opens", lambda r: r.samples.pil, "decode"),
        (MECHANISM, "others", "other files opened for an image", _others, "cached"),
        (MECHANISM, "size", "size of an image", _size, "smaller"),
        (MECHANISM, "dtype", "type of an image", lambda r: r.samples.dtype, "uint8"),
    )
    found = alike(mine, reference, *looks)
    # Without the solution's, which a failed job lacks.
    found.append(Finding(MECHANISM, "grey", "channels of a grey file", colours, grey, "3", "grey"))
    if mine.samples.boxes and mine.samples.shape[0] == 3:  # the colours encode the crop
        found += _cuts(mine.samples, reference.samples)
    return found


def _set(run):
    return run.samples.set


def _workers(run):
    return run.probe.loader.num_workers


def _others(run):
    return run.samples.others


def _size(run):
    return run.samples.shape and run.samples.shape[1:]


def _epoch(run):
    return f"{run.setup.get('train_images')} in {run.setup.get('steps_per_epoch')} batches"


def _cuts(mine, reference):
    cuts, expected = (len(_different(seen.boxes)) for seen in (mine, reference))
    away = max(map(_away, mine.boxes, reference.boxes))
    detail = mine.detail / reference.detail - 1
    count, reds = len(mine.boxes), (shown(mine.red), str(reference.red))
    kept = f"{mine.kept_objects} objects, {mine.kept_bytes / 1e6:.1f} MB"
    leaks = mine.kept_objects > KEPT_OBJECTS or mine.kept_bytes > KEPT_BYTES
    which = f"{cuts} different, up to {away:.1%} of the file away from the solution's"
    return [
        Finding(SAME, "red", "channel of red", mine.red == reference.red, *reds, "colours"),
        Finding(
            *(SAME, "crops", f"crops of {count} images", cuts == expected and away <= NEAR, which),
            f"{expected} different, at most {NEAR:.0%} away",
            _why(mine.boxes, reference.boxes),
        ),
        Finding(
            *(SAME, "detail", "detail of an image", abs(detail) <= DETAIL, f"{1 + detail:.0%}"),
            *(f"100% of the solution's, within {DETAIL:.0%}", "detail"),
        ),
        Finding(
            *(MECHANISM, "fresh", "a changed file shows", mine.fresh == reference.fresh),
            # A cache shows it in none; in some if other colours hide it.
            *(f"in {mine.fresh} images", f"in {reference.fresh}", None if mine.fresh else "cached"),
        ),
        Finding(
            *(MECHANISM, "kept", f"kept after {count // 2} images", not leaks, kept),
            *(f"at most {KEPT_OBJECTS} objects, {KEPT_BYTES / 1e6:.1f} MB", "leak"),
        ),
    ]


def _why(boxes, expected):
    if len(_different(boxes)) == 1:
        left, right, top, bottom = boxes[0]
        middle = left < right and max(abs(left + right - 1), abs(top + bottom - 1)) < NEAR
        return "augmentation" if middle else "same-crop"
    if any((b[0] > b[1]) != (e[0] > e[1]) for b, e in zip(boxes, expected, strict=True)):
        return "augmentation"  # other images are flipped
    alike = [_away(_size_of(b), _size_of(e)) < NEAR for b, e in zip(boxes, expected, strict=True)]
    # Most have the solution's size at another place: cropped after the file was resized.
    return "detail" if sum(alike) > 0.75 * len(alike) else "augmentation"


def _size_of(box):
    """Return the width and the height of a crop as shares of the file; flipped: width < 0."""
    left, right, top, bottom = box
    return right - left, bottom - top


def _away(box, other):
    return max(abs(a - b) for a, b in zip(box, other, strict=True))


def _different(boxes):
    found = []
    for box in boxes:
        if all(_away(box, other) > NEAR for other in found):
            found.append(box)
    return found


def _entered(mine, reference, mode):
    """Return a finding on mean and standard deviation of the model's first input, by colour."""
    what = {"train": "pixels that enter the model", "val": "pixels of the validation"}[mode]
    yours, expected = (r.whole.pixels.get(mode) for r in (mine, reference))
    near = bool(yours and expected) and all(
        _away(a, b) <= PIXELS for a, b in zip(yours, expected, strict=True)
    )
    text, wanted = (
        f"mean {p[0]}, deviation {p[1]}" if p else Unseen.UNKNOWN for p in (yours, expected)
    )
    # Other images, if normalized, have about the same deviation.
    spread = yours[1][0] / expected[1][0] if yours and expected else math.inf
    other = "pixels" if 1 / SPREAD < spread < SPREAD else "normalize"
    hint = {"train": other, "val": "middle"}[mode]
    return Finding(SAME, f"{mode}-pixels", what, near, text, wanted, hint)


EXERCISE = Exercise(
    step="05_dataloader",
    own_flags={},
    mechanism=mechanism,
    bars=(
        Bar(
            *(CPU, 1.0),
            "a CPU that also loads gains less than its loader; it must not get slower",
            **{"model": "shufflenet", "image_size": 64, "batch_size": 32, "not_slower": True},
        ),
    ),
    epochs="--precision fp32 --num-workers 1",
    later={"pixels": "cached", "val-pixels": "cached"},
    first_hints=(),  # mistakes in loading come before their consequences
    errors=(
        (r"pic should be PIL|Input tensor should be a float", "half"),
        (r"found <class 'PIL", "decode"),
        (r"should have at least two dimensions", "bytes"),
        (r"\(3\) must match the size of tensor", "turned"),
        (r"stack expects each tensor|storage that is not resizable", "unequal"),
    ),
    hint_of={
        "drawn": "order",
        "labels": "labels",
        "val-pixels": "middle",
    },
    of_files=True,
    recorded=("h100/05-resnet50-bf16-pil.jsonl", "h100/05-resnet50-bf16-files-1.jsonl"),
)
