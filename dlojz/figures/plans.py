"""Tables and figures of `dlojz estimate`: the memory of a training step, and what fits."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt

from dlojz.figures.look import MEMORY, PALETTE
from dlojz.figures.report import bytes_text
from dlojz.runs import memory
from dlojz.runs.memory import PARTS, SENT, Peak
from dlojz.table import Table

WHEN = {
    "forward begins": "early in the forward pass",
    "forward ends": "as the forward pass ends",
    "backward begins": "as the backward pass begins",
    "backward ends": "late in the backward pass",
    "update": "in the update",
}
LEFT_OUT = (
    "Without the CUDA context, cuDNN's and NCCL's buffers: the peak of an eager step, as "
    "max_memory_allocated shows it."
)
NEW_BUCKETS = (
    "DDP makes its buckets again as the second step begins. If NCCL has not let go of the first "
    "ones by then, that takes {} more, once: have room for it."
)
HEADS = (
    "torch's plans for tensors do not reach the queries, keys and values of nn.MultiheadAttention, "
    "which are one weight. This is the memory of the same products, dealt out by heads."
)
ONE_FORWARD = (
    "1F1B: a stage holds the activations of as many parts as there are stages from it to the last. "
    "FSDP gathers its weights once in a step, and reduces the gradients of all parts at its end."
)
NAMED = 8  # parts in a legend
WIDTH = 40  # characters of the longest bar
VISIBLE = 0.002  # of the longest bar: the legend names no smaller part
CARD = {"color": PALETTE["limit"], "linestyle": "--", "lw": 1}  # the line of a card's memory
PAPER = {"facecolor": "white", "pad": 2, "lw": 0}  # behind a text, so that no line crosses it


def highest(row: Mapping) -> tuple[str, Peak]:
    """Return the phase of the step with the most memory, and what it is made of.

    row: what `estimate.estimate` has written.
    """
    found = {phase: Peak(parts) for phase, parts in row["peaks"].items()}
    phase = max(found, key=lambda name: found[name].bytes)
    return phase, found[phase]


def about(row: Mapping) -> str:
    """Return the prediction: what was asked, the peak with its parts, what is left out."""
    phase, peak = highest(row)
    plan, size = row["plan"], row["parameters"]
    count = f"{size / 1e9:.2f} billion" if size >= 1e9 else f"{size / 1e6:.1f} million"
    asked = f"{plan['model']} ({count} parameters), {memory.means(plan)}"
    several = "s" * (plan["batch"] > 1)
    tensor, stages = plan.get("tensor", 1), plan.get("stages", 1)
    share = tensor * stages
    on = f"on each {share} GPUs" if share > 1 else "on each GPU"
    batch = row.get("batch") or f"{plan['batch']:,} image{several} of {plan['image_size']} px"
    images = f"{batch} {on}"
    where = f" of stage {plan['stage']}" if stages > 1 else ""
    most = f"At most {bytes_text(peak.bytes)} on each GPU{where}, {WHEN[phase]}. At that moment"
    notes = [str(by_stage(row))] if stages > 1 else []
    notes += [str(messages(row))] if share > 1 else []
    notes += [*later(row, phase), *[HEADS] * (tensor > 1), *[ONE_FORWARD] * (stages > 1), LEFT_OUT]
    if plan["sharding"] == "ddp" and plan["gpus"] > share:  # seen on one of two H200
        notes.append(NEW_BUCKETS.format(bytes_text(peak.parts["gradients"])))
    return "\n\n".join([f"{asked}, {images}\n{most}:", str(parts(peak)), *notes])


def later(row: Mapping, phase: str) -> list[str]:
    """Return a line on the activations, if most of them are there in another phase than this."""
    sizes = {name: parts.get("activations", 0) for name, parts in row["peaks"].items()}
    most = max(sizes, key=sizes.get)
    if sizes[most] <= 2 * sizes[phase]:
        return []
    return [f"The activations take most {WHEN[most]}: {bytes_text(sizes[most])}."]


def parts(peak: Peak) -> Table:
    """Return a table of what a peak is made of, with bars."""
    found = {part: size for part in PARTS if (size := peak.parts.get(part, 0)) > 0}
    longest = max(found.values())
    rows = [
        (part, bytes_text(size), "█" * round(WIDTH * size / longest), PARTS[part])
        for part, size in found.items()
    ]
    return Table(("", "bytes", "", ""), rows, "<><<")


def by_stage(row: Mapping) -> Table:
    """Return a table of the stages of a pipeline: the memory of each GPU at the stage's peak."""
    names = ("parameters", "gradients", "unreduced", "optimizer", "gathered", "activations")
    rows = []
    for number, stage in enumerate(row["stages"]):
        phase, peak = highest(stage)
        sizes = [bytes_text(peak.parts.get(name, 0)) for name in names]
        rows.append((str(number), bytes_text(peak.bytes), *sizes, WHEN[phase]))
    return Table(("stage", "at most", *names, ""), rows, ">>" + ">" * len(names) + "<")


def messages(row: Mapping) -> Table:
    """Return a table of the bytes that each GPU sends in a step."""
    rows = [(name, bytes_text(size), SENT[name]) for name, size in row["sent"].items()]
    return Table(("sent in a step", "bytes", ""), rows, "<><", "Nothing is sent.")


def fits(row: Mapping, limit: int) -> str:
    """Return a table of all ways to fit into this memory, and the answer."""
    plan, ways = row["plan"], row["fits"]
    rows = [(memory.means(way["plan"]), _batch(way), bytes_text(way["bytes"])) for way in ways]
    head = (f"in {bytes_text(limit)}, the cheapest first", "largest batch", "takes")
    return f"{Table(head, rows, '<>>')}\n\n{answer(plan, ways)}"


def _batch(way):
    return f"{way['plan']['batch']:,}" if way["plan"]["batch"] else "not even 1"


def answer(plan: Mapping, ways: Sequence[Mapping]) -> str:
    """Return the cheapest way that holds the batch that was asked for, in a sentence."""
    wanted = plan["batch"]
    for way in ways:
        if (most := way["plan"]["batch"]) >= wanted:
            return (
                f"The cheapest that holds {wanted:,}: {memory.means(way['plan'])} (up to {most:,})."
            )
    most = max(ways, key=lambda way: way["plan"]["batch"])
    if not most["plan"]["batch"]:
        return "Nothing here holds a single image: more --gpus with FSDP, or a smaller model."
    return (
        f"Nothing here holds {wanted:,}: the most is {_batch(most)}, with "
        f"{memory.means(most['plan'])}. More --gpus, or a smaller batch and --accumulate."
    )


def plot(peaks: Mapping[str, Peak], ax=None, each="GPU"):
    """Draw the parts of these peaks as stacked bars, by name."""
    ax = ax or plt.subplots(figsize=(8, 1.2 + 0.5 * len(peaks)))[1]
    names, shown, thick = [*peaks], set(), _thickest(peaks)
    largest = max(peak.bytes for peak in peaks.values())
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    for y, peak in enumerate(peaks.values()):
        left = 0
        for part in PARTS:
            size = max(0, peak.parts.get(part, 0)) / scale
            if size:
                named = part not in shown and part in thick
                ax.barh(y, size, left=left, color=MEMORY[part], label=part if named else None)
                shown.update([part] * named)
            left += size
        label(ax, left, y, bytes_text(peak.bytes))
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel=f"memory of each {each} ({unit})", xlim=(0, 1.15 * largest / scale))
    below = -0.6 / (0.5 + 0.5 * len(peaks))  # nearly half an inch
    ax.legend(ncols=4, loc="upper right", bbox_to_anchor=(1, below), frameon=False)
    return ax


def _thickest(peaks):
    """Return the parts that a legend names: the largest of all bars, and no invisible one."""
    largest = max(peak.bytes for peak in peaks.values())
    sizes = {part: max(peak.parts.get(part, 0) for peak in peaks.values()) for part in PARTS}
    seen = [part for part in PARTS if sizes[part] > VISIBLE * largest]
    return sorted(seen, key=lambda part: -sizes[part])[:NAMED]


def label(ax, x, y, text, points=6, **look):
    """Write a text beside the end of a bar, and interrupt the lines behind it."""
    look = {"textcoords": "offset points", "va": "center", "bbox": PAPER} | look
    ax.annotate(text, (x, y), (points, 0), **look)
