"""The readers of facts, on small fake machines: a tree of /proc and /sys, an NVML, a python."""

import re
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlojz.machine import facts, nvml

NOWHERE = Path("/nowhere")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ---------------------------------------------------------------- processors and memory


def test_amx_xeon_with_two_sockets_of_which_half_is_ours(tmp_path, monkeypatch):
    flags = "fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
    files = {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Xeon 8480+\nflags\t\t: {flags}\n"}
    for cpu in range(8):  # four to a socket, two to a core
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{base}/physical_package_id"] = f"{cpu // 4}\n"
        files[f"{base}/thread_siblings_list"] = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
    files["sys/devices/system/node/node0/cpulist"] = "0-3\n"
    files["sys/devices/system/node/node1/cpulist"] = "4-7\n"
    monkeypatch.setattr(facts.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(facts.os, "sched_getaffinity", lambda pid: {0, 1, 2, 6}, raising=False)
    tree(tmp_path, files)
    assert facts.cpu(tmp_path / "proc", tmp_path / "sys") == {
        "model": "Xeon 8480+",
        "sockets": 2,
        "cores": 4,
        "threads": 8,
        "affinity": 4,
        "usable": 4,
        "instructions": ["AVX2", "AVX-512", "VNNI", "AVX512_BF16", "AMX"],
        "numa": {"node0": "0-3", "node1": "4-7"},
    }


def test_caches_are_those_of_data_from_the_fastest_with_the_threads_on_each(tmp_path):
    files, names = {}, ("level", "type", "size", "shared_cpu_list")
    for cpu in range(8):  # two to a core, four to a last cache
        core, group = cpu // 2 * 2, cpu // 4 * 4
        caches = [(1, "Data", "48K", f"{core},{core + 1}")]
        caches += [(1, "Instruction", "64K", f"{core},{core + 1}")]
        caches += [(2, "Unified", "2048K", f"{core}-{core + 1}")]
        caches += [(3, "Unified", "32M", f"{group}-{group + 3}")]
        for index, cache in enumerate(caches):
            base = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{base}/{n}": f"{text}\n" for n, text in zip(names, cache, strict=True)}
    files["sys/devices/system/cpu/cpu0/cache/index4/size"] = "odd\n"
    found = facts.cpu(NOWHERE, tree(tmp_path, files) / "sys")["caches"]
    assert [tuple(cache.values()) for cache in found] == [
        (1, 48 << 10, 4, 2),
        (2, 2 << 20, 4, 2),
        (3, 32 << 20, 2, 4),
    ]


def test_arm_is_named_by_its_part_number(tmp_path):
    text = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\nCPU part\t: 0xd4f\n"
    found = facts.cpu(tree(tmp_path, {"cpuinfo": text}), NOWHERE)
    assert found["model"] == "ARM Neoverse V2"
    assert found["instructions"] == ["NEON", "SVE", "BF16"]


V2_LIMITS = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/user/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/user/memory.max": f"{4 << 30}\n",
}
V1_LIMITS = {
    "proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n",
    "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    # Inside a container the host's path is often not below the mount; 2**63 is no limit.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [(V2_LIMITS, 2.5, 4 << 30), (V1_LIMITS, 2.5, None)],
    ids=["v2", "v1"],
)
def test_cgroup_limits(tmp_path, files, cpus, memory):
    tree(tmp_path, {**files, "proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable: 8388608 kB\n"})
    assert facts.cpu(tmp_path / "proc", tmp_path / "sys").get("cgroup") == cpus
    found = facts.memory(tmp_path / "proc", tmp_path / "sys", shm=tmp_path)
    assert found.get("limit_bytes") == memory
    assert (found["total_bytes"], found["available_bytes"]) == (16 << 30, 8 << 30)


def test_a_machine_that_tells_nothing_yields_nothing_and_invents_nothing(tmp_path):
    assert set(facts.cpu(NOWHERE, NOWHERE)) == {"threads", "affinity", "usable"}
    assert facts.memory(NOWHERE, NOWHERE, NOWHERE) == {}
    assert facts.network(NOWHERE) == {"interfaces": {}, "infiniband": {}}
    assert facts.file_system(tmp_path, NOWHERE) is None
    assert facts.storage(NOWHERE)["error"] == "No such file or directory"


# ---------------------------------------------------------------- GPUs and network


class FakeNvml:
    """Two H100s joined by NVLink, or not; what it lacks raises, as NVML does."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_NVLINK_MAX_LINKS = 36

    def __init__(self, nvlink=True, ends_at=None):
        here = {
            "Init": lambda: None,
            "DeviceGetCount": lambda: 2,
            "DeviceGetHandleByIndex": lambda i: i,
            "SystemGetDriverVersion": lambda: "580.65.06",
            "SystemGetCudaDriverVersion_v2": lambda: 13000,
            "DeviceGetName": lambda h: "NVIDIA H100 80GB HBM3",
            "DeviceGetMemoryInfo": lambda h: SimpleNamespace(total=80 << 30, used=600 << 20),
            "DeviceGetCudaComputeCapability": lambda h: (9, 0),
            "DeviceGetPowerManagementLimit": lambda h: 700_000,
            "DeviceGetMaxClockInfo": lambda h, kind: {1: 1980}[kind],
            "DeviceGetMigMode": lambda h: [0, 0],
            "DeviceGetMaxPcieLinkGeneration": lambda h: 5,
            "DeviceGetCurrPcieLinkWidth": lambda h: 16,
            "DeviceGetComputeRunningProcesses": lambda h: [SimpleNamespace(pid=4242)] * h,
            "DeviceGetP2PStatus": lambda a, b, what: 0 if nvlink else 1,
            "DeviceGetTopologyCommonAncestor": lambda a, b: 50,
            "DeviceGetNvLinkState": lambda h, i: int(i < 18),
            "DeviceGetPciInfo": lambda h: SimpleNamespace(busId=h),
            "DeviceGetNvLinkRemotePciInfo": lambda h, i: SimpleNamespace(
                busId=ends_at if i < 4 else "elsewhere"
            ),
        }
        for name, answer in here.items():
            setattr(self, f"nvml{name}", answer)


def test_two_h100_joined_through_a_switch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = facts.gpus()
    assert found["links"] == [["X", "NV18"], ["NV18", "X"]]
    assert (found["driver"], found["driver_cuda"]) == ("580.65.06", "13.0")
    card = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30, "used_bytes": 600 << 20}
    card |= {"capability": (9, 0), "power_limit_w": 700.0, "clock_mhz": 1980, "mig": False}
    card |= {"pcie_generation": 5, "pcie_width": 16, "pids": [4242]}
    assert found["cards"][1] == card


def test_links_are_those_that_end_at_the_other_card_or_the_path_over_pcie(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(ends_at=1))
    assert nvml.link(0, 1) == "NV4"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvlink=False))
    assert nvml.link(0, 1) == "SYS"


def test_visible_devices_are_read_as_cuda_reads_them():
    uuids = ["GPU-aa11", "GPU-bb22", "GPU-bb33"]
    expected = {
        "": (),
        "0": ("GPU-aa11",),
        "2, 0": ("GPU-bb33", "GPU-aa11"),
        "GPU-aa": ("GPU-aa11",),
        "GPU-bb": (),  # two of them
        "0,0": ("GPU-aa11",),
        "0,,1": ("GPU-aa11",),
        "0,-1,1": ("GPU-aa11",),
        "7": (),
        "MIG-1234": ("MIG-1234",),
    }
    assert {value: nvml.named(value, uuids) for value in expected} == expected


def test_the_gpus_of_a_job_are_those_that_cuda_may_see(monkeypatch):
    library = FakeNvml()
    library.nvmlDeviceGetUUID = "GPU-{}".format
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert nvml.visible() == ("GPU-0", "GPU-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert nvml.visible() == ("GPU-1",)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    assert nvml.visible() == (), "no driver"


def test_a_card_without_a_driver_that_answers_is_seen_on_the_bus(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    device = "bus/pci/devices/0000:01:00.0"
    tree(tmp_path, {f"{device}/vendor": "0x10de\n", f"{device}/class": "0x030200\n"})
    found = facts.gpus(tmp_path)
    assert (found["cards"], found["on_bus"]) == ([], True)
    assert facts.gpus(NOWHERE)["on_bus"] is False


def test_network_gives_speeds_of_real_interfaces_and_active_infiniband(tmp_path):
    ib = "class/infiniband/mlx5_0/ports"
    net = "class/net"
    files = {f"{net}/{name}/operstate": "up\n" for name in ("eth0", "virtio", "docker0")}
    files |= {f"{net}/eth0/speed": "100000\n", f"{net}/virtio/speed": "-1\n"}
    files |= {f"{net}/{name}/device/vendor": "" for name in ("eth0", "virtio")}
    files |= {f"{ib}/1/state": "4: ACTIVE\n", f"{ib}/1/rate": "400 Gb/sec (4X NDR)\n"}
    files |= {f"{ib}/2/state": "1: DOWN\n"}
    assert facts.network(tree(tmp_path, files)) == {
        "interfaces": {"eth0": 100.0, "virtio": None},
        "infiniband": {"mlx5_0:1": "400 Gb/sec (4X NDR)"},
    }


# ---------------------------------------------------------------- storage


def test_file_system_is_that_of_the_deepest_mount(tmp_path):
    lines = [
        "27 1 254:0 / / rw - ext4 /dev/vda rw",
        "30 27 0:9 / /scratch rw,relatime shared:1 - lustre server:/scratch rw",
        "31 27 0:9 / /scratches rw - nfs4 server:/x rw",
    ]
    proc = tree(tmp_path, {"self/mountinfo": "\n".join(lines)})
    assert facts.file_system(Path("/scratch/me"), proc) == "lustre"
    assert facts.file_system(Path("/home"), proc) == "ext4"


def test_storage_is_measured_in_a_folder_that_is_removed(tmp_path, monkeypatch):
    real = facts.bandwidth
    monkeypatch.setattr(facts, "operations", lambda folder: 5000.0)
    monkeypatch.setattr(facts, "bandwidth", lambda folder, most: real(folder, 8 << 20))
    found = facts.storage(tmp_path)
    assert min(found["write_bytes_per_s"], found["read_bytes_per_s"]) > 0
    assert found["operations_per_s"] == 5000.0
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_falls_back_where_o_direct_is_refused(tmp_path, monkeypatch):
    real, direct = facts.os.open, getattr(facts.os, "O_DIRECT", 0)

    def refuses_direct(path, flags, mode=0o600):
        if flags & direct:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(facts.os, "open", refuses_direct)
    found = facts.bandwidth(tmp_path, 8 << 20)
    assert found["direct"] is False
    assert found["write_bytes_per_s"] > 0


def test_measurements_end_when_their_time_is_up(tmp_path):
    ticks = count(step=0.5)  # seconds that pass between two looks at the clock
    assert facts.operations(tmp_path, seconds=1.2, clock=lambda: next(ticks)) == 10 / 2.0
    found = facts.bandwidth(tmp_path, 1 << 40, seconds=1.2, clock=lambda: next(ticks))
    assert found["write_bytes_per_s"] == 2 * (8 << 20) / 2.0


# ---------------------------------------------------------------- software and torch


def test_pins_are_found_in_a_folder_above(tmp_path):
    tree(tmp_path, {"constraints.txt": "# the set\ntorch==2.11.0\nPillow==13.0.0  # decodes\n"})
    (tmp_path / "notebooks").mkdir()
    assert facts.pinned(tmp_path / "notebooks") == {"torch": "2.11.0", "pillow": "13.0.0"}


def test_the_tested_versions_are_those_that_the_package_admits(monkeypatch):
    lines = ["torch<2.16,>=2.11", "torchvision<0.30,>=0.26", "numpy<2.4", 'torchao; extra == "x"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    assert facts.tested() == {"torch": ("2.11", "2.16"), "torchvision": ("0.26", "0.30")}


def test_a_file_that_shadows_a_package_is_named(tmp_path):
    tree(tmp_path, {"dlojz.py": "", "other.py": ""})
    assert facts.shadows([str(tmp_path), "", str(tmp_path)]) == [str(tmp_path / "dlojz.py")]


def test_torch_answers_from_another_process():
    found = facts.torch_build()
    assert {"version", "cuda", "cpu_capability", "threads", "gloo", "decode_jpeg"} <= set(found)
    assert len(found["devices"]) == found["gpus"]
    assert re.fullmatch(r"\d+(\.\d+)+", found["libraries"]["oneDNN"])
    assert not [name for name in found if name.endswith("_error")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo OSError: libcudart.so.13 is missing >&2; exit 1", "libcudart.so.13 is missing"),
        ("kill -ILL $$", "code -4"),
        ("exec sleep 60", "no answer in 0.2 s"),
    ],
)
def test_a_torch_that_cannot_be_asked_is_one_line(tmp_path, body, expected):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    error = facts.torch_build(str(python), timeout_s=0.2 if "sleep" in body else 20)
    assert expected in error["version_error"]
    assert "\n" not in error["version_error"]
