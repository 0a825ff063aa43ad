"""Figures of notebook 10c: attention by length, batches of texts, products, and networks.

A line or a bar is a median, and its thin bar spans all rounds or seeds.
"""

import statistics
from itertools import groupby

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz.figures import drawing, report
from dlojz.figures.look import PALE, PALETTE, SERIES, entitle
from dlojz.runs.stats import summary
from dlojz.table import Table

BEFORE, AFTER = PALETTE["limit"], PALETTE["speed"]
WAYS = {"naive": BEFORE, "math": SERIES[4], "compiled": AFTER}
WAYS |= {"efficient": SERIES[2], "flash": SERIES[3], "cudnn": SERIES[1]}
PASSES = 3  # operations of both passes, relative to the forward pass of the plain formula
MEMORY = {"peak_bytes": "peak memory", "kept_bytes": "kept for the backward pass"}
PRICES = {"joules": "joules", "core_s": "core-seconds"}
FAMILIES = {"dense": BEFORE, "depthwise": SERIES[0], "wide": SERIES[2], "deep": SERIES[1]}


def _cases(run, field: str, program: str) -> list[dict]:
    """Return the cases that have a field. Raises UserError if the run is of another program."""
    found = [case for case in report.measured(run).cases.values() if field in case]
    if not found:
        drawing.of_experiment(run, field, f"experiments/{program}.py")
    return found


def _span(values) -> list[float]:
    """Return the lowest, the median and the highest."""
    return [f(values) for f in (min, statistics.median, max)]


def _line(ax, x, spans, colour, label):
    """Draw medians, with a bar from the lowest to the highest."""
    low, middle, high = np.transpose(spans)
    look = {"color": colour, "label": label, "capsize": 2, "marker": "o", "ms": 4}
    ax.errorbar(x, middle, [middle - low, high - middle], **look)


def _setting(run) -> str:
    given = summary(run).arguments
    how = f"{given['precision']}, " if "precision" in given else ""
    return f"{how}{drawing.where(run)}; a bar spans all rounds"


# Attention ----------------------------------------------------------------------------------------


def _speed(case) -> np.ndarray:
    """Return the lowest, median and highest TFLOP/s of both passes."""
    return PASSES * case["flops"] / 1e9 / np.array(_span(case["both_ms"])[::-1])


def plot_attention(run, axes=None):
    """Draw the speed of both passes by length, and the memory that they need."""
    cases = _cases(run, "way", "attention")
    which = next(name for name in MEMORY if any(name in case for case in cases))
    with drawing.axes(axes, (10, 4.4), "both", (1, 2)) as axes:
        for way, colour in WAYS.items():
            mine = [case for case in cases if case["way"] == way and "both_ms" in case]
            if mine:
                lengths = [case["length"] for case in mine]
                _line(axes[0], lengths, [_speed(case) for case in mine], colour, way)
                axes[1].plot(lengths, [case[which] for case in mine], "o-", ms=4, color=colour)
        for ax in axes:
            ax.set_xscale("log", base=2)
            lengths = sorted({case["length"] for case in cases})
            ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
            ax.set_xlabel("tokens of a sequence")
        axes[0].set(ylabel="TFLOP/s, forward and backward", ylim=(0, None))
        axes[1].set(yscale="log", ylabel=MEMORY[which])
        axes[1].yaxis.set_major_formatter(FuncFormatter(lambda x, _: report.bytes_text(x)))
        axes[1].yaxis.set_minor_formatter(NullFormatter())
        drawing.legend(axes[0], 3)
        entitle(axes[0], _saved(cases, which), _setting(run))
    return axes


def _saved(cases, which) -> str:
    """Return the gains of the fastest way, at the longest sequence that has a matrix, in words."""
    ran = {(c["way"], c["length"]): c for c in cases if "both_ms" in c}
    length = max(length for way, length in ran if way == "naive")
    here = {way: case for (way, other), case in ran.items() if other == length}
    others = [way for way in here if way not in ("compiled", "naive")]
    best = max(others, key=lambda way: _speed(here[way])[1])
    times = _speed(here[best])[1] / _speed(here["naive"])[1]
    text = f"{length:,} tokens: {best} is {times:.2g} times as fast as naive, with 1/"
    text += f"{here['naive'][which] / here[best][which]:,.0f} of its memory"
    over = [c["length"] for c in cases if c["way"] == "naive" and "error" in c]
    return text + (f"; {min(over):,} tokens are too many for naive" if over else "")


def attentions(run, length: int | None = None) -> Table:
    """Return a table of all ways for one length, by default the longest one that naive has."""
    cases = _cases(run, "way", "attention")
    ran = [c["length"] for c in cases if c["way"] == "naive" and "both_ms" in c]
    rows = []
    for case in (c for c in cases if c["length"] == (length or max(ran))):
        cells = ("", "", "", "", case.get("error", ""))
        if "both_ms" in case:
            ms = [_ms(case[what]) for what in ("ms", "both_ms")]
            memory = case.get("peak_bytes", case["kept_bytes"])
            note = "the compiler put SDPA in its place" if case["replaced"] else ""
            cells = (*ms, report.bytes_text(memory), f"{case['off']:.1e}", note)
        rows.append((f"{case['way']}, {case['length']:,}", *cells))
    head = ("way, tokens", "ms, forward", "both passes", "memory", "error", "")
    return Table(head, rows, "<>>>><")


def _ms(values) -> str:
    low, middle, high = _span(values)
    return f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"


def backends(run) -> Table:
    """Return a table of each mask, width and format: the kernel that answers, and all times."""
    rows, names = [], ("math", "efficient", "flash", "cudnn")
    cases = _cases(run, "backend", "attention")
    for setting, group in groupby(cases, lambda c: (c["mask"], c["size"], c["format"])):
        here = {case["backend"]: case for case in group}
        times = [statistics.median(here[n]["both_ms"]) if "ms" in here[n] else None for n in names]
        cells = ("refuses" if ms is None else f"{ms:.3g}" for ms in times)
        rows.append((*map(str, setting), here["default"]["answers"], *cells))
    head = ("mask", "head", "format", "answers", *(f"{name}, ms" for name in names))
    return Table(head, rows, "<><<>>>>")


def refusals(run) -> Table:
    """Return a table of torch's reasons for refusing, and the settings that they hold for."""
    found = {}
    for case in _cases(run, "backend", "attention"):
        for why in (case["why"] or [case["error"].partition(". ")[0]]) if "error" in case else ():
            setting = f"{case['mask']}, {case['size']}, {case['format']}"
            found.setdefault((case["backend"], why), []).append(setting)
    every = len({(c["mask"], c["size"], c["format"]) for c in _cases(run, "backend", "attention")})
    rows = [
        (backend, why, "all" if len(settings) == every else "; ".join(settings))
        for (backend, why), settings in found.items()
    ]
    return Table(("backend", "what torch says", "mask, head, format"), rows, "<<<")


# Texts --------------------------------------------------------------------------------------------


def plot_layouts(run, axes=None):
    """Draw a batch of each layout: its texts in blue, and what it computes for nothing in grey."""
    cases = {c["layout"]: c for c in _cases(run, "layout", "sequences") if "," not in c["layout"]}
    look = {"shape": (1, len(cases)), "sharey": True}
    with drawing.axes(axes, (11, 3.4), "x", **look) as axes:
        for ax, (name, case) in zip(axes, cases.items(), strict=True):
            for y, row in enumerate(case["picture"]):
                ax.barh(y, case["width"], 0.9, color=PALE)
                for n, (left, length) in enumerate(zip(np.cumsum([0, *row]), row, strict=False)):
                    ax.barh(y, length, 0.9, left, color=SERIES[0] if n % 2 == 0 else SERIES[5])
            ax.set(xlabel="words of a row", xlim=(0, summary(run).arguments["longest"]), yticks=[])
            drawing.caption(ax, f"{name}: {case['words'] / case['places']:.0%}")
        axes[0].invert_yaxis()
        first, last = (f(c["words"] / c["places"] for c in cases.values()) for f in (min, max))
        title = f"{first:.0%} to {last:.0%} of what is computed are words: the layout decides"
        setting = f"a batch of each, and the share of words in all batches; {drawing.where(run)}"
        entitle(axes[0], title, setting)
    return axes


def plot_sequences(run, axes=None):
    """Draw the words per second of each way, and the length of its rows over an epoch."""
    cases = [c for c in _cases(run, "layout", "sequences") if c.get("ms")]
    with drawing.axes(axes, (10, 4.2), "x", (1, 2), width_ratios=(3, 2)) as axes:
        for row, case in enumerate(cases):
            low, middle, high = case["words"] / np.array(_span(case["ms"])[::-1])
            look = {"capsize": 3, "color": AFTER if case["layout"].startswith("packed") else BEFORE}
            axes[0].barh(row, middle, 0.6, xerr=[[middle - low], [high - middle]], **look)
        drawing.rows(axes[0], (f"{c['layout']}, {c['words'] / c['places']:.0%}" for c in cases))
        axes[0].set(xlabel="thousand words per second, trained on")
        for name, colour in (("buckets", SERIES[2]), ("sorted", SERIES[1])):
            (case,) = [c for c in cases if c["layout"] == name]
            axes[1].plot(case["columns"], color=colour, label=name)
        axes[1].set(xlabel="step of an epoch", ylabel="words of a row", ylim=(0, None))
        drawing.legend(axes[1], 2)
        speeds = {c["layout"]: c["words"] / statistics.median(c["ms"]) for c in cases}
        first, best = cases[0]["layout"], max(speeds, key=speeds.get)
        title = f"{best}: {speeds[best] / speeds[first]:.2g} times the words per second of {first}"
        entitle(axes[0], title, _setting(run))
    return axes


def gradients(run) -> Table:
    """Return a table of the loss and of the gradients of the same texts in several layouts."""
    rows = []
    for case in _cases(run, "gradients", "sequences"):
        cells = (case["error"], "") if "error" in case else ("", "")
        if "loss" in case:
            cells = f"{case['loss']:.6f}", f"{case['away']:.1e}"
        rows.append((case["gradients"], *cells))
    return Table(("16 texts", "loss", "gradients, away from the first row's"), rows, "<>>")


# Products -----------------------------------------------------------------------------------------


def plot_products(run, axes=None):
    """Draw the time of each product, beside those that it is compared with."""
    cases = [c for c in _cases(run, "comparison", "products") if c.get("ms")]
    groups = {name: [*group] for name, group in groupby(cases, lambda c: c["comparison"])}
    with drawing.axes(axes, (11, 4.2), "x", (2, 4)) as axes:
        for ax, (name, group) in zip(np.ravel(axes), groups.items(), strict=False):
            for row, case in enumerate(group):
                low, middle, high = _span(case["ms"])
                look = {"capsize": 3, "color": AFTER if middle == _best(group) else BEFORE}
                ax.barh(row, middle, 0.6, xerr=[[middle - low], [high - middle]], **look)
            drawing.rows(ax, (case["way"] for case in group))
            ax.set_xlabel("ms, both passes")
            drawing.caption(ax, _named(name))
        told = f"the fastest is blue; {_setting(run)}"
        entitle(np.ravel(axes)[0], _largest(groups), told)
    return axes


def _best(group) -> float:
    return min(statistics.median(case["ms"]) for case in group)


def _largest(groups) -> str:
    """Return the largest gain, of the fastest over the slowest, whose bars do not touch."""
    gains = {}
    for name, group in groups.items():
        fast, slow = (f(group, key=lambda c: statistics.median(c["ms"])) for f in (min, max))
        if max(fast["ms"]) < min(slow["ms"]):
            gains[name] = (statistics.median(slow["ms"]) / _best(group), fast["way"], slow["way"])
    if not gains:
        return "No pair differs by more than its rounds do"
    best = max(gains, key=gains.get)
    gain, fast, slow = gains[best]
    return f"{_named(best)}: {fast} is {gain:.2g} times as fast as {slow}"


def _named(comparison: str) -> str:
    return comparison.replace("hidden numbers", "width of an LSTM")


# Networks -----------------------------------------------------------------------------------------


def _fresh(run) -> dict[str, dict[int, list[dict]]]:
    """Return the trainings that count, by family and length."""
    found = {}
    for case in _cases(run, "family", "families"):
        if case["phase"] == "fresh":
            found.setdefault(case["family"], {}).setdefault(case["epochs"], []).append(case)
    return found


def _price(run) -> str:
    """Return the field that a training is paid with: joules, or seconds of processors."""
    return "joules" if "joules" in _cases(run, "family", "families")[0] else "core_s"


def plot_families(run, ax=None):
    """Draw the accuracy of each network against the joules of its training, or the seconds."""
    found, price = _fresh(run), _price(run)
    with drawing.axes(ax, (8, 4.4), "both") as ax:
        for family, lengths in found.items():
            x = [statistics.fmean(case[price] for case in cases) for cases in lengths.values()]
            spans = [_span([100 * case["accuracy"] for case in c]) for c in lengths.values()]
            _line(ax, x, spans, FAMILIES[family], family)
        ax.set(xscale="log", xlabel=f"{PRICES[price]} of the training", ylabel="accuracy (%)")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        drawing.legend(ax, 4)
        last = {family: [*lengths.values()][-1] for family, lengths in found.items()}
        costs = {f: statistics.fmean(c[price] for c in cases) for f, cases in last.items()}
        low, high = min(costs, key=costs.get), max(costs, key=costs.get)
        epochs, factor = last[high][0]["epochs"], costs[high] / costs[low]
        title = f"{epochs} epochs of {high} cost {factor:.2g} times the {PRICES[price]} of {low}"
        entitle(ax, title, _setting(run).replace("rounds", "seeds"))
    return ax


def families(run) -> Table:
    """Return a table of the networks: sizes, images per second, and the longest training."""
    rows, price = [], _price(run)
    spent, unit = ("seconds", "second") if price == "joules" else (price, "core-second")
    for family, lengths in _fresh(run).items():
        cases = [*lengths.values()][-1]
        first = cases[0]
        speeds = [case["images"] / case[spent] for case in cases]
        cost = statistics.fmean(case[price] for case in cases)
        accuracy = _span([100 * case["accuracy"] for case in cases])
        sizes = f"{first['layers']}", f"{first['width']}", f"{first['parameters']:,}"
        told = f"{accuracy[1]:.1f} ({accuracy[0]:.1f} to {accuracy[2]:.1f})"
        flops = f"{first['flops'] / 1e6:,.3g}"
        speed = f"{statistics.median(speeds):,.0f}"
        rows.append((family, *sizes, flops, speed, f"{cost:,.{2 if cost < 100 else 0}f}", told))
    sizes = "layers", "width", "parameters", "MFLOP"
    head = ("", *sizes, f"images per {unit}", PRICES[price], "accuracy (%)")
    return Table(head, rows, "<>>>>>>>")
