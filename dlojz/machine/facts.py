"""The facts of this machine: processors, memory, GPUs, storage, network, software, torch.

Each reader returns plain facts, ready for JSON, with units in their names, and none raises for what
this machine lacks: an unknown fact is absent, never zero. `dlojz.machine.doctor` interprets them.

torch is queried in a process of its own, which runs this file as a script: the other facts need not
wait for its import, and a broken torch is a fact rather than a traceback.
"""

import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from dlojz.machine import cpus, nvml

PROC, SYS, SHM = Path("/proc"), Path("/sys"), Path("/dev/shm")
SHADOWS = ("dlojz.py", "dl.py", "torch.py", "torchvision.py", "numpy.py")

# The CPU flags of Linux that affect the speed of training, and their usual names.
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_bf16": "AMX",
    "asimd": "NEON",  # ARM, from here on
    "sve": "SVE",
    "bf16": "BF16",
}

# What torch says of a GPU, by our names. An AMD GPU lacks some of them.
DEVICE = {
    "name": "name",
    "units": "multi_processor_count",
    "warp": "warp_size",
    "threads_per_unit": "max_threads_per_multi_processor",
    "registers_per_unit": "regs_per_multiprocessor",
    "shared_bytes_per_unit": "shared_memory_per_multiprocessor",
    "cache_bytes": "L2_cache_size",
    "memory_bytes": "total_memory",
    "clock_khz": "clock_rate",
}
LIBRARIES = {  # in the text of torch.__config__.show()
    "MKL": r"Math Kernel Library Version (\S+?)-?(?:Product|\s)",
    "oneDNN": r"MKL-DNN v(\S+)",
    "GCC": r"GCC (\S+)",
}


def cpu(proc: Path = PROC, sysfs: Path = SYS) -> dict:
    """Return model, counts and instructions; `usable` is how many CPUs this process can fill."""
    cpuinfo, system = _read(proc / "cpuinfo"), sysfs / "devices/system"
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", cpuinfo, re.M)
    flags = flags[1].split() if flags else []
    sockets = {_read(p) for p in system.glob("cpu/cpu*/topology/physical_package_id")}
    cores = {_read(p) for p in system.glob("cpu/cpu*/topology/thread_siblings_list")}
    threads = os.cpu_count()
    affinity = cpus.count()
    limit = _cgroup_cpus(proc, sysfs)
    return _known(
        model=cpus.model(cpuinfo),
        sockets=len(sockets - {"-1"}) or None,
        cores=len(cores) or None,
        threads=threads,
        affinity=affinity,
        cgroup=limit,
        usable=max(1, int(min(affinity, limit or affinity))),
        instructions=[name for flag, name in INSTRUCTIONS.items() if flag in flags] or None,
        numa={p.parent.name: _read(p) for p in sorted(system.glob("node/node*/cpulist"))} or None,
        caches=_caches(system) or None,
    )


def _caches(system: Path) -> list[dict]:
    """Return the caches of data, from the fastest: their bytes, how many, and threads on each."""
    found = {}
    for folder in sorted(system.glob("cpu/cpu*/cache/index*")):
        level, kind = _read(folder / "level"), _read(folder / "type")
        size = re.fullmatch(r"(\d+)([KM]?)", _read(folder / "size"))
        if not size or kind not in ("Data", "Unified"):
            continue
        count = int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
        threads = _read(folder / "shared_cpu_list")
        found.setdefault((int(level), count), set()).add(threads)
    return [
        {"level": level, "bytes": count, "many": len(lists), "threads": _threads_in(min(lists))}
        for (level, count), lists in sorted(found.items())
    ]


def _threads_in(cpulist: str) -> int:
    """Return 6 for the Linux list "0-3,8-9"."""
    ends = [part.partition("-") for part in cpulist.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _cgroup_cpus(proc: Path, sysfs: Path) -> float | None:
    """Return the tightest limit in CPUs: v2 writes 'quota period' into one file, v1 into two."""
    limits = []
    for folder in _cgroups("cpu", proc, sysfs):
        v1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        for text in (_read(folder / "cpu.max"), v1):
            if match := re.fullmatch(r"(\d+) (\d+)", text):  # "max ..." and "-1 ..." limit nothing
                limits.append(int(match[1]) / int(match[2]))
    return min(limits, default=None)


def _cgroups(controller: str, proc: Path, sysfs: Path) -> list[Path]:
    """Return the folders that limit this process, up to the root: a parent's limit applies too.

    A container often sees its host's path in /proc/self/cgroup, but only the root below /sys.
    """
    folders = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # v2, or this one of v1
            root = sysfs / "fs/cgroup" / (controller if controllers else "")
            inside = Path(path.lstrip("/"))
            folders += [root / p for p in (inside, *inside.parents)]
    return folders


def memory(proc: Path = PROC, sysfs: Path = SYS, shm: Path = SHM) -> dict:
    """Return the bytes of memory: total, available, allowed by the cgroup, and in /dev/shm."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", _read(proc / "meminfo"), re.M))
    here = {name: int(count) * 1024 for name, count in kib.items()}
    limits = [
        int(text)
        for folder in _cgroups("memory", proc, sysfs)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdigit()
    ]
    limit, total = min(limits, default=None), here.get("MemTotal")
    return _known(
        total_bytes=total,
        available_bytes=here.get("MemAvailable"),
        # "No limit" reads as about 2**63 in cgroup v1.
        limit_bytes=limit if limit and total and limit < total else None,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
    )


def gpus(sysfs: Path = SYS) -> dict:
    """Return all NVIDIA cards, even those that CUDA_VISIBLE_DEVICES hides, and their links."""
    try:
        with nvml.session():
            cards, cuda = nvml.handles(), nvml.ask("SystemGetCudaDriverVersion_v2")
            return _known(
                cards=[_known(**nvml.card(handle)) for handle in cards],
                links=[[nvml.link(a, b) for b in cards] for a in cards],
                driver=nvml.ask("SystemGetDriverVersion"),
                driver_cuda=cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
                visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            )
    except nvml.NvmlError as error:
        nvidia = [v.parent for v in sysfs.glob("bus/pci/devices/*/vendor") if _read(v) == "0x10de"]
        on_bus = any(_read(device / "class").startswith("0x03") for device in nvidia)  # displays
        return {"cards": [], "why": str(error), "on_bus": on_bus}


def network(sysfs: Path = SYS) -> dict:
    """Return the interfaces that are up, with their speeds in Gb/s if known, and InfiniBand."""
    interfaces = {}
    for folder in sorted(sysfs.glob("class/net/*")):
        if (folder / "device").exists() and _read(folder / "operstate") in ("up", "unknown"):
            speed = _read(folder / "speed")  # Mb/s; -1 or unreadable in virtual machines
            interfaces[folder.name] = int(speed) / 1000 if speed.isdigit() else None
    ports = {
        f"{port.parent.parent.name}:{port.name}": _read(port / "rate") or None
        for port in sorted(sysfs.glob("class/infiniband/*/ports/*"))
        if "ACTIVE" in _read(port / "state")
    }
    return {"interfaces": interfaces, "infiniband": ports}


def storage(folder=".", measure: bool = True, proc: Path = PROC) -> dict:
    """Return type, size and free space of the folder's file system, and its speed if `measure`.

    Each measurement takes at most 1.2 s and 256 MiB, in a temporary folder inside `folder`.
    """
    folder = Path(folder).expanduser().resolve()
    facts = {"folder": str(folder), "type": file_system(folder, proc)}
    try:
        usage = shutil.disk_usage(folder)
        facts |= {"total_bytes": usage.total, "free_bytes": usage.free}
        if measure:
            with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
                facts |= bandwidth(Path(scratch), min(256 << 20, usage.free // 4))
                facts["operations_per_s"] = operations(Path(scratch))
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return _known(**facts)


def file_system(folder: Path, proc: Path = PROC) -> str | None:
    """Return the type ('ext4', 'lustre', 'tmpfs', ...) of the deepest mount with `folder`."""
    kinds = {}
    for line in _read(proc / "self/mountinfo").splitlines():
        mount, kind = line.split()[4], line.partition(" - ")[2].split()[0]
        kinds[Path(mount.replace("\\040", " "))] = kind  # a later mount covers an earlier one
    return next((kinds[place] for place in (folder, *folder.parents) if place in kinds), None)


def bandwidth(folder: Path, most_bytes: int, seconds: float = 1.2, clock=time.perf_counter) -> dict:
    """Return the bytes/s of one sequential stream, written and read back.

    The page cache is bypassed where O_DIRECT works. Elsewhere each write waits for the storage, and
    the cache is asked to drop the file.
    """
    limits = (most_bytes, seconds, clock)
    try:
        return {"direct": True, **_streams(folder / "direct", os.O_DIRECT, *limits)}
    except (AttributeError, OSError):  # macOS has no O_DIRECT, many file systems refuse it
        return {"direct": False, **_streams(folder / "cached", os.O_SYNC, *limits)}


def _streams(path: Path, flag: int, most_bytes: int, seconds: float, clock) -> dict:
    rates = {}
    with mmap.mmap(-1, 8 << 20) as block:  # a mapping starts on a page, which O_DIRECT demands
        block.write(os.urandom(len(block)))  # a file system that compresses gains nothing
        for name, move in (("write", os.writev), ("read", os.readv)):
            fd = os.open(path, flag | (os.O_CREAT | os.O_WRONLY if name == "write" else 0), 0o600)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                done, start = 0, clock()
                while done < most_bytes and clock() - start < seconds:
                    if not (moved := move(fd, [block])):  # end of file
                        break
                    done += moved
                rates[f"{name}_bytes_per_s"] = done / (clock() - start) or None
            finally:
                os.close(fd)
    return rates


def operations(folder: Path, seconds: float = 1.2, clock=time.perf_counter) -> float:
    """Return operations/s on 4 KiB files, one after another: create, stat, open, read, unlink."""
    body, path, done, start = bytes(4096), folder / "small", 0, clock()
    while done < 5 * 5000 and clock() - start < seconds:
        path.write_bytes(body)
        path.stat()
        path.read_bytes()  # an open and a read
        path.unlink()
        done += 5
    return done / (clock() - start)


def software(packages, folder=".") -> dict:
    """Return the operating system, versions found and pinned, Slurm, compilers and limits."""
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.system()
    has_slurm = shutil.which("sbatch")
    _, slurm, slurm_error = ask(["sbatch", "--version"], 5) if has_slurm else (0, "", "")
    files, most_files = _limits(resource.RLIMIT_NOFILE)
    path = os.environ.get("PYTHONPATH", "")
    return _known(
        system=system,
        kernel=platform.release(),
        python=platform.python_version(),
        executable=sys.executable,
        packages={name: _version(name) for name in packages},
        pinned=pinned(folder),
        tested=tested(),
        slurm=slurm.strip() or None,
        slurm_error=None if slurm.strip() else slurm_error.strip() or None,
        compiler=shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        openssl=bool(shutil.which("openssl")),
        open_files=files,
        open_files_most=most_files,
        locked_bytes=_limits(resource.RLIMIT_MEMLOCK)[0],
        pythonpath=path or None,
        shadows=shadows([os.getcwd(), *path.split(os.pathsep)]),
        recompiled=sys.dont_write_bytecode and not _is_compiled("torch"),
    )


def _is_compiled(package: str) -> bool:
    """Return whether Python finds the bytecode of a package; True if the package is missing."""
    found = importlib.util.find_spec(package)
    origin = found and found.origin  # None for a mere folder of this name
    return not origin or Path(importlib.util.cache_from_source(origin)).exists()


def _limits(which: int) -> list[int | None]:
    """Return the soft and the hard limit; None means unlimited."""
    return [None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(which)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pinned(folder=".") -> dict[str, str]:
    """Return the versions in constraints.txt of `folder` or its nearest parent that has one."""
    folder = Path(folder).expanduser().resolve()
    for place in (folder, *folder.parents):
        if text := _read(place / "constraints.txt"):
            lines = re.findall(r"^([\w.-]+)==([\w.+!]+)", text, re.M)
            return {name.lower(): version for name, version in lines}
    return {}


def tested() -> dict[str, tuple[str, str]]:
    """Return the oldest torch and torchvision that were tested, and what comes after the newest."""
    try:
        lines = importlib.metadata.requires("dlojz") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        bounds = dict(re.findall(r"([<>]=?)([\d.]+)", line))
        name = re.match(r"[\w.-]+", line)[0]
        if name in ("torch", "torchvision") and {">=", "<"} <= bounds.keys():
            found[name] = (bounds[">="], bounds["<"])
    return found


def shadows(folders) -> list[str]:
    """Return the files that Python would import instead of the package of that name."""
    paths = [Path(folder, name) for folder in dict.fromkeys(folders) if folder for name in SHADOWS]
    return [str(path) for path in paths if path.is_file()]


def torch_build(python: str = sys.executable, timeout_s: float = 60) -> dict:
    """Return torch's build, queried in another process; `version_error` if that fails."""
    # -P: nothing must be imported from this file's folder
    code, out, err = ask([python, "-P", __file__], timeout_s)
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or ["it said nothing"])[-1]
        how = "did not end" if code is None else f"ended with code {code}"
        return {"version_error": f"`import torch` {how}: {last}"}


def _torch_questions() -> dict:
    """Return the functions that read the facts for `torch_build`."""
    import torch

    def decode():
        from torchvision.io import decode_jpeg, encode_jpeg

        return list(decode_jpeg(encode_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8))).shape)

    def nccl():
        there = torch.distributed.is_nccl_available()
        return ".".join(map(str, torch.cuda.nccl.version())) if there else None

    def devices():
        cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{name: getattr(card, its, None) for name, its in DEVICE.items()} for card in cards]

    return {
        "version": lambda: torch.__version__,
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: torch.version.hip,
        "libraries": lambda: _libraries(torch.__config__.show()),
        "devices": devices,
        "cudnn": torch.backends.cudnn.version,
        # torch.cuda.get_arch_list() is empty on a machine without a GPU
        "architectures": lambda: (torch._C._cuda_getArchFlags() or "").split(),
        "gpus": torch.cuda.device_count,
        "cpu_capability": torch.backends.cpu.get_cpu_capability,
        "threads": torch.get_num_threads,
        "gloo": lambda: torch.distributed.is_gloo_available(),
        "nccl": lambda: torch.distributed.is_nccl_available(),
        "nccl_version": nccl,
        "torchvision": lambda: __import__("torchvision").__version__,
        "decode_jpeg": decode,
    }


def _answers(questions: dict) -> dict:
    """Return the facts by name; one that cannot be read leaves its error instead."""
    facts = {}
    for name, answer in questions.items():
        try:
            facts[name] = answer()
        except Exception as error:
            facts[f"{name}_error"] = f"{type(error).__name__}: {error}"
    return facts


def _libraries(text: str) -> dict:
    versions = {name: re.search(pattern, text) for name, pattern in LIBRARIES.items()}
    return {name: found[1] for name, found in versions.items() if found}


def ask(argv: list[str], timeout_s: float, cwd=None) -> tuple[int | None, str, str]:
    """Return a program's exit code, output and errors; the code is None if it did not end."""
    try:
        done = subprocess.run(
            argv, cwd=cwd, capture_output=True, encoding="utf-8", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return None, "", f"no answer in {timeout_s:g} s"
    except OSError as error:
        return None, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _read(path: Path) -> str:
    """Return the file's text, stripped; '' where it is missing or unreadable."""
    try:
        return path.read_text(errors="replace", encoding="utf-8").strip()
    except OSError:
        return ""


def _known(**facts) -> dict:
    return {name: value for name, value in facts.items() if value is not None}


if __name__ == "__main__":
    print(json.dumps(_answers(_torch_questions())))
