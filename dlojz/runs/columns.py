"""The steps of a run as a log is read: in columns."""

from array import array
from dataclasses import dataclass, field

PHASES = ("data", "transfer", "forward", "backward", "update")  # of a step, in their order


@dataclass
class Steps:
    """The steps of a run as columns: 10^6 steps take 120 MB, not gigabytes of dicts."""

    epoch: array = field(default_factory=lambda: array("l"))
    step: array = field(default_factory=lambda: array("l"))
    images: array = field(default_factory=lambda: array("l"))
    tokens: array = field(default_factory=lambda: array("l"))  # 0 for images
    lr: array = field(default_factory=lambda: array("d"))
    loss: array = field(default_factory=lambda: array("d"))
    host_ms: dict = field(default_factory=lambda: {p: array("d") for p in PHASES})
    device_ms: dict = field(default_factory=lambda: {p: array("d") for p in PHASES})
    ahead_ms: array = field(default_factory=lambda: array("d"))  # NaN before the window

    def __len__(self):
        return len(self.step)

    def append(self, event):
        """Append a `step` event. Raises KeyError or TypeError for a missing or wrong field."""
        for name in ("epoch", "step", "images", "lr", "loss"):
            getattr(self, name).append(event[name])
        self.tokens.append(event.get("tokens", 0))
        for phase in PHASES:
            self.host_ms[phase].append(event["host_ms"][phase])
            if "device_ms" in event:
                self.device_ms[phase].append(event["device_ms"][phase])
        self.ahead_ms.append(event.get("ahead_ms", float("nan")))
