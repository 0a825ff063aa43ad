"""ReLU in C++, or in CUDA on a GPU, compiled from a string: its time, and what breaks it.

Submitted by a notebook: submit("dlojz/chapters/n10_kernels/experiments/inline.py").

torch's load_inline writes the string to a file, and has ninja call the compilers. The function is
then given inputs that it was not written for, and the build is broken in three ways.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils import cpp_extension

from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.training import flags, imports

ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
WAIT_S = 2  # for a build that never begins
# torch/extension.h has all of torch in it, and takes longer to compile than all of these.
HEADERS = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
"""
IN_CPP = """
at::Tensor relu(at::Tensor x) {
  at::Tensor out = at::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t count = x.numel();
  for (int64_t i = 0; i < count; ++i)
    to[i] = from[i] > 0 ? from[i] : 0;
  return out;
}
"""
IN_CUDA = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void relu_kernel(const float* from, float* to, int64_t count) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count)
    to[i] = from[i] > 0 ? from[i] : 0;
}

at::Tensor relu(at::Tensor x) {
  at::Tensor out = at::empty_like(x);
  const int threads = 256;
  const int64_t blocks = (x.numel() + threads - 1) / threads;
  relu_kernel<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""


# The build ---------------------------------------------------------------------------------------


def build(folder, language: str, headers: str = HEADERS) -> Callable:
    """Return the function, compiled in a folder, which keeps it for the next time."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    own = {"cpp_sources": [headers, IN_CPP]}
    if language == "CUDA":
        own = {"cpp_sources": [headers, "at::Tensor relu(at::Tensor x);"], "cuda_sources": IN_CUDA}
    return cpp_extension.load_inline(
        "own_relu",
        functions=["relu"],
        build_directory=str(folder),
        extra_cflags=["-O3"],
        no_implicit_headers=True,
        **own,
    ).relu


def again(folder, language: str) -> float:
    """Return the seconds of the same build in another process."""
    run = subprocess.run(
        [sys.executable, __file__, "--again", folder, language],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return float(run.stdout.split()[-1])


def said(error: Exception) -> str:
    """Return the line of an error that tells its cause: a compiler's, or else the first."""
    lines = [line for line in str(error).splitlines() if "error:" in line]
    return lines[0].partition("error:")[2].strip() if lines else imports.first_line(error)


@contextmanager
def without(program: str):
    """Hide a program from this process."""
    path = os.environ["PATH"]
    folders = [f for f in path.split(os.pathsep) if not Path(f, program).exists()]
    os.environ["PATH"] = os.pathsep.join(folders)
    try:
        yield
    finally:
        os.environ["PATH"] = path


def missing_header(folder, language):
    """Build with a header that is not there."""
    build(folder, language, HEADERS + "#include <torch/extensions.h>\n")


def no_ninja(folder, language):
    """Build without the program that calls the compilers."""
    with without("ninja"):
        build(folder, language)


def stale_lock(folder, language):
    """Build where a job that was killed has left its lock; raise TimeoutError."""
    Path(folder).mkdir()
    lock = Path(folder, "lock")
    lock.touch()
    thread = threading.Thread(target=ends, args=(build, folder, language), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    waited = thread.is_alive()
    lock.unlink()  # the thread then finds nothing built, and ends
    thread.join()
    if waited:
        raise TimeoutError(f"nothing after {WAIT_S} s: it waits until {lock.name} is removed")


def ends(call, *args):
    """Call a function, whatever becomes of it."""
    with suppress(ImportError, RuntimeError, OSError):
        call(*args)


BREAKS = {
    "a header that is not there": missing_header,
    "no ninja": no_ninja,
    "the lock of a killed job": stale_lock,
}


# The inputs --------------------------------------------------------------------------------------


def inputs(device) -> dict[str, torch.Tensor]:
    """Return inputs that the function was not written for, by name."""
    x = torch.randn(64, 48, device=device)
    with_nan = x.clone()
    with_nan[3, 5] = torch.nan
    return {
        "as it was written for": x,
        "transposed": x.T,
        "every other column": x[:, ::2],
        "float64": x.double(),
        "one number is NaN": with_nan,
        "no numbers": x[:0],
        "weights to train": x.clone().requires_grad_(),
    }


def given(relu, x) -> str:
    """Return the result of an input, compared with torch's ReLU: "right", or what is not."""
    try:
        out = relu(x)
    except RuntimeError as error:
        return said(error)
    expected = torch.relu(x)
    if not torch.equal(out.nan_to_num(7), expected.nan_to_num(7)):
        wrong = (out.nan_to_num(7) != expected.nan_to_num(7)).sum().item()
        return f"wrong, without an error: {wrong:,} of {out.numel():,} numbers"
    if expected.requires_grad and not out.requires_grad:
        return "wrong, without an error: no gradient"
    return "right"


# The times ---------------------------------------------------------------------------------------


def times(run, relu, device, rounds):
    """Log the time of this function, and of torch's, on random numbers."""

    def make():
        return (torch.randn(ELEMENTS[device.type], device=device),)

    operands = timing.copies(make, device)
    calls = {"ours": relu, "torch.relu": torch.relu}
    cycles = {name: timing.Cycle(call, operands) for name, call in calls.items()}
    least = 2 * session.size(operands[0][0])
    for name, ms in timing.by_call(cycles, device, rounds).items():
        run.case(name, what="time", ms=ms, least=least)


def measured(run, device, rounds):
    """Log the build, the times, the inputs and the broken builds."""
    language = "CUDA" if device.type == "cuda" and cpp_extension.CUDA_HOME else "C++"
    where = device if language == "CUDA" else torch.device("cpu")
    folder = Path(tempfile.mkdtemp(prefix="dlojz-inline-"))
    try:
        built = []
        first = session.seconds(lambda: built.append(build(folder / "own", language)), where)
        run.case("build", what="build", language=language, first_s=first)
        with torch.no_grad():
            timing.keep_pages()
            times(run, built[0], where, rounds)
        for name, x in inputs(where).items():
            run.case(name, what="input", result=given(built[0], x))
        for number, (name, broken) in enumerate(BREAKS.items()):
            try:
                broken(folder / str(number), language)
            except (RuntimeError, OSError) as error:  # TimeoutError is one of the latter
                run.case(name, what="broken", result=said(error))
            else:
                run.case(name, what="broken", result="built")
        run.case("again", what="again", again_s=again(folder / "own", language))
    except (RuntimeError, OSError) as error:  # no compiler, no ninja, no nvcc
        run.case("no build", what="no build", language=language, result=said(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.add_argument("--again", nargs=2, help=argparse.SUPPRESS)  # folder, language
    args = parser.parse_args()
    if args.again:
        print(session.seconds(lambda: build(*args.again), torch.device("cpu")))
        return
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # where pip puts ninja
    with session.begin(args) as (run, device):
        torch.manual_seed(0)
        measured(run, device, args.rounds)


if __name__ == "__main__":
    main()
