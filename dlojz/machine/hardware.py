"""The vendors' figures of hardware: GPUs and processors of hardware.toml, with their documents.

Notebook 00b shows it beside what was measured. Nothing here is measured, and a figure
that no document gives is None. tiers.toml is a second table: how far away data can be.
"""

import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """One device as it is sold. Its fields are explained on top of hardware.toml."""

    name: str
    kind: str
    year: int
    match: str
    read: datetime.date
    sources: list
    tflops: Mapping = field(default_factory=dict)
    per_cycle: Mapping = field(default_factory=dict)
    seen: list = field(default_factory=list)
    note: str = ""
    devices: int = 1  # that torch sees
    clock_mhz: float | None = None
    memory: str = ""  # its kind: HBM3, DDR5, ...
    memory_gb: float | None = None
    memory_gb_per_s: float | None = None
    links_gb_per_s: float | None = None
    power_w: float | None = None
    cache_mb: float | None = None
    units: int | None = None
    units_full: int | None = None
    tensor_cores_per_unit: int | None = None
    warps_per_unit: int | None = None
    registers_per_unit: int | None = None
    shared_kb_per_unit: float | None = None

    @property
    def derived(self) -> bool:
        """Return whether the speeds follow from cores and clock, as no vendor gives them."""
        return bool(self.per_cycle)

    def speed(self, name: str) -> float | None:
        """Return the TFLOP/s in a format; None if it is not sold, or not known."""
        if self.derived:
            per_cycle = self.per_cycle.get(name)
            return per_cycle and per_cycle * self.units * self.clock_mhz / 1e6
        return self.tflops.get(name)

    def ridge(self, name: str) -> float | None:
        """Return the operations per byte from which arithmetic, not memory, is the limit."""
        speed = self.speed(name)
        return speed and self.memory_gb_per_s and 1000 * speed / self.memory_gb_per_s


@dataclass(frozen=True)
class Tier:
    """One place where data can be: how long the first byte takes, and how fast more come."""

    name: str
    read: datetime.date
    sources: list
    seen: list = field(default_factory=list)
    latency_ns: float | None = None
    gb_per_s: float | None = None
    note: str = ""


def sold() -> list[Hardware]:
    """Return the devices of hardware.toml, in its order."""
    return [Hardware(**row) for row in _rows("hardware.toml")]


def tiers() -> list[Tier]:
    """Return the places of data of tiers.toml, in its order."""
    return [Tier(**row) for row in _rows("tiers.toml")]


def same_as(device_name: str, rows: Sequence[Hardware]) -> Hardware | None:
    """Return the row of a device by the name that torch gives it; None if no row is that device."""
    return next((row for row in rows if re.search(row.match, device_name)), None)


def _rows(name):
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return tomllib.loads(text).values()
