"""The meter of a job: the use of CPUs, memory and GPUs, sampled by its keeper from outside.

A sample reads the kernel's table of processes and a few counters of the GPUs. It takes
milliseconds, more on a machine with thousands of processes, where it is taken less often.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dlojz.jobs import processes
from dlojz.machine import nvml
from dlojz.runs.outside import Outside

EVERY_S = 1.0  # between samples
COST = 0.002  # of a CPU: the largest share that samples may take
KEEP_S = 5.0  # between two writes of the file
TICK_S, PAGE = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Meter:
    """The use of CPUs, memory and GPUs by a job, since the meter was made.

    devices: the job's, as UUIDs of GPUs, or "cpu". run: the folder of the job.
    """

    def __init__(self, devices: Iterable[str], run: Path = Path()):
        self._run, self._begin = run, time.monotonic()
        self._next, self._kept = self._begin, self._begin
        names = [name for name in devices if name != "cpu"]
        if names:
            nvml.ask("Init")
        self._gpus = [nvml.ask("DeviceGetHandleByUUID", name) for name in names]
        self._energy_j = self._energy()
        self._samples, self._cpu_s, self._memory, self._processes = 0, 0.0, None, 0
        self._use, self._gpu_memory, self._gpu_limit = [], None, None

    def look(self):
        """Take a sample if it is time for one, and write the figures from time to time."""
        begin = time.monotonic()
        if begin < self._next:
            return
        used = time.thread_time()
        with suppress(OSError):
            self._sample()
        cost = time.thread_time() - used
        self._next = begin + max(EVERY_S, cost / COST)
        if begin >= self._kept + KEEP_S:
            self._kept = begin
            self._write(self._cpu_s)

    def end(self, cpu_s: float, peak_memory_bytes: int):
        """Write the figures of a job that has ended.

        cpu_s, peak_memory_bytes: what the kernel says of all its processes, and of the largest.
        """
        if peak_memory_bytes > (self._memory or 0):  # between two samples, or before the first
            self._memory, self._processes = peak_memory_bytes, 1
        self._write(cpu_s)

    def _sample(self):
        found = processes.used()
        self._samples += 1
        self._cpu_s = TICK_S * sum(one.ticks for one in found)
        memory = PAGE * sum(one.pages for one in found)
        if found and memory > (self._memory or 0):
            self._memory, self._processes = memory, len(found)
        for gpu in self._gpus:
            if use := nvml.ask("DeviceGetUtilizationRates", gpu):
                self._use.append(use.gpu / 100)
            if memory := nvml.ask("DeviceGetMemoryInfo", gpu):
                self._gpu_memory = max(self._gpu_memory or 0, memory.used)
                self._gpu_limit = memory.total

    def _energy(self):
        """Return the joules that all GPUs have used; None without a GPU, or a counter."""
        found = [nvml.energy_j(gpu) for gpu in self._gpus]
        return sum(found) if found and None not in found else None

    def _write(self, cpu_s):
        energy, now = self._energy(), time.monotonic()
        known = None not in (energy, self._energy_j)
        with suppress(OSError):  # a full disk, or the folder was removed
            Outside(
                seconds=round(now - self._begin, 3),
                samples=self._samples,
                cpu_s=round(cpu_s, 3),
                peak_memory_bytes=self._memory,
                processes=self._processes,
                gpus=len(self._gpus),
                gpu_use=round(sum(self._use) / len(self._use), 4) if self._use else None,
                gpu_memory_bytes=self._gpu_memory,
                gpu_memory_limit_bytes=self._gpu_limit,
                energy_j=round(energy - self._energy_j, 3) if known else None,
            ).write(self._run)
