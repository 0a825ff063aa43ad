"""Attention in several ways: time, memory and error by length; and which kernel answers, and why.

Submitted by a notebook: submit("dlojz/chapters/n10c_attention/experiments/attention.py").

A way that refuses, or that has too little memory, is logged with its error. The lengths are timed
from Python, so the shortest ones are limited by launches.
"""

import argparse
import re
import warnings
from contextlib import nullcontext
from functools import partial

import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.training import flags, imports

WAYS = ("naive", "compiled", "math", "efficient", "flash", "cudnn")
ON_GPU = {"lengths": [2**n for n in range(9, 15)], "batch_size": 4, "heads": 16, "at": 2048}
ON_GPU |= {"precision": "bf16", "ways": [*WAYS]}
ON_CPU = {"lengths": [128, 256, 512, 1024], "batch_size": 1, "heads": 4, "at": 256}
ON_CPU |= {"precision": "fp32", "ways": ["naive", "math", "flash"]}  # compiling takes 25 s
WIDTH = 64  # of a head
CHECKED = 256  # queries whose errors are computed
BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
MASKS = ("none", "causal", "boolean", "additive")
SIZES, FORMATS = (60, 80, 128, 256), ("fp32", "fp16", "bf16")


def naive(q, k, v):
    """Return softmax(q k^T / sqrt(d)) v, with its matrix of length x length in memory."""
    weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
    return weights @ v


def by(backend, q, k, v, **how):
    """Return attention by one of torch's kernels."""
    with sdpa_kernel(backend) if backend else nullcontext():
        return sdpa(q, k, v, **how)


def operands(shape, device, dtype):
    """Return queries, keys and values, all of them random."""
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def training(call, given):
    """Return the gradients of a call's operands; those of its output are the random values."""
    return torch.autograd.grad(call(*given), given, given[-1].detach())


def kept(call, given) -> int:
    """Return the bytes that a call keeps for its backward pass; shared storage counts once."""
    found = {}

    def note(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = call(*given)
    del out
    return sum(found.values())


def peak(call, given) -> dict:
    """Return the GPU's peak memory during a call, without what was there before; {} without one."""
    if not given[0].is_cuda:
        return {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training(call, given)
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def error(call, given) -> float:
    """Return the relative error of a few queries of a head, measured against float64."""
    q, k, v = (x.detach()[:1, :1] for x in given)
    few = (x.double() for x in (q[:, :, :CHECKED], k, v))
    return session.away([call(q, k, v)[:, :, :CHECKED]], [naive(*few)])


def timed(call, given, args) -> dict:
    """Return the milliseconds of the forward pass, and of both passes, by round."""
    device = given[0].device
    calls = {"ms": lambda: call(*given), "both_ms": lambda: training(call, given)}
    return session.in_turn(calls, device, args.rounds, session.TIMES, warm_up=1)


def ways(names) -> dict:
    """Return the ways that are compared, by name."""
    torch.compiler.reset()
    found = {"naive": naive, "compiled": torch.compile(naive, dynamic=False)}
    found |= {name: partial(by, backend) for name, backend in BACKENDS.items()}
    return {name: found[name] for name in names}


def attempt(call, *given) -> dict:
    """Return the fields of a call, or its error and the reasons that torch gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call(*given)
        except RuntimeError as failed:  # also where memory runs out
            first = imports.first_line(failed)
        torch.cuda.empty_cache()
    return {"error": "out of memory" if "out of memory" in first else first, "why": why(caught)}


def why(caught) -> list[str]:
    """Return the reasons of refusals, of torch's warnings, without the places in its source."""
    said = (re.sub(r"\s*\((Triggered|function) .*", "", str(w.message), flags=re.S) for w in caught)
    return [s for s in dict.fromkeys(said) if not re.search(r"because:?$|runtime disabled", s)]


def of_lengths(args, device, dtype):
    """Yield the fields of each way, for each length."""
    for length in tqdm(args.lengths, unit="length"):
        shape = (args.batch_size, args.heads, length, WIDTH)
        flops = 4 * args.batch_size * args.heads * length**2 * WIDTH
        for name, call in ways(args.ways).items():
            given = operands(shape, device, dtype)
            counters.clear()
            yield {"way": name, "length": length, "flops": flops} | attempt(
                lambda call=call, given=given: {
                    **timed(call, given, args),
                    **peak(call, given),
                    "kept_bytes": kept(call, given),
                    "off": error(call, given),
                    "replaced": counters["inductor"]["fuse_attention"],  # by SDPA, in compiling
                }
            )


def settings(precision):
    """Yield mask, width of a head and format: each is changed alone."""
    yield from ((mask, WIDTH, precision) for mask in MASKS)
    yield from (("none", size, precision) for size in SIZES)
    yield from (("none", WIDTH, other) for other in FORMATS if other != precision)


def masked(mask, length, device, dtype) -> dict:
    """Return the arguments for a mask; the boolean one and the additive one are random."""
    if mask in ("none", "causal"):
        return {"is_causal": mask == "causal"}
    made = torch.rand(length, length, device=device) < 0.5
    made.fill_diagonal_(True)  # a row without any would be NaN
    return {"attn_mask": made if mask == "boolean" else torch.randn_like(made, dtype=dtype)}


def of_backends(args, device):
    """Yield the kernel that answers in each setting, and each backend's time or refusal."""
    for mask, size, precision in tqdm([*settings(args.precision)], unit="setting"):
        dtype = session.DTYPES.get(precision, torch.float32)
        given = operands((args.batch_size, args.heads, args.at, size), device, dtype)
        how = masked(mask, args.at, device, dtype)
        about = {"mask": mask, "size": size, "format": precision}
        answers = SDPBackend(torch._fused_sdp_choice(*given, **how))
        about["answers"] = next((n for n, b in BACKENDS.items() if b == answers), answers.name)
        for name, backend in {"default": None, **BACKENDS}.items():
            call = partial(by, backend, **how)
            yield {"backend": name, **about} | attempt(timed, call, given, args)


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--lengths", type=positive, nargs="+", help="tokens of a sequence")
    parser.add_argument("--ways", choices=WAYS, nargs="+", help="ways to compare by length")
    parser.add_argument("--at", type=positive, help="tokens, where masks and formats are compared")
    parser.add_argument("-b", "--batch-size", type=positive, help="sequences")
    parser.add_argument("--heads", type=positive, help="heads of each sequence")
    parser.add_argument("--precision", choices=("fp32", *session.DTYPES), help="a format")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        torch.manual_seed(0)
        session.measure_product(run, device, args.precision, args.rounds)
        dtype = session.DTYPES.get(args.precision, torch.float32)
        for found in of_lengths(args, device, dtype):
            run.case(f"{found['way']}, {found['length']} tokens", **found)
        for found in of_backends(args, device):
            run.case(
                " ".join(str(found[n]) for n in ("backend", "mask", "size", "format")), **found
            )


if __name__ == "__main__":
    main()
