"""A cache of compiled code, and a run with another precision.

Submitted by a notebook: submit("dlojz/chapters/n09b_modes/experiments/stale.py").

Three processes compile the same small model, one after the other, with one cache, empty at first.
The first process runs under autocast in bf16, the second in fp16, and the third in fp16 with a tag
of its own in the cache's key.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from dlojz import idr_torch
from dlojz.chapters import session

CACHE = "TORCHINDUCTOR_CACHE_DIR"
PROCESSES = (("bf16", ""), ("fp16", ""), ("fp16", "fp16"))  # precision, tag
WIDTH = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process", nargs=2, metavar=("PRECISION", "TAG"), help="be one of them")
    args = parser.parse_args()
    device = idr_torch.device()
    if args.process:
        print(json.dumps(computed(*args.process, device)))
        return
    with session.begin(args, device) as (run, _), tempfile.TemporaryDirectory() as folder:
        for number, asked in enumerate(PROCESSES, 1):
            run.case(f"process {number}", **in_a_process(*asked, Path(folder)))


def in_a_process(precision, tag, folder):
    """Return the results of a process with this cache."""
    command = [sys.executable, __file__, "--process", precision, tag]
    own = os.environ | {CACHE: str(folder)}
    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return json.loads(done.stdout.splitlines()[-1])


def computed(precision, tag, device):
    """Compile a model, run it once, and return its distance from the eager result in fp64."""
    torch.compiler.config.cache_key_tag = tag
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2)))
    x = torch.randn(WIDTH, WIDTH, device=device)
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
        eager = forward(model, x, precision)
    found = forward(torch.compile(lambda x: model(x)), x, precision)
    found.float().sum().backward()  # a training step: the backward pass is compiled, too
    return {
        "asked": precision,
        "tag": tag,
        "computed": str(found.dtype).removeprefix("torch."),
        "from_cache": bool(counters["aot_autograd"]["autograd_cache_hit"]),
        "error": distance(found, exact),
        "eager_error": distance(eager, exact),
    }


def forward(model, x, precision):
    with torch.autocast(x.device.type, session.DTYPES[precision]):
        return model(x)


def distance(found, exact):
    """Return the relative distance from the exact result."""
    return ((found.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
