"""The record that an auditor keeps of a run, for its replay."""

from dataclasses import dataclass, field
from pathlib import Path

import torch


def folder_of(run: Path) -> Path:
    """Return the folder that a run's auditor writes to."""
    return Path(run) / "audit"


def watched_file(run: Path, rank: int) -> Path:
    """Return the file with the record of every step."""
    return folder_of(run) / f"watched.rank{rank}.pt"


@dataclass
class Batch:
    """The record of a batch, of the training or of a validation; None: not observed."""

    pixels: torch.Tensor | None = None
    layout: str | None = None  # the images', in the training
    images: torch.Tensor | None = None  # the number with a gradient
    logits: torch.Tensor | None = None
    gradient: torch.Tensor | None = None  # of the logits
    labels: torch.Tensor | None = None
    loss: torch.Tensor | None = None


@dataclass
class Facts:
    """The facts of an update, besides its tensors."""

    update: int
    scale: torch.Tensor | None = None  # the gradient scaler's
    grad_scale: torch.Tensor | None = None  # a fused optimizer's divisor
    found_inf: torch.Tensor | None = None
    optimizer: str = ""
    lr: list = field(default_factory=list)  # of each group
    settings: list = field(default_factory=list)
    missing: list = field(default_factory=list)  # weights without a gradient
    evaluating: int = 0  # layers in evaluation mode
    random: list = field(default_factory=list)  # digests of the generators


@dataclass
class Watched:
    """An auditor's record of all steps and updates, and the files of whole updates."""

    steps: list[Batch] = field(default_factory=list)
    updates: list[Facts] = field(default_factory=list)
    kept: list = field(default_factory=list)
    files: list = field(default_factory=list)  # the files of `kept`
    validated: dict | None = None  # the buffers as the last validation began
    validation: list[Batch] = field(default_factory=list)  # of all epochs


torch.serialization.add_safe_globals([Batch, Facts, Watched])
