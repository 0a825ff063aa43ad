"""The opening figure of notebook 08: how fast others trained a ResNet-50, and with which batch."""

from typing import NamedTuple

from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, entitle

MINUTE, HOUR, DAY = 60, 3_600, 86_400
UNKNOWN = PALETTE["limit"]  # colour of a batch that its source does not name


class Record(NamedTuple):
    """A reported training of ResNet-50 on ImageNet, to 74.9 % of right answers or more."""

    who: str
    year: int
    seconds: float
    processors: int
    of: str  # the processor's name
    batch: int | None  # of an update; None: not in the source
    source: str


# Each row is from the abstract of its source, which says 32k and 64k; Goyal's 8 GPUs, and batches
# of Ying and Yamazaki, are from the texts. MLPerf's source says "under 30 seconds".
RECORDS = (
    Record("You", 2017, 14 * DAY, 1, "M40", None, "arXiv 1709.05011"),
    Record("Goyal", 2017, 29 * HOUR, 8, "P100", 256, "arXiv 1706.02677"),
    Record("Goyal", 2017, HOUR, 256, "P100", 8_192, "arXiv 1706.02677"),
    Record("You", 2017, 20 * MINUTE, 2_048, "KNL", 32_768, "arXiv 1709.05011"),
    Record("Akiba", 2017, 15 * MINUTE, 1_024, "P100", 32_768, "arXiv 1711.04325"),
    Record("Jia", 2018, 6.6 * MINUTE, 2_048, "P40", 65_536, "arXiv 1807.11205"),
    Record("Ying", 2018, 2.2 * MINUTE, 1_024, "TPU v3", 32_768, "arXiv 1811.06992"),
    Record("Yamazaki", 2019, 74.7, 2_048, "V100", 81_920, "arXiv 1903.12650"),
    Record("MLPerf v0.7", 2020, 30, 4_096, "TPU v3", None, "cloud.google.com/blog, 2020-07-29"),
)
TICKS = {DAY: "1 day", HOUR: "1 hour", MINUTE: "1 minute"}
TICKS |= {14 * DAY: "14 days", 15 * MINUTE: "15 minutes", 15: "15 s"}


def plot_history(ax=None):
    """Draw the time of each record against its processors, with its batch as the dot's area."""
    with drawing.axes(ax, (10, 5.4), "both") as ax:
        for record in RECORDS:
            size = _area(record)
            colour = UNKNOWN if record.batch is None else SERIES[0]
            at = (record.processors, record.seconds)
            ax.scatter(*at, s=size, color=colour, alpha=0.45, lw=0)
            ax.plot(*at, ".", color=colour, ms=4)
            _write(ax, record)
        ax.set(xscale="log", yscale="log", xlabel="processors (GPUs, TPUs or KNLs)")
        ax.set(xlim=(0.6, 90_000), ylim=(12, 3e6), ylabel="time of the training")
        processors = (1, 8, 64, 256, 1_024, 4_096)
        ax.set_xticks(processors, [f"{n:,}" for n in processors])
        ax.set_yticks([*TICKS], [*TICKS.values()])
        ax.minorticks_off()
        first, last = RECORDS[0].seconds, RECORDS[-2].seconds
        title = f"ResNet-50 on ImageNet: from {first / DAY:.0f} days to {last:.1f} s in two years"
        sources = "area: the batch of an update (grey: its source names none); as reported"
        entitle(ax, title, sources)
    return ax


def _area(record):
    """Return the area of a record's dot, in points squared."""
    return 60 if record.batch is None else 20 + record.batch / 60


def _write(ax, record):
    """Write the name of a record beside its dot: on the left of those with a right neighbour."""
    batch = "" if record.batch is None else f", batch {record.batch:,}"
    text = f"{record.who} {record.year}: {record.processors:,} {record.of}{batch}"
    beside = _area(record) ** 0.5 / 2 + 5
    left = record.processors == 1_024
    look = (
        {"ha": "right", "xytext": (-beside, 0)} if left else {"ha": "left", "xytext": (beside, 0)}
    )
    at = record.processors, record.seconds
    ax.annotate(text, at, textcoords="offset points", va="center", fontsize=8, **look)
