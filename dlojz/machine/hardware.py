"""The vendors' figures of hardware: GPUs and processors of hardware.toml, with their documents.

Notebook 00b shows it beside what was measured. Nothing here is measured, and a figure
that no document gives is None. TIERS is a second table: how far away data can be.
"""

import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

FILE = Path(__file__).with_name("hardware.toml")
TIERS = Path(__file__).with_name("tiers.toml")
BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8}
FORMATS = tuple(BITS)  # the order of all tables
KINDS = ("gpu", "cpu")


class HardwareError(ValueError):
    """An error in a table of hardware: the file, the key, what was found and what was expected."""


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


def sold(path: Path = FILE) -> list[Hardware]:
    """Return the devices of a file, in its order. Raises HardwareError."""
    return _rows(path, Hardware)


def tiers(path: Path = TIERS) -> list[Tier]:
    """Return the places of data in a file, in its order. Raises HardwareError."""
    return _rows(path, Tier)


def same_as(device_name: str, rows: Sequence[Hardware]) -> Hardware | None:
    """Return the row of a device by the name that torch gives it; None if no row is that device."""
    return next((row for row in rows if re.search(row.match, device_name)), None)


def _rows(path, kind):
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path}: {error}; expected TOML") from error
    return [_row(kind, f"{path}: [{key}]", table) for key, table in tables.items()]


def _row(kind, where, table):
    """Return one checked row; `where` begins each error."""
    known = {f.name: f for f in fields(kind)}
    if not isinstance(table, dict):
        raise HardwareError(f"{where} is {table!r}; expected a table")
    for key in table:
        if key not in known:
            raise HardwareError(f"{where} {key}: unknown; expected one of {', '.join(known)}")
    for key, f in known.items():
        if key not in table and f.default is MISSING and f.default_factory is MISSING:
            raise HardwareError(f"{where} {key}: missing")
    for key, value in table.items():
        _check(f"{where} {key}", key, value)
    row = kind(**table)
    if kind is Hardware and row.derived and not (row.units and row.clock_mhz):
        raise HardwareError(f"{where} per_cycle: expected units and clock_mhz beside it")
    return row


def _check(where, key, value):
    if key in ("sources", "seen"):
        good = isinstance(value, list) and value and all(_is_link(v) for v in value)
        expected = "a list of https:// addresses"
    elif key == "read":
        good, expected = type(value) is datetime.date, "a date, such as 2026-11-23"
    elif key == "kind":
        good, expected = value in KINDS, f"one of {', '.join(KINDS)}"
    elif key in ("tflops", "per_cycle"):
        good = isinstance(value, dict) and all(n in BITS and _above_0(v) for n, v in value.items())
        expected = f"numbers above 0, by format: {', '.join(FORMATS)}"
    elif key in ("name", "note", "match"):
        good, expected = isinstance(value, str) and bool(value), "a text"
    else:
        good, expected = _above_0(value), "a number above 0"
    if not good:
        raise HardwareError(f"{where} is {value!r}; expected {expected}")


def _is_link(value):
    return isinstance(value, str) and value.startswith("https://")


def _above_0(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
