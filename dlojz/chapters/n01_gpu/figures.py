"""The figure of the two clocks, of notebook 01."""

import matplotlib.pyplot as plt
import numpy as np

from dlojz.figures import report
from dlojz.figures.look import style
from dlojz.runs import derived, log
from dlojz.runs.columns import PHASES
from dlojz.runs.stats import summary


def plot_clocks(run, ax=None):
    """Draw the phases of one run by its two clocks, the host's and the device's."""
    read = log.read(run)
    chosen = derived.measured(read)
    clocks = {"host: Python passed the mark": read.steps.host_ms}
    if len(read.steps.device_ms["data"]) == len(read.steps):
        clocks["device: the GPU passed it"] = read.steps.device_ms
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.3 + 0.6 * len(clocks)))[1]
        for row, times in enumerate(clocks.values()):
            report.phase_bar(ax, row, {p: np.asarray(times[p])[chosen].mean() for p in PHASES})
        what = report.setting_text(summary(read)).split("; ")  # too long for one line
        ax.set_yticks(range(len(clocks)), list(clocks))
        ax.invert_yaxis()
        ax.set(xlabel="\n".join(["mean step (ms)", *what]), xlim=(0, None))
        ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax
