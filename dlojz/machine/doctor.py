"""The doctor of your system, software and stack: what this machine can do, and its problems.

    dlojz doctor                                            # in a terminal
    from dlojz.machine import doctor; doctor.examine("data")     # in a notebook: a table

`dlojz.machine.facts` reads the facts, `diagnose` turns them into lines and problems, and
`Examination` shows those as text or HTML.
"""

import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from html import escape
from pathlib import Path

from dlojz.machine import facts

GIB = 1 << 30
INSTALL = "pip install -c constraints.txt -e .    (in the course's folder)"
PACKAGES = {
    "torch": "trains",
    "torchvision": "models, transforms, JPEG decoding",
    "triton": "GPU kernels: torch.compile's and yours",
    "numpy": "arrays outside torch",
    "pillow": "decodes JPEGs in DataLoader workers",
    "jupyterlab": "shows the notebooks (jobs do without)",
    "matplotlib": "draws the figures (jobs do without)",
}
NEEDED = ("torch", "torchvision", "numpy", "pillow")
NETWORK_FILE_SYSTEMS = re.compile("nfs|lustre|gpfs|beegfs|ceph|cifs|9p|weka|panfs|fuse\\.")


@dataclass(frozen=True)
class Entry:
    """One line of the report: a value with its unit, and its meaning for training."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Problem:
    """A finding, what was expected, and what to type next; a note can safely be ignored."""

    found: str
    expected: str
    remedy: str
    note: bool = False


@dataclass(frozen=True, repr=False)
class Examination:
    """The sections of the report, and the facts behind them."""

    sections: dict[str, list[Entry]]  # system, software, stack, notebooks
    problems: list[Problem] | None  # None where they are left out
    facts: dict

    def only(self, *names: str) -> "Examination":
        """Return these sections of the report, without the others and without the problems."""
        if wrong := set(names) - set(self.sections):
            raise ValueError(f"no section {min(wrong)!r}: expected {', '.join(self.sections)}")
        return replace(self, sections={n: self.sections[n] for n in names}, problems=None)

    def to_dict(self) -> dict:
        """Return plain lists, dicts, numbers and texts, for JSON."""
        found = asdict(self)
        return found.pop("sections") | found

    def __repr__(self) -> str:
        """Return the report as aligned text, 98 columns wide."""
        lines = []
        for name, entries in self.sections.items():
            lines += [name.capitalize(), *(_row((18, 34, 40), *astuple(e)) for e in entries), ""]
        if self.problems is None:
            return "\n".join(lines).rstrip()
        lines.append(f"Problems and notes: {len(self.problems) or 'none'}")
        for p in self.problems:
            lines.append(_row((8, 8, 76), "note" if p.note else "PROBLEM", "found", p.found))
            lines.append(_row((8, 8, 76), "", "expected", p.expected))
            lines.append(_row((8, 8, 76), "", "type", p.remedy))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the report as one table, in JupyterLab's own colours, light or dark."""
        sections = {name.capitalize(): entries for name, entries in self.sections.items()}
        if self.problems is not None:
            problems = sections[f"Problems and notes: {len(self.problems) or 'none'}"] = []
            for p in self.problems:
                todo = f"expected: {p.expected}\ntype: {p.remedy}"
                problems.append(Entry("note" if p.note else "PROBLEM", p.found, todo))
        style = "text-align:left;vertical-align:top;white-space:pre-line"  # keeps line breaks
        rows = []
        for title, entries in sections.items():
            rows.append(f'<tr><th colspan="3" style="{style}">{title}</th></tr>')
            for e in entries:
                cells = [f'<td style="{style}">{escape(text)}</td>' for text in astuple(e)]
                rows.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"


def examine(folder=".", quick: bool = False, storage_speed: bool = True) -> Examination:
    """Return a report on this machine and on the storage of `folder`.

    This takes about 10 s: at most 4 s to measure the storage, the rest for `import torch` in
    another process. `quick` leaves both out, `storage_speed=False` the first. Nothing is raised for
    what this machine lacks.
    """
    if sys.stderr.isatty() and not quick:
        print("examining, about 10 s ...", file=sys.stderr)
    found = {
        "cpu": facts.cpu(),
        "memory": facts.memory(),
        "gpu": facts.gpus(),
        "network": facts.network(),
        "software": facts.software(PACKAGES, folder),
        "storage": facts.storage(folder, measure=storage_speed and not quick),
        "torch": {} if quick else facts.torch_build(),
    }
    return diagnose(found)


def diagnose(facts: dict) -> Examination:
    """Return the lines and problems that follow from the facts, without reading anything else."""
    parts = {
        "system": (_cpu, _memory, _gpus, _storage, _network),
        "software": (_software,),
        "stack": (_stack,),
        "notebooks": (_notebooks,),
    }
    sections = {name: [e for part in found for e in part(facts)] for name, found in parts.items()}
    problems = (_install_problems, _gpu_problems, _limit_problems, _software_problems)
    return Examination(sections, [p for part in problems for p in part(facts)], facts)


def _cpu(facts: dict) -> Iterator[Entry]:
    cpu = facts["cpu"]
    counts = [f"{name}: {cpu[name]}" for name in ("sockets", "cores", "threads") if name in cpu]
    usable = [f"{cpu[name]:g} by {name}" for name in ("affinity", "cgroup") if name in cpu]
    numa = [f"{name}: CPUs {cpus}" for name, cpus in cpu.get("numa", {}).items()]
    near = "keep a process near its GPU" if len(numa) > 1 else "where memory is near"
    yield Entry("CPU", cpu.get("model", "unknown"), "decodes and augments the images")
    yield Entry("cores", ", ".join(counts), "a DataLoader worker fills one core")
    yield Entry("CPUs usable", ", ".join(usable), "workers + main process fit in this")
    yield Entry("instructions", ", ".join(cpu.get("instructions", ["unknown"])), _bf16_on_cpu(cpu))
    if caches := cpu.get("caches"):
        texts = ", ".join(map(_cache, caches))
        yield Entry("caches", texts, "a core computes from them; memory is farther")
    yield Entry("NUMA", "\n".join(numa) or "unknown", near)


def _cache(cache: dict) -> str:
    """Return "L3 32 MiB for 8 threads"."""
    unit, name = (1 << 20, "MiB") if cache["bytes"] >= 1 << 20 else (1 << 10, "KiB")
    many = f" for {cache['threads']} threads" if cache["threads"] > 2 else ""
    return f"L{cache['level']} {cache['bytes'] / unit:.3g} {name}{many}"


def _bf16_on_cpu(cpu: dict) -> str:
    if "instructions" not in cpu:
        return "bf16 on this CPU: unknown"
    native = {"AVX512_BF16", "AMX", "BF16"}.intersection(cpu["instructions"])
    if native:
        return f"bf16 on this CPU: native ({', '.join(sorted(native))})"
    return "bf16 on this CPU: emulated, 2 to 30 times slower; no gain is required"


def _memory(facts: dict) -> Iterator[Entry]:
    memory, cpus = facts["memory"], facts["cpu"]["usable"]
    total, limit = memory.get("total_bytes"), memory.get("limit_bytes")
    share = f"{_size((limit or total) / cpus)} per usable CPU" if total else ""
    available = _size(memory.get("available_bytes"))
    yield Entry("memory", f"{_size(total)}, {available} available", share)
    if limit:
        yield Entry("memory limit", f"{_size(limit)} by cgroup", "killed above it")
    yield Entry("/dev/shm", _size(memory.get("shm_bytes")), "workers hand their batches over in it")


def _gpus(facts: dict) -> Iterator[Entry]:
    gpu = facts["gpu"]
    if not gpu["cards"]:
        yield Entry("GPU", "no GPU", "figures recorded on an H100 will be shown instead")
        return
    for i, card in enumerate(gpu["cards"]):
        yield _card(f"GPU {i}", card)
    driver = f"{gpu.get('driver', 'unknown')}, CUDA up to {gpu.get('driver_cuda', 'unknown')}"
    yield Entry("GPU driver", driver, "must be as new as torch's CUDA")
    if kinds := {link for row in gpu["links"] for link in row} - {"X"}:
        nvlink = all(kind.startswith("NV") for kind in kinds)
        meaning = "NVLink carries the gradients" if nvlink else "PCIe paths carry gradients slowly"
        table = "\n".join(" ".join(f"{link:4}" for link in row) for row in gpu["links"])
        value = f"{kinds.pop()} between each pair" if len(kinds) == 1 else table
        yield Entry("GPU links", value, meaning)
    if "visible" in gpu:
        yield Entry("visible GPUs", f"CUDA_VISIBLE_DEVICES={gpu['visible']}", "hides the others")


def _card(name: str, card: dict) -> Entry:
    parts = [_size(card.get("memory_bytes"))]
    if "power_limit_w" in card:
        parts.append(f"{card['power_limit_w']:.0f} W")
    if "pcie_generation" in card and "pcie_width" in card:
        parts.append(f"PCIe {card['pcie_generation']}.0 x{card['pcie_width']}")
    if card.get("mig"):
        parts.append("MIG on")
    value = f"{card.get('name', 'unknown')}\n{', '.join(parts)}"
    if "capability" not in card:
        return Entry(name, value, "precisions unknown")
    major, minor = card["capability"]
    bf16 = "tensor cores: TF32, fp16, bf16" if major >= 8 else "no bf16 or TF32 tensor cores"
    return Entry(name, f"{value}\ncompute capability {major}.{minor}", bf16)


def _storage(facts: dict) -> Iterator[Entry]:
    storage = facts["storage"]
    kind = storage.get("type", "unknown")
    network = NETWORK_FILE_SYSTEMS.match(kind)
    size = f"{_size(storage.get('free_bytes'))} free of {_size(storage.get('total_bytes'))}"
    value = f"{kind}{' (network)' if network else ''}, {size}\n{storage['folder']}"
    meaning = "shared: few large files, not many small" if network else "holds images and runs"
    yield Entry("storage", value, meaning)
    if "error" in storage:
        yield Entry("storage speed", "unknown", f"cannot write: {storage['error']}")
    for name in ("write", "read"):
        if f"{name}_bytes_per_s" in storage:
            rate = f"{storage[f'{name}_bytes_per_s'] / GIB:.2f} GiB/s"
            cache = "past the page cache" if storage["direct"] else "page cache may have helped"
            yield Entry(f"large file, {name}", rate, f"one stream, {cache}")
    if "operations_per_s" in storage:
        rate = f"{storage['operations_per_s']:,.0f} operations/s"
        yield Entry("small files", rate, "create, stat, open, read, unlink; cached")


def _network(facts: dict) -> Iterator[Entry]:
    network, meaning = facts["network"], "carries gradients between machines"
    for name, speed in network["interfaces"].items():
        yield Entry(f"network {name}", f"{speed:g} Gb/s" if speed else "speed unknown", meaning)
    for name, rate in network["infiniband"].items():
        yield Entry(f"InfiniBand {name}", rate or "rate unknown", f"{meaning}, past the kernel")


def _software(facts: dict) -> Iterator[Entry]:
    software = facts["software"]
    yield Entry("system", f"{software['system']}\nkernel {software['kernel']}", "any Linux will do")
    yield Entry("Python", f"{software['python']}\n{software['executable']}", "runs the jobs too")
    for name, purpose in PACKAGES.items():
        yield Entry(name, software["packages"][name] or "not installed", purpose)
    slurm, files = software.get("slurm"), software.get("open_files")
    yield Entry("Slurm", slurm or "none", "runs the jobs" if slurm else "jobs run on this machine")
    files = f"at most {files:,}" if files else "unlimited"
    yield Entry("open files", files, "workers hand over batches through them")
    locked = _size(software["locked_bytes"]) if "locked_bytes" in software else "unlimited"
    yield Entry("locked memory", locked, "InfiniBand wants unlimited")


def _stack(facts: dict) -> Iterator[Entry]:
    torch = facts["torch"]
    if "version" not in torch:
        yield Entry("torch", "unknown", torch.get("version_error", "not asked: quick=True"))
        return
    built = f"CUDA {torch['cuda']}" if torch.get("cuda") else "no CUDA"
    if torch.get("hip"):  # a build for AMD's GPUs, which torch calls "cuda" all the same
        built = f"ROCm {torch['hip']}, called cuda"
    if v := torch.get("cudnn"):
        built += f", cuDNN {v // 10000}.{v % 10000 // 100}.{v % 100}"
    yield Entry("torch", f"{torch['version']}\n{built}", "the build that trains")
    where = "none for this GPU" if _uncovered(facts) else "they run on this GPU"
    where = where if facts["gpu"]["cards"] else "no GPU here to use them"
    yield Entry("GPU kernels", " ".join(torch.get("architectures", [])) or "none", where)
    threads = f"{(n := torch.get('threads', '?'))} thread{'s' * (n != 1)} by default"
    if found := torch.get("libraries"):
        names = [f"{name} {found[name]}" for name in ("oneDNN", "MKL") if name in found]
        if compiler := found.get("GCC"):
            names.append(f"built by GCC {compiler}")
        yield Entry("CPU libraries", ", ".join(names), "convolutions, matrix products")
    yield Entry("CPU kernels", torch.get("cpu_capability", "unknown"), threads)
    decodes = "decodes JPEGs" if "decode_jpeg" in torch else "cannot decode JPEGs"
    yield Entry("torchvision", torch.get("torchvision", "broken"), decodes)
    names = {"gloo": "gloo", "nccl": f"nccl {torch.get('nccl_version') or ''}".strip()}
    joined = ", ".join(text for name, text in names.items() if torch.get(name)) or "none"
    yield Entry("distributed", joined, "nccl joins GPUs, gloo joins CPUs")
    yield Entry("torch.compile", _compile(facts), facts["software"].get("compiler", ""))


def _compile(facts: dict) -> str:
    """Return 'ready', or what torch.compile lacks to build C++ for a CPU or Triton for a GPU."""
    software = facts["software"]
    lacking = {
        "a C++ compiler": "compiler" not in software,
        "Python.h": not software["python_headers"],
        "openssl": not software["openssl"],  # whose checksums the C++ headers need
        "triton": facts["gpu"]["cards"] and not software["packages"]["triton"],
    }
    names = ", ".join(name for name, lacks in lacking.items() if lacks)
    return f"lacks {names}" if names else "ready"


def covers(architectures: list[str], capability) -> bool:
    """Return whether kernels built for `architectures` run on a card of this compute capability.

    Machine code (sm_80) runs on the same major version with an equal or higher minor; PTX
    (compute_80) on that and anything newer; sm_90a only on exactly 9.0 (CUDA C++ Programming
    Guide, binary compatibility).
    """
    here = tuple(capability)
    for arch in architectures:
        kind, major, minor, exact = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch).groups()
        built = (int(major), int(minor))
        older = built <= here and (kind == "compute" or built[0] == here[0])
        if built == here or (older and not exact):
            return True
    return False


def _uncovered(facts: dict) -> list[str]:
    """Return the names of the cards that torch has no kernels for; none where that is unknown."""
    built = facts["torch"].get("architectures")
    cards = [c for c in facts["gpu"]["cards"] if built and "capability" in c]
    return [c.get("name", "GPU") for c in cards if not covers(built, c["capability"])]


def _notebooks(facts: dict) -> Iterator[Entry]:
    cards, cpu = facts["gpu"]["cards"], facts["cpu"]
    many = f"GPUs: {len(cards)}"
    without = "recorded H100 results are shown; the check rehearses without values"
    yield Entry("01 GPU", many, "figures of your own" if cards else without)
    modern = all(card.get("capability", (0,))[0] >= 8 for card in cards)
    precisions = "fp16" if not modern else "TF32, fp16, bf16" if cards else "fp32, bf16"
    yield Entry("02 precision", precisions, _bf16_on_cpu(cpu))
    little = "little gain at 128 px and below; must not be slower"
    yield Entry("03 channels_last", "everywhere", "tensor cores want it" if cards else little)
    trace = "kernels of the GPU" if cards else "operations"
    holes = "and where the GPU waits" if cards else "a CPU does not wait for another device"
    yield Entry("04 profiler", trace, holes)
    yield Entry("05 DataLoader", f"CPUs: {cpu['usable']}", "more workers only queue")
    where = many if len(cards) > 1 else "CPU processes, over gloo"
    meaning = "data parallel" if len(cards) > 1 else "recorded figures for the speed"
    yield Entry("06 many GPUs", where, meaning)
    mixes = "batches mixed on the GPU" if cards else "batches mixed by the cores that train"
    yield Entry("07 augmentation", f"CPUs: {cpu['usable']}", mixes)
    own = "LAMB in bf16" if cards else "a small training; the large ones are recorded"
    yield Entry("08 large batches", "everywhere", own)
    speed = "and what a step gains" if cards else "the gain of a whole step needs a GPU"
    yield Entry("09 compile", _compile(facts), f"graphs, kernels, {speed}")
    kernels = "compiled, and timed" if cards else "interpreted; the times are recorded"
    yield Entry("10 kernels", "Triton", f"kernels of your own are {kernels}")
    peaks = "and what a GPU's memory holds" if cards else "peaks are predicted"
    yield Entry("11 FSDP", where, f"shards, bytes, {peaks}")
    speeds = "and their speeds" if len(cards) > 1 else "recorded figures for the speed"
    yield Entry("12 model parallel", where, f"gradients, messages, {speeds}")
    yield Entry("13 search", "everywhere", "a small study; the large ones are recorded")
    yield Entry("14 race", many if cards else "CPU", "joules, too" if cards else "seconds only")
    yield Entry("15 your own", "everywhere", "three small programs, and then yours")


def _install_problems(facts: dict) -> Iterator[Problem]:
    torch, pinned = facts["torch"], facts["software"]["pinned"]
    found = facts["software"]["packages"]
    if missing := [name for name in NEEDED if not found[name]]:
        yield Problem(f"{', '.join(missing)}: not installed", "the pinned set", INSTALL)
    if "version_error" in torch and found["torch"]:
        yield Problem(torch["version_error"], "torch imports", INSTALL)
    elif error := torch.get("torchvision_error") or torch.get("decode_jpeg_error"):
        pair = f"torch {found['torch']} with torchvision {found['torchvision']}: {error}"
        yield Problem(pair, "builds made for each other, as pinned", INSTALL)
    if _numbers(found["numpy"]) >= (2, 4) and _numbers(found["triton"]) == (3, 6):
        text = f"numpy {found['numpy']} with triton {found['triton']}"
        yield Problem(text, "numpy below 2.4, for triton's interpreter", 'pip install "numpy<2.4"')
    for name, (oldest, beyond) in facts["software"]["tested"].items():
        if found[name] and not _numbers(oldest) <= _numbers(found[name]) < _numbers(beyond):
            expected = f"{name} from {oldest} to below {beyond}: the tested versions"
            yield Problem(f"{name} {found[name]}", expected, INSTALL, note=True)
    others = [n for n, pin in pinned.items() if found.get(n) and not found[n].startswith(pin)]
    others = [n for n in others if n not in (*facts["software"]["tested"], "triton")]  # torch's
    if others:
        text = ", ".join(f"{name} {found[name]}" for name in others)
        expected = ", ".join(f"{name} {pinned[name]}" for name in others)
        yield Problem(text, f"{expected}, as pinned", INSTALL, note=True)


def _gpu_problems(facts: dict) -> Iterator[Problem]:
    gpu, torch, smi = facts["gpu"], facts["torch"], "nvidia-smi"
    cards, built, driver = gpu["cards"], torch.get("cuda"), gpu.get("driver_cuda")
    if gpu.get("on_bus"):
        text = f"an NVIDIA card, but its driver does not answer: {gpu['why']}"
        yield Problem(text, "a loaded driver", f"{smi}    (and show its error)")
    if cards and "version" in torch and not built:
        yield Problem("a GPU, but torch was built without CUDA", "a CUDA build", INSTALL)
    # Within a major version of CUDA, an older driver runs a newer toolkit (CUDA compatibility).
    elif cards and built and driver and _numbers(driver)[0] < (major := _numbers(built)[0]):
        text = f"driver for CUDA {driver}, torch built for CUDA {built}"
        remedy = f"{smi}    (and ask for a newer driver, or install a torch for CUDA {driver})"
        yield Problem(text, f"a driver for CUDA {major}", remedy)
    elif cards and torch.get("gpus") == 0 and "visible" not in gpu:
        yield Problem("a GPU that torch does not see", "torch sees it", smi)
    if names := _uncovered(facts):
        text = f"{', '.join(names)}: torch has kernels for {' '.join(torch['architectures'])} only"
        yield Problem(text, "kernels for this GPU", "https://pytorch.org/get-started")
    for i, card in enumerate(cards):
        pids, used = card.get("pids"), card.get("used_bytes", 0)
        if pids or used > GIB:  # a card keeps about 0.6 GiB for itself
            who = f"processes {pids}" if pids else "unseen processes"  # outside this container
            text = f"GPU {i}: {who} hold memory, {_size(used)} in use"
            yield Problem(text, "a GPU to yourself, to measure on", smi)


def _limit_problems(facts: dict) -> Iterator[Problem]:
    cpu, storage, software = facts["cpu"], facts["storage"], facts["software"]
    affinity, threads, limit = cpu["affinity"], cpu["threads"], cpu.get("cgroup")
    if limit and limit < affinity:
        text = f"{affinity} CPUs seen, {limit:g} allowed by the cgroup"
        yield Problem(text, "as many threads at most", f"export OMP_NUM_THREADS={cpu['usable']}")
    if affinity < threads:
        text = f"{affinity} of the machine's {threads} CPUs are for this process"
        yield Problem(text, "one per worker", "nproc    (Slurm: --cpus-per-task)", note=True)
    if (shm := facts["memory"].get("shm_bytes", GIB)) < GIB:
        remedy = "docker run --shm-size=8g ...    (or --num-workers 0)"
        yield Problem(f"/dev/shm of {_size(shm)}", "1 GiB, for the workers", remedy)
    if (free := storage.get("free_bytes", 5 * GIB)) < 5 * GIB:
        text = f"{_size(free)} free in {storage['folder']}"
        yield Problem(text, "5 GiB, for images and runs", "df -h .    (and make room)")
    if (files := software.get("open_files", 4096)) < 4096:
        most = min(software.get("open_files_most", 65536), 65536)
        remedy = f"ulimit -n {most}" if most > files else "docker run --ulimit nofile=65536 ..."
        text = f"at most {files} open files"
        yield Problem(text, "4096, with many workers", remedy, note=files >= 1024)
    if facts["network"]["infiniband"] and "locked_bytes" in software:
        text = f"at most {_size(software['locked_bytes'])} of locked memory"
        yield Problem(text, "unlimited, for InfiniBand", "ulimit -l unlimited")


def _software_problems(facts: dict) -> Iterator[Problem]:
    software = facts["software"]
    if (lacking := _compile(facts)) != "ready":
        remedy = "apt install g++ python3-dev openssl    (or load a compiler's module)"
        yield Problem(
            f"torch.compile {lacking}", "its compilers, if you want to try it", remedy, note=True
        )
    if error := software.get("slurm_error"):
        text = f"sbatch does not answer: {error.splitlines()[-1]}"
        yield Problem(text, "Slurm, or no sbatch", "sbatch --version", note=True)
    for path in software["shadows"]:
        yield Problem(f"{path} hides a package", "no such file", f"mv {path} my_{Path(path).name}")
    if path := software.get("pythonpath"):
        text = f"PYTHONPATH={path} comes before the installed packages"
        yield Problem(text, "no PYTHONPATH", "unset PYTHONPATH", note=not software["shadows"])
    if software.get("recompiled"):  # measured: 8.5 s for torch and torchvision, and 3.7 s with it
        text = "PYTHONDONTWRITEBYTECODE is set, and each job compiles torch's files again"
        remedy = "export PYTHONPYCACHEPREFIX=$HOME/.cache/pyc; unset PYTHONDONTWRITEBYTECODE"
        yield Problem(text, "bytecode that is kept", remedy, note=True)


def _size(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _numbers(version: str | None) -> tuple[int, ...]:
    """Return (2, 11) for '2.11.0+cu130'."""
    return tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])


def _row(widths: tuple[int, ...], *cells: str) -> str:
    """Return the cells side by side, each wrapped to its width."""
    columns = [
        [line for part in cell.split("\n") for line in textwrap.wrap(part, width) or [""]]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = itertools.zip_longest(*columns, fillvalue="")
    layout = "".join(f"  {{:{width}}}" for width in widths)
    return "\n".join(layout.format(*parts).rstrip() for parts in lines)
