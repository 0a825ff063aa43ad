"""The origin of a run, which its log begins with: its source, its versions and its machine."""

import hashlib
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

from dlojz import idr_torch
from dlojz.machine import cpus, facts


def origin() -> dict:
    """Return the origin of this run: the exact source, the versions, the machine."""
    trainer = Path(sys.argv[0])
    source = trainer.read_bytes() if trainer.is_file() else b""
    torch = sys.modules.get("torch")
    packages = ("torch", "torchvision", "numpy", "pillow")
    return {
        "rank": idr_torch.rank,
        "size": idr_torch.size,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "trainer": trainer.name,
        "trainer_sha256": hashlib.sha256(source).hexdigest()[:16],
        "git": _git_state() if idr_torch.is_master else None,  # one process that asks git is enough
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in packages},
        "cpu": cpus.name(),
        "cpu_count": cpus.count(),
        "instructions": facts.cpu().get("instructions", []),
        "threads": torch.get_num_threads() if torch else None,
    }


def _version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state():
    """Return the commit of the course's code, `-dirty` if edited; None outside a clone."""
    command = ["git", "describe", "--always", "--dirty"]
    _, out, _ = facts.ask(command, timeout_s=5, cwd=Path(__file__).parent)
    return out.strip() or None
