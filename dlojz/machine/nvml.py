"""The only reader of NVML, NVIDIA's library: which cards are here, and their properties.

torch could answer some of this, but a command must not wait seconds for its import.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# nvidia-smi's names for the path between two GPUs that NVLink does not connect.
PCIE_PATHS = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

CLOCK_SM = 1  # NVML_CLOCK_SM, of the multiprocessors


class NvmlError(Exception):
    """An error that says why NVML has no answers: no nvidia-ml-py, or no driver."""


@contextmanager
def session() -> Iterator[None]:
    """Open NVML, so that `ask` gets answers. Raises NvmlError."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        raise NvmlError(str(error)) from error
    try:
        yield
    finally:
        ask("Shutdown")


def ask(name: str, *args):
    """Return one answer of NVML, or None: not every card, driver or container supports each."""
    try:
        import pynvml

        return getattr(pynvml, f"nvml{name}")(*args)
    except Exception:  # NVMLError_NotSupported, NoPermission, a missing function, ...
        return None


def handles() -> list:
    """Return NVML's handles of the cards in PCI bus order, as CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return [ask("DeviceGetHandleByIndex", i) for i in range(ask("DeviceGetCount") or 0)]


def handle_of(device: str):
    """Return NVML's handle of a CUDA device such as "cuda:0"; None where there is none.

    NVML stays open. The card is found by its UUID: the two libraries number cards differently.
    """
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    ask("Init")
    return ask("DeviceGetHandleByUUID", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def visible() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a job may use here; none without a driver."""
    try:
        with session():
            uuids = [ask("DeviceGetUUID", handle) for handle in handles()]
    except NvmlError:
        return ()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(uuids) if names is None else named(names, uuids)


def named(names: str, uuids: list[str]) -> tuple[str, ...]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, among those with these UUIDs.

    As in CUDA, the list ends at the first name that is empty, unknown or a duplicate. Slices of a
    card (MIG-...) are taken as they are.
    """
    chosen = []
    for name in (n.strip() for n in names.split(",")):
        matches = [
            u for i, u in enumerate(uuids) if name == str(i) or (name and u.startswith(name))
        ]
        found = [name] if name.startswith("MIG-") else matches
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def card(handle) -> dict:
    """Return the properties of a card; those that it does not report are None."""

    def tell(name):
        return ask(f"DeviceGet{name}", handle)

    memory, power, mig = tell("MemoryInfo"), tell("PowerManagementLimit"), tell("MigMode")
    running = tell("ComputeRunningProcesses") or []
    return {
        "name": tell("Name"),
        "memory_bytes": memory and memory.total,
        "used_bytes": memory and memory.used,
        "capability": tell("CudaComputeCapability"),
        "power_limit_w": power and power / 1000,  # NVML counts milliwatts
        "clock_mhz": ask("DeviceGetMaxClockInfo", handle, CLOCK_SM),
        "mig": mig and mig[0] == 1,
        # The current generation drops when a card idles.
        "pcie_generation": tell("MaxPcieLinkGeneration"),
        "pcie_width": tell("CurrPcieLinkWidth"),
        "pids": [p.pid for p in running if p.pid != os.getpid()],
    }


def link(a, b) -> str:
    """Return "NV18" for 18 NVLinks between two cards, directly or by a switch; else the PCIe path.

    The link of a card with itself is "X".
    """
    import pynvml

    if a is b:
        return "X"
    if ask("DeviceGetP2PStatus", a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) != 0:
        return PCIE_PATHS.get(ask("DeviceGetTopologyCommonAncestor", a, b), "unknown")
    links = range(pynvml.NVML_NVLINK_MAX_LINKS)
    active = [i for i in links if ask("DeviceGetNvLinkState", a, i) == 1]
    ends = [ask("DeviceGetNvLinkRemotePciInfo", a, i) for i in active]
    there = ask("DeviceGetPciInfo", b)
    direct = sum(bool(there and end and end.busId == there.busId) for end in ends)
    return f"NV{direct or len(active) or ''}"


def energy_j(handle) -> float | None:
    """Return the energy that a card has used since its driver was loaded, in joules.

    The counter moves about every 100 ms, so only differences over seconds are meaningful.
    Source: NVML's nvmlDeviceGetTotalEnergyConsumption (Volta and later).
    """
    millijoules = ask("DeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1000


def clock(handle) -> tuple[int | None, int | None]:
    """Return a card's SM clock in MHz, and NVML's bits for why it is not higher."""
    reasons = ask("DeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # before driver 535 it had another name
        reasons = ask("DeviceGetCurrentClocksThrottleReasons", handle)
    return ask("DeviceGetClockInfo", handle, CLOCK_SM), reasons
