"""The parameters of a model, and its arithmetic and memory for one image, by stage.

Submitted by a notebook:

    dlojz/chapters/n00_start/experiments/model.py
    --model resnet18 --image-size 64

"""

import argparse

import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from dlojz.chapters import session


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--of", choices=("parameters", "flops", "activations"), default="flops")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        model = torchvision.models.get_model(args.model, weights=None).eval()
        images = torch.randn(1, 3, args.image_size, args.image_size)

        outputs = {}  # bytes of each stage's output
        for name, stage in model.named_children():
            stage.register_forward_hook(
                lambda _, __, out, name=name: outputs.update({name: out.nbytes})
            )
        with FlopCounterMode(display=False) as counter:
            model(images)
        counts = counter.get_flop_counts()  # of "Global", "ResNet", "ResNet.layer1", ...
        stages = {name: counts.get(f"{type(model).__name__}.{name}", {}) for name in outputs}
        flops = {name: sum(count.values()) for name, count in stages.items()}
        for name, stage in model.named_children():
            if args.of == "parameters":
                run.measure(
                    name, sum(p.numel() for p in stage.parameters()) / 1e6, "million parameters"
                )
            elif args.of == "flops":
                run.measure(name, flops.get(name, 0) / 1e6, "million operations per image, forward")
            elif name in outputs:
                run.measure(name, outputs[name], "bytes")


if __name__ == "__main__":
    main()
