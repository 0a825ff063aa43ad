"""The decoding speed of a core, in several ways: `make bench-loader`.

From the bytes of a JPEG file in memory to a random crop of 224 pixels: images per second of
processor time, one thread, all ways in turn in each round. Ratios have their 95 % interval over the
rounds. Goals: the solution's way (torchvision's decoder, v2 on tensors, uint8) at least 1.6 times
as fast as PIL's (v1, float32), and at least as fast as DALI's on the processor, if it is installed;
nvJPEG at least 3 times as fast in batches as one by one, if there is a GPU.

Ours decodes one image after another: stacking them into a batch takes 10 microseconds per image in
channels_last, 55 otherwise (torch 2.11, AMD EPYC). DALI's are in a batch already.

DALI is not a dependency of the course: `pip install nvidia-dali-cuda130` (200 MB) to compare with
it.
"""

import argparse
import statistics
import sys
from importlib.util import find_spec
from itertools import count, cycle

import numpy as np
import torch
from bench_gpu import outcome

from dlojz import course
from dlojz.chapters import session
from dlojz.machine import cpus
from dlojz.runs import stats
from dlojz.training import imports

GOAL, DALI_GOAL, NVJPEG_GOAL = 1.6, 1.0, 3.0
SIZE, BATCH = 224, 50
PIL, OURS, DALI = "PIL, v1, float32", "torchvision, v2, uint8", "DALI, uint8"


def dali(jpegs):
    """Return DALI's pipeline on the processor, in one thread, to be called once for each image.

    It decodes only the crop. Every BATCHth call does a whole batch, the others nothing.
    """
    from nvidia.dali import fn, pipeline_def, types

    batches = cycle(np.array_split(np.arange(len(jpegs)), max(1, len(jpegs) // BATCH)))
    arrays = [np.frombuffer(jpeg, np.uint8) for jpeg in jpegs]

    def source():
        return [arrays[i] for i in next(batches)]

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        files = fn.external_source(source=source, dtype=types.UINT8)
        area = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
        images = fn.decoders.image_random_crop(files, device="cpu", output_type=types.RGB, **area)
        images = fn.resize(
            images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True
        )
        return fn.flip(images, horizontal=fn.random.coin_flip(probability=0.5))

    built, calls = pipeline(seed=0), count()
    built.build()

    def call(_):
        if next(calls) % BATCH == 0:
            built.run()

    return call


def judge(name, ratios, goal) -> bool:
    """Print a ratio beside its goal; return whether the goal is certainly reached."""
    mean, low, high = stats.interval(ratios)
    word = outcome(low, high, goal)
    print(
        f"{name}: {mean:.2f} ({low:.2f} to {high:.2f}, {len(ratios)} rounds); "
        f"goal {goal:.1f}: {word}"
    )
    return word == "reached"


def _ratios(found, name, to):
    return [a / b for a, b in zip(found[name], found[to], strict=True)]


def on_processor(decoders, jpegs, rounds) -> list[bool]:
    """Time all ways, print them, and judge the solution's."""
    roads = decoders.roads(SIZE)
    if find_spec("nvidia") and find_spec("nvidia.dali"):
        roads[DALI] = dali(jpegs)
    found = decoders.images_per_s(roads, jpegs, rounds)
    for name, speeds in found.items():
        middle = statistics.median(speeds)
        print(f"{name:36} {middle:6,.0f}  ({min(speeds):,.0f} to {max(speeds):,.0f})")
    for name in ("simplejpeg, v2, uint8", DALI):
        if name not in found:
            print(f"{name:36} not installed here")
    verdicts = [judge("ours / PIL", _ratios(found, OURS, PIL), GOAL)]
    if DALI in found:
        verdicts.append(judge("ours / DALI", _ratios(found, OURS, DALI), DALI_GOAL))
    return verdicts


def on_gpu(decoders, jpegs, rounds) -> list[bool]:
    """Time nvJPEG one by one and in batches, in turn, and judge the best batch."""
    device, found = torch.device("cuda"), {batch: [] for batch in decoders.BATCHES}
    for again in range(rounds + 1):
        for batch, speeds in found.items():
            speed = decoders.nvjpeg(jpegs, batch, device)
            speeds += [speed] if again else []  # the first round warms up
    for batch, speeds in found.items():
        print(f"nvJPEG, {batch:3} at once: {statistics.median(speeds):8,.0f} images/s")
    best = max(found, key=lambda batch: statistics.median(found[batch]))
    return [judge(f"nvJPEG, {best} at once / one by one", _ratios(found, best, 1), NVJPEG_GOAL)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_images(parser, 200)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    decoders = imports.from_file(course.experiment("decoders.py"), "decoders")
    torch.set_num_threads(1)
    jpegs = [bytearray(file.read_bytes()) for file in session.jpegs(args)]
    kilobytes = sum(map(len, jpegs)) / len(jpegs) / 1000
    print(f"{cpus.name()}, torch {torch.__version__}; {len(jpegs)} JPEGs of {kilobytes:.0f} kB")
    print("from bytes to a crop of 224 pixels, images per CPU-second, one thread:")
    verdicts = on_processor(decoders, jpegs, args.rounds)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        verdicts += on_gpu(decoders, jpegs, args.rounds)
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
