"""A kernel of one's own, in Triton, which the trainer calls with --normalize triton.

Without a GPU Triton's interpreter runs it, one block after the other, in NumPy.
"""

import os

import torch

from dlojz.course import UserError
from dlojz.training import data

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # Triton reads this where it meets `@triton.jit`
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise UserError(
        f"--normalize triton: no Triton beside torch {torch.__version__} ({error}): expected that "
        "of constraints.txt, which exists for Linux: `pip install -c constraints.txt triton`; or "
        "leave that flag out"
    ) from error

BLOCK = 1024 if ON_GPU else 16384  # values of a program; the interpreter likes few large ones


@triton.jit
def _normalize(images, out, shift, scale, count, block: tl.constexpr):
    """Write shift + byte * scale for each byte of the images, in the order of their memory.

    images, out: [count], the three channels of a pixel, then those of the next; shift, scale: [3].
    """
    # 10a: normalize the values of this program's block, in float32, and store them
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    channels = places % 3
    values = tl.load(images + places, mask=inside).to(tl.float32)
    values = tl.load(shift + channels) + values * tl.load(scale + channels)
    tl.store(out + places, values, mask=inside)  # converts them to the type of `out`


def normalize(images, dtype):
    """Return uint8 images, [N, 3, H, W], normalized in `dtype` and channels_last, by one kernel."""
    if images.dtype != torch.uint8:
        raise UserError(
            f"kernels.normalize: the images are {images.dtype}, expected torch.uint8, as the "
            "transforms of notebook 05 leave them"
        )
    images = images.contiguous(memory_format=torch.channels_last)  # no copy, if they already are
    out = torch.empty_like(images, dtype=dtype)
    shift, scale = data.line(images.device)
    programs = triton.cdiv(out.numel(), BLOCK)
    _normalize[(programs,)](images, out, shift, scale, out.numel(), BLOCK)
    return out
