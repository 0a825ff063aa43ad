"""The few figures of a step of the course that are kept after its runs are gone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlojz.runs import records, stats

MIN_RUNS = 3  # with two, an interval says more about Student's t than about the runs


@dataclass(frozen=True)
class Reached(records.Record):
    """The speed, the memory and the energy of one step of the course, and what they depend on."""

    device_name: str = "?"
    processes: int = 1
    model: str = "?"
    image_size: int = 0  # pixels
    batch_size: int = 0  # images per process
    data: str = "?"  # in words
    torch: str = "?"
    memory_of: str = "process"  # "device": of a GPU; see `stats.Summary`
    flags: str = ""  # of the job
    date: str = ""
    runs: int = 0  # that were timed
    disturbed: int = 0  # of these: something else may have slowed them down
    images_per_s: float | None = None  # their geometric mean, as in a comparison of pairs
    interval: list = field(default_factory=list)  # its ends, of 95 %
    peak_memory_bytes: int | None = None
    energy_per_image_j: float | None = None

    @property
    def on_gpu(self) -> bool:
        return self.memory_of == "device"

    @property
    def setting(self) -> dict:
        """Return the setting that must be equal for two of these to be compared."""
        return {name: getattr(self, name) for name in SETTING}


SETTING = ("device_name", "processes", "model", "image_size", "batch_size", "data")
SETTING += ("memory_of", "torch")


def of(timed: Sequence, alone: Sequence, flags: str = "") -> Reached:
    """Return the figures that runs of one setting reached.

    timed: the runs that give the speed; alone: those that give memory and energy. An auditor sets
    memory aside, and its work takes energy, so a check's own runs can give the speed only.
    """
    found, costs = ([stats.summary(run) for run in runs] for runs in (timed, alone))
    first = found[0]
    speeds = [s.images_per_s for s in found if s.images_per_s]
    peaks = [s.peak_memory_bytes for s in costs if s.peak_memory_bytes]
    energies = [s.energy_per_image_j for s in costs if s.energy_per_image_j]
    return Reached(
        device_name=first.device_name,
        processes=first.size,
        model=first.model,
        image_size=first.image_size,
        batch_size=first.batch_size,
        data="synthetic data" if first.synthetic else "images from files",
        torch=first.versions.get("torch", "?"),
        memory_of=first.memory_of,
        flags=flags,
        date=first.date,
        runs=len(speeds),
        disturbed=sum(bool(s.disturbance) for s in found),
        images_per_s=statistics.geometric_mean(speeds) if speeds else None,
        interval=list(stats.interval(speeds)[1:]) if len(speeds) >= MIN_RUNS else [],
        peak_memory_bytes=max(peaks, default=None),
        energy_per_image_j=statistics.fmean(energies) if energies else None,
    )
