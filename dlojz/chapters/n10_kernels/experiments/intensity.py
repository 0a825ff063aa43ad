"""Seven operations: their arithmetic per byte, and their speed, beside this machine's limits.

Submitted by a notebook: submit("dlojz/chapters/n10_kernels/experiments/intensity.py").

The intensity follows from the shapes: each operand and each result moves once. The speed is
measured on random operands that no cache holds; on a GPU in a CUDA graph, without Python.
The linear layers, the pooling, ReLU and the normalization are those of NVIDIA's guide, "GPU
Performance Background": https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch.nn import functional

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.training import flags

ON_GPU = {"batch_size": 256, "channels": 256, "precision": "bf16"}
ON_CPU = {"batch_size": 8, "channels": 64, "precision": "fp32"}
SIDE, FEATURES = 56, 1024
# Of the device, as torch names them: for the table of its parts.
CARD = {
    "multi_processor_count": "multiprocessors",
    "warp_size": "threads of a warp",
    "max_threads_per_multi_processor": "threads of a multiprocessor, at most",
    "regs_per_multiprocessor": "registers of a multiprocessor",
    "shared_memory_per_multiprocessor": "bytes of shared memory of a multiprocessor",
    "L2_cache_size": "bytes of the last cache",
}


@dataclass(frozen=True)
class Operation:
    """An operation on operands of these shapes; flops: its additions and multiplications."""

    name: str
    kind: str
    call: Callable
    shapes: tuple
    flops: int

    def make(self, device, dtype) -> tuple:
        """Return random operands, images in channels_last."""
        made = [torch.randn(shape, device=device, dtype=dtype) for shape in self.shapes]
        last = torch.channels_last
        return tuple(x.to(memory_format=last) if x.ndim == 4 else x for x in made)


def operations(batch, channels) -> list[Operation]:
    """Return the operations; a comparison counts as one, and normalization as 8 per number."""
    images = (batch, channels, SIDE, SIDE)
    count = prod(images)
    rows = (count // FEATURES, FEATURES)
    pool = partial(functional.max_pool2d, kernel_size=3, stride=1, padding=1)
    norm = partial(functional.layer_norm, normalized_shape=(FEATURES,))
    convolve = partial(functional.conv2d, padding=1)
    depthwise = partial(convolve, groups=channels)
    # name, kind, call, shapes, operations
    pointwise, reduction, product = "elementwise", "reduction", "matrix product"
    return [
        Operation("ReLU", pointwise, functional.relu, (images,), count),
        Operation("layer norm", reduction, norm, (rows,), 8 * prod(rows)),
        Operation("max pool 3 x 3", reduction, pool, (images,), 9 * count),
        *(
            Operation(
                f"linear, batch {rows}",
                product,
                functional.linear,
                ((rows, FEATURES), (4096, FEATURES)),
                2 * rows * 4096 * FEATURES,
            )
            for rows in (1, 512)
        ),
        Operation(
            "depthwise convolution 3 x 3",
            product,
            depthwise,
            (images, (channels, 1, 3, 3)),
            2 * 9 * count,
        ),
        Operation(
            "dense convolution 3 x 3",
            product,
            convolve,
            (images, (channels, channels, 3, 3)),
            2 * 9 * channels * count,
        ),
    ]


def measure_reading(run, device, rounds):
    """Measure the speed of memory that is read alone: for some kernels more than a copy's."""
    x = torch.randn(session.COPY_BYTES[device.type] // 4, device=device)
    ms = session.median_ms(lambda: torch.sum(x), device, rounds)
    run.measure("reading", session.size(x) / ms / 1e6, "GB/s")


def measured(wanted, device, dtype, rounds):
    """Yield the fields of each operation: its work, its bytes, its times."""
    for each in wanted:
        operands = timing.copies(partial(each.make, device, dtype), device)
        moved = sum(map(session.size, (*operands[0], each.call(*operands[0]))))
        cycle = timing.Cycle(each.call, operands)
        ms = timing.by_call({each.name: cycle}, device, rounds)[each.name]
        yield {
            "operation": each.name,
            "kind": each.kind,
            "shapes": each.shapes,
            "flops": each.flops,
            "bytes": moved,
            "ms": ms,
        }


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("-b", "--batch-size", type=positive, help="images")
    parser.add_argument("--channels", type=positive, help="channels of the images")
    parser.add_argument("--precision", choices=("fp32", *session.DTYPES), help="a format")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        torch.backends.cudnn.benchmark = True
        session.measure_memory(run, device, args.rounds)
        measure_reading(run, device, args.rounds)
        session.measure_product(run, device, args.precision, args.rounds)
        if device.type == "cuda":
            card = torch.cuda.get_device_properties(device)
            for field, what in CARD.items():
                if hasattr(card, field):
                    run.measure(what, getattr(card, field), "")
        dtype = session.DTYPES.get(args.precision, torch.float32)
        wanted = operations(args.batch_size, args.channels)
        for found in measured(wanted, device, dtype, args.rounds):
            run.case(found["operation"], **found)


if __name__ == "__main__":
    main()
