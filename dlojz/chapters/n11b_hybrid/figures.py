"""Figures of recorded runs of large models: the share of the peak speed.

They take a run of `predicted.py`, an experiment of notebook 11, which names its recordings.
"""

from dlojz import runs
from dlojz.chapters.n11b_hybrid import flops
from dlojz.course import UserError
from dlojz.figures import drawing, peaks, plans, report
from dlojz.figures.look import PALETTE, entitle, percent
from dlojz.runs import log
from dlojz.runs.stats import Summary, summary
from dlojz.table import Table

AGAIN = PALETTE["again"]  # pale: not the model's own operations


def cases(run) -> list[tuple[Summary, dict]]:
    """Return each recording and its prediction, the smallest memory first."""
    found = drawing.of_experiment(run, "operations", "predicted.py").cases
    pairs = [(summary(runs.recorded(name)), case) for name, case in found.items()]
    return sorted(pairs, key=lambda pair: plans.highest(pair[1])[1].bytes)


def run_name(s: Summary) -> str:
    """Return a run in a few words: "vit_2b, 32 images, FSDP on 2 GPUs, checkpointing"."""
    words = [s.model, f"{s.batch_size} images"]
    if s.size > 1:
        words.append(f"{s.arguments.get('sharding', 'ddp').upper()} on {s.size} GPUs")
    words += ["checkpointing"] * (s.arguments.get("checkpointing", "off") != "off")
    return ", ".join(words + ["compiled"] * _compiled(s))


def _compiled(s) -> bool:
    return s.arguments.get("compile", "off") != "off"


def _where(pairs) -> str:
    """Return the hardware of the recordings, with their precision and dates."""
    first, days = pairs[0][0], sorted({s.date for s, _ in pairs})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    where = report.hardware_text(first).replace(first.date, when)
    return f"{first.arguments['precision']}, {where}"


# Speed -------------------------------------------------------------------------------------------


def used(run) -> list[tuple[Summary, flops.Utilization]]:
    """Return each recording with a speed and its utilization, the lowest first."""
    found = [(s, flops.utilization(s, case["operations"])) for s, case in cases(run)]
    return sorted(((s, u) for s, u in found if u), key=lambda pair: pair[1].tflops)


def shares(run, product=None) -> Table:
    """Return a table of speed, and of the memory and the shares of the peak of each GPU.

    product: a run of experiments/sizes.py or roofline.py, for the speed of a bare product.
    """
    pairs, rows = used(run), []
    peak, best = pairs[0][1].peak_tflops, _best(product, pairs)
    for s, u in pairs:
        image = u.tflops * s.size / s.images_per_s
        speed = f"{s.images_per_s:,.0f}", f"{image:.2f}", f"{u.tflops:,.0f}"
        of = [u.mfu, u.hfu] * bool(peak) + [best and u.tflops / best[0]] * bool(best)
        size = report.bytes_text(s.peak_memory_bytes)
        rows.append((run_name(s), *speed, *(f"{share:.1%}" for share in of), size))
    of_each = " of each GPU" * any(s.size > 1 for s, _ in pairs)
    head = ["", "images/s", "TFLOP per image", f"TFLOP/s{of_each}"]
    head += [f"MFU: of {peak:,.1f} TFLOP/s", "HFU"] if peak else []
    head += [f"of {best[0]:,.0f}, {best[1]}"] if best else []
    return Table([*head, "memory"], rows, "<" + ">" * len(head))


def _best(product, pairs) -> tuple[float, str] | None:
    """Return the best speed of a product in the recordings' precision, and its name."""
    if product is None:
        return None
    found = peaks.measured(product)
    precision = pairs[0][0].arguments["precision"]
    if precision not in found.tflops:
        there = ", ".join(found.tflops) or "none"
        raise UserError(f"{log.read(product).path}: expected products in {precision}, not {there}")
    return found.tflops[precision], f"a product on {found.device}"


def plot_shares(run, product=None, ax=None):
    """Draw the operations per second of each recording's GPUs, below the specified peak.

    product: as in `shares`.
    """
    pairs = used(run)
    peak, best = pairs[0][1].peak_tflops, _best(product, pairs)
    lines = {f"sold: {peak:,.1f}": peak} if peak else {}
    if best:
        lines[best[1].replace(" on ", " on\n") + f": {best[0]:,.0f}"] = best[0]
    with drawing.axes(ax, (10, 1.6 + 0.5 * len(pairs)), "x") as ax:
        _plot_used(pairs, ax)
        for text, at in lines.items():
            ax.axvline(at, color="black", ls="--", lw=1)
            ax.text(at, -0.6, text, ha="center", va="bottom", fontsize=8)
        ax.set(ylim=(len(pairs) - 0.5, -0.5))
        what = "forward and backward pass of an image, times its images/s"
        ax.set_xlabel(f"TFLOP/s of each GPU: {what}")
        drawing.legend(
            ax, 2, (1, -0.9 / len(pairs)), loc="upper right"
        )  # nearly half an inch below
        entitle(ax, _reached_text(pairs, peak, best), _where(pairs))
    return ax


def _reached_text(pairs, peak, best):
    """Return the speed of the fastest recording, as shares of what is sold and of a product."""
    s, most = pairs[-1]
    told = [f"{run_name(s)}: {most.tflops:,.0f} TFLOP/s"]
    if peak:
        told.append(f"{percent(most.tflops / peak)} of what is sold")
    if best:
        told.append(f"{percent(most.tflops / best[0])} of what a product reaches")
    return ", ".join(told)


def _plot_used(pairs, ax):
    """Draw the bars of `plot_shares`."""
    own, again = [u.tflops for _, u in pairs], [u.again_tflops for _, u in pairs]
    names, blue = [run_name(s) for s, _ in pairs], PALETTE["backward"]
    known = any(u.mfu for _, u in pairs)
    words = "needed by the model" + ", with its share of what is sold: MFU" * known
    ax.barh(names, own, 0.6, color=blue, label=words)
    if any(again):
        ax.barh(names, again, 0.6, own, color=AGAIN, label="computed again")
    for y, (_, u) in enumerate(pairs):
        share = f"{u.mfu:.0%}  " if u.mfu else ""
        ax.text(u.tflops, y, share, ha="right", va="center", color="white")
        more = f" + {u.again_tflops:,.0f}" if u.again_tflops else ""
        text = f"  {u.tflops:,.0f}{more} TFLOP/s"
        ax.text(u.tflops + u.again_tflops, y, text, va="center", fontsize=9)
