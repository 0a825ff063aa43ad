"""The map of plans, and a table of large language models.

The map takes a run of `experiments/choices.py`, or a recording.
"""

from collections import defaultdict

import numpy as np

from dlojz.chapters.n12_model_parallel import giants
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, PLANS, entitle
from dlojz.figures.report import bytes_text
from dlojz.table import Table

NOTHING = "nothing fits"
NAMES = {"llama_70b": "Llama 3 70B", "bloom": "BLOOM 176B"}
DIVIDED = ("tensors", "stages", "tensors and stages")
AS_FAST = 0.95  # of the fastest plan's speed: no prediction is nearer
DAY = 86_400
OF_PEAK = 0.4  # the MFU of the days of `sizes`, as Llama 3 405B had: 38 to 43 %


def sizes() -> Table:
    """Return a table of giants: tokens and operations, trained and as Chinchilla's rule has them.

    A training takes 6 operations for each parameter and token: 120 P^2 with 20 tokens for each of P
    parameters.
    """
    peak = giants.rates(1).flops / giants.MFU
    rows = []
    for giant in giants.giants().values():
        p, tokens = giant.parameters, giant.trained_tokens
        needs, rule_needs = 6 * p * tokens, 120 * p**2
        days, rule_days = (_rounded(n / (OF_PEAK * peak * DAY)) for n in (needs, rule_needs))
        trained = f"{tokens / 1e12:.3g}", f"{tokens / p:,.0f}", f"{needs:.1e}", days
        rule = f"{20 * p / 1e12:.3g}", f"{rule_needs:.1e}", rule_days
        rows.append((f"{giant.name} ({giant.year})", f"{p / 1e9:,.1f}", *trained, *rule))
    head = ("", "10^9 parameters", "10^12 tokens", "tokens of a parameter", "operations")
    rule = ("20 of a parameter: 10^12 tokens", "120 P^2", "days")
    return Table((*head, f"days of an H100 at {OF_PEAK:.0%}", *rule), rows, "<>>>>>>>>")


def _rounded(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.0f}"


# The map ------------------------------------------------------------------------------------------


def cells(run) -> dict[str, dict[tuple[str, int], dict]]:
    """Return the cells of the map, by network, then by model and number of GPUs."""
    found = defaultdict(dict)
    for case in drawing.of_experiment(run, "network", "choices.py").cases.values():
        found[case["network"]][case["model"], case["gpus"]] = case
    return dict(found)


def kind(cell) -> str:
    """Return the kind of a cell's plan, a name of PLANS."""
    if not (plan := cell["plan"]):
        return NOTHING
    tensor, stages = plan["tensor"] > 1, plan["stages"] > 1
    if tensor or stages:
        return " and ".join(["tensors"] * tensor + ["stages"] * stages)
    return "one GPU" if plan["gpus"] == 1 else plan["sharding"].upper()


def words(plan) -> list[str]:
    """Return a plan in a few words: ["TP 4", "PP 8", "FSDP 8"]."""
    replicas = plan["gpus"] // (plan["tensor"] * plan["stages"])
    named = {"TP": plan["tensor"], "PP": plan["stages"], plan["sharding"].upper(): replicas}
    return [f"{name} {size:,}" for name, size in named.items() if size > 1]


def reason(cell) -> str:
    """Return the reason for a cell's plan, in a few words."""
    plan, alone = cell["plan"], cell["alone"]
    if plan["tensor"] * plan["stages"] == 1:
        waits = cell["seconds"]["data"] / sum(cell["seconds"].values())
        return f"{waits:.0%} of a step waits for messages" if waits > 0.005 else "nothing waits"
    if not cell["undivided"]:
        return f"fewer images or sequences than GPUs: {giants.largest(plan['model']):,}"
    if alone is None:
        return "DDP or FSDP alone does not fit"
    return f"DDP or FSDP alone has {alone:.0%} of its speed"


def chosen(run) -> Table:
    """Return a table of the map's cells: plan, MFU, memory, and the reason."""
    rows = []
    for network, found in cells(run).items():
        for (model, gpus), cell in found.items():
            if cell["plan"]:
                plan = ", ".join(words(cell["plan"])) or "whole"
                plan += ", recomputed" * (cell["plan"]["checkpointing"] == "blocks")
                told = plan, f"{cell['mfu']:.0%}", bytes_text(cell["bytes"]), reason(cell)
                rows.append((NAMES.get(model, model), f"{gpus:,}", network, *told))
    return Table(("", "GPUs", "network", "plan", "MFU", "memory", "reason"), rows, "<><<>><")


def pays(cell) -> bool:
    """Return whether a divided model is faster than whole ones, by more than an error."""
    plan = cell["plan"]
    divided = bool(plan) and plan["tensor"] * plan["stages"] > 1
    return divided and (cell["alone"] or 0) < AS_FAST


def finding(found) -> str:
    """Return the map's finding: how often it pays to divide a model, by network."""
    lines = []
    for network, of in found.items():
        several = [cell for cell in of.values() if cell["plan"] and cell["plan"]["gpus"] > 1]
        times = sum(map(pays, several))
        lines.append(f"in {times} of {len(several)} cases with {network}")
    return "It pays to divide the model " + ",\n".join(lines)


def plot_map(run, axes=None):
    """Draw the fastest plan for each model and number of GPUs, with its MFU, for each network."""
    found = cells(run)
    keys = next(iter(found.values()))
    models, gpus = ([*dict.fromkeys(each)] for each in zip(*keys, strict=True))
    size = (1.5 + 1.35 * len(gpus), 1.9 + 0.62 * len(models) * len(found))
    with drawing.axes(axes, size, shape=(len(found), 1), sharex=True) as axes:
        for ax, (network, of) in zip(np.ravel(axes), found.items(), strict=True):
            ax.grid(False)
            for (model, count), cell in of.items():
                _draw(ax, gpus.index(count), models.index(model), cell)
            ax.set(xlim=(-0.5, len(gpus) - 0.5), ylim=(len(models) - 0.5, -0.5))
            ax.set_yticks(range(len(models)), [NAMES.get(name, name) for name in models])
            ax.set_xticks(range(len(gpus)), [f"{n:,}" for n in gpus])
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            drawing.caption(ax, f"between nodes: {network}")
        ax.set_xlabel("GPUs")
        shown = {kind(cell) for of in found.values() for cell in of.values()}
        named = {name: colour for name, colour in PLANS.items() if name in shown - {NOTHING}}
        drawing.legend(
            ax, len(named), (0, -0.75 / len(models)), drawing.swatches(named), loc="upper left"
        )
        entitle(ax, finding(found), note())
    return axes


def _draw(ax, x, y, cell):
    """Draw a cell: its colour, its plan and its MFU."""
    look = {"ha": "center", "va": "center"}
    ax.barh(y, 0.96, 0.92, x - 0.48, color=PLANS[kind(cell)])
    if not cell["plan"]:
        ax.text(x, y, NOTHING, fontsize=8, color=PALETTE["model"], **look)
        return
    plan = " x ".join(words(cell["plan"])) or "whole"
    more = " ↻" * (cell["plan"]["checkpointing"] == "blocks")
    more += " ≈" * (kind(cell) in DIVIDED and not pays(cell))
    ax.text(x, y - 0.18, f"{cell['mfu']:.0%}{more}", fontsize=11, fontweight="bold", **look)
    ax.text(x, y + 0.22, plan, fontsize=7, **look)


def note() -> str:
    """Return the map's assumptions."""
    r = giants.rates(1)
    peak, sold = r.flops / giants.MFU / 1e12, r.inside / giants.OF_LINKS / 1e9
    return "\n".join(
        (
            "Predicted MFU of plans whose memory dlojz estimate finds to fit; bf16, AdamW. TP: "
            "GPUs for each tensor, PP: stages.",
            "↻: blocks are recomputed. ≈: DDP or FSDP alone is nearly as fast. Nodes of "
            f"{giants.NODE} H100, of whose 80 GB a step may take {giants.OF_MEMORY:.0%}.",
            f"As measured: matmuls of any size at {giants.MFU:.0%} of {peak:,.1f} TFLOP/s, links "
            f"at {giants.OF_LINKS:.0%} of {sold:,.0f} GB/s.",
            "At most 4,096 images, or 4.2 million tokens, in a step; giants are vision "
            "transformers of their layers, width, heads and parameters.",
        )
    )
