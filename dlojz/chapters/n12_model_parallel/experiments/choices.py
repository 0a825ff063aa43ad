"""A map of the plans that are predicted fastest, by model, number of GPUs and network.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/choices.py").

No GPU is needed, but some minutes: each cell of the map tries plans until one fits, by running
steps of each on tensors without memory.
"""

import argparse
import time
import warnings
from itertools import product

import torch
from tqdm import tqdm

from dlojz.chapters import session
from dlojz.chapters.n12_model_parallel import choosing, giants


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, [*choosing.known()]
    add("--models", nargs="+", default=names, choices=names)
    add("--gpus", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256, 1024])
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        warnings.filterwarnings("ignore")  # DDP's on tensors without values
        for cell in tqdm([*product(args.models, args.gpus, giants.NETWORKS)], unit="cell"):
            (name, gpus, network), begin = cell, time.perf_counter()
            rates = giants.rates(giants.NETWORKS[network])
            found = choosing.choose(name, gpus, rates) or {"plan": None}
            seconds = round(time.perf_counter() - begin, 2)
            where = {"model": name, "gpus": gpus, "network": network}
            run.case(f"{name}, {gpus} GPUs, {network}", **where, **found, took_s=seconds)


if __name__ == "__main__":
    main()
