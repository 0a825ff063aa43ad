"""The header of an image file, read before the file is decoded.

A decoder makes room for the size that it finds there, and two kilobytes can claim gigabytes. And
decoders differ: for 16 bits or an animation, torchvision's returns what no loop expects.
"""

import struct

from PIL import Image

from dlojz.images.dataset import DataError

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
# Markers in a JPEG file: of a picture's size, in each kind of compression, and without a length.
SIZES = {bytes([marker]) for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC)}
ALONE = {bytes([marker]) for marker in (0x00, 0x01, *range(0xD0, 0xD8))}


def check(path):
    """Raise DataError if the file is larger than PIL's limit, or not one picture of 8 bits.

    What it cannot read is left to the decoder. A JPEG takes less than a hundredth of its decoding.
    """
    with open(path, "rb") as file:
        start = file.read(25)
        if start.startswith(JPEG):
            file.seek(len(JPEG))
            wrong = _wrong_jpeg(file)
        elif start.startswith(PNG) and start[24:] == b"\x10":
            wrong = "16 bits"  # in colours, PIL's mode would not say so
        elif start.startswith(b"GIF8"):
            wrong = "a GIF"  # maybe animated; a damaged one makes torchvision's decoder crash
        else:
            file.seek(0)
            wrong = _wrong_other(file)
    if wrong:
        limit = f"{_limit():,} pixels" if _limit() else "any size"
        raise DataError(
            f"{path}: found {wrong}, expected one picture of 8 bits per colour and at most {limit}."
            " Convert the file, or remove it"
        )


def _limit():
    """Return the number of pixels that PIL decodes without an error; None: any number."""
    return Image.MAX_IMAGE_PIXELS and 2 * Image.MAX_IMAGE_PIXELS


def _wrong_jpeg(file):
    while byte := file.read(1):  # as libjpeg, which skips what is between two segments
        if byte != b"\xff":
            continue
        while (marker := file.read(1)) == b"\xff":
            pass
        if marker in ALONE:
            continue
        length = int.from_bytes(file.read(2), "big")
        if marker in SIZES:
            bits, height, width = struct.unpack(">BHH", file.read(5).ljust(5, b"\0"))
            return _wrong_size(width, height) or (f"{bits} bits" if bits > 8 else "")
        file.seek(max(0, length - 2), 1)
    return ""


def _wrong_other(file):
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":
                return f"numbers of more than 8 bits (PIL's mode {image.mode})"
            if getattr(image, "is_animated", False):
                return "an animation"
            image.verify()  # the checksums of a PNG: torchvision 0.29 crashes on a damaged one
            return ""
    except Image.DecompressionBombError:
        raise
    except Exception:  # a damaged file makes PIL raise nearly anything: the decoder says what
        file.seek(0)
        return "a damaged PNG" if file.read(len(PNG)) == PNG else ""


def _wrong_size(width, height):
    limit = _limit()
    return f"{width:,} x {height:,} pixels" if limit and width * height > limit else ""
