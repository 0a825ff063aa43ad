"""The errors of number formats: in long sums, small updates and, on a GPU, split sums.

Submitted by a notebook: submit("dlojz/chapters/n02b_formats/experiments/formats.py").
"""

import argparse

import torch

from dlojz.chapters import session

FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TERMS = [2**n for n in range(15)]  # lengths of the sums
ROWS = 64  # sums of each length; their median error is logged
UPDATES, UPDATE = 500, 1e-3  # steps of a weight that begins at 1


def sum_in(dtype, terms):
    """Add the columns of `terms` one by one, with rounding; yield the sums at TERMS."""
    total = torch.zeros(len(terms), dtype=dtype)
    for count, column in enumerate(terms.T, 1):
        total = (total.float() + column).to(dtype)
        if count in TERMS:
            yield count, total.double()


def measure_sums(run):
    # Numbers of 8 significant bits: their products are exact in fp32, so only adding rounds.
    x, y = torch.rand(2, ROWS, TERMS[-1]).bfloat16().float()
    exact = (x.double() * y.double()).cumsum(1)
    for name, dtype in FORMATS.items():
        for count, total in sum_in(dtype, torch.ones(1, TERMS[-1])):
            run.measure(name, total.item(), "sum of ones", x=count)
        for count, total in sum_in(dtype, x * y):
            error = (total / exact[:, count - 1] - 1).abs().median().item()
            run.measure(name, error, "relative error of a dot product", x=count)


def measure_updates(run):
    for name, dtype in FORMATS.items():
        weight, update = torch.ones(1, dtype=dtype), torch.tensor([UPDATE], dtype=dtype)
        for step in range(UPDATES + 1):
            if step % 10 == 0:
                run.measure(name, weight.item(), f"weight, {UPDATE:g} less each step", x=step)
            weight -= update


def measure_reductions(run, device):
    """Measure a few long dot products, whose sums a GPU splits into parts."""
    flags, unit = torch.backends.cuda.matmul, "relative error of a matrix product"
    for terms in (2**n for n in range(10, 21, 2)):
        for name in ("fp16", "bf16"):
            x = torch.rand(16, terms, device=device).to(FORMATS[name])
            # The products add up to about 256 for any number of them: fp16 ends at 65,504.
            y = torch.rand(terms, 16, device=device).to(FORMATS[name]) * (1024 / terms)
            exact = x.double() @ y.double()
            for word, allowed in (("allowed", True), ("refused", False)):
                setattr(flags, f"allow_{name}_reduced_precision_reduction", allowed)
                error = ((x @ y).double() / exact - 1).abs().max().item()
                run.measure(name, error, unit, x=terms, variant=word)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    with session.begin(parser.parse_args()) as (run, device):
        torch.manual_seed(0)
        measure_sums(run)
        measure_updates(run)
        if device.type == "cuda":  # elsewhere the switches have no effect
            measure_reductions(run, device)


if __name__ == "__main__":
    main()
