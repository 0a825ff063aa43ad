"""Drawings of ImageNet's shape: `jpeg(seed, split, label, index)` returns one image file.

Loading these files costs what loading ImageNet costs, because their dimensions and file sizes match
(mostly 500 x 375 pixels, about 110 kB, baseline 4:2:0; Deng et al., "ImageNet", CVPR 2009, and
Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015, give 1.28
million training images in 138 GB). Training on them is meaningful, because a class is an object
that a network has to recognise: a silhouette with a pattern (a striped star, a dotted heart), in
any colours, place and size, slightly rotated, on a cluttered background whose spectrum falls as 1/f
like that of natural images (Field, "Relations between the statistics of natural images and the
response properties of cortical cells", JOSA A 1987). Colour carries no information on the class.

The first 12 classes share neither silhouette nor pattern; up to 144, a class shares each of the two
with others, but its pair is unique; beyond that, some classes differ only in their proportions.

An image depends on (seed, split, class, index) alone: workers, order and counts do not change a
byte of it (with the same versions of NumPy and Pillow).
"""

import functools
import io
import math

import numpy as np
from PIL import Image

MAX_CLASSES = 5000  # names stay within 8 digits
SPLITS = ("train", "val")


# Names --------------------------------------------------------------------------------------------


def wnid(label: int) -> str:
    """Return the folder name of class `label`: 1000 of them span ImageNet's range, sorted."""
    step = 13_648
    return f"n{1_440_764 + step * label + (7_919 * label) % step:08d}"


def image_name(split: str, label: int, index: int) -> str:
    """Return the file name of an image; as in ImageNet, those in val/ are unique across classes."""
    if split == "train":
        return f"{wnid(label)}_{index}.JPEG"
    return f"ILSVRC2012_val_{index * MAX_CLASSES + label + 1:08d}.JPEG"


# Classes: a silhouette and a pattern --------------------------------------------------------------
# A silhouette returns the radius (at most 1) for each angle `t`. Silhouettes and patterns are
# symmetric, because training flips images.


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
    """Return the sine of `x` cycles, sharpened to nearly a square wave, in [0, 1]."""
    return np.clip(0.5 + 1.6 * np.sin(2 * math.pi * x), 0, 1)


def _lattice(u, v):
    """Return hexagonal spots: three waves at 60 degrees."""
    a, b = 2 * math.pi * u, math.pi * (u + math.sqrt(3) * v)
    return np.clip(0.2 + 0.8 * (np.cos(a) + np.cos(b) + np.cos(a - b)), 0, 1)


def _zigzag(u, v):
    return _wave(u + 0.9 * np.abs(np.mod(v, 1) - 0.5))


def _mesh(u, v):
    near = np.maximum(np.cos(2 * math.pi * u), np.cos(2 * math.pi * v))
    return np.clip(0.5 + 5 * (near - 0.8), 0, 1)


def _scales(u, v):
    """Return rows of overlapping arcs, each row shifted by half an arc."""
    row = np.floor(v)
    across = np.mod(u + 0.5 * np.mod(row, 2), 1) - 0.5
    return _wave(np.hypot(across, v - row) * 1.5)


def _blotches(u, v):
    return np.clip(0.5 + 2.5 * _sample_blobs(u, v), 0, 1)


def _veins(u, v):
    return np.clip(1.9 - 6 * np.abs(_sample_blobs(u, v)), 0, 1)


# A pattern returns the mix of the object's two colours, in [0, 1], from the position in the object
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
    """Return the features of class `label`: (silhouette, pattern, frequency, height / width).

    The pairs are taken along the diagonals of the table silhouettes x patterns, so that the first
    classes are as different as possible. After the last pair, proportions tell classes apart.
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


# Noise, computed once per process and cropped at random places ------------------------------------


def _noise(size, spectrum, stream):
    """Return a (size, size) float32 field that wraps around, of mean 0 and deviation 1.

    Its amplitude at frequency f (cycles per pixel) is proportional to `spectrum(f)`.
    """
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
    """Return the blob field at positions in units of one blob, anywhere in the plane."""
    rows, columns = (v * 128).astype(np.int32) & 1023, (u * 128).astype(np.int32) & 1023
    return _blobs()[rows, columns]


def _cut(field, height, width, rng, zoom=1.0):
    """Return a random (height, width) window of a field that wraps around, magnified by `zoom`."""
    size = len(field)
    top, left = rng.integers(size, size=2)
    rows = (top + np.arange(math.ceil(height / zoom))) % size
    columns = (left + np.arange(math.ceil(width / zoom))) % size
    window = field[rows[:, None], columns[None, :]][:: rng.choice((-1, 1))]
    if zoom == 1.0:
        return window
    return np.asarray(Image.fromarray(window).resize((width, height), Image.Resampling.BILINEAR))


# Drawing ------------------------------------------------------------------------------------------


def _colour(rng, low, high, saturation=1.0):
    """Return a random RGB colour (0 to 255) whose luma is between `low` and `high`."""
    hue = rng.uniform(0, 2 * math.pi)
    chroma = saturation * rng.uniform(20, 85)
    shift = chroma * np.cos(hue + np.array([0, 2.1, 4.2]))
    return np.clip(rng.uniform(low, high) + shift - shift @ [0.299, 0.587, 0.114], 0, 255)


def _background(height, width, rng):
    """Return a (height, width, 3) float32 scene: 1/f clouds of four colours, with a horizon."""
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

    `rows` and `columns` are slices of the canvas; `u`, `v`, `r`, `t` are the arguments of PATTERNS;
    `depth` is the distance to the outline along the radius, in pixels, positive inside.
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
    """Paint an object over its soft shadow, lit from above and with a darker rim, to look solid.

    colour: RGB, one for all pixels or one per pixel.
    """
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
    """Draw stones and leaves without a pattern, so that a shape alone does not make a class."""
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
    """Draw a large object of the class near the middle and a few small ones behind it.

    The small ones are anywhere, so that most random crops show an object.
    """
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


# From a drawing to a file of a given size ---------------------------------------------------------


def _size(rng):
    """Return a random (width, height) in pixels: 60 % are 500 x 375 or 375 x 500, Flickr's size."""
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
    """Return a random file size to aim at: 110 kB on average, with a long tail to the right."""
    typical = 106_000 * (width * height / 187_500) ** 0.65
    return typical * math.exp(0.34 * rng.standard_normal())


def _jpeg(picture, quality):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()


def _quality(picture, weight):
    """Return the JPEG quality for which the file of `picture` has about `weight` bytes.

    Every fourth band of 16 rows (one row of 4:2:0 blocks) is compressed at two qualities. The
    logarithm of the file's size is nearly linear in the logarithm of libjpeg's quantisation scale,
    which is 200 - 2 quality.
    """
    bands = picture[: len(picture) // 64 * 64]
    bands = bands.reshape(-1, 64, *picture.shape[1:])[:, :16].reshape(-1, *picture.shape[1:])
    if not len(bands):
        bands = picture
    header = 625  # bytes, most of them tables
    coarse, fine = (math.log(len(_jpeg(bands, q)) - header) for q in (85, 97))
    slope = (fine - coarse) / math.log(6 / 30)
    aim = math.log(max(weight - header, 500) * len(bands) / len(picture))
    scale = 6 * math.exp((aim - fine) / slope)
    return int(np.clip(round(100 - scale / 2), 40, 98))


def jpeg(seed: int, split: str, label: int, index: int, judge: int | None = None) -> bytes:
    """Return the file of one image, a pure function of the arguments: baseline JPEG, 4:2:0.

    judge: the seed of a judge's images, which replace those of "val"; None: the usual ones. The
    classes depend on `seed` alone.
    """
    drawn = [seed, SPLITS.index(split), label, index]
    if judge is not None and split == "val":
        drawn = [seed, len(SPLITS), label, index, judge]
    rng = np.random.default_rng(drawn)
    width, height = _size(rng)
    # Drawn on at most 64 000 pixels, then enlarged: fine detail in a photo is mostly grain.
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
