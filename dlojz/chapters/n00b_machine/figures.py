"""Tables and figures of machines: the hardware's specifications beside its measured speed.

Specifications are rows of `dlojz.machine.hardware`, passed by the notebook; measurements are from
the logs of experiments/roofline.py --ceilings, sizes.py and latency.py; the parts of this machine
are from the doctor's facts.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import StrMethodFormatter

from dlojz.figures import drawing, report
from dlojz.figures.look import DARK, INK, PALETTE, SERIES, entitle
from dlojz.figures.peaks import FORMATS, Measured
from dlojz.runs import log
from dlojz.table import Table

REACH = (20, 2000)  # operations per byte, in the figure
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # of a name on a line
NO_COMPILER = "no C++ compiler that works: the caches and the memory were not measured"


# Tables ------------------------------------------------------------------------------------------


def _number(value, digits=3):
    """Return a number with at most this many significant digits; "" if it is unknown."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:,.{digits}g}"


def speeds(rows: Sequence, found: Sequence[Measured] = ()) -> Table:
    """Return a table of TFLOP/s by format and of the memory's speed, sold and measured.

    ≈: derived from cores and clock. The ridge is that of fp16, or of bf16 without it.
    """
    lines = []
    for row in rows:
        sign = "≈ " if row.derived else ""
        cells = [_number(row.speed(f), 3 if row.derived else 4) for f in FORMATS]
        best = ridge(row)
        memory = _number(row.memory_gb_per_s, 4)
        cells = [sign + cell if cell else "" for cell in cells]
        lines.append((row.name, *cells, memory, _number(best)))
    for m in found:
        cells = [_number(m.tflops.get(f)) for f in FORMATS]
        lines.append((m.label, *cells, _number(m.memory_gb_per_s), ""))
    head = ("TFLOP/s, dense", *FORMATS, "memory GB/s", "ridge, operations per byte")
    return Table(head, lines, "<" + ">" * (len(head) - 1))


def ridge(row) -> float | None:
    """Return the ridge of a device in 16 bits; None without 16 bits or memory."""
    return row.ridge("fp16") or row.ridge("bf16")


def rest(rows: Sequence) -> Table:
    """Return a table of the other specifications: sizes, links, power, units."""
    lines = []
    for row in rows:
        units = f"{row.units} of {row.units_full}" if row.units_full else _number(row.units)
        sizes = (row.memory_gb, row.cache_mb, row.links_gb_per_s, row.power_w)
        lines.append((row.name, str(row.year), row.memory, *map(_number, sizes), units))
    head = ("", "year", "memory", "GB", "last cache MB", "links GB/s", "W", "units, of all")
    return Table(head, lines, "<><>>>>>")


def shares(found: Measured, row) -> Table:
    """Return a table of measured speeds, beside the device's specifications, and their ratio.

    row: the device's, or None if it is in no table. torch sees one of several dies.
    """
    lines = []
    for name in FORMATS:
        if name in found.tflops:
            sold = row and row.speed(name)
            lines.append((f"matrix product, {name}", "TFLOP/s", found.tflops[name], sold))
    if found.memory_gb_per_s:
        lines.append(("copy in memory", "GB/s", found.memory_gb_per_s, row and row.memory_gb_per_s))
    cells = [_share(*line, row.devices if row else 1) for line in lines]
    return Table((found.label, "", "reached", "sold", "share"), cells, "<<>>>")


def _share(what, unit, reached, sold, devices):
    sold = sold and sold / devices
    share = f"{reached / sold:.0%}" if sold else ""
    return what, unit, _number(reached), _number(sold, 4), share


class Sources:
    """The documents of a table, by its rows, with links where it is shown as HTML."""

    def __init__(self, rows: Sequence):
        self.rows = rows

    def __repr__(self):
        lines = []
        for row in self.rows:
            lines.append(f"{row.name}{f': {row.note}' if row.note else ''}")
            lines += [f"    {address}" for address in row.sources]
            lines += [f"    as quoted on {row.read} in {address}" for address in row.seen]
        return "\n".join(lines)

    def _repr_html_(self):
        items = []
        for row in self.rows:
            note = f" {escape(row.note)}" if row.note else ""
            quoted = f"; as quoted on {row.read} in {_linked(row.seen)}" if row.seen else ""
            documents = f"{_linked(row.sources)}{quoted}"
            items.append(f"<li><b>{escape(row.name)}</b>: {documents}.{note}</li>")
        return f"<ul>{''.join(items)}</ul>"


def _linked(addresses):
    """Return links that show their host, without the path."""
    links = (f'<a href="{escape(a)}" target="_blank">{_host(a)}</a>' for a in addresses)
    return ", ".join(links)


def _host(address):
    host, *path = address.removeprefix("https://").split("/")
    return escape("/".join([host, *path[:2]]) if host == "github.com" else host)


# Readings ----------------------------------------------------------------------------------------


class Readings(list):
    """Numbered sentences on the content of a figure."""

    def __repr__(self):
        return "\n".join(f"{i}. {text}" for i, text in enumerate(self, 1))

    def _repr_html_(self):
        items = "".join(f"<li>{escape(text)}</li>" for text in self)
        return f'<ol style="max-width:60em">{items}</ol>'


def _times(ratio):
    return f"{ratio:.1f} times"


def readings(rows: Sequence) -> Readings:
    """Return four readings of what is sold, with every number computed from the rows.

    The rows of NVIDIA's V100, A100, H100 and H200, and of AMD's MI250X, are expected among them.
    """
    v100, a100, h100, h200, mi250x = (
        next(row for row in rows if name in row.name)
        for name in ("V100", "A100", "H100", "H200", "MI250X")
    )
    return Readings(
        [
            _ridges(v100, a100, h100, h200),
            _halves(h100, mi250x),
            _growth(v100, h100),
            _links((v100, a100, h100, h200)),
        ]
    )


def _ridges(v100, a100, h100, h200):
    first, second, third, last = (f"{r.ridge('fp16'):.0f}" for r in (v100, a100, h100, h200))
    return (
        f"The ridge moves right: {first}, {second}, {third} operations per byte in fp16, from V100 "
        "to A100 to H100. An operation that kept a V100 busy may leave an H100 waiting for memory. "
        f"The H200 moves it back to {last}: the same chip, with faster memory."
    )


def _halves(h100, mi250x):
    half, again = (h100.speed(a) / h100.speed(b) for a, b in (("fp16", "tf32"), ("fp8", "fp16")))
    other = mi250x.speed("int8") / mi250x.speed("fp16")
    int8 = "no faster than fp16" if other <= 1 else f"{_times(other)} as fast as fp16"
    return (
        f"Half the bits, twice the arithmetic: on an H100 fp16 is {_times(half)} as fast as TF32, "
        f"and fp8 {_times(again)} as fast as fp16, with half the bytes. It is not a law: on an "
        f"MI250X int8 is {int8}. And TF32 is {_times(h100.speed('tf32') / h100.speed('fp32'))} as "
        "fast as fp32 with the same bytes: those are other units, the tensor cores."
    )


def _growth(v100, h100):
    arithmetic = h100.speed("fp16") / v100.speed("fp16")
    power = h100.power_w / v100.power_w
    grown = {
        "16-bit arithmetic": arithmetic,
        "the memory's speed": h100.memory_gb_per_s / v100.memory_gb_per_s,
        "the links": h100.links_gb_per_s / v100.links_gb_per_s,
        "the memory's size": h100.memory_gb / v100.memory_gb,
        "the power": power,
    }
    most = sorted(grown.items(), key=lambda item: -item[1])
    text = ", ".join(f"{what} {_times(ratio)}" for what, ratio in most)
    return (
        f"Not all grows alike. From V100 to H100: {text}. "
        f"For each watt there is {_times(arithmetic / power)} the arithmetic."
    )


def _links(line):
    gaps = [row.memory_gb_per_s / (row.links_gb_per_s / 2) for row in line]
    text = ", ".join(f"{gap:.1f}" for gap in gaps)
    return (
        "Each step away is slower: from V100 to H200, one direction of the links to other GPUs is "
        f"{text} times slower than the GPU's own memory."
    )


# Figures -----------------------------------------------------------------------------------------


class Roof(NamedTuple):
    """The limits of a device in 16 bits: of its memory, and of its arithmetic."""

    name: str
    gb_per_s: float
    tflops: float
    measured: bool = False

    @property
    def ridge(self) -> float:
        """Return the operations per byte from which arithmetic is the limit."""
        return 1000 * self.tflops / self.gb_per_s


def roofs(rows: Sequence, found: Sequence[Measured] = ()) -> list[Roof]:
    """Return the roofs of devices that compute in 16 bits, the lowest ridge first."""
    known = [(row.name, row.memory_gb_per_s, row.speed, False) for row in rows]
    known += [(m.label, m.memory_gb_per_s, m.tflops.get, True) for m in found]
    made = []
    for name, gb_per_s, speed, measured in known:
        tflops = speed("fp16") or speed("bf16")
        if gb_per_s and tflops:
            short = re.sub(r"^(NVIDIA|AMD Instinct|AMD|Intel) | SXM.*", "", name)
            made.append(Roof(name if measured else short, gb_per_s, tflops, measured))
    return sorted(made, key=lambda roof: roof.ridge)


def plot_ridges(rows: Sequence, found: Sequence[Measured] = (), ax=None):
    """Draw the roof of each device in 16 bits, as specified and measured, with its ridge.

    Left of its ridge an operation waits for memory, right of it for arithmetic.
    """
    known = roofs(rows, found)
    with drawing.axes(ax, (9.5, 5), "both") as ax:
        x = np.array([REACH[0], *(roof.ridge for roof in known), REACH[1]])
        for roof in known:
            colour = PALETTE["after" if roof.measured else "before"]
            line = "--" if roof.measured else "-"
            ax.plot(x, np.minimum(roof.gb_per_s * x / 1000, roof.tflops), line, color=colour)
            ax.plot(roof.ridge, roof.tflops, "o", color=colour, ms=7, mec="white")
            _write(ax, roof, known, colour)
        ax.set(xscale="log", yscale="log", xlim=REACH, ylabel="TFLOP/s, dense, in 16 bits")
        ax.set_xlabel("operations per byte moved")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        how = "grey: as sold; dashed: measured. On the slope memory is the limit"
        entitle(ax, _ridges_text(known), f"{how}, on the level arithmetic")
    return ax


def _write(ax, roof, known, colour):
    """Write a device's name and ridge beside its bend: on the left if another is near its right."""
    near = [
        other
        for other in known
        if 0 < np.log10(other.ridge / roof.ridge) < 0.2
        and abs(np.log10(other.tflops / roof.tflops)) < 0.2
    ]
    at, side = ((-6, 5), "right") if near else ((7, -13), "left")
    text = f"{roof.name}: {roof.ridge:.0f}"
    look = {"ha": side, "fontsize": 9, "color": colour if roof.measured else INK, "bbox": BEHIND}
    place = (roof.ridge, roof.tflops)
    ax.annotate(text, place, at, textcoords="offset points", parse_math=False, **look)


def _ridges_text(known):
    """Return the lowest and the highest ridge of what is sold."""
    sold = [roof for roof in known if not roof.measured] or known
    if not sold:
        return "No device here computes in 16 bits"
    first, last = sold[0], sold[-1]
    if first is last:
        return f"The ridge is at {first.ridge:.0f} operations per byte ({first.name})"
    text = f"The ridge is at {first.ridge:.0f} ({first.name}) to {last.ridge:.0f} operations"
    return f"{text} per byte ({last.name})"


def plot_latency(run, axes=None):
    """Draw the time of a load, and the speed of reading in order, against the size of the block."""
    found = log.read(run)
    processor = found.cases["processor"]
    with drawing.axes(axes, (11, 4), "both", shape=(1, 2)) as axes:
        looks = (("load", "ns for a load, each after the last", SERIES[0]),
                 ("read in order", "GB/s, one core, in order", SERIES[1]))  # fmt: skip
        for ax, (what, label, colour) in zip(axes, looks, strict=True):
            points = _by_size(found, what)
            ax.plot([x / 2**20 for x in points], points.values(), "o-", ms=4, color=colour)
            ax.set(xscale="log", ylabel=label, xlabel="block (MiB)")
            ax.set_yscale("log" if what == "load" else "linear")
            if what != "load":
                ax.set_ylim(0)
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            for cache in processor["caches"]:
                if not points or cache["bytes"] > max(points):
                    continue
                x = cache["bytes"] / 2**20
                ax.axvline(x, color=PALETTE["limit"], ls=":", lw=1.2)
                text = {"xycoords": ("data", "axes fraction"), "va": "top", "color": DARK}
                ax.annotate(f" L{cache['level']}", (x, 0.98), fontsize=9, **text)
        title = drawing.where(found)
        title = title if processor["compiled"] else f"{title}: {NO_COMPILER}"
        entitle(axes, _slower_text(_by_size(found, "load")), title)
    return axes


def _slower_text(ns):
    """Return the time of a load from the largest block, relative to the smallest's."""
    if not ns:
        return "No load was measured"
    small, large = min(ns), max(ns)
    times, size = ns[large] / ns[small], _size_text(large)
    return f"A load takes {times:.0f} times as long from {size} as from {_size_text(small)}"


def _by_size(found, what):
    return {m.x: m.value for m in found.measures if m.what == what}


def distances(run, published: Sequence = ()) -> Table:
    """Return a table of the latencies of data: measured by experiments/latency.py, then published.

    A cache's row is the fastest load from a block that fits it, and is twice the cache before it.
    """
    found = log.read(run)
    loads, speeds = _by_size(found, "load"), _by_size(found, "read in order")
    lines, before = [], 0
    for cache in found.cases["processor"]["caches"]:
        inside = [x for x in loads if 2 * before <= x <= 0.75 * cache["bytes"]]
        if inside:
            name = f"L{cache['level']}, {_size_text(cache['bytes'])}"
            speed = max(speeds[x] for x in inside)
            lines.append((name, min(loads[x] for x in inside), speed, "measured here"))
        before = cache["bytes"]
    if loads:
        largest = max(loads)
        name = f"anywhere in {_size_text(largest)}"
        lines.append((name, loads[largest], speeds[largest], "measured here"))
    lines += _storage(found.cases["storage"])
    copies = {m.what: m.value for m in found.measures if "GPU" in m.what}
    if copies:
        tiny, large = copies["tiny copy to the GPU"], copies["copy to the GPU"]
        lines.append(("the GPU, from pinned memory", tiny, large, "measured here"))
    lines += [(t.name, t.latency_ns, t.gb_per_s, t.note) for t in published]
    cells = [(name, _time(ns), _number(speed), where) for name, ns, speed, where in lines]
    return Table(("where", "first byte after", "then GB/s", ""), cells, "<>><")


def _storage(facts):
    """Return the lines of the storage: operations on small files, and a large one."""
    kind = facts.get("type", "storage")
    if rate := facts.get("operations_per_s"):
        yield f"a small file on {kind}, cached", 1e9 / rate, None, "measured here, one operation"
    if speed := facts.get("read_bytes_per_s"):
        how = "past the page cache" if facts.get("direct") else "the page cache may have helped"
        yield f"a large file on {kind}", None, speed / 1e9, f"measured here, {how}"


def _size_text(count):
    size, unit = next((2**n, u) for n, u in ((30, "GiB"), (20, "MiB"), (0, "")) if count >= 2**n)
    return f"{count / size:.3g} {unit}" if unit else f"{count / 2**10:.3g} KiB"


def _time(ns):
    """Return nanoseconds in a readable unit; "" for None."""
    if ns is None:
        return ""
    for size, unit in ((1e6, "ms"), (1e3, "µs")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns" if ns >= 10 else f"{ns:.2g} ns"


# Anatomy -----------------------------------------------------------------------------------------


def anatomy(facts: Mapping, sold, own=None) -> Table:
    """Return a table of the parts of this machine's GPU, or processor, beside an H100's.

    facts: the doctor's; sold: the row of the H100; own: the row of this machine's GPU, if it is in
    the table, because neither torch nor the driver reports all of it.
    """
    here = _gpu_parts(facts, own) if facts["torch"].get("devices") else _cpu_parts(facts)
    parts = {
        "name": sold.name,
        "units": f"{sold.units} multiprocessors, of {sold.units_full} on the whole die",
        "at once": f"{sold.warps_per_unit} warps of 32 threads on each: "
        f"{sold.units * sold.warps_per_unit * 32:,} threads",
        "registers": _size_text(sold.units * sold.registers_per_unit * 4)
        + f" in all, {_size_text(sold.registers_per_unit * 4)} on each",
        "first cache": f"up to {sold.shared_kb_per_unit:g} KiB on each, shared memory",
        "last cache": f"{sold.cache_mb:g} MB, L2",
        "matrix units": _tensor_cores(sold, sold.units),
        "memory": f"{sold.memory_gb:g} GB, {sold.memory_gb_per_s:,.0f} GB/s",
        "clock": f"{sold.clock_mhz:,} MHz",
        "power": f"{sold.power_w:g} W",
    }
    lines = [(part, here.get(part, ""), text) for part, text in parts.items()]
    return Table(("", "here", "sold"), lines, "<<<")


def _tensor_cores(row, units):
    each = row.tensor_cores_per_unit
    return f"{units * each} tensor cores, {each} on each"


def _gpu_parts(facts, own):
    device, cards = facts["torch"]["devices"][0], facts["gpu"]["cards"]
    card = next((c for c in cards if c.get("name") == device["name"]), {})
    units, warp = device["units"], device["warp"]
    warps = device["threads_per_unit"] // warp if device["threads_per_unit"] else 0
    registers = 4 * (device["registers_per_unit"] or 0)
    shared, clock = device["shared_bytes_per_unit"], device["clock_khz"]
    found = {
        "name": device["name"],
        "units": f"{units} multiprocessors"
        + (f", of {own.units_full} on the whole die" if own and own.units_full else ""),
        "at once": warps
        and f"{warps} warps of {warp} threads on each: {units * warps * warp:,} threads",
        "registers": registers
        and f"{_size_text(units * registers)} in all, {_size_text(registers)} on each",
        "first cache": shared and f"up to {shared / 1024:g} KiB on each, shared memory",
        "last cache": device["cache_bytes"] and f"{device['cache_bytes'] / 2**20:.3g} MiB, L2",
        "matrix units": own and own.tensor_cores_per_unit and _tensor_cores(own, units),
        "memory": report.bytes_text(device["memory_bytes"])
        + (f", sold with {own.memory_gb_per_s / own.devices:,.0f} GB/s" if own else ""),
        "clock": clock and f"{card.get('clock_mhz') or clock / 1000:,.0f} MHz",
        "power": card.get("power_limit_w") and f"{card['power_limit_w']:.0f} W, the limit set",
    }
    return {part: text for part, text in found.items() if text}


def _cpu_parts(facts):
    cpu, memory = facts["cpu"], facts["memory"]
    names, caches = cpu.get("instructions", []), cpu.get("caches", [])
    bits = next((b for n, b in (("AVX-512", 512), ("AVX2", 256), ("NEON", 128)) if n in names), 0)
    cores, threads = cpu.get("cores"), cpu["threads"]
    matrix = [n for n in ("AMX", "AVX512_BF16", "VNNI", "BF16") if n in names]
    each = [f"L{c['level']} {_size_text(c['bytes'])}" for c in caches]
    lanes = f", each with {bits // 32} fp32 numbers in an instruction" if bits else ""
    found = {
        "name": cpu.get("model", "this processor"),
        "units": cores and f"{cores} cores{lanes}",
        "at once": f"{threads} threads" + (f", {threads // cores} on a core" if cores else ""),
        "first cache": each and f"{each[0]} on each core",
        "last cache": each and each[-1] + _for(caches[-1]),
        "matrix units": ", ".join(matrix) or "none: only vectors",
        "memory": report.bytes_text(memory.get("total_bytes")),
    }
    return {part: text for part, text in found.items() if text}


def _for(cache):
    return f" for {cache['threads']} threads" if cache["threads"] > 1 else ""
