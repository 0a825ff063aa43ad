"""Weights of eight bits and fewer: whole numbers with scales, two of them in a byte, and floats."""

import torch
from torch.nn import functional

WIDE = {"cuda": "bf16", "cpu": "fp32"}  # what is compared with: a processor is fast in it
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (E4M3, E5M2)}
TINY = 1e-12  # instead of a largest number of zero

# Whole numbers -----------------------------------------------------------------------------------


def quantized(weight, bits: int = 8, per="row"):
    """Return whole numbers of a few bits and their scales, one for each line of both.

    per: the numbers that share a scale: "tensor", "row", or a number of neighbours in a row.
    """
    width = {"tensor": weight.numel(), "row": weight.shape[-1]}.get(per, per)
    lines, most = weight.reshape(-1, width), 2 ** (bits - 1) - 1
    scale = lines.abs().amax(1, keepdim=True).clamp(min=TINY) / most
    return (lines / scale).round().to(torch.int8), scale


def restored(weight, bits: int = 8, per="row"):
    """Return the weights that are left after rounding."""
    values, scale = quantized(weight, bits, per)
    return (values * scale).reshape(weight.shape)


def linear8(x, weight, scale):
    """Return the product with int8 weights; the scales of rows can wait until after the sum."""
    return functional.linear(x, weight.to(x.dtype)) * scale


def packed(values):
    """Return neighbours in one byte, the left one in its lower half: values from -8 to 7."""
    return (values[:, 0::2] & 15) | (values[:, 1::2] << 4)


def unpacked(pairs):
    """Return the values of `packed`; a shift to the right repeats the sign."""
    return torch.stack([pairs << 4 >> 4, pairs >> 4], dim=-1).flatten(-2)


def linear4(x, pairs, scale):
    """Return the product of one row with int4 weights, two in a byte."""
    even, odd = (x[0, n::2].float() for n in (0, 1))
    total = ((pairs << 4 >> 4) * even + (pairs >> 4) * odd).sum(1)
    return (total * scale).to(x.dtype)[None]


class Linear8(torch.nn.Module):
    """A linear layer with int8 weights and a scale for each row; it computes as its input does."""

    def __init__(self, layer):
        super().__init__()
        weight, scale = quantized(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.flatten())
        self.bias = layer.bias

    def forward(self, x):
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        # Scales in float32: with theirs cast the compiler of torch 2.11 fails on a GPU.
        return (linear8(x, self.weight, self.scale) + self.bias).to(x.dtype)


def linears(model) -> dict:
    """Return the linear layers of a model, by name.

    Attention is not among them: torch's class holds its weights itself.
    """
    found = model.named_modules()
    return {name: module for name, module in found if type(module) is torch.nn.Linear}


def replace(model):
    """Give a model int8 weights in its linear layers."""
    for name, layer in linears(model).items():
        model.set_submodule(name, Linear8(layer))
    return model


# Floats of eight bits ----------------------------------------------------------------------------


def scaled(largest, dtype):
    """Return the scale that takes a largest magnitude to that of a format."""
    return LARGEST[dtype] / largest.float().clamp(min=TINY)


def cast(x, scale, dtype=E4M3):
    """Return a tensor in 8 bits, times a scale; a number beyond the range becomes the last one."""
    return (x * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
