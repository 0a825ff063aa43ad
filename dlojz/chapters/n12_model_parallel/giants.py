"""Large language models, and the machines that the map of plans assumes: numbers, without torch."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from dlojz.machine import hardware

VITS, GIANTS = ("vit_600m", "vit_2b", "vit_6b"), ("llama_70b", "bloom")  # of the map
NODE, PATCH = 8, 14  # GPUs of a node, and pixels of a stand-in's patches
NETWORKS = {"400 Gb/s for each GPU": 50e9, "400 Gb/s for each node of 8": 6.25e9}  # bytes/s of each
MOST = {"vit": 4096, "giant": 2**22}  # images of a step, as in ViT's paper; tokens, as BLOOM's
MFU, OF_LINKS, OF_MEMORY = 0.52, 0.81, 0.9  # the last leaves room for CUDA, NCCL and fragments


@dataclass(frozen=True)
class Rates:
    """The speeds and the memory of a GPU.

    They are those of an H100 as it is sold, times what was measured: the MFU of vit_2b with FSDP,
    compiled (reference/h200/11-vit_2b-b0160-off-fsdp-compiled-x2), and the speed and the latency of
    all-reduces (06-all-reduce-x4). Between nodes the network has the same share of what is sold.
    """

    flops: float
    memory: float
    inside: float  # bytes/s, to the other GPUs of a node
    between: float  # bytes/s, to other nodes
    latency_s: float = 34e-6


def rates(network: float) -> Rates:
    """Return the rates of an H100 with this network between nodes, in bytes/s for each GPU."""
    gpu = next(row for row in hardware.sold() if row.name == "NVIDIA H100 SXM")
    inside = OF_LINKS * gpu.links_gb_per_s / 2 * 1e9  # sold: both directions together
    memory = OF_MEMORY * gpu.memory_gb * 1e9
    return Rates(MFU * gpu.speed("bf16") * 1e12, memory, inside, OF_LINKS * network)


@cache
def giants() -> dict[str, SimpleNamespace]:
    """Return the models of giants.toml."""
    text = Path(__file__).with_name("giants.toml").read_text(encoding="utf-8")
    return {name: SimpleNamespace(**row) for name, row in tomllib.loads(text).items()}


def image_size(name: str) -> int:
    """Return the pixels of an image; a giant's has about as many patches as a sequence tokens."""
    return 224 if name in VITS else PATCH * math.isqrt(giants()[name].sequence)


def largest(name: str) -> int:
    """Return the most images, or sequences, that a step may have on all GPUs."""
    return MOST["vit"] if name in VITS else MOST["giant"] // giants()[name].sequence
