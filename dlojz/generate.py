"""Makes an image set with the shape of ImageNet, without downloading anything.

    from dlojz.generate import generate
    generate("data/imagenet-like")  # 10 classes, 100 + 20 images each: about 130 MB, half a minute

The folder has the layout that `torchvision.datasets.ImageFolder` and `ImageNet` read:

    root/train/n01440764/n01440764_0.JPEG           root/dataset.json: what the folder holds
    root/val/n01440764/ILSVRC2012_val_00000001.JPEG

Loading these files costs what loading ImageNet costs, because their sizes and weights follow it
(mostly 500 x 375 pixels, about 110 kB, baseline 4:2:0; Deng et al., "ImageNet", CVPR 2009, and
Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015, give 1.28
million training images in 138 GB). Training on them means something, because a class is an object
that a network has to recognise: a silhouette with a pattern (a striped star, a dotted heart), in
any colours, place and size, a little rotated, on a cluttered background whose spectrum falls as 1/f
like that of natural images (Field, "Relations between the statistics of natural images and the
response properties of cortical cells", JOSA A 1987). Colour says nothing about the class.

The first 12 classes share neither silhouette nor pattern; up to 144, a class shares each of them
with others but is alone with the pair; beyond, classes also differ in proportions only.

An image depends on (seed, split, class, index) alone: workers, order and counts do not change a
byte of it (with the same versions of NumPy and Pillow). This file imports neither torch nor
anything else of dlojz, so that worker processes start at once.
"""

import contextlib
import errno
import functools
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import operator
import os
import pathlib
import secrets
import shlex
import signal
import threading
from concurrent import futures

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

FORMAT_VERSION = 1  # raise it whenever a byte of any image changes
MARKER = "dataset.json"
MAX_CLASSES = 5000  # names stay within 8 digits
MAX_VAL_IMAGES = 19_999
SPLITS = ("train", "val")
COUNTS = ("classes", "images_per_class", "val_images_per_class")
CHUNK = 8  # images per task of a worker: about 0.2 s, the delay of Ctrl-C


class DataError(Exception):
    """The image set cannot be made here; the message says why and what to type next."""


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def wnid(label: int) -> str:
    """Folder of class `label`: 1000 of them span the range of ImageNet's, in sorted order."""
    step = 13_648
    return f"n{1_440_764 + step * label + (7_919 * label) % step:08d}"


def image_name(split: str, label: int, index: int) -> str:
    """File name of an image; as in ImageNet, validation names are distinct across classes."""
    if split == "train":
        return f"{wnid(label)}_{index}.JPEG"
    return f"ILSVRC2012_val_{index * MAX_CLASSES + label + 1:08d}.JPEG"


# ---------------------------------------------------------------------------------------------
# What a class is: a silhouette and a pattern
# ---------------------------------------------------------------------------------------------
# A silhouette gives the radius (at most 1) for each angle `t`. Each is its own mirror image, and so
# is each pattern, because training flips images.


def _polygon(t, corners):
    sector = 2 * math.pi / corners
    return math.cos(sector / 2) / np.cos(np.mod(t, sector) - sector / 2)


def _star(t, points):
    inner, half = 0.45, math.pi / points
    across = half - np.abs(np.mod(t, 2 * half) - half)  # angle from the nearest tip
    return (
        inner
        * math.sin(half)
        / (np.sin(across) * (1 - inner * math.cos(half)) + inner * math.sin(half) * np.cos(across))
    )


def _cross(t):
    major = np.maximum(np.abs(np.cos(t)), np.abs(np.sin(t)))
    minor = np.minimum(np.abs(np.cos(t)), np.abs(np.sin(t)))
    return np.minimum(0.94 / major, 0.34 / np.maximum(minor, 1e-6))


def _heart(t):
    sine = np.sin(t)
    return (2 - 2 * sine + sine * np.sqrt(np.abs(np.cos(t))) / (sine + 1.4)) / 4


def _leaf(t):
    return (np.abs(np.cos(t)) ** 1.25 + np.abs(np.sin(t) / 0.5) ** 1.25) ** (-1 / 1.25)


def _butterfly(t):
    return (0.3 + 0.7 * np.abs(np.sin(2 * t)) ** 0.8) * (1 + 0.2 * np.sin(t)) / 1.2


SILHOUETTES = (
    lambda t: np.full_like(t, 0.9),
    lambda t: _polygon(t, 3),
    lambda t: _star(t, 5),
    lambda t: 0.74 + 0.26 * np.cos(6 * t),
    _cross,
    _heart,
    lambda t: 0.86 + 0.14 * np.clip(3 * np.cos(11 * t), -1, 1),
    lambda t: _polygon(t, 4),
    _leaf,
    _butterfly,
    lambda t: 0.58 + 0.42 * np.maximum(np.sin(t), 0) ** 5,
    lambda t: 0.7 + 0.3 * np.cos(3 * t),
)


def _wave(x):
    """Sine of `x` cycles, sharpened to nearly square, in [0, 1]."""
    return np.clip(0.5 + 1.6 * np.sin(2 * math.pi * x), 0, 1)


def _lattice(u, v):
    """Hexagonal spots: three waves at 60 degrees."""
    a, b = 2 * math.pi * u, math.pi * (u + math.sqrt(3) * v)
    return np.clip(0.2 + 0.8 * (np.cos(a) + np.cos(b) + np.cos(a - b)), 0, 1)


def _zigzag(u, v):
    return _wave(u + 0.9 * np.abs(np.mod(v, 1) - 0.5))


def _mesh(u, v):
    near = np.maximum(np.cos(2 * math.pi * u), np.cos(2 * math.pi * v))
    return np.clip(0.5 + 5 * (near - 0.8), 0, 1)


def _scales(u, v):
    """Rows of overlapping arcs, each row shifted by half an arc."""
    row = np.floor(v)
    across = np.mod(u + 0.5 * np.mod(row, 2), 1) - 0.5
    return _wave(np.hypot(across, v - row) * 1.5)


def _blotches(u, v):
    return np.clip(0.5 + 2.5 * _sample_blobs(u, v), 0, 1)


def _veins(u, v):
    return np.clip(1.9 - 6 * np.abs(_sample_blobs(u, v)), 0, 1)


# A pattern gives the mix of the object's two colours, in [0, 1], from the place in the object
# (u, v: in units of its radius), the radius `r`, the angle `t`, the fraction `edge` of the way from
# the centre to the outline, and the frequency `f`.
PATTERNS = (
    lambda u, v, r, t, edge, f: _wave(1.6 * f * u),  # stripes
    lambda u, v, r, t, edge, f: _lattice(1.9 * f * u, 1.9 * f * v),  # spots
    lambda u, v, r, t, edge, f: _wave(1.7 * f * r + 0.25),  # rings
    lambda u, v, r, t, edge, f: _wave(t * round(7 * f) / (2 * math.pi)),  # rays
    lambda u, v, r, t, edge, f: _mesh(1.9 * f * u, 1.9 * f * v),
    lambda u, v, r, t, edge, f: _blotches(1.2 * f * u, 1.2 * f * v),
    lambda u, v, r, t, edge, f: np.clip(0.5 + 14 * (edge - 0.5 / f**0.5), 0, 1),  # a rim
    lambda u, v, r, t, edge, f: (  # checks
        np.clip(0.5 + 2 * np.sin(4.4 * f * u) * np.sin(4.4 * f * v), 0, 1)
    ),
    lambda u, v, r, t, edge, f: _zigzag(1.5 * f * u, 1.3 * f * v),
    lambda u, v, r, t, edge, f: _veins(1.0 * f * u, 1.0 * f * v),
    lambda u, v, r, t, edge, f: np.clip(0.5 + 9 * u, 0, 1),  # two halves
    lambda u, v, r, t, edge, f: _scales(2.0 * f * u, 2.0 * f * v),
)


@functools.cache
def identity(seed: int, label: int):
    """What makes class `label`: (silhouette, pattern, frequency, height / width).

    The pairs are walked along the diagonals of the table silhouettes x patterns, so that the first
    classes are as different as can be. After the last pair, proportions tell classes apart.
    """
    rng = np.random.default_rng([seed, 7])
    silhouettes = rng.permutation(len(SILHOUETTES))
    patterns = rng.permutation(len(PATTERNS))
    turn, place = divmod(label, len(SILHOUETTES))
    level, shift = divmod(turn, len(PATTERNS))
    frequency = (1.0, 1.5, 0.7)[level % 3] * 1.15 ** (level // 9)
    stretch = (1.0, 0.6, 0.8)[level // 3 % 3]
    pattern = patterns[(place + shift) % len(PATTERNS)]
    return SILHOUETTES[silhouettes[place]], PATTERNS[pattern], frequency, stretch


# ---------------------------------------------------------------------------------------------
# Noise, computed once per process and cut at random places
# ---------------------------------------------------------------------------------------------


def _noise(size, spectrum, stream):
    """A (size, size) float32 field that wraps around, of mean 0 and deviation 1, whose amplitude
    at frequency f (cycles per pixel) is `spectrum(f)`."""
    rng = np.random.default_rng([2012, stream])
    f = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    f[0, 0] = 1
    amplitude = spectrum(f)
    amplitude[0, 0] = 0
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * amplitude)
    return (field / field.std()).astype(np.float32)


@functools.cache
def _clouds():
    return [_noise(512, lambda f: f**-1.15, stream) for stream in range(3)]


@functools.cache
def _grain():
    return (64 * _noise(512, lambda f: f**-0.1, 10)).astype(np.int16)


@functools.cache
def _blobs():
    return _noise(1024, lambda f: np.exp(-(((f - 1 / 128) / 0.002) ** 2)), 20)  # 128 pixels a blob


def _sample_blobs(u, v):
    """The blob field at places in units of one blob, anywhere in the plane."""
    rows, columns = (v * 128).astype(np.int32) & 1023, (u * 128).astype(np.int32) & 1023
    return _blobs()[rows, columns]


def _cut(field, height, width, rng, zoom=1.0):
    """A random (height, width) window of a field that wraps around, magnified `zoom` times."""
    size = len(field)
    top, left = rng.integers(size, size=2)
    rows = (top + np.arange(math.ceil(height / zoom))) % size
    columns = (left + np.arange(math.ceil(width / zoom))) % size
    window = field[rows[:, None], columns[None, :]][:: rng.choice((-1, 1))]
    if zoom == 1.0:
        return window
    return np.asarray(Image.fromarray(window).resize((width, height), Image.Resampling.BILINEAR))


# ---------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------


def _colour(rng, low, high, saturation=1.0):
    """A random RGB colour (0 to 255) whose luma is between `low` and `high`."""
    hue = rng.uniform(0, 2 * math.pi)
    chroma = saturation * rng.uniform(20, 85)
    shift = chroma * np.cos(hue + np.array([0, 2.1, 4.2]))
    return np.clip(rng.uniform(low, high) + shift - shift @ [0.299, 0.587, 0.114], 0, 255)


def _background(height, width, rng):
    """A (height, width, 3) float32 scene: 1/f clouds between four colours, with a horizon."""
    mix, light, other = rng.permutation(3)
    clouds = _clouds()
    a = _cut(clouds[mix], height, width, rng, rng.uniform(1.2, 3))
    b = _cut(clouds[light], height, width, rng, rng.uniform(1.2, 3))
    c = _cut(clouds[other], height, width, rng, rng.uniform(0.9, 1.6))
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None] - rng.uniform(-0.7, 0.7)
    ground = np.clip(0.5 + rng.uniform(0.5, 6) * (down + 0.25 * a), 0, 1)[..., None]
    sky = [_colour(rng, 95, 215, 0.35) for _ in range(2)]
    soil = [_colour(rng, 45, 160, 0.45) for _ in range(2)]
    blend = np.clip(0.5 + 0.4 * b, 0, 1)[..., None]
    top = np.float32(sky[0]) + blend * np.float32(sky[1] - sky[0])
    bottom = np.float32(soil[0]) + blend * np.float32(soil[1] - soil[0])
    return top + ground * (bottom - top) + (rng.uniform(8, 18) * c)[..., None]


class _Frame:
    """The pixels around one object, in the object's own coordinates.

    `rows` and `columns` are slices of the canvas; `u`, `v`, `r`, `t` are what PATTERNS take;
    `depth` is the distance to the outline in pixels, positive inside, along the radius.
    """

    def __init__(self, shape, outline, centre, radius, turn, stretch):
        y, x = centre
        reach = radius * 1.15
        self.rows = slice(max(0, int(y - reach)), min(shape[0], int(y + reach) + 1))
        self.columns = slice(max(0, int(x - reach)), min(shape[1], int(x + reach) + 1))
        down = (np.arange(self.rows.start, self.rows.stop, dtype=np.float32) - y) / radius
        right = (np.arange(self.columns.start, self.columns.stop, dtype=np.float32) - x) / radius
        cosine, sine = math.cos(turn), math.sin(turn)
        self.u = cosine * right[None, :] + sine * down[:, None]
        self.v = (cosine * down[:, None] - sine * right[None, :]) / np.float32(stretch)
        self.r = np.hypot(self.u, self.v)
        self.t = np.arctan2(self.v, self.u)
        angles = np.linspace(-math.pi, math.pi, 1025)
        table = outline(angles).astype(np.float32)
        limit = table[((self.t + math.pi) * (1024 / (2 * math.pi))).astype(np.int32)]
        self.edge = self.r / limit
        self.depth = (limit - self.r) * radius


def _paint(canvas, frame, colour):
    """Lay an object (an RGB colour, or one per pixel) over its soft shadow, with light from above
    and a darker rim, so that it looks solid."""
    region = canvas[frame.rows, frame.columns]
    drop = max(2, region.shape[0] // 32)
    shadow = np.clip(0.5 + frame.depth[:-drop, :-drop] / (3.0 * drop), 0, 1)
    region[drop:, drop:] *= (1 - 0.45 * shadow)[..., None]
    alpha = np.clip(0.5 + frame.depth, 0, 1)[..., None]
    height = len(region)
    light = np.linspace(1.14, 0.84, height, dtype=np.float32)[:, None]
    light = light * (1 - 0.3 * np.clip(frame.edge, 0, 1) ** 6)
    region += alpha * (colour * light[..., None] - region)


def _draw_clutter(canvas, rng):
    """Plain stones and leaves without a pattern: shapes alone do not make a class."""
    height, width, _ = canvas.shape
    for _ in range(rng.integers(1, 4)):
        lobes, phase = rng.integers(2, 6), rng.uniform(0, 6)
        wobble = rng.uniform(0.03, 0.2)

        def outline(t, lobes=lobes, phase=phase, wobble=wobble):
            return 0.8 + wobble * np.cos(lobes * t + phase)

        centre = rng.uniform(0, height), rng.uniform(0, width)
        radius = min(height, width) * rng.uniform(0.05, 0.15)
        frame = _Frame(
            canvas.shape, outline, centre, radius, rng.uniform(0, 6.3), rng.uniform(0.5, 1)
        )
        _paint(canvas, frame, np.float32(_colour(rng, 40, 215, 0.7)))


def _draw_objects(canvas, rng, seed, label):
    """One large object of the class near the middle and, behind it, a few small ones anywhere, so
    that most random crops show one."""
    silhouette, pattern, frequency, stretch = identity(seed, label)
    height, width, _ = canvas.shape
    short = min(height, width)
    dark, bright = _colour(rng, 15, 85), _colour(rng, 170, 240)
    if rng.random() < 0.5:
        dark, bright = bright, dark
    for small in [True] * rng.integers(2, 5) + [False]:
        low, high = (0.05, 0.95) if small else (0.38, 0.62)
        centre = height * rng.uniform(low, high), width * rng.uniform(low, high)
        radius = short * (rng.uniform(0.16, 0.26) if small else rng.uniform(0.4, 0.55))
        proportions = stretch * rng.uniform(0.85, 1.0)
        frame = _Frame(
            canvas.shape, silhouette, centre, radius, rng.uniform(-0.4, 0.4), proportions
        )
        f = frequency * rng.uniform(0.9, 1.12)
        u, v = frame.u, frame.v
        if pattern not in _CENTRED:
            u, v = u + rng.uniform(0, 8), v + rng.uniform(0, 8)
        mix = pattern(u, v, frame.r, frame.t, frame.edge, f)[..., None].astype(np.float32)
        _paint(canvas, frame, np.float32(dark) + mix * np.float32(bright - dark))


_CENTRED = {PATTERNS[2], PATTERNS[3], PATTERNS[6], PATTERNS[10]}  # rings, rays, a rim, two halves


# ---------------------------------------------------------------------------------------------
# From a drawing to a file of a given weight
# ---------------------------------------------------------------------------------------------


def _size(rng):
    """(width, height) in pixels: 60 % are 500 x 375 or 375 x 500, as Flickr made them."""
    kind = rng.random()
    if kind < 0.60:
        size = (500, 375)
    elif kind < 0.74:
        size = (500, 333)
    elif kind < 0.87:
        size = (500, int(rng.integers(280, 501)))
    elif kind < 0.95:
        width = rng.integers(120, 480)
        size = (int(width), int(width * rng.uniform(0.65, 1)))
    else:
        width = 1500 * rng.uniform(0.36, 1) ** 1.5
        size = (int(width), int(width * rng.uniform(0.6, 0.8)))
    return size if rng.random() < 0.75 else size[::-1]


def _weight(width, height, rng):
    """The bytes aimed at: 110 kB on average over `_size`, with a long tail to the right."""
    typical = 106_000 * (width * height / 187_500) ** 0.65
    return typical * math.exp(0.34 * rng.standard_normal())


def _jpeg(picture, quality):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def _quality(picture, weight):
    """The JPEG quality for which `picture` weighs about `weight` bytes.

    Every fourth band of 16 rows (one row of 4:2:0 blocks) is compressed at two qualities; the
    logarithm of the weight is nearly linear in that of libjpeg's scale of the quantisation, which
    is 200 - 2 quality.
    """
    bands = picture[: len(picture) // 64 * 64]
    bands = bands.reshape(-1, 64, *picture.shape[1:])[:, :16].reshape(-1, *picture.shape[1:])
    if not len(bands):
        bands = picture
    header = 625  # bytes, of which the tables are most
    coarse, fine = (math.log(len(_jpeg(bands, q)) - header) for q in (85, 97))
    slope = (fine - coarse) / math.log(6 / 30)
    aim = math.log(max(weight - header, 500) * len(bands) / len(picture))
    scale = 6 * math.exp((aim - fine) / slope)
    return int(np.clip(round(100 - scale / 2), 40, 98))


def jpeg(seed: int, split: str, label: int, index: int) -> bytes:
    """The file of one image, a pure function of its four arguments: baseline JPEG, 4:2:0."""
    rng = np.random.default_rng([seed, SPLITS.index(split), label, index])
    width, height = _size(rng)
    # Drawn on at most 64 000 pixels, then enlarged: what is fine in a photo is mostly grain.
    shrink = min(1.0, math.sqrt(64_000 / (width * height)))
    canvas = _background(round(height * shrink), round(width * shrink), rng)
    _draw_clutter(canvas, rng)
    _draw_objects(canvas, rng, seed, label)
    drawing = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    picture = np.asarray(drawing.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    strength = int(rng.integers(8, 15))  # deviation of the grain, in grey levels
    grain = (_cut(_grain(), height, width, rng) * strength) >> 6
    picture = np.clip(picture + grain[..., None], 0, 255).astype(np.uint8)
    if rng.random() < 0.01:  # ImageNet has a few grey images, which loaders must convert
        picture = np.asarray(Image.fromarray(picture).convert("L"))
    return _jpeg(picture, _quality(picture, _weight(width, height, rng)))


# ---------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------


def _is_temporary(name):
    return name.startswith(".dlojz-") and name.endswith(".tmp")


def _write(path, content):
    """Write under a temporary name of our own, then rename: `path` is whole or absent.

    Another process that starts in the same folder may take our temporary file for a leftover and
    remove it; then write it again. Errors name `path`.
    """
    for _ in range(10):
        temporary = path.with_name(f".dlojz-{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
            return
        except FileNotFoundError as error:
            failure = error
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
    raise OSError(failure.errno, failure.strerror, str(path)) from failure


def _names(folder):
    """Names in a folder (none if it does not exist), after removing leftovers of a killed run."""
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return set()
    leftovers = {name for name in names if _is_temporary(name)}
    for name in leftovers:
        (folder / name).unlink(missing_ok=True)
    return names - leftovers


def _call(root, wanted):
    """The command that makes `wanted`, to be pasted."""
    flags = " ".join(f"{_flag(key)} {wanted[key]}" for key in (*COUNTS, "seed"))
    return f"dlojz data {flags} {shlex.quote(str(root))}"


def _flag(key):
    return "--" + key.replace("_", "-")


def _read_marker(root):
    """What the folder holds, from its marker; None if it has none."""
    path = root / MARKER
    try:
        held = json.loads(path.read_text())
        if held["made_by"] != "dlojz.generate":
            raise ValueError(held["made_by"])
        [int(held[key]) for key in ("format_version", "seed", *COUNTS)]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} exists but is not a marker of dlojz.generate ({error!r}). An image set is made"
            f" in an empty folder or in one made before. Type `dlojz data` with another folder."
        ) from error
    return held


def _write_marker(root, wanted, complete):
    content = {"made_by": "dlojz.generate", **wanted, "complete": complete}
    _write(root / MARKER, (json.dumps(content, indent=2) + "\n").encode())


def _refuse_other_content(root, names):
    """A folder without our marker must be empty: it may be somebody's home, or ImageNet."""
    if names:
        some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise DataError(
            f"{root} is not empty (found {some}) and was not made by dlojz.generate (no {MARKER});"
            f" nothing was written. Type `dlojz data` with a new or empty folder; if these are"
            f" images that you want to train on, no generation is needed: pass the folder to"
            f" --data."
        )


def _refuse_another_set(root, held, wanted):
    """The folder's set can go on or grow, not change."""
    for key, what in (("format_version", "format version"), ("seed", "seed")):
        if held[key] != wanted[key]:
            raise DataError(
                f"{root} holds images of {what} {held[key]}, but {what} {wanted[key]} was asked"
                f" for, and the two cannot be mixed. Type `dlojz data` with a new folder"
                + (f", or {_call(root, held)}." if key == "seed" else ".")
            )
    for key in COUNTS:
        if held[key] > wanted[key]:
            larger = wanted | {name: max(held[name], wanted[name]) for name in COUNTS}
            raise DataError(
                f"{root} holds a set of {key}={held[key]}, but {key}={wanted[key]} was asked for,"
                f" and images are never deleted. Type {_call(root, larger)}, or choose a new"
                f" folder."
            )


def _check_arguments(wanted, workers):
    limits = {
        "classes": (1, MAX_CLASSES),
        "images_per_class": (0, 10**9),
        "val_images_per_class": (0, MAX_VAL_IMAGES),
        "seed": (0, 2**32 - 1),
    }
    for key, (low, high) in limits.items():
        if not low <= wanted[key] <= high:
            raise DataError(
                f"{key} is {wanted[key]}, expected {low} to {high}."
                f" Give {_flag(key)} {min(max(wanted[key], low), high)}."
            )
    if workers < 1:
        raise DataError(f"workers is {workers}, expected 1 or more. Give --workers 1.")


def _missing(root, wanted):
    """(split, label, indices) of the images to make, after a look at the folder; each class's
    folder exists afterwards."""
    tasks = []
    for split, count in zip(
        SPLITS, (wanted["images_per_class"], wanted["val_images_per_class"]), strict=True
    ):
        (root / split).mkdir(exist_ok=True)
        there = _names(root / split)
        for label in range(wanted["classes"]):
            folder = root / split / wnid(label)
            if folder.name not in there:
                folder.mkdir(exist_ok=True)
            names = _names(folder) if folder.name in there else set()
            missing = [i for i in range(count) if image_name(split, label, i) not in names]
            for first in range(0, len(missing), CHUNK):
                tasks.append((split, label, missing[first : first + CHUNK]))
    return tasks


def _make(root, seed, split, label, indices):
    """Make a few images of one class; returns how many."""
    for index in indices:
        path = root / split / wnid(label) / image_name(split, label, index)
        _write(path, jpeg(seed, split, label, index))
    return len(indices)


# ---------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------


def _start_worker():
    """Leave Ctrl-C to the parent, which stops us; end when the parent is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process().sentinel

    def follow():
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(root, seed, tasks, workers):
    """Do the tasks, here or in `workers` processes; yields the number of images of each.

    Processes are spawned, not forked: a notebook's threads, or torch's, do not survive a fork.
    """
    if workers == 1:
        for task in tasks:
            yield _make(root, seed, *task)
        return
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        queue, pending = iter(tasks), set()
        while True:
            # A few tasks per worker wait, not all of them: a million would take memory.
            for task in itertools.islice(queue, 4 * workers - len(pending)):
                pending.add(pool.submit(_make, root, seed, *task))
            if not pending:
                return
            done, pending = futures.wait(pending, return_when=futures.FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _default_workers():
    """The CPUs that this process may use; on a shared node, fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _explain(error, root, again):
    """The DataError for a failure of the system or of a worker."""
    if isinstance(error, futures.BrokenExecutor):
        return DataError(
            f"a worker process died while making images in {root}: out of memory, or killed, or"
            f" generate() was called at the top level of a script. What is finished is kept."
            f" Type {again} --workers 1."
        )
    hints = {
        errno.ENOSPC: "Free some space (an image takes about 110 kB)",
        errno.EDQUOT: "Free some of your quota (an image takes about 110 kB)",
    }
    hint = hints.get(error.errno, "Make it a folder that you can write to, or choose another one")
    return DataError(
        f"cannot write {error.filename or root}: {error.strerror or error}. What is finished is"
        f" kept. {hint}, then type {again}."
    )


def generate(
    root,
    classes=10,
    images_per_class=100,
    val_images_per_class=20,
    seed=0,
    workers=None,
    progress=True,
) -> pathlib.Path:
    """Make the image set in the folder `root`, or finish it, or let it grow; returns the folder.

    classes: 1 to 5000 (one is allowed, to look at images; learning needs two).
    images_per_class, val_images_per_class: images of each class in `train` and in `val`.
    workers: processes; by default, one per CPU that this process may use; 1 means this process.
    progress: show a bar, in images per second.

    Raises DataError if an argument is out of range, if the folder holds something else (another
    seed, a larger set, files of any other origin), or if it cannot be written. Interrupted runs
    go on where they stopped; several processes may make the same set in the same folder.
    """
    root = pathlib.Path(root)
    workers = _default_workers() if workers is None else workers
    wanted = {
        "format_version": FORMAT_VERSION,
        "seed": operator.index(seed),
        "classes": operator.index(classes),
        "images_per_class": operator.index(images_per_class),
        "val_images_per_class": operator.index(val_images_per_class),
    }
    _check_arguments(wanted, workers)
    try:
        _fill(root, wanted, workers, progress)
    except (OSError, futures.BrokenExecutor) as error:
        raise _explain(error, root, _call(root, wanted)) from error
    return root


def _fill(root, wanted, workers, progress):
    """Bring the folder to `wanted`: marker, images, marker again with `complete`."""
    root.mkdir(parents=True, exist_ok=True)
    # Listed before the marker is read: what another process made since then is not foreign.
    names = {n for n in os.listdir(root) if not _is_temporary(n)}
    held = _read_marker(root)
    if held is None:
        _refuse_other_content(root, names)
    else:
        _refuse_another_set(root, held, wanted)
    _names(root)  # removes leftovers
    if held is None or any(held[key] != wanted[key] for key in COUNTS):
        _write_marker(root, wanted, complete=False)
    tasks = _missing(root, wanted)
    total = sum(len(indices) for _, _, indices in tasks)
    if total:
        description = f"making images in {root.name}"
        counts = _run(root, wanted["seed"], tasks, min(workers, len(tasks)))
        bar = tqdm(total=total, unit="image", desc=description, disable=not progress)
        with contextlib.closing(counts), bar:
            for count in counts:
                bar.update(count)
    # A larger set may have been started in this folder meanwhile; then that run completes it.
    now = _read_marker(root)
    ours = now is None or all(now[key] == wanted[key] for key in COUNTS)
    if ours and not (now and now["complete"]):
        _write_marker(root, wanted, complete=True)
