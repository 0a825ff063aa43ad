"""The roofline of a model: the speed of each layer, beside this machine's limits.

Submitted by a notebook:

    dlojz/chapters/n04b_roofline/experiments/roofline.py
    --model resnet18


Two ceilings are measured: the speed of a copy in memory, and that of a large matrix product. Then
each layer of the model is timed alone, forward, on inputs of its own shape. The work and traffic of
a layer follow from the shapes: each input, output and weight moves once, as if caches had no limit.
With --ceilings there is no model, and the matrix product is measured in each format of the device.
(Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.)
"""

import argparse
from collections import Counter

import torch
import torchvision

from dlojz.chapters import session
from dlojz.machine import facts

# Approximate operations per output element, for layers that are not matrix products.
PER_ELEMENT = {"BatchNorm2d": 8, "ReLU": 1, "Hardswish": 4, "GELU": 8, "LayerNorm": 8}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, 64)
    parser.add_argument("--ceilings", action="store_true", help="only these, in each format")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        torch.backends.cudnn.benchmark = True
        dtype = session.DTYPES.get(args.precision, torch.float32)
        with torch.no_grad():
            session.measure_memory(run, device, args.rounds)
            if args.ceilings:
                for name in formats(device):
                    session.measure_product(run, device, name, args.rounds, variant=name)
                return
            session.measure_product(run, device, args.precision, args.rounds)
            found = layers(args, device, dtype)
            times = [timed(*each, device, dtype, args.rounds) for each in found.items()]
            run.case("layers", layers=times)


def formats(device):
    """Return the formats in which this device multiplies matrices without emulation."""
    if torch.version.hip:
        return ("fp32", "fp16", "bf16")
    if device.type == "cuda":
        modern = torch.cuda.get_device_capability(device) >= (8, 0)
        return ("fp32", "tf32", "fp16", "bf16") if modern else ("fp32", "fp16")
    native = {"AVX512_BF16", "AMX", "BF16"}.intersection(facts.cpu().get("instructions", ()))
    return ("fp32", "bf16") if native else ("fp32",)


def layers(args, device, dtype):
    """Return the model's layers with their input shapes, and the count of each."""
    model = torchvision.models.get_model(args.model, weights=None).to(device, dtype)
    model = model.to(memory_format=torch.channels_last)
    found, known = Counter(), {}

    def note(layer, inputs):
        key = (repr(layer), tuple(inputs[0].shape))
        found[known.setdefault(key, (layer, tuple(inputs[0].shape)))] += 1

    for layer in model.modules():
        if not any(True for _ in layer.children()):
            layer.register_forward_pre_hook(note)
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    model(torch.randn(shape, device=device, dtype=dtype))
    for layer in model.modules():
        layer._forward_pre_hooks.clear()
    return found


def timed(what, count, device, dtype, rounds):
    """Return a layer's kind, operations, bytes and milliseconds."""
    layer, shape = what
    x = torch.randn(shape, device=device, dtype=dtype)
    if x.ndim == 4:
        x = x.to(memory_format=torch.channels_last)
    out = layer(x)
    weights = sum(p.numel() for p in layer.parameters())
    return {
        "kind": type(layer).__name__,
        "input": list(shape),
        "count": count,
        "flops": operations(layer, x, out),
        "bytes": (x.numel() + out.numel() + weights) * x.element_size(),
        "ms": session.median_ms(lambda: layer(x), device, rounds),
    }


def operations(layer, x, out):
    """Return the multiplications and additions of a layer; for pooling, one per input."""
    if isinstance(layer, torch.nn.Conv2d):
        return 2 * out.numel() * layer.weight[0].numel()
    if isinstance(layer, torch.nn.Linear):
        return 2 * out.numel() * layer.in_features
    if "Pool" in type(layer).__name__:
        return x.numel()
    return out.numel() * PER_ELEMENT.get(type(layer).__name__, 1)


if __name__ == "__main__":
    main()
