"""Convolutional networks of equally many parameters: what each learns in its seconds and joules.

Submitted by a notebook: submit("dlojz/chapters/n10c_attention/experiments/families.py").

Dense against depthwise, wide against deep, on the drawings of the course. Each network tries the
same learning rates, and trains in several lengths with seeds of its own. On a GPU its passes are
CUDA graphs: launches would take longer than the kernels of a small network.
"""

import argparse
import time
from itertools import product

import torch
from torch import nn
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import resident, session
from dlojz.machine import meters
from dlojz.training import data, flags

ON_GPU = {"image_size": 64, "classes": 24, "images_per_class": 400, "val_per_class": 100}
ON_GPU |= {"parameters": 2_000_000, "batch_size": 256, "lengths": [3, 6, 12], "seeds": 3}
ON_GPU |= {"rates": [0.002, 0.005, 0.0125]}
# About two minutes on one core.
ON_CPU = {"image_size": 24, "classes": 6, "images_per_class": 100, "val_per_class": 50}
ON_CPU |= {"parameters": 125_000, "batch_size": 16, "lengths": [2, 4, 8], "seeds": 3}
ON_CPU |= {"rates": [0.005, 0.0125]}
STAGES = 3  # each with half of the pixels, and twice the channels, of the one before
LAYERS = {"dense": 3, "depthwise": 3, "wide": 1, "deep": 9}  # of each stage
TUNING_SEED = 100
DECAY = 0.05


class Layer(nn.Module):
    """A convolution of 3 x 3, with a shortcut around it where nothing changes its shape."""

    def __init__(self, inputs, outputs, stride, depthwise):
        super().__init__()
        how = {"padding": 1, "stride": stride, "bias": False}
        if depthwise:
            self.conv = nn.Sequential(
                nn.Conv2d(inputs, inputs, 3, groups=inputs, **how),
                nn.BatchNorm2d(inputs),
                nn.ReLU(),
                nn.Conv2d(inputs, outputs, 1, bias=False),
            )
        else:
            self.conv = nn.Conv2d(inputs, outputs, 3, **how)
        self.norm, self.same = nn.BatchNorm2d(outputs), inputs == outputs and stride == 1

    def forward(self, x):
        out = self.norm(self.conv(x))
        return (out + x if self.same else out).relu()


class Network(nn.Module):
    """A network of one family; in 16 bits on a GPU."""

    def __init__(self, family, width, classes):
        super().__init__()
        layers, inputs = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width)], width
        for stage, layer in product(range(STAGES), range(LAYERS[family])):
            stride, outputs = (2 if stage and not layer else 1), width << stage
            layers.append(Layer(inputs, outputs, stride, family == "depthwise"))
            inputs = outputs
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.layers = nn.Sequential(*layers, *pool, nn.Linear(inputs, classes))

    def forward(self, images):
        on_gpu = images.device.type == "cuda"
        images = data.normalize(images).to(memory_format=torch.channels_last)
        # A graph may not keep autocast's copies of the weights: the next step has others.
        with torch.autocast(images.device.type, torch.bfloat16, on_gpu, cache_enabled=False):
            return self.layers(images)


def parameters(model) -> int:
    """Return the number of a model's parameters."""
    return sum(weight.numel() for weight in model.parameters())


def width_of(family, most, classes) -> int:
    """Return the largest width, a multiple of 8, with at most that many parameters."""
    width = 8
    with torch.device("meta"):
        while parameters(Network(family, width + 8, classes)) <= most:
            width += 8
    return width


def train(family, width, rate, seed, epochs, args, images, device) -> dict:
    """Train a network once, and return its accuracy, and the seconds and joules of its updates.

    core_s: seconds of the processor, which other programs on it hardly change.
    """
    torch.manual_seed(seed)
    model = Network(family, width, args.classes).to(device, memory_format=torch.channels_last)
    ways, labels = images["train"]
    size = args.image_size, args.batch_size
    loader = resident.Resident(ways["usual"], labels, *size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=DECAY, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * len(loader))
    if args.graphs and device.type == "cuda":
        record(model, next(iter(loader))[0])
    session.wait(device)
    sensors, begin = meters.Sensors(device), (time.perf_counter(), time.process_time())
    for loader.epoch in range(epochs):
        for batch, answers in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), answers, label_smoothing=0.1).backward()
            optimizer.step()
            scheduler.step()
    session.wait(device)
    found = {"seconds": time.perf_counter() - begin[0], "core_s": time.process_time() - begin[1]}
    found["images"] = epochs * len(loader) * size[1]
    joules = sensors.window().get("energy_j")
    found |= {} if joules is None else {"joules": joules}
    return found | {"accuracy": accuracy(model, images["val"], args)}


def record(model, batch):
    """Let the passes of a model in training be CUDA graphs; its statistics stay as they are."""
    kept = [buffer.clone() for buffer in model.buffers()]
    torch.cuda.make_graphed_callables(model, (batch.clone(),))
    for buffer, before in zip(model.buffers(), kept, strict=True):
        buffer.copy_(before)


@torch.no_grad()
def accuracy(model, images, args) -> float:
    """Return the share of images whose class has the highest logit."""
    ways, labels = images
    model.eval()
    loader = resident.Resident(ways["usual"], labels, args.image_size, resident.VAL_BATCH)
    right = sum((model(batch).argmax(1) == answers).sum() for batch, answers in loader)
    return right.item() / len(labels)


def about(family, width, args, device) -> dict:
    """Return the family, width, layers, parameters and operations of a network."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Network(family, width, args.classes).to(device)
    images = torch.randint(0, 256, (1, 3, *[args.image_size] * 2), dtype=torch.uint8, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(images)
    found = {"family": family, "width": width, "layers": STAGES * LAYERS[family]}
    return found | {"parameters": parameters(model), "flops": counter.get_total_flops()}


def trainings(args, images, device, note):
    """Yield the fields of each training: those that choose a rate, and those that count."""
    for family in LAYERS:
        width = width_of(family, args.parameters, args.classes)
        fields, given = about(family, width, args, device), (args, images, device)
        tried = {}
        for rate in args.rates if len(args.rates) > 1 else ():
            found = train(family, width, rate, TUNING_SEED, args.lengths[0], *given)
            tried[rate] = found["accuracy"]
            note()
            yield {**fields, "phase": "tuning", "rate": rate, "epochs": args.lengths[0], **found}
        rate = max(tried, key=tried.get, default=args.rates[0])
        for epochs, seed in product(args.lengths, range(args.seeds)):
            found = train(family, width, rate, seed, epochs, *given)
            note()
            yield {
                **fields,
                "phase": "fresh",
                "rate": rate,
                "epochs": epochs,
                "seed": seed,
                **found,
            }


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    add = parser.add_argument
    add("--image-size", type=positive, help="pixels")
    add("--classes", type=positive, help="number of classes to draw")
    add("--images-per-class", type=positive, help="images of each class for training")
    add("--val-per-class", type=positive, help="images of each class for validation")
    add("--parameters", type=flags.at_least(2000), help="parameters of a network, at most")
    add("-b", "--batch-size", type=positive, help="images of an update")
    add("--lengths", type=positive, nargs="+", help="epochs of the trainings")
    add(
        "--rates",
        type=float,
        nargs="+",
        help="learning rates to choose from, with the first length",
    )
    graphs = argparse.BooleanOptionalAction
    add("--graphs", action=graphs, default=True, help="CUDA graphs of both passes, on a GPU")
    add("--seeds", type=positive, help="trainings of each length")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        images = resident.draw(args, device)
        with tqdm(unit="training") as bar:
            for number, found in enumerate(trainings(args, images, device, bar.update)):
                run.case(f"{found['family']} {number}", **found)


if __name__ == "__main__":
    main()
