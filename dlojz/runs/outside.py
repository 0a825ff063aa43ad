"""A job as its keeper sees it from outside, whatever it runs: outside.json in its folder."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dlojz.course import FileError, read_table, write_atomically

FILE = "outside.json"


@dataclass(frozen=True)
class Outside:
    """The use of CPUs, memory and GPUs by a job so far. A figure without a counter is None.

    The samples are a second or more apart, so a peak between two of them is not seen.
    """

    seconds: float  # since its start
    samples: int
    cpu_s: float  # of all its processes, also of those that have ended
    peak_memory_bytes: int | None = None  # resident: the sum over its processes
    processes: int = 0  # that there were then; each counts what it shares with the others
    gpus: int = 0  # that it held
    gpu_use: float | None = None  # mean share of the time in which a kernel ran, of all its GPUs
    gpu_memory_bytes: int | None = None  # peak of the fullest GPU, with what the driver takes
    gpu_memory_limit_bytes: int | None = None  # of a GPU
    energy_j: float | None = None  # of its GPUs

    @property
    def busy_cpus(self) -> float:
        return self.cpu_s / self.seconds if self.seconds else 0.0

    @property
    def in_short(self) -> str:
        """Return the figures for a line of a table: "1.8 CPUs, 2.1 GB, GPU 43 %"."""
        words = [f"{self.busy_cpus:.2g} CPUs"]
        if self.peak_memory_bytes:
            words.append(f"{self.peak_memory_bytes / 1e9:.2g} GB")
        if self.gpu_use is not None:
            words.append(f"GPU {self.gpu_use:.0%}")
        return ", ".join(words)

    def write(self, run: Path):
        """Write it into a job's folder."""
        write_atomically(run / FILE, json.dumps(asdict(self)))


def read(run: Path) -> Outside | None:
    """Return the figures of the job in this folder; None without a file, or with a torn one."""
    with suppress(FileError, KeyError, OSError, TypeError):
        found = read_table(run / FILE)
        known = {field.name: found[field.name] for field in fields(Outside)}
        if all(value is None or isinstance(value, int | float) for value in known.values()):
            return Outside(**known) if None not in (known["seconds"], known["cpu_s"]) else None
    return None
