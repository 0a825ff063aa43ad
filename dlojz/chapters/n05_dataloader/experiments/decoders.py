"""The JPEG files per second that one core can turn into training images, in several ways.

Submitted by a notebook: submit("dlojz/chapters/n05_dataloader/experiments/decoders.py").

Each way takes the same bytes, already in memory, in one thread: first the decoder alone, then all
steps to a random crop of 224 x 224 pixels, as float32 or as uint8. It is timed in seconds of
processor time, so that other users of the machine disturb it less. All ways are timed in turn. On a
GPU nvJPEG decodes too, one by one and in batches; it is timed in wall time.
"""

import argparse
import io
import time
from importlib.util import find_spec

import torch
from PIL import Image
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from dlojz.chapters import session
from dlojz.training import data

BATCHES = (1, 16, 64, 256)  # nvJPEG's


def pil(jpeg):
    """Return a PIL image, in RGB."""
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def torchvision(jpeg):
    """Return a uint8 tensor, [3, H, W], decoded by libjpeg-turbo."""
    return decode_jpeg(torch.frombuffer(jpeg, dtype=torch.uint8), mode=ImageReadMode.RGB)


def simplejpeg(jpeg):
    """Return a uint8 tensor, [3, H, W], decoded by the optional package simplejpeg."""
    from simplejpeg import decode_jpeg as decode

    return torch.from_numpy(decode(jpeg)).permute(2, 0, 1)


class RandomResizedCrop(v2.RandomResizedCrop):
    """torchvision's transform, but the crop is first copied to channels_last.

    The image is the same, bit for bit. torch resizes a view of the decoded image by a slower path,
    which puts each channel into a plane of its own.
    """

    def transform(self, image, params):
        crop = v2.functional.crop(image, **params)
        crop = crop.unsqueeze(0).contiguous(memory_format=torch.channels_last)
        return v2.functional.resize(crop, self.size, self.interpolation, antialias=True)[0]


DECODERS = {"PIL": pil, "torchvision": torchvision}
if find_spec("simplejpeg"):
    DECODERS["simplejpeg"] = simplejpeg


def roads(size):
    """Return the ways from a file's bytes to a training image, by name."""
    crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    v1 = transforms.Compose(crop)
    as_float = transforms.Compose(
        [*crop, transforms.ToTensor(), transforms.Normalize(data.MEAN, data.STD)]
    )
    flip = v2.RandomHorizontalFlip()
    on_tensors = v2.Compose([v2.RandomResizedCrop(size, antialias=True), flip])
    copied = v2.Compose([RandomResizedCrop(size, antialias=True), flip])
    found = {
        "PIL, v1, float32": lambda jpeg: as_float(pil(jpeg)),
        "PIL, v1, uint8": lambda jpeg: transforms.functional.pil_to_tensor(v1(pil(jpeg))),
    }
    for name, decode in DECODERS.items():
        if name != "PIL":
            found[f"{name}, v2, uint8"] = lambda jpeg, decode=decode: on_tensors(decode(jpeg))
    found["torchvision, v2, crop copied, uint8"] = lambda jpeg: copied(torchvision(jpeg))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_images(parser, 100)
    parser.add_argument("--size", type=int, default=224, help="pixels of the crop")
    parser.add_argument("--rounds", type=int, default=6, help="timings of each decoder")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        torch.set_num_threads(1)
        jpegs = [bytearray(file.read_bytes()) for file in session.jpegs(args)]
        for kind, ways in (("decoder", DECODERS), ("road", roads(args.size))):
            for way, speeds in images_per_s(ways, jpegs, args.rounds).items():
                run.case(way, kind=kind, images_per_cpu_s=speeds, bytes=sum(map(len, jpegs)))
        if device.type == "cuda":
            for batch in BATCHES:
                speeds = [nvjpeg(jpegs, batch, device) for _ in range(args.rounds + 1)][1:]
                many = f"{batch} in a batch" if batch > 1 else "one by one"
                run.case(f"nvJPEG, {many}", kind="nvJPEG", batch=batch, images_per_s=speeds)


def images_per_s(ways, jpegs, rounds):
    """Return the images per second of one core, by way and round, after a warm-up round."""
    found = {name: [] for name in ways}
    for again in range(rounds + 1):
        for name, way in ways.items():
            torch.manual_seed(again)  # the same crops for all
            begin = time.process_time()
            for jpeg in jpegs:
                way(jpeg)
            found[name].append(len(jpegs) / (time.process_time() - begin))
    return {name: speeds[1:] for name, speeds in found.items()}


def nvjpeg(jpegs, batch, device):
    """Return the images per second of the GPU's decoder."""
    tensors = [torch.frombuffer(jpeg, dtype=torch.uint8) for jpeg in jpegs]

    def decode():
        for i in range(0, len(tensors), batch):
            decode_jpeg(tensors[i : i + batch], mode=ImageReadMode.RGB, device=device)

    return len(tensors) / session.seconds(decode, device)


if __name__ == "__main__":
    main()
