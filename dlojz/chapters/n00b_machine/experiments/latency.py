"""The latency of data, measured: from the first cache to memory, then storage and a GPU.

Submitted by a notebook: submit("dlojz/chapters/n00b_machine/experiments/latency.py").

A chain goes through a block of memory in random order: each cache line holds the address of the
next, so the core can neither predict nor overlap loads, and each takes its full latency. A block
larger than a cache is read from the next one. Beyond a few MB the latency includes the look-up of
the page (a TLB miss), as in any program. Then one core reads the same blocks in order.

Python is too slow for that, so the loops are C, compiled in the run's folder. Without a compiler
only the storage and the GPU are measured. Storage is measured in the run's folder, as by the
doctor: 4 KiB files from the page cache, a large file past it where the file system allows.
"""

import argparse
import ctypes
import time
from pathlib import Path

import torch

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.machine import facts

SOURCE = """
#include <stddef.h>
extern "C" void *chase(void *at, size_t loads) {
    for (size_t i = 0; i < loads; i++) at = *(void **)at;
    return at;
}
extern "C" unsigned long total(const unsigned long *block, size_t count, size_t times) {
    unsigned long sum = 0;
    for (size_t t = 0; t < times; t++) {
        for (size_t i = 0; i < count; i++) sum += block[i];
        __asm__ volatile("" ::: "memory");  // else one pass would be enough
    }
    return sum;
}
"""
LINE = 64  # bytes of a cache line
SMALLEST = 16 << 10
LOADS, READ_BYTES = 1 << 18, 1 << 28  # in one timing
COPY_BYTES, TINY_BYTES = 1 << 28, 8  # to a GPU


def loops(folder):
    """Return the compiled loops; None without a working compiler."""
    compiler = facts.software(()).get("compiler")
    if not compiler:
        return None
    source, library = Path(folder, "loops.cpp").absolute(), Path(folder, "loops.so").absolute()
    source.write_text(SOURCE, "utf-8")
    # O3 and the processor's own instructions, or a core would add more slowly than it reads.
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
    code, _, _ = facts.ask([compiler, *flags], timeout_s=60)
    if code != 0:
        return None
    found = ctypes.CDLL(str(library))
    found.chase.argtypes, found.chase.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    found.total.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    found.total.restype = ctypes.c_ulong
    return found


def chain(size):
    """Return a block of `size` bytes, whose lines hold each other's addresses in one cycle."""
    words = LINE // 8
    block = torch.zeros(size // 8, dtype=torch.int64)
    order = torch.randperm(size // LINE)
    block[order * words] = block.data_ptr() + order.roll(-1) * LINE
    return block


def sizes(largest):
    """Return the bytes of the blocks: two in each doubling."""
    size = SMALLEST
    while size <= largest:
        yield size
        if size * 3 // 2 <= largest:
            yield size * 3 // 2
        size *= 2


def nanoseconds(call, rounds):
    """Return the fewest nanoseconds of a call after a warm-up, because disturbances only add."""
    call()
    spent = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        call()
        spent.append(time.perf_counter_ns() - begin)
    return min(spent)


def memory(run, found, largest, rounds):
    """Measure the loads of a chain, and reading in order, in blocks of each size."""
    for size in sizes(largest):
        block = chain(size)
        loads = max(LOADS, 2 * size // LINE) if size < 1 << 22 else LOADS
        # Each timing continues at the end of the last one, or a large block would stay cached.
        at = [block.data_ptr()]

        def follow(at=at, loads=loads):
            at[0] = found.chase(at[0], loads)

        run.measure("load", nanoseconds(follow, rounds) / loads, "ns", x=size)
        times = max(1, READ_BYTES // size)
        call = (block.data_ptr(), size // 8, times)
        spent = nanoseconds(lambda call=call: found.total(*call), rounds)
        run.measure("read in order", size * times / spent, "GB/s", x=size)


def gpu(run, device, rounds):
    """Measure copies from the host, tiny and large, and a copy inside the GPU's memory."""
    for what, size in (("tiny copy to the GPU", TINY_BYTES), ("copy to the GPU", COPY_BYTES)):
        here = torch.zeros(size, dtype=torch.uint8).pin_memory()
        there = torch.empty_like(here, device=device)

        def copy(here=here, there=there):
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize()

        spent = nanoseconds(copy, rounds)
        tiny = size == TINY_BYTES
        run.measure(what, spent if tiny else size / spent, "ns" if tiny else "GB/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=256, help="MiB, of the largest block")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the fastest counts")
    args = parser.parse_args()
    device = idr_torch.device()
    with session.begin(args, torch.device("cpu")) as (run, _):
        torch.manual_seed(0)
        found = loops(run.folder)
        cpu = facts.cpu()
        run.case("processor", caches=cpu.get("caches", []), compiled=found is not None)
        if found:
            memory(run, found, args.largest << 20, args.rounds)
        run.case("storage", **facts.storage(run.folder))
        if device.type == "cuda":
            gpu(run, device, args.rounds)


if __name__ == "__main__":
    main()
