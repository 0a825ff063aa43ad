"""The sensors: what is read, what is made of it, and what is left out where nothing is told."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest

from dlojz import launch
from dlojz.launch import Request, series
from dlojz.machine import meters

CPU, GPU = SimpleNamespace(type="cpu"), SimpleNamespace(type="cuda")


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """A /proc/stat of three CPUs, of which this process may use two; write(busy ticks of each)."""
    file = tmp_path / "stat"

    def write(*ticks):
        lines = [f"cpu{i} {t} 0 0 5000 70 0 0 0 0 0" for i, t in enumerate(ticks)]
        file.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "intr 1 2 3"]) + "\n")

    write(1000, 1000, 1000)
    monkeypatch.setattr(meters, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.get)
    monkeypatch.setattr(meters, "_cpu_seconds", lambda root, cpus: 0.0)
    return write


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now.s)
    return now


def test_others_are_what_is_busy_on_our_cpus_but_for_us(stat, clock, monkeypatch):
    sensors = meters.Sensors(CPU)
    monkeypatch.setattr(meters, "_cpu_seconds", lambda root, cpus: 1.5)
    stat(1200, 9999, 1100)  # 3 s on two of the three, of which 1.5 are ours
    clock.s = 2.0
    assert sensors.window() == {"others_cpu": 0.75}


def test_all_ways_to_be_busy_count_and_no_way_to_wait(stat, tmp_path):
    row = "{} {} {} 50000 60000 {} {} {} 70000 80000".format(*(1, 20, 300, 4_000, 50_000, 600_000))
    (tmp_path / "stat").write_text(f"cpu0 {row}\n")
    assert meters.cpu_seconds_of_others(os.getpid()) == pytest.approx(6543.21)


def test_ticks_that_fall_short_of_our_own_time_are_zero(stat, clock, monkeypatch):
    sensors = meters.Sensors(CPU)
    monkeypatch.setattr(meters, "_cpu_seconds", lambda root, cpus: 0.01)
    clock.s = 1.0
    assert sensors.window() == {"others_cpu": 0.0}


def test_a_sandbox_that_shows_zeros_has_told_nothing(stat, clock):
    stat(0, 0, 0)
    sensors = meters.Sensors(CPU)
    clock.s = 1.0
    assert sensors.window() == {}


def test_without_proc_nothing_is_said(stat, tmp_path, clock):
    (tmp_path / "stat").unlink()
    assert meters.Sensors(CPU).window() == {}


@pytest.fixture
def child():
    """A child that has used 0.1 s of CPU time and lives on; as a loader's worker does."""
    code = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_children_count_as_we_do_while_they_live_and_after(child):
    cpus = os.sched_getaffinity(0)
    alone = sum(os.times()[:4])
    living = meters._cpu_seconds(os.getpid(), cpus)
    assert living >= alone + 0.09
    child.kill()
    child.wait()
    assert meters._cpu_seconds(os.getpid(), cpus) >= living - 1e-6  # sums of floats


def test_a_process_bound_to_other_cpus_takes_none_of_ours(child):
    elsewhere = {max(os.sched_getaffinity(0)) + 1}
    assert meters._cpu_seconds(os.getpid(), elsewhere) == 0


def test_the_processes_of_one_run_do_not_disturb_each_other(monkeypatch):
    roots = []
    monkeypatch.setattr(meters, "cpu_seconds_of_others", roots.append)
    meters.Sensors(CPU, size=1)
    meters.Sensors(CPU, size=4)
    monkeypatch.setenv(meters.TREE, "7")  # of a series: each process of a run has its own parent
    meters.Sensors(CPU, size=1)
    meters.Sensors(CPU, size=4)
    assert roots == [os.getpid(), os.getppid(), os.getpid(), 7]


def test_a_series_names_the_tree_that_all_processes_of_a_run_are_in(script):
    trainer = script("import os; print(os.environ['DLOJZ_TREE'], os.getppid())")
    job = series.submit([series.Entry("one", trainer, [])], Request(name="tree", n_gpu=2))
    assert job.wait() == launch.State.COMPLETED, job.explain()
    lines = (job.directory / "one" / "stdout.txt").read_text().splitlines()
    trees, parents = map(set, zip(*map(str.split, lines), strict=True))
    assert (len(trees), len(parents)) == (1, 2)
    assert not trees & parents


def test_this_machine_can_be_read():
    assert (meters.cpu_seconds_of_others(os.getpid()) or 0) >= 0  # a sandbox may hide it
    assert meters.peak_memory(CPU).get("process_peak_bytes", 1) > 0


def test_a_window_too_short_for_the_ticks_of_the_counts_tells_nothing():
    assert "others_cpu" not in meters.Sensors(CPU).window()


@pytest.fixture
def card(monkeypatch):
    """A GPU whose sensors can be set; None raises, as a sensor that is not there."""
    found = SimpleNamespace(energy=5_000, clock=1980, reasons=0, old_reasons=None)

    def sensor(name):
        def read(handle, *args):
            if getattr(found, name) is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return getattr(found, name)

        return read

    for function, name in {
        "TotalEnergyConsumption": "energy",
        "ClockInfo": "clock",
        "CurrentClocksEventReasons": "reasons",
        "CurrentClocksThrottleReasons": "old_reasons",
    }.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{function}", sensor(name))
    monkeypatch.setattr(meters, "_card", lambda device: "handle")
    monkeypatch.setattr(meters, "cpu_seconds_of_others", lambda root: None)
    return found


def test_a_gpu_tells_energy_clock_and_why_it_was_throttled(card):
    sensors = meters.Sensors(GPU)
    card.energy, card.clock, card.reasons = 905_000, 1410, 0x4 | 0x40
    assert sensors.window() == {
        "energy_j": 900.0,
        "sm_clock_mhz": [1980, 1410],
        "throttled": ["power cap", "heat, seen by the hardware"],
    }


def test_a_gpu_throttled_at_either_end_was_throttled(card):
    for first, second in ((0x20, 0), (0, 0x20)):
        card.reasons = first
        sensors = meters.Sensors(GPU)
        card.reasons = second
        assert sensors.window()["throttled"] == ["heat, seen by the driver"]


def test_idling_and_clocks_that_somebody_set_are_no_throttling(card):
    card.reasons = 0x1 | 0x2 | 0x10 | 0x100
    assert meters.Sensors(GPU).window()["throttled"] == []


def test_an_old_driver_is_asked_by_the_old_name(card):
    card.reasons, card.old_reasons = None, 0x4
    assert meters.Sensors(GPU).window()["throttled"] == ["power cap"]


def test_a_gpu_without_sensors_tells_nothing(card):
    card.energy = card.clock = card.reasons = None
    assert meters.Sensors(GPU).window() == {}


def test_host_memory_counts_the_workers_and_what_is_shared_once(tmp_path, monkeypatch, child):
    monkeypatch.setattr(meters, "PROC", tmp_path)
    assert meters.host_memory() == {}, "what is hidden is absent, not zero"
    for pid, kilobytes in ((os.getpid(), 5000), (child.pid, 700)):
        (tmp_path / str(pid)).mkdir()
        text = f"5567c693d000-7ffc9f182000 ---p [rollup]\nRss: 9000 kB\nPss:  {kilobytes} kB\n"
        (tmp_path / str(pid) / "smaps_rollup").write_text(text)
    assert meters.host_memory() == {"host_memory_bytes": 5700 * 1024}
