"""07_augmentation: a batch is mixed on its device, each image by a share of its own."""

from dataclasses import replace

from dlojz.check.bars import CPU, HOPPER, LARGE, Bar
from dlojz.check.common import flag, no_brake
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, SAME, WORK_FIRST, Exercise, Extra, Finding, Runs, State
from dlojz.check.wording import share

MIXUP = "mixup"
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 4 "
SMALL += "--precision fp32 --deterministic"
NEAR = 1e-3  # shares of labels and pixels: float32, and cutmix moves whole pixels
LEVELS = {"cutmix": NEAR, "mixup": 0.51 / 255}  # mixup rounds to a level: at most half of one
ALIKE = 1e-5  # of an epoch's losses: then no image is classified otherwise
LOSSES = 1e-3  # of the first steps, before rounding grows; one wrong share of eight is 1e-2
CROPS, DETAIL = 0.01, 0.01  # the same draws on the same pixels give the same images
ONE_HOT = 12  # reads of a few calls of `one_hot`, which on a processor looks at the labels
IN_FORWARD = "mixed by `forward`"
ELSEWHERE = (State.NOT_ASKED, "not seen", "images and updates are compared")


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on a batch of the probe's, and on the images of files."""
    mine = runs.mine
    return [
        flag(mine, "--mix", lambda how: how != "off", "mixup or cutmix", "asked"),
        flag(mine, "--randaugment", lambda _: True, "N M, or none", "flag"),
        *_probed(mine.mixtures),
        *(_alike(*runs.extras[MIXUP]) if MIXUP in runs.extras else []),
        *(_augmented(*runs.extras[Role.EPOCHS]) if Role.EPOCHS in runs.extras else []),
        *(_counted(*runs.extras[Role.EPOCHS]) if Role.EPOCHS in runs.extras else []),
        *_no_brake(runs),
    ]


def _probed(seen):
    """Return findings on the probe's batches; a trainer may also mix elsewhere."""
    ways = [way for way in seen.ways if _mixes(way)]
    if not ways:
        return [Finding(MECHANISM, "mixes", IN_FORWARD, *ELSEWHERE)]
    return [
        *(finding for way in ways for finding in _of(way)),
        _yes("unasked", "with --mix off, images stay as they are", seen.unasked, "not-asked"),
        _yes(
            "unmixed", "a validation's images stay as they are", seen.validated, "validation-mixed"
        ),
    ]


def _mixes(way):
    return len(way.get("shape", ())) == 2 or min(way.get("pixels", [1.0])) < 1


def _yes(key, what, ok, hint):
    return Finding(MECHANISM, key, what, bool(ok), "yes" if ok else "no", "yes", hint)


def _of(way):
    """Return the findings on one way of mixing."""
    how = way["how"]
    named = [(_targets(way), "targets", f"targets, {how}"), *_shares(way)]
    few, many = way["operations"]
    yield from (replace(f, key=f"{key}-{how}", what=what) for f, key, what in named)
    text = f"{few} for 16 images, {many} for 64"
    what = f"operations, {how}"
    yield Finding(MECHANISM, f"loop-{how}", what, few == many, text, "the same number", "loop")


def _targets(way):
    """Return a finding on the targets' shape, type and sums, in one call of the criterion."""
    if "shape" not in way:
        return Finding(MECHANISM, "", "", State.NOT_ASKED, "not seen", "the audit judges the loss")
    shape, dtype, sums = way["shape"], way["dtype"], way.get("sums", ())
    ok = dtype == "float32" and way["calls"] == 1 and _sum_to_1(way)
    text = f"{shape} of {dtype}"
    text += f", sums {sums[0]:.4g} to {sums[1]:.4g}" if sums else ""
    text += f", in {way['calls']} calls" * (way["calls"] > 1)
    hint = "labels" if len(shape) == 1 and way["calls"] == 1 else "targets"
    asked = f"[{way['images']}, {way['classes']}] of float32, sums 1"
    return Finding(MECHANISM, "", "", ok, text, asked, hint)


def _sum_to_1(way):
    return all(abs(each - 1) <= NEAR for each in way.get("sums", [0.0]))


def _shares(way):
    """Yield findings on the shares of pixels and labels, with their keys and labels."""
    how, wanted = way["how"], way["wanted"]
    pixels, own, level = way.get("pixels", []), way.get("own", []), LEVELS[way["how"]]
    off = _furthest(pixels, wanted)
    text = "the solution's" if off <= level else f"up to {share(off)} off"
    asked, what = "as drawn", f"share of each image's pixels, {how}"
    ok = off <= level
    yield Finding(SAME, "", "", ok, text, asked, _why_pixels(way)), "pixels", what
    if how == "cutmix" and "placed" in way:
        right, turned = way["placed"]
        text, what = f"{right} of {len(wanted)} images", "partners' pixels inside their box"
        hint = "turned" if turned > right else _why_pixels(way)
        yield Finding(SAME, "", "", right == len(wanted), text, "all", hint), "box", what
    if not own:
        return
    distinct = len({round(each, 3) for each in own})
    text, what = f"{distinct} in {len(own)} images", f"shares of labels, {how}"
    yield Finding(SAME, "", "", distinct > 1, text, "one for each", "one-share"), "distinct", what
    off, what = _furthest(own, pixels), f"share of each label, {how}"
    near = "its image's share of the pixels"
    ok = off <= level + NEAR
    text = near if ok else f"up to {share(off)} off"
    yield Finding(SAME, "", "", ok, text, near, _why_labels(way)), "share", what
    off = _furthest([a + b for a, b in zip(own, way["partners"], strict=True)], [1.0] * len(own))
    text, what = ("all" if off <= NEAR else f"{share(off)} missing"), f"rest of each label, {how}"
    yield Finding(SAME, "", "", off <= NEAR, text, "all", "partner"), "rest", what


def _why_pixels(way):
    pixels, wanted, level = way.get("pixels", []), way["wanted"], LEVELS[way["how"]]
    if len(pixels) != len(wanted):
        return "shape"
    if _furthest(pixels, wanted) > 2:  # levels, which should be numbers up to 1
        return "floats"
    if min(pixels) == 1:
        return "partner"  # of the same colour: itself
    if way["in_place"]:
        return "in-place"
    if len({round(each, 2) for each in pixels}) == 1:
        return "one-share"
    if _furthest(pixels, [1 - each for each in wanted]) <= level:
        return "side"
    if way["how"] == "mixup" and _furthest(pixels, wanted) <= 2 * level:
        return "rounded"
    return "mixture"


def _why_labels(way):
    own, pixels = way["own"], way.get("pixels", [])
    if not _sum_to_1(way) or way["dtype"] != "float32":
        return "targets"
    if min(own) == 1:
        return "labels"
    if _furthest(own, [1 - each for each in pixels]) <= 2 * NEAR:
        return "side"
    if way["how"] == "cutmix":
        return "clipped"
    return "mixture"


def _furthest(found, expected):
    if len(found) != len(expected):
        return 1.0
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def _alike(mine, reference):
    """Return a finding on the losses of the run with mixup, against the solution's."""
    off = _apart(mine, reference)
    what, asked = "losses of the first steps, mixup", f"the solution's, within {share(LOSSES)}"
    text = f"up to {share(off)} apart"
    return [Finding(SAME, "losses-mixup", what, off <= LOSSES, text, asked, "mixture")]


def _apart(mine, reference, steps=slice(None)):
    """Return the largest distance of the losses of some steps, as a share."""
    pairs = zip(list(mine.steps.loss)[steps], list(reference.steps.loss)[steps], strict=False)
    return max((abs(a / b - 1) for a, b in pairs), default=1.0)


def _augmented(mine, reference):
    """Return a finding on the crops of a file with RandAugment, against the solution's."""
    yours, usual = mine.samples, reference.samples
    what, asked = "crops with RandAugment", "the solution's, uint8"
    same = yours.dtype == usual.dtype and yours.shape == usual.shape
    apart = [
        abs(a - b)
        for box, other in zip(yours.boxes, usual.boxes, strict=False)
        for a, b in zip(box, other, strict=True)
    ]
    near = same and bool(apart) and max(apart) <= CROPS
    near = near and abs(yours.detail / usual.detail - 1) <= DETAIL
    text = f"others, {yours.dtype}" if not near else f"the same, {yours.dtype}"
    return [Finding(SAME, "randaugment", what, near, text, asked, "randaugment")]


def _counted(mine, reference):
    """Return a finding on the training's accuracy, which counts each image's own label.

    Only of epochs with the solution's losses: other images have another accuracy.
    """
    each, images = (reference.setup[name] for name in ("steps_per_epoch", "train_images"))
    what, hint = "accuracy of the training, by own labels", "metrics"
    pairs = [
        [100 * epoch["train_accuracy"] for epoch in both]
        for i, both in enumerate(zip(mine.epochs, reference.epochs, strict=False))
        if _apart(mine, reference, slice(i * each, (i + 1) * each)) <= ALIKE
    ]
    if not pairs:
        return [Finding(SAME, "counted", what, State.NOT_ASKED, "not compared", "the same losses")]
    same = all(abs(a - b) <= 50 / images for a, b in pairs)
    text, asked = (", ".join(f"{n:.1f} %" for n in numbers) for numbers in zip(*pairs, strict=True))
    return [Finding(SAME, "counted", what, same, text, asked, hint)]


def _no_brake(runs):
    """Return the findings on brakes; on a processor `one_hot` itself reads labels."""
    items, usual = (r.last.calls.get("item", 0) for r in (runs.mine, runs.reference))
    for finding in no_brake(runs.mine, runs.reference):
        if finding.key == "items" and not runs.on_gpu and items <= usual + ONE_HOT:
            yield replace(finding, state=State.PASSED)
        else:
            yield finding


def extras(on_gpu: bool) -> list[Extra]:
    """Return a run with mixup: that of two epochs has cutmix."""
    return [Extra(MIXUP, tuple(f"{SMALL} --mix mixup".split()))]


EXERCISE = Exercise(
    step="07_augmentation",
    own_flags={"--mix": 1, "--randaugment": 2},
    mechanism=mechanism,
    follows=("losses-mixup",),
    bars=(
        Bar(
            *(HOPPER, 1.0, "mixing reads and writes a batch of bytes a few times"),
            **{**LARGE, "precision": "16", "not_slower": True},
        ),
        Bar(CPU, None, "a CPU mixes the images with the cores that train"),
    ),
    extras=extras,
    epochs="--precision fp32 --mix cutmix --randaugment 2 9",
    # The probe brings its own draws: where its batches are right, these differ.
    hint_of={"labels": "drawn", "pixels": "drawn"},
    later={"pixels": "drawn"},
    first_hints=("asked", *WORK_FIRST),
    causes=((r"(?s)metrics\.py.*must match the size of tensor|argmax\(1\) == labels", "metrics"),),
    errors=(
        (r"unrecognized arguments: .*--(mix|randaugment)", "flag"),
        (r"has no attribute '(mix|randaugment)'", "flag"),
        (r"has no attribute '(draws|classes)'", "draws"),
        (r"result type Float can't be cast", "mixture"),
        (r"torch\.uint8|Input tensor should be|pic should be", "randaugment"),
    ),
)
