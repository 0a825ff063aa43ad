"""Meters of energy, memory and disturbance; None where the hardware has no sensor.

Nothing here is read inside a training step: the run log reads the sensors at the two ends of a
measured window, and the memory's peak once, at the end.
"""

import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from dlojz.machine import nvml

PROC = Path("/proc")
TREE = "DLOJZ_TREE"  # the variable with the process whose tree is the run, if it is no parent
BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal
# The bits of NVML's clocks event reasons (nvml.h). Those left out are not a disturbance: 0x1 idle,
# 0x2 clocks set by a user, 0x10 synchronised cards, 0x100 a display's clocks, 0x400 top voltage.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat, seen by the driver",
    0x40: "heat, seen by the hardware",
    0x80: "power brake",
    0x200: "board limit",
}


class Reading(NamedTuple):
    """The values of the sensors at one moment; None where there is no sensor."""

    at_s: float
    energy_j: float | None
    others_s: float | None  # CPU time of other processes
    sm_clock_mhz: int | None
    reasons: int | None  # NVML's bits


MIN_OTHERS_WINDOW_S = 0.5  # the counters tick by 10 ms on each CPU


class Sensors:
    """The sensors as they were at the beginning of a measured window, to compare with its end."""

    def __init__(self, device, size: int = 1):
        """Read the sensors.

        device: a torch.device. size: processes of this run, which do not count as disturbance.
        """
        self._device = device
        # torchrun and Slurm start the processes of a run from one parent, so its tree is the run.
        self._root = os.getpid() if size == 1 else int(os.environ.get(TREE) or os.getppid())
        self._begin = self._read()

    def window(self) -> dict:
        """Return the fields of a window that ends now, without those that cannot be read.

        energy_j: used by the GPU.
        others_cpu: how many of this process's CPUs other processes kept busy, on average.
        sm_clock_mhz: of the GPU, at the beginning and at the end.
        throttled: why the GPU had lowered its clock, at either end.
        """
        begin, end = self._begin, self._read()
        fields = {}
        if None not in (begin.energy_j, end.energy_j):
            fields["energy_j"] = round(end.energy_j - begin.energy_j, 3)
        seconds = end.at_s - begin.at_s
        if None not in (begin.others_s, end.others_s) and seconds >= MIN_OTHERS_WINDOW_S:
            mean = (end.others_s - begin.others_s) / seconds
            # The counters tick by 10 ms, so the mean may come out just below 0.
            fields["others_cpu"] = round(max(0.0, mean), 3)
        if None not in (begin.sm_clock_mhz, end.sm_clock_mhz):
            fields["sm_clock_mhz"] = [begin.sm_clock_mhz, end.sm_clock_mhz]
        if None not in (begin.reasons, end.reasons):
            seen = begin.reasons | end.reasons
            fields["throttled"] = [word for bit, word in THROTTLES.items() if seen & bit]
        return fields

    def _read(self):
        card = _card(str(self._device)) if self._device.type == "cuda" else None
        return Reading(
            time.perf_counter(),
            None if card is None else nvml.energy_j(card),
            cpu_seconds_of_others(self._root),
            *((None, None) if card is None else nvml.clock(card)),
        )


def cpu_seconds_of_others(root: int) -> float | None:
    """Return the CPU time used outside the tree of `root`, on the CPUs that this process may use.

    It counts from an unknown origin, so only differences are meaningful. Linux only. /proc/stat
    covers the whole machine, so in a container the neighbours count too, as they should. Zeros
    there, as some sandboxes show, count as unknown; a cgroup's quota is not taken into account.
    """
    try:
        cpus = os.sched_getaffinity(0)
        lines = re.findall(r"^cpu(\d+) (.+)$", (PROC / "stat").read_text(encoding="utf-8"), re.M)
        ours = _cpu_seconds(root, cpus)
    except (AttributeError, OSError, psutil.Error):
        return None
    columns = [[int(n) for n in line.split()] for cpu, line in lines if int(cpu) in cpus]
    ticks = sum(c[i] for c in columns for i in BUSY if i < len(c))
    return ticks / os.sysconf("SC_CLK_TCK") - ours if ticks else None


def _cpu_seconds(root: int, cpus: set[int]) -> float:
    """Return the CPU time of a process and its descendants, living or ended, on these CPUs."""
    top, seconds = psutil.Process(root), 0.0
    for process in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if cpus & set(process.cpu_affinity()):  # ranks may be bound to different CPUs
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


_card = cache(nvml.handle_of)  # it stays the same


def host_memory() -> dict:
    """Return `host_memory_bytes` of this process with its loader's workers; {} if hidden.

    Memory that several processes share counts once (Linux's PSS): the data set that a forked worker
    inherits, batches in transit. Takes some milliseconds per process.
    """
    total = _reported(f"{os.getpid()}/smaps_rollup", "Pss")
    if total is None:
        return {}
    for child in psutil.Process().children(recursive=True):
        total += _reported(f"{child.pid}/smaps_rollup", "Pss") or 0  # it may just have ended
    return {"host_memory_bytes": total}


def _reported(file: str, name: str) -> int | None:
    """Return the bytes of a line in a file of /proc; None where the kernel does not report them."""
    try:
        text = (PROC / file).read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
    return int(line[1]) * 1024 if line else None


def peak_memory(device) -> dict:
    """Return the peak memory in bytes, by kind.

    On a GPU: `device_peak_bytes` of the tensors; `device_reserved_bytes` of the allocator's pool,
    which is what nvidia-smi shows and what runs out; `device_total_bytes` of the card. Everywhere
    that the kernel reports it: `process_peak_bytes`, the resident set of this process without its
    workers.
    """
    found = {}
    if device.type == "cuda":
        import torch

        found = {
            "device_peak_bytes": torch.cuda.max_memory_allocated(device),
            "device_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
    if resident := _reported("self/status", "VmHWM"):
        found["process_peak_bytes"] = resident
    return found
