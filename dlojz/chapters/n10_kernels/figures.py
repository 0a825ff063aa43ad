"""Figures of notebook 10: operations under the roofline, and one operation written several times.

Bytes per second are of the bytes that must move at least: each operand and result once.
"""

import statistics
from functools import partial
from itertools import pairwise

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import PALETTE, SERIES, WAYS, entitle
from dlojz.runs import log
from dlojz.runs.stats import summary
from dlojz.table import Table

KINDS = dict(zip(("elementwise", "reduction", "matrix product"), SERIES, strict=False))
OURS = ("PyTorch", "compiled", "Triton")
SOFTMAXES = {way: WAYS[way] for way in OURS} | {"online": SERIES[3], "torch.softmax": SERIES[4]}
KERNELS = {"loop": SERIES[1]} | {way: WAYS[way] for way in OURS}
PATH = ("PyTorch", "compiled", "Triton", "online")  # of the arrows on the roofline
HIDDEN = 0.1  # the difference of two speeds, as a share, below which their points coincide
ROOF, TICKS = (0.1, 2.5), (0.1, 0.2, 0.5, 1, 2)  # operations per byte of a softmax in float32
PROGRAMS = 32  # of a multiprocessor of an A100, H100 or B200, by CUDA's programming guide
NAME = {"textcoords": "offset points", "fontsize": 8, "va": "center"}  # of a point, on its right

intensities_of = partial(drawing.of_experiment, field="kind", experiment="experiments/intensity.py")
softmaxes_of = partial(drawing.of_experiment, field="columns", experiment="experiments/softmax.py")
counters_of = partial(drawing.of_experiment, field="once", experiment="experiments/counters.py")
normalizations_of = partial(
    drawing.of_experiment, field="units_off", experiment="experiments/normalize.py"
)


def _measured(run) -> dict[str, float]:
    """Return the values that a run measured once: GB/s of "memory", TFLOP/s of "matrix product".

    The memory's speed is that of a copy, or of reading alone, where that is faster.
    """
    found = {m.what: m.value for m in log.read(run).measures}
    return found | {"memory": max(found["memory"], found.get("reading", 0))}


def rate(case, what="least") -> np.ndarray:
    """Return the lowest, the median and the highest rate of a case, in 10^9 per second."""
    return case[what] / 1e6 / np.array([f(case["ms"]) for f in (max, statistics.median, min)])


def _digits(value, count=4) -> str:
    """Return a number with `count` significant digits, and without an exponent."""
    return f"{float(f'{value:.{count}g}'):,.12g}"


def _speed(case, field="ms") -> float:
    """Return the median GB/s of the bytes that must move."""
    return case["least"] / 1e6 / statistics.median(case[field])


# The roofline ------------------------------------------------------------------------------------


def attainable(intensity, memory: float, product: float | None = None):
    """Return the GFLOP/s under a roof, at an intensity; memory in GB/s, product in TFLOP/s."""
    slope = np.multiply(intensity, memory)
    return slope if product is None else np.minimum(slope, 1000 * product)


def _roof(ax, low, high, memory, product=None):
    """Draw a roof between two intensities."""
    x = np.geomspace(low, high, 200)
    ax.plot(x, attainable(x, memory, product), color="black", label="what is possible")
    ax.set(xscale="log", yscale="log", ylabel="GFLOP/s")
    ax.set_xlabel("arithmetic intensity (operations per byte moved)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())


def intensities(run) -> Table:
    """Return a table of a run of experiments/intensity.py: the work and the speed of each."""
    best, rows = _measured(run), []
    for case in intensities_of(run).cases.values():
        intensity = case["flops"] / case["bytes"]
        low, middle, high = rate(case, "flops")
        roof = attainable(intensity, best["memory"], best["matrix product"])
        rows.append(
            (
                case["operation"],
                case["kind"],
                _digits(intensity, 3),
                f"{_digits(middle)} ({_digits(low)} to {_digits(high)})",
                _digits(rate(case, "bytes")[1]),
                f"{middle / roof:.0%}",
            )
        )
    head = ("operation", "kind", "FLOP/byte", "GFLOP/s", "GB/s", "of what is possible")
    return Table(head, rows, "<<>>>>")


def plot_intensity(run, ax=None):
    """Draw each operation of experiments/intensity.py under the roof of its machine."""
    cases = sorted(intensities_of(run).cases.values(), key=lambda c: c["flops"] / c["bytes"])
    best = _measured(run)
    memory, product = best["memory"], best["matrix product"]
    bend = 1000 * product / memory
    with drawing.axes(ax, (9, 4.8), "both") as ax:
        at, points = [case["flops"] / case["bytes"] for case in cases], {}
        _roof(ax, min(at) / 4, 20 * max(at), memory, product)
        for case, x in zip(cases, at, strict=True):
            low, middle, high = rate(case, "flops")
            look = {"color": KINDS[case["kind"]], "label": case["kind"], "capsize": 2}
            ax.errorbar(x, middle, [[middle - low], [high - middle]], fmt="o", **look)
            points[case["operation"]] = x, middle
        ax.axvline(bend, color=PALETTE["limit"], ls="--", lw=1)
        _name(ax, points)
        drawing.legend(ax, 4)
        entitle(ax, _limited(cases, bend), setting(run))
    return ax


def _name(ax, points: dict[str, tuple]):
    """Write the name of each point below it, on its right, where no point or other name is.

    Points that hide each other have one text with both names, from left to right.
    """
    at = {}
    pixels = {name: ax.transData.transform(point) for name, point in points.items()}
    for name, (x, y) in sorted(pixels.items(), key=lambda item: item[1][0]):
        near = (other for other, (a, b) in at.items() if np.hypot(x - a, y - b) < 9)
        if (other := next(near, None)) is not None:
            at[f"{other}, {name}"] = at.pop(other)
        else:
            at[name] = x, y
    taken = [(x - 4, x + 4, y) for x, y in at.values()]
    for name, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):
        left, right, below = x + 10, x + 10 + 6.5 * len(name), y - 12
        while any(a < right and left < b and abs(below - c) < 13 for a, b, c in taken):
            below -= 1
        taken.append((left, right, below))
        place = ax.transData.inverted().transform((left, below))
        ax.text(*place, name, fontsize=8, va="center")


def _limited(cases, bend) -> str:
    """Return the number of operations that memory limits, in words."""
    left = sum(case["flops"] / case["bytes"] < bend for case in cases)
    return (
        f"Below {bend:,.0f} operations per byte memory is the limit: of {left} of these "
        f"{len(cases)} operations"
    )


def setting(run) -> str:
    given = summary(run).arguments
    how = f"{given['precision']}, " if "precision" in given else ""
    return f"{how}{drawing.where(run)}; a bar spans all rounds"


def parts(run) -> Table:
    """Return a table of the GPU's parts: those that torch names, and the limit of programs."""
    found = [m for m in intensities_of(run).measures if not m.unit]
    rows = [(m.what, f"{m.value:,.0f}") for m in found]
    rows += [("programs of a multiprocessor, at most", f"{PROGRAMS}")] if found else []
    return Table(("", summary(run).device_name), rows, "<>", "this run had no GPU")


# Softmax -----------------------------------------------------------------------------------------


def _lengths(run) -> list[int]:
    """Return the numbers of columns of a run."""
    return list(dict.fromkeys(case["columns"] for case in softmaxes_of(run).cases.values()))


def _middle(run) -> int:
    """Return 4,096, or else the middle one of a run's numbers of columns."""
    known = _lengths(run)
    return 4096 if 4096 in known else known[len(known) // 2]


def _softmaxes(run, columns=None) -> dict[str, dict]:
    """Return the cases of one number of columns, by way; by default of the middle one."""
    known, columns = _lengths(run), columns or _middle(run)
    if columns not in known:
        raise UserError(f"no rows of {columns} in this run: expected one of {known}")
    cases = softmaxes_of(run).cases.values()
    return {case["way"]: case for case in cases if case["columns"] == columns}


def softmaxes(run, columns: int | None = None) -> Table:
    """Return a table of a run of experiments/softmax.py: each way, for one length of a row."""
    rows = []
    for way, case in _softmaxes(run, columns).items():
        timed = ("-", "interpreted", "-") if "ms" not in case else _times(case)
        error = f"{case['error'][0] / 2**-24:.1f}"
        rows.append((way, f"{case['kernels']}", *timed, error, _large(case["error"][1])))
    errors = "error, in roundings of float32", "with numbers x 100"
    head = ("way", "kernels", "bytes moved", "ms", "GB/s", *errors)
    return Table(head, rows, "<>>>>>>")


def _times(case) -> tuple[str, str, str]:
    low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
    ms = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"
    return report.bytes_text(case["moved"]), ms, f"{_speed(case):,.4g}"


def _large(error) -> str:
    return f"{error / 2**-24:.1f}" if np.isfinite(error) else "NaN"


def asked(run, columns: int | None = None) -> Table:
    """Return a table of what Triton's kernels ask of memory, for each number, in the interpreter.

    The run needs no GPU.
    """
    rows = []
    for way, case in _softmaxes(run, columns).items():
        if found := case.get("asked"):
            count = case["rows"] * case["columns"]
            per = [f"{found[what] / count:.3g}" for what in ("read_bytes", "written_bytes")]
            rows.append((way, str(case["rows"]), str(found["loads"]), str(found["stores"]), *per))
    head = ("way", "programs", "loads", "stores", "bytes read per number", "written per number")
    return Table(head, rows, "<>>>>>", "this run had a GPU: its kernels were not interpreted")


def plot_softmax(run, ax=None):
    """Draw the speed of each softmax by the length of a row."""
    cases, best = softmaxes_of(run).cases.values(), _measured(run)["memory"]
    with drawing.axes(ax, (9, 4.4)) as ax:
        for way, colour in SOFTMAXES.items():
            mine = [c for c in cases if c["way"] == way and "ms" in c]
            if mine:
                draw_line(ax, [c["columns"] for c in mine], [rate(c) for c in mine], colour, way)
        _copy(ax, best)
        _by_size(ax, _lengths(run), "numbers of a row")
        entitle(ax, _fastest(run, best), setting(run))
    return ax


def draw_line(ax, x, rates, colour, label, **look):
    """Draw medians, with a bar over all rounds."""
    low, middle, high = np.transpose(rates)
    look = {"color": colour, "label": label, "capsize": 2, "marker": "o", "ms": 4} | look
    ax.errorbar(x, middle, [middle - low, high - middle], **look)


def _copy(ax, memory):
    """Draw the speed of a large copy."""
    ax.axhline(memory, color=PALETTE["limit"], ls="--", lw=1.2, label="a large copy")


def _by_size(ax, sizes, name, ncols=6):
    """Give axes of speeds by size their labels, and a legend of as many columns."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=30 if len(sizes) > 7 else 0)
    ax.set(xlabel=name, ylabel="GB/s of the bytes that must move", ylim=(0, None))
    drawing.legend(ax, ncols)


def _fastest(run, memory) -> str:
    """Return the gain of fusing, and the fastest way, for rows of a middle length."""
    cases = {way: case for way, case in _softmaxes(run).items() if "ms" in case}
    best = max(cases, key=lambda way: _speed(cases[way]))
    columns = cases[best]["columns"]
    gain = _speed(cases[best]) / _speed(cases["PyTorch"])
    return (
        f"Rows of {columns:,}: {best} is {gain:.1f} times as fast as five operations, at "
        f"{_speed(cases[best]) / memory:.0%} of a copy's speed"
    )


def plot_path(run, axes=None):
    """Draw the softmaxes on the roofline, with an arrow from each way to the next.

    On the left for rows of a middle length, on the right for the longest.
    """
    memory = _measured(run)["memory"]
    lengths = sorted({_middle(run), max(_lengths(run))})
    size = (1.5 + 4.5 * len(lengths), 4.2)
    with drawing.axes(axes, size, "both", (1, len(lengths)), sharey=True, sharex=True) as axes:
        for ax, columns in zip(axes, lengths, strict=True):
            _roof(ax, *ROOF, memory)
            timed = {way: c for way, c in _softmaxes(run, columns).items() if "ms" in c}
            _follow(ax, {way: _place(case) for way, case in timed.items()}, memory)
            drawing.caption(ax, f"{timed['PyTorch']['rows']:,} rows of {columns:,} numbers")
        axes[-1].set_ylabel("")
        lowest = min(y for ax in axes for line in ax.lines[1:] for y in line.get_ydata())
        axes[0].set(xlim=ROOF, ylim=(0.6 * lowest, None), xticks=TICKS, xticklabels=TICKS)
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
        case = _softmaxes(run)["PyTorch"]
        saved = f"{case['moved'] / case['least']:.1f} times fewer bytes"
        title = f"Fused, the same operations need {saved}: long rows gain less by it"
        note = f"arrows: {', then '.join(way for way in PATH if way in timed)}"
        entitle(axes[0], title, f"float32; {note}; {drawing.where(run)}")
    return axes


def _place(case) -> tuple[float, float]:
    """Return a softmax's operations per byte that its kernels must move, and its GFLOP/s."""
    return case["flops"] / case["moved"], rate(case, "flops")[1]


def _follow(ax, at, memory):
    """Draw these points under a roof, each with its name, and an arrow from one to the next.

    Points that hide each other have no arrow between them.
    """
    below = np.inf
    for way, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):
        ax.plot(x, y, "o", color=SOFTMAXES[way], ms=8, alpha=0.8)
        below = min(y, below / 1.22)  # no name on the one before
        text = f"{way}: {y / attainable(x, memory):.0%}"
        look = NAME | {"color": SOFTMAXES[way], "fontsize": 9}
        ax.annotate(text, (x, below), (22, 0), **look)
    path = [at[way] for way in PATH if way in at]
    for begin, end in pairwise(path):
        if begin[0] == end[0] and abs(np.log(end[1] / begin[1])) < HIDDEN:
            continue
        bend = 0.4 if begin[0] == end[0] else 0  # two arrows on a line would hide each other
        arrow = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={bend}", "shrinkB": 4}
        ax.annotate("", end, begin, arrowprops=arrow | {"color": PALETTE["limit"]})


def plot_counters(run, axes=None):
    """Draw the passes of each softmax over all rows, read and written, as the GPU counted.

    run: of experiments/counters.py.
    """
    cases = counters_of(run).cases.values()
    lengths = list(dict.fromkeys(case["columns"] for case in cases))
    colours = {"read": SERIES[0], "written": SERIES[1]}
    how = {"shape": (1, len(lengths)), "sharey": True, "sharex": True}
    with drawing.axes(axes, (9, 3.6), "x", **how) as axes:
        for ax, columns in zip(axes, lengths, strict=True):
            mine = [case for case in cases if case["columns"] == columns]
            for row, case in enumerate(mine):
                times = {what: case[what] / case["once"] for what in colours}
                drawing.stack(ax, row, times, colours)
            drawing.write_widths(ax, "{:.1f}", 0.4, color="white", fontsize=8)
            ax.axvline(2, color=PALETTE["limit"], ls="--", lw=1.2, zorder=0.9)
            ax.set(xlabel=f"times all numbers, in rows of {columns:,}")
        drawing.rows(axes[0], [case["way"] for case in mine])
        limit = {"each once": axes[0].lines[0]}
        drawing.legend(axes[0], 3, named=drawing.swatches(colours) | limit)
        most = {case["way"]: (case["read"] + case["written"]) / case["once"] / 2 for case in mine}
        title = f"Rows of {columns:,}: Triton's kernel moves {most['Triton']:.1f} times the bytes "
        title += f"that must, the online one {most['online']:.1f} times"
        entitle(axes[0], title, f"float32, counted by the GPU, {drawing.where(run)}")
    return axes


def occupancy(run, card_run, columns=None) -> Table:
    """Return a table of the resources of Triton's softmax, and how many fit a multiprocessor.

    run: of experiments/softmax.py, on a GPU; card_run: of experiments/intensity.py, on such a GPU;
    columns: the lengths of rows that are shown, by default all.
    """
    card, rows = _measured(card_run), []
    for case in softmaxes_of(run).cases.values():
        if "registers" in case and (columns is None or case["columns"] in columns):
            programs, limit = resident(case, card)
            threads = case["warps"] * card["threads of a warp"]
            share = programs * threads / card["threads of a multiprocessor, at most"]
            counts = [case[what] for what in ("warps", "registers", "spills")]
            name = (f"{case['way']}, {case['columns']:,}", *map(str, counts))
            rows.append((*name, str(programs), f"{share:.0%}", limit))
    of_thread = "registers of a thread", "and spilled"
    head = ("way, columns", "warps", *of_thread, "programs", "occupancy", "limit")
    return Table(head, rows, "<>>>>><", "this run had no GPU")


def resident(case, card) -> tuple[int, str]:
    """Return the number of programs that fit one multiprocessor, and the part that runs out first.

    A warp gets its registers in steps of 256, eight for each thread.
    """
    threads = case["warps"] * card["threads of a warp"]
    registers = threads * -(-case["registers"] // 8) * 8
    limits = {
        "threads": card["threads of a multiprocessor, at most"] // threads,
        "registers": card["registers of a multiprocessor"] // registers,
        "programs": PROGRAMS,
    }
    if case["shared_bytes"]:
        shared = card["bytes of shared memory of a multiprocessor"]
        limits["shared memory"] = shared // case["shared_bytes"]
    first = min(limits, key=limits.get)
    return int(limits[first]), first


# The normalization -------------------------------------------------------------------------------


def _timed(run) -> list[dict]:
    return [case for case in normalizations_of(run).cases.values() if "ms" in case]


def plot_normalize(run, ax=None):
    """Draw the speed of each normalization by batch; on a GPU also that of its kernels alone."""
    cases, best = _timed(run), _measured(run)["memory"]
    alone, gains = _alone(cases), _gains(run)
    with drawing.axes(ax, (9, 4.4)) as ax:
        for way, colour in KERNELS.items():
            mine = [case for case in cases if case["way"] == way]
            if mine:
                batches = [case["batch"] for case in mine]
                label = way if way == "PyTorch" else f"{way}: x {gains[way]:.2g}"
                draw_line(ax, batches, [rate(case) for case in mine], colour, label)
            if mine and alone:
                speeds = [_speed(case, "kernel_ms") for case in mine]
                ax.plot(batches, speeds, ":", color=colour)
        if alone:
            ax.plot([], [], ":", color="black", label="dotted: kernels alone")
        _copy(ax, best)
        _by_size(ax, list(dict.fromkeys(case["batch"] for case in cases)), "images", 3)
        ax.set_ylim(0, 1.04 * ax.get_ylim()[1])
        side = summary(run).arguments["image_size"]
        entitle(ax, _gained(cases, gains), f"{side} px, bytes to bf16; {setting(run)}")
    return ax


def _alone(cases) -> bool:
    return any("kernel_ms" in case for case in cases)


def _gains(run) -> dict[str, float]:
    """Return the speed of each way relative to PyTorch's two operations, by way.

    On a GPU that of the kernels alone.
    """
    ms = _median_ms(run)
    return {way: ms["PyTorch"] / each for way, each in ms.items()}


def _gained(cases, gains) -> str:
    """Return the gain of one kernel, in words."""
    names = {"compiled": "compiled", "Triton": "your kernel"}
    told = [f"{names[way]} x {gain:.2g}" for way, gain in gains.items() if way in names]
    told = told or [f"a loop x {gains['loop']:.2g}"]
    what = "The kernels alone, " if _alone(cases) else ""
    return f"{what}{_usual(cases):,} images: {', '.join(told)}, relative to PyTorch's two"


def normalizations(run) -> Table:
    """Return a table of a run of experiments/normalize.py: each way, with 256 images.

    Or else with the largest batch.
    """
    cases, batch = normalizations_of(run).cases.values(), _usual(_timed(run))
    rows = []
    for case in cases:
        if case["batch"] == batch or "asked" in case:
            ms, speed = "interpreted", "-"
            if "ms" in case:
                low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
                ms, speed = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})", f"{_speed(case):,.4g}"
            counts = (f"{case['batch']}", f"{case['kernels']:,}")
            rows.append((case["way"], *counts, ms, speed, f"{case['units_off']:.2f}"))
    what = "kernels" if summary(run).on_gpu else "operations"
    head = ("way", "images", what, "ms", "GB/s", "units in the last place")
    return Table(head, rows, "<>>>>>")


def kernel_gain(run, way: str = "Triton", batch: int | None = None) -> float | None:
    """Return the speed of a way's kernels, relative to PyTorch's; None without a GPU.

    batch: by default 256, or the largest one.
    """
    ms = _kernel_ms(run, batch)
    return ms["PyTorch"] / ms[way] if way in ms else None


def step_gain(run, step, way: str = "Triton", batch: int | None = None) -> float | None:
    """Return the speed-up of a step, by Amdahl's law; None without a GPU.

    step: a run of the trainer on that GPU with this batch.
    """
    ms = _kernel_ms(run, batch)
    if way not in ms:
        return None
    whole = summary(step).step_ms
    return whole / (whole - ms["PyTorch"] + ms[way])


def _usual(cases) -> int:
    """Return 256 images, or else the largest batch of these cases."""
    known = [case["batch"] for case in cases]
    return 256 if 256 in known else max(known, default=0)


def _kernel_ms(run, batch) -> dict[str, float]:
    """Return the median milliseconds of the kernels alone, by way; {} without a GPU."""
    return _median_ms(run, batch) if _alone(_timed(run)) else {}


def _median_ms(run, batch=None) -> dict[str, float]:
    """Return the median milliseconds, by way; on a GPU of the kernels alone."""
    cases = _timed(run)
    field = "kernel_ms" if _alone(cases) else "ms"
    batch = batch or _usual(cases)
    mine = [case for case in cases if case["batch"] == batch]
    return {case["way"]: statistics.median(case[field]) for case in mine}
