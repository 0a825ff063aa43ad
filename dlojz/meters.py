"""Energy and memory, read where the hardware has a sensor; None where it has not.

Nothing here is read inside a training step: the run log reads the energy counter at the two ends of
a measured window, and the peak of the memory once, at the end.
"""

import re
from functools import cache
from pathlib import Path


def energy_joules(device) -> float | None:
    """Energy that `device` (a torch.device) has used since its driver was loaded, in joules.

    The counter moves about every 100 ms, so only differences over seconds mean anything.
    Source: NVML's nvmlDeviceGetTotalEnergyConsumption (Volta and later); None elsewhere.
    """
    handle = _nvml_handle(str(device)) if device.type == "cuda" else None
    if handle is None:
        return None
    import pynvml

    try:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # mJ
    except pynvml.NVMLError:  # a card without the counter, or a hypervisor that hides it
        return None


@cache
def _nvml_handle(device: str):
    """NVML's handle of a CUDA device, found by UUID: the two number the cards differently."""
    import pynvml
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def peak_memory(device) -> dict:
    """The most memory held at once, in bytes, by kind.

    On a GPU: `device_peak_bytes`, of the tensors; `device_reserved_bytes`, of the allocator's
    pool, which is what nvidia-smi shows and what runs out; `device_total_bytes`, of the card.
    Everywhere: `process_peak_bytes`, the resident set of this process (not of its workers), where
    the kernel tells.
    """
    found = {}
    if device.type == "cuda":
        import torch

        found = {
            "device_peak_bytes": torch.cuda.max_memory_allocated(device),
            "device_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "device_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
    status = Path("/proc/self/status")
    line = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.M) if status.exists() else None
    if line:
        found["process_peak_bytes"] = int(line[1]) * 1024
    return found
