"""What a job uses, as its keeper sees it from outside, whatever program it runs."""

import json
from types import SimpleNamespace

import pytest

from dlojz import launch
from dlojz.figures import report
from dlojz.jobs import meter, processes
from dlojz.jobs.meter import Meter
from dlojz.machine import nvml
from dlojz.runs import outside

GIB = 1 << 30
BURN = """
    import os, time
    mine = b"1" * 60_000_000
    if os.fork() == 0:
        its = b"2" * 60_000_000
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        pass
    print("accuracy: 97.3")
    """


def answers(energy=(1000, 5000), **absent):
    """An NVML whose GPU is used by a job: a driver may leave out some of its answers."""
    energies = iter(energy)
    known = {
        "Init": lambda: None,
        "DeviceGetHandleByUUID": lambda name: name,
        "DeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=40),
        "DeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * GIB, total=80 * GIB),
        "DeviceGetTotalEnergyConsumption": lambda _: next(energies),
    }
    known |= absent
    return lambda name, *args: known[name](*args)


@pytest.fixture
def one_process(monkeypatch):
    """A job of one process, and a clock that each look moves by a second."""
    clock = iter(range(100))
    stat = processes._Stat("R", 1, 0, ticks=100, pages=250)
    monkeypatch.setattr(processes, "used", lambda: [stat, stat])
    monkeypatch.setattr(meter.time, "monotonic", lambda: next(clock))


def test_a_program_is_measured_from_outside(script):
    script(BURN)
    job = launch.submit("t.py")
    assert job.wait(60) == "COMPLETED", job.explain()
    seen = outside.read(job.directory)
    assert seen.samples >= 1
    assert seen.seconds >= 2.5
    assert 0.5 < seen.cpu_s < 2 * seen.seconds
    assert seen.processes == 2
    assert 160e6 < seen.peak_memory_bytes < 400e6
    assert (seen.gpus, seen.gpu_use, seen.energy_j) == (0, None, None)
    note = launch.queue().rows[-1][launch.QUEUE.index("note")]
    assert note == f"no Chronometer in it; {seen.in_short}"
    text = repr(report.inspect_run(job))
    assert "  energy       not measured: no counter here" in text
    assert "resident, of 2 processes, which each count what they share" in text
    assert "  | accuracy: 97.3" in text


def test_a_program_that_runs_is_seen_too(script, monkeypatch):
    script("import time\nprint('step 1', flush=True)\ntime.sleep(60)")
    job = launch.submit("t.py")
    while not (job.directory / outside.FILE).exists():
        assert not job.state.final
    text = repr(report.inspect_run(job))
    assert text.startswith("run 0001: RUNNING\n  time ")
    assert "  | step 1" in text
    assert "CPUs, " in launch.queue().rows[0][launch.QUEUE.index("note")]
    job.cancel()
    job.wait(30)


def test_the_gpus_of_a_job_are_measured(one_process, monkeypatch, tmp_path):
    monkeypatch.setattr(nvml, "ask", answers())
    one = Meter(["GPU-1"], tmp_path)
    one.look()
    one.end(cpu_s=7.5, peak_memory_bytes=1000)
    seen = outside.read(tmp_path)
    assert (seen.gpus, seen.gpu_use, seen.energy_j) == (1, 0.4, 4.0)
    assert (seen.gpu_memory_bytes, seen.gpu_memory_limit_bytes) == (3 * GIB, 80 * GIB)
    assert seen.peak_memory_bytes == 500 * meter.PAGE
    lines = dict(report.outside_lines(seen))
    assert lines["GPU"] == "40% of the time in use"
    assert lines["GPU memory"] == "3.22 GB of 85.9 GB at its peak"
    assert lines["energy"].startswith("4.0 J of the GPU, ")
    assert seen.in_short.endswith("GPU 40%")


def test_what_a_gpu_does_not_count_is_not_measured(one_process, monkeypatch, tmp_path):
    nothing = dict.fromkeys(
        ("DeviceGetUtilizationRates", "DeviceGetMemoryInfo", "DeviceGetTotalEnergyConsumption"),
        lambda _: None,
    )
    monkeypatch.setattr(nvml, "ask", answers(**nothing))
    one = Meter(["MIG-1", "MIG-2"], tmp_path)
    one.look()
    one.end(cpu_s=0.0, peak_memory_bytes=0)
    lines = dict(report.outside_lines(outside.read(tmp_path)))
    assert lines["GPU"] == "not measured (mean of 2 GPUs)"
    assert lines["GPU memory"].startswith("not measured at its peak")
    assert lines["energy"] == "not measured: no counter here"


def test_a_sample_that_costs_more_is_taken_less_often(one_process, monkeypatch, tmp_path):
    costs = iter([0, 0.04] * 9)
    monkeypatch.setattr(meter.time, "thread_time", lambda: next(costs))
    one = Meter(["cpu"], tmp_path)
    for _ in range(41):  # seconds
        one.look()
    one.end(0.0, 0)
    assert outside.read(tmp_path).samples == 3, "each took 40 ms"


def test_a_short_job_has_the_memory_of_its_largest_process(script):
    script("x = b'1' * 50_000_000")
    job = launch.submit("t.py")
    job.wait(30)
    seen = outside.read(job.directory)
    assert seen.peak_memory_bytes >= 50e6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": "1"}', '{"seconds": 1}'])
def test_a_torn_file_is_no_measurement(text, tmp_path):
    (tmp_path / outside.FILE).write_text(text)
    assert outside.read(tmp_path) is None


def test_a_full_disk_ends_no_job(one_process, tmp_path):
    Meter(["cpu"], tmp_path / "removed").end(1.0, 1)


def test_a_file_of_other_types_is_no_measurement(tmp_path):
    outside.Outside(seconds=1.0, samples=1, cpu_s=0.5).write(tmp_path)
    found = json.loads((tmp_path / outside.FILE).read_text())
    (tmp_path / outside.FILE).write_text(json.dumps(found | {"gpus": "one"}))
    assert outside.read(tmp_path) is None
