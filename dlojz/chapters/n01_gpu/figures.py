"""The figure of the two clocks, of notebook 01."""

import matplotlib.pyplot as plt
import numpy as np

from dlojz.figures import drawing, report
from dlojz.figures.look import entitle, style
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
        ax.set_yticks(range(len(clocks)), list(clocks))
        ax.invert_yaxis()
        ax.set(xlabel="mean step (ms)", xlim=(0, None))
        forward = [np.asarray(times["forward"])[chosen].mean() for times in clocks.values()]
        entitle(ax, _forward_text(*forward), report.setting_text(summary(read)))
        drawing.legend(ax, 5)
    return ax


def _forward_text(host, device=None):
    if device is None:
        return f"One clock: the host computes, the forward pass takes {host:,.0f} ms"
    more = f"by the host's clock, {device:,.0f} ms by the device's"
    return f"The forward pass takes {host:,.0f} ms {more}"
