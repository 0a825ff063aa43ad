"""The processors of this machine: their name, and how many of them this process may use."""

import os
import platform
import re
from pathlib import Path

# ARM's /proc/cpuinfo gives a part number and no name (Arm's Technical Reference Manuals, MIDR_EL1).
ARM_PARTS = {
    "0xd0c": "ARM Neoverse N1",
    "0xd40": "ARM Neoverse V1",
    "0xd4f": "ARM Neoverse V2",
}


def count() -> int:
    """Return the number of CPUs that a scheduler or `taskset` allows this process."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def model(cpuinfo: str) -> str | None:
    """Return the processor's name from the text of /proc/cpuinfo; None where it has none."""
    found = dict(re.findall(r"^(model name|CPU part)\s*: (.+)$", cpuinfo, re.M))
    part = found.get("CPU part")
    return found.get("model name") or ARM_PARTS.get(part, part and f"ARM part {part}")


def name() -> str:
    """Return the processor's name, as Linux or Python knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace", encoding="utf-8") if cpuinfo.exists() else ""
    return model(text) or platform.processor() or platform.machine()
