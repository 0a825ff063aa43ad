"""The doctor: lines and problems that follow from fake facts, the report as text and HTML."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dlojz.machine import doctor

REPOSITORY = Path(__file__).parent.parent


def software(**changes) -> dict:
    found = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0", "numpy": "2.3.5"}
    found |= {"pillow": "13.0.0", "jupyterlab": None, "matplotlib": None}
    base = {"system": "Linux", "kernel": "6.1", "python": "3.11.7", "executable": "/bin/python3"}
    base |= {"pinned": {}, "shadows": [], "python_headers": True, "openssl": True}
    base |= {"tested": {"torch": ("2.11", "2.16"), "torchvision": ("0.26", "0.30")}}
    base |= {"compiler": "/usr/bin/g++", "open_files": 65536, "open_files_most": 65536}
    return {**base, **changes, "packages": found | changes.pop("packages", {})}


def cpu(**changes) -> dict:
    return {"threads": 8, "affinity": 8, "usable": 8, "instructions": ["AVX2"]} | changes


def facts(**changes) -> dict:
    """A laptop on which all is well, but for the changes."""
    healthy = {
        "cpu": cpu(),
        "memory": {"total_bytes": 16 << 30, "available_bytes": 8 << 30, "shm_bytes": 8 << 30},
        "gpu": {"cards": []},
        "network": {"interfaces": {"eth0": 10.0}, "infiniband": {}},
        "software": software(),
        "storage": {"folder": "/data", "free_bytes": 10**11, "total_bytes": 10**12},
        "torch": {"version": "2.11.0", "cuda": "13.0", "torchvision": "0.26.0", "decode_jpeg": [1]},
    }
    return healthy | changes


H100 = {"name": "H100", "capability": (9, 0), "used_bytes": 600 << 20, "pids": []}


def with_gpu(torch=None, **card) -> dict:
    gpu = {"cards": [H100 | card], "links": [["X"]], "driver": "580.65", "driver_cuda": "13.0"}
    return facts(gpu=gpu, torch=facts()["torch"] | (torch or {}))


def test_a_healthy_machine_has_no_problem():
    assert doctor.diagnose(facts()).problems == []
    assert doctor.diagnose(with_gpu({"architectures": ["sm_90"], "gpus": 1})).problems == []


NMS = "RuntimeError: operator torchvision::nms does not exist"
PAIR = {"torch": "2.13.0+cpu", "torchvision": "0.26.0"}
CASES = {
    "a CPU-only torch": (
        facts(
            software=software(packages=PAIR),
            torch={"version": "2.13.0+cpu", "torchvision_error": NMS},
        ),
        "operator torchvision::nms does not exist",
        "pip install -c constraints.txt -e .",
    ),
    "torch does not import": (
        facts(torch={"version_error": "OSError: libcudart"}),
        "OSError: libcudart",
        "pip install",
    ),
    "torch is missing": (
        facts(software=software(packages={"torch": None}), torch={"version_error": "no torch"}),
        "torch: not installed",
        "pip install",
    ),
    "numpy too new": (
        facts(software=software(packages={"numpy": "2.4.1"})),
        "numpy 2.4.1 with triton 3.6.0",
        'pip install "numpy<2.4"',
    ),
    "a card without kernels": (
        with_gpu({"architectures": ["sm_75", "sm_80"]}),
        "H100: torch has kernels for sm_75 sm_80 only",
        "pytorch.org",
    ),
    "an old driver": (
        facts(gpu={"cards": [H100], "driver_cuda": "12.4", "links": [["X"]]}),
        "driver for CUDA 12.4, torch built for CUDA 13.0",
        "nvidia-smi",
    ),
    "a CPU build beside a GPU": (with_gpu({"cuda": None}), "built without CUDA", "pip install"),
    "a GPU that torch does not see": (with_gpu({"gpus": 0}), "does not see", "nvidia-smi"),
    "a neighbour on the GPU": (with_gpu(pids=[7]), "GPU 0: processes [7] hold", "nvidia-smi"),
    "a driver that does not answer": (
        facts(gpu={"cards": [], "why": "Driver/library version mismatch", "on_bus": True}),
        "Driver/library version mismatch",
        "nvidia-smi",
    ),
    "a shadowing file": (
        facts(software=software(shadows=["/home/me/dlojz.py"])),
        "/home/me/dlojz.py hides",
        "mv /home/me/dlojz.py my_dlojz.py",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_problem_is_found_alone_and_says_what_to_type(case):
    unwell, found, remedy = case
    serious = [p for p in doctor.diagnose(unwell).problems if not p.note]
    texts = [p.found for p in serious]
    assert len(texts) == 1, texts
    assert found in texts[0]
    assert remedy in serious[0].remedy
    assert serious[0].expected


def test_each_limit_that_is_too_low_is_a_problem():
    poor = facts(
        cpu=cpu(cgroup=2.5, usable=2),
        memory={"shm_bytes": 64 << 20},
        storage={"folder": "/data", "free_bytes": 1 << 30},
        network={"interfaces": {}, "infiniband": {"mlx5_0:1": "400 Gb/sec"}},
        software=software(open_files=256, open_files_most=4096, locked_bytes=8 << 20),
    )
    assert [(p.found, p.remedy.split("    ")[0]) for p in doctor.diagnose(poor).problems] == [
        ("8 CPUs seen, 2.5 allowed by the cgroup", "export OMP_NUM_THREADS=2"),
        ("/dev/shm of 64 MiB", "docker run --shm-size=8g ..."),
        ("1.0 GiB free in /data", "df -h ."),
        ("at most 256 open files", "ulimit -n 4096"),
        ("at most 8 MiB of locked memory", "ulimit -l unlimited"),
    ]


def test_a_limit_that_only_the_container_can_raise_is_not_to_be_raised_in_it():
    stuck = facts(software=software(open_files=256, open_files_most=256))
    (problem,) = doctor.diagnose(stuck).problems
    assert problem.remedy == "docker run --ulimit nofile=65536 ..."


def test_a_torch_that_was_not_tested_is_named_in_one_line():
    said = {"2.10.1": True, "2.11.0": False, "2.15.3+cu132": False, "2.16.0": True}
    for version in said:
        changes = {"packages": {"torch": version}, "pinned": {"torch": "2.11.0", "triton": "3.0"}}
        problems = doctor.diagnose(facts(software=software(**changes))).problems
        expected = [(f"torch {version}", True)] * said[version]
        assert [(p.found, p.note) for p in problems] == expected


def test_what_costs_little_is_a_note():
    changes = {"pinned": {"numpy": "2.3.4", "torch": "2.11.0"}, "pythonpath": "/old"}
    changes |= {"open_files": 1024, "slurm_error": "sbatch: fatal: no DNS", "python_headers": False}
    changes |= {"openssl": False, "recompiled": True}
    problems = doctor.diagnose(
        facts(cpu=cpu(affinity=4, threads=64), software=software(**changes))
    ).problems
    assert all(p.note for p in problems)
    assert [p.found for p in problems] == [
        "numpy 2.3.5",
        "4 of the machine's 64 CPUs are for this process",
        "at most 1024 open files",
        "torch.compile lacks Python.h, openssl",
        "sbatch does not answer: sbatch: fatal: no DNS",
        "PYTHONPATH=/old comes before the installed packages",
        "PYTHONDONTWRITEBYTECODE is set, and each job compiles torch's files again",
    ]


def test_which_kernels_run_on_which_card():
    expected = {
        ("sm_80 sm_90", (9, 0)): True,
        ("sm_80", (8, 6)): True,
        ("sm_86", (8, 0)): False,
        ("sm_75 sm_80", (7, 0)): False,
        ("sm_90", (10, 0)): False,
        ("sm_90 compute_90", (10, 0)): True,
        ("sm_90a", (9, 0)): True,
        ("sm_100a", (10, 3)): False,
        ("sm_100 sm_120", (12, 0)): True,
    }
    assert {(a, c): doctor.covers(a.split(), c) for a, c in expected} == expected


# ---------------------------------------------------------------- lines


def test_two_h100_are_shown_with_their_links():
    card = H100 | {"memory_bytes": 80 << 30, "power_limit_w": 700.0}
    links = [["X", "NV18"], ["NV18", "X"]]
    text = str(doctor.diagnose(facts(gpu={"cards": [card, card], "links": links})))
    assert "80.0 GiB, 700 W" in text
    assert "NV18 between each pair" in text
    assert "tensor cores: TF32, fp16, bf16" in text


def test_without_a_gpu_recorded_figures_are_announced():
    (gpu,) = [e for e in doctor.diagnose(facts()).sections["system"] if e.name == "GPU"]
    expected = ("no GPU", "figures recorded on an H100 will be shown instead")
    assert (gpu.value, gpu.meaning) == expected


@pytest.mark.parametrize("machine", [facts(), with_gpu()])
def test_it_names_the_notebooks_that_exist_and_no_others(machine):
    there = {path.name[:2] for path in (REPOSITORY / "notebooks").glob("[0-9]*.ipynb")}
    found = doctor.diagnose(machine)
    assert {entry.name[:2] for entry in found.sections["notebooks"]} == there - {"00"}
    assert set(re.findall(r"notebook (\d\d)", str(found))) <= there
    lacking = doctor.diagnose(facts(software=software(python_headers=False)))
    assert set(re.findall(r"notebook (\d\d)", str(lacking))) <= there


def test_instructions_tell_whether_bf16_is_native():
    for name, expected in {"AMX": "native (AMX)", "FMA": "emulated, 2 to 30 times slower"}.items():
        text = doctor.diagnose(facts(cpu=cpu(instructions=["AVX2", name])))._repr_html_()
        assert f"bf16 on this CPU: {expected}" in text


def test_what_is_not_known_is_said_to_be_unknown():
    unknown = {"threads": 2, "affinity": 2, "usable": 2}
    gpu = {"cards": [{}], "links": [["X"]]}
    storage = {"folder": "/data", "error": "Read-only file system"}
    poor = facts(cpu=unknown, memory={}, gpu=gpu, storage=storage, torch={})
    found = doctor.diagnose(poor).sections
    names = {e.name for e in [*found["system"], *found["stack"]] if "unknown" in e.value}
    assert {"CPU", "instructions", "NUMA", "memory", "/dev/shm", "GPU 0", "torch"} <= names
    assert "cannot write: Read-only file system" in [e.meaning for e in found["system"]]


# ---------------------------------------------------------------- the report


def test_text_is_aligned_and_narrow_and_ends_with_the_problems():
    unwell = with_gpu({"architectures": [f"sm_{n}0" for n in range(5, 20)]}, pids=[7])
    lines = str(doctor.diagnose(unwell)).splitlines()
    assert max(map(len, lines)) <= 100
    assert "Problems and notes: 1" in lines
    assert lines[-1].split()[:2] == ["type", "nvidia-smi"]
    values = [line for line in lines if line.startswith("  GPU ")]
    assert {line[18:20] for line in values} == {"  "}  # the gap between two columns


def test_the_libraries_of_torch_and_the_caches_are_shown():
    caches = [{"level": 1, "bytes": 48 << 10, "threads": 1}]
    caches.append({"level": 3, "bytes": 32 << 20, "threads": 16})
    libraries = {"oneDNN": "3.10.2", "MKL": "2024.2", "GCC": "13.3"}
    torch = facts()["torch"] | {"libraries": libraries, "nccl": True, "nccl_version": "2.28.9"}
    text = str(doctor.diagnose(facts(cpu=cpu(caches=caches), torch=torch)))
    assert "L1 48 KiB, L3 32 MiB for 16" in text
    assert "oneDNN 3.10.2, MKL 2024.2, built" in text
    assert "nccl 2.28.9" in text


def test_a_build_for_amd_says_that_its_gpus_are_called_cuda():
    torch = facts()["torch"] | {"cuda": None, "hip": "6.4.1"}
    [entry] = [
        e for e in doctor.diagnose(facts(torch=torch)).sections["stack"] if e.name == "torch"
    ]
    assert entry.value.endswith("ROCm 6.4.1, called cuda")


def test_a_part_of_the_report_has_no_other_section_and_no_problems():
    whole = doctor.diagnose(facts(software=software(shadows=["/home/me/torch.py"])))
    part = whole.only("stack")
    lines = str(part).splitlines()
    assert lines[0] == "Stack"
    assert {"System", "Software", "Notebooks"}.isdisjoint(lines)
    assert "Problems" not in str(part) + part._repr_html_()
    assert "Problems and notes: 1" in str(whole)
    with pytest.raises(ValueError, match="no section 'stak': expected system, software, stack"):
        whole.only("stak")


def test_html_is_one_well_formed_table_with_text_escaped():
    unwell = facts(software=software(shadows=["/home/<me>/dlojz.py"]))
    text = doctor.diagnose(unwell)._repr_html_()
    rows = ElementTree.fromstring(text).iter("tr")
    assert {len(row) for row in rows} == {1, 3}  # titles, and lines
    assert "&lt;me&gt;" in text


def test_the_whole_of_it_becomes_json():
    found = json.loads(json.dumps(doctor.examine(quick=True).to_dict()))
    assert list(found) == ["system", "software", "stack", "notebooks", "problems", "facts"]
    assert found["system"][0]["name"] == "CPU"
    assert found["facts"]["torch"] == {}
    assert "operations_per_s" not in found["facts"]["storage"]


def test_the_storage_can_be_left_unmeasured_while_torch_answers(monkeypatch):
    monkeypatch.setattr(doctor.facts, "torch_build", lambda: {"version": "9.9"})
    found = doctor.examine(storage_speed=False).facts
    assert found["torch"] == {"version": "9.9"}
    assert "operations_per_s" not in found["storage"]


def test_importing_the_doctor_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; from dlojz.machine import doctor; doctor.examine(quick=True)\n"
        "print([m for m in ('torch', 'torchvision', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
