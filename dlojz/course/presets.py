"""Sizes that suit the hardware, so that one notebook serves a laptop, a GPU and a cluster.

`choose()` picks the preset for this machine; DLOJZ_PRESET=smoke|cpu|gpu|cluster forces one.
"""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlojz.machine import nvml
from dlojz.machine.cpus import count as cpus  # noqa: F401  as presets.cpus


@dataclass(frozen=True)
class Preset:
    """The sizes that a notebook uses instead of fixed numbers."""

    name: str
    model: str  # a torchvision classifier
    image_size: int  # pixels, of the square that the model sees
    batch_size: int  # images per process
    nsteps: int  # steps of a test run
    batch_sizes: tuple[int, ...]  # of a sweep
    classes: int  # of the generated data set
    images_per_class: int  # in train/
    val_images_per_class: int  # in val/

    def __repr__(self):
        sweep = ", ".join(map(str, self.batch_sizes))
        return (
            f"preset    {self.name}\n"
            f"model     {self.model}, {self.image_size} px\n"
            f"batch     {self.batch_size} images; in a sweep {sweep}\n"
            f"test run  {self.nsteps} steps\n"
            f"images    {self.classes} classes, each of {self.images_per_class} for training and "
            f"{self.val_images_per_class} for validation"
        )

    @property
    def flags(self) -> str:
        """Return the trainer's flags for these sizes."""
        return self._flags(self.batch_size, self.nsteps)

    @property
    def cpu_flags(self) -> str:
        """Return flags for the same model while it still trains on the CPU: fewer images, steps."""
        return self._flags(min(32, self.batch_size), min(12, self.nsteps))

    def _flags(self, batch, steps):
        model = f"--model {self.model} --image-size {self.image_size}"
        return f"{model} -b {batch} --test-nsteps {steps}"


PRESETS = {
    p.name: p
    for p in (
        Preset("smoke", "shufflenet_v2_x0_5", 32, 8, 8, (4, 8), 4, 16, 8),
        Preset("cpu", "resnet18", 64, 32, 12, (4, 8, 16, 32, 64, 128), 10, 100, 20),
        Preset("gpu", "resnet50", 224, 256, 50, (8, 16, 32, 64, 128, 256, 512, 1024), 100, 260, 20),
        Preset("cluster", "resnet50", 224, 256, 50, (32, 64, 128, 256, 512, 1024), 100, 260, 20),
    )
}


@cache
def gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a job may use here; () without a driver."""
    return nvml.visible()


def several() -> tuple[Preset, int]:
    """Return the preset and the number of processes for a notebook on several: all GPUs, or 2.

    With a single GPU such a notebook and its jobs run on the CPU, and the GPU is hidden.
    """
    if len(gpus()) == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        gpus.cache_clear()
    return choose(), len(gpus()) or 2


def choose(name: str | None = None) -> Preset:
    """Return the preset `name`, else $DLOJZ_PRESET, else the one for this machine."""
    here = "gpu" if gpus() else "cluster" if _is_a_login_node() else "cpu"
    name = name or os.environ.get("DLOJZ_PRESET") or here
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset {name!r}: expected one of {', '.join(PRESETS)}; "
            "set DLOJZ_PRESET to one of them, or unset it"
        )
    return PRESETS[name]


def _is_a_login_node():
    """Return whether jobs probably go to Slurm from here, without asking a controller."""
    chosen = os.environ.get("DLOJZ_LAUNCHER")
    configured = Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf").exists()
    return chosen == "slurm" or (chosen is None and bool(shutil.which("sbatch")) and configured)
