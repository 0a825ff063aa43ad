"""The figures of a run, computed from logs whose answers are known."""

import json

import pytest

from dlojz import stats
from dlojz.chronometer import PHASES
from dlojz.stats import summary


def write_log(path, steps=10, warmup=3, batch=32, device=False, ms=None, rank=0, size=1, **changes):
    """A log of equal steps; `changes` replace whole events, None leaves one out."""
    ms = ms or dict(zip(PHASES, (10, 1, 20, 60, 9), strict=True))  # 100 ms in all
    wall = (steps - warmup) * sum(ms.values()) / 1000
    events = {
        "start": {"schema": 1, "time": "2026-01-02T03:04:05", "rank": rank, "size": size,
                  "arguments": {"model": "resnet18", "batch_size": batch, "image_size": 64,
                                "data": "synthetic"}, "versions": {"torch": "2.11.0"}},
        "setup": {"device": "cuda:0" if device else "cpu", "device_name": "X1", "optimizer": "SGD",
                  "warmup_steps": warmup, "parameter_bytes": 1000, "train_images": 6400,
                  "steps": steps},
        "window": {"first_step": warmup, "steps": steps - warmup, "wall_s": wall},
        "validation": {"seconds": 2.0},
        "epoch": {"epoch": 0, "train_loss": 1.0, "train_accuracy": 0.5, "val_loss": 1.0,
                  "val_accuracy": 0.4},
        "memory": {"process_peak_bytes": 500_000_000},
        "end": {"outcome": "completed", "time": "2026-01-02T03:05:05"},
    } | changes  # fmt: skip
    lines = []
    for kind, event in events.items():
        if event is not None:
            lines.append({"event": kind, **event})
        if kind == "setup":
            for i in range(steps):
                clocks = {"host_ms": {p: v * (50 if i < warmup else 1) for p, v in ms.items()}}
                if device:
                    clocks |= {"device_ms": ms, "ahead_ms": 40.0}
                lines.append(
                    {
                        "event": "step",
                        "epoch": 0,
                        "step": i,
                        "images": batch,
                        "lr": 0.1,
                        "loss": 2.0,
                    }
                    | clocks
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_figures_of_a_cpu_run(tmp_path):
    s = summary(write_log(tmp_path / "run.jsonl"))
    assert s.state == "COMPLETED"
    assert s.steps == 7
    assert s.clock == "host"
    assert s.images_per_s == pytest.approx(320)
    assert s.device_images_per_s is None
    assert s.step_ms == pytest.approx(100)
    assert s.shares == pytest.approx(
        {"data": 0.1, "transfer": 0.01, "forward": 0.2, "backward": 0.6, "update": 0.09}
    )
    assert s.epoch_s == pytest.approx(20)
    assert s.peak_memory_bytes == 500_000_000
    assert s.memory_of == "process"
    assert s.energy_per_image_j is None, "no sensor is not zero"
    assert s.validation_s == 2.0
    assert s.synthetic


def test_the_figures_of_a_gpu_run(tmp_path):
    path = write_log(
        tmp_path / "run.jsonl",
        device=True,
        steps=43,
        window={"first_step": 3, "steps": 40, "wall_s": 4.0, "energy_j": 2000.0},
        memory={"device_peak_bytes": 7, "device_total_bytes": 80, "process_peak_bytes": 9},
    )
    s = summary(path)
    assert s.clock == "device"
    assert s.device_images_per_s == pytest.approx(320)
    assert s.ahead_ms == 40
    assert s.power_w == pytest.approx(500)
    assert s.energy_per_image_j == pytest.approx(2000 / (40 * 32))
    assert (s.peak_memory_bytes, s.memory_of, s.memory_limit_bytes) == (7, "device", 80)


def test_energy_over_less_than_seconds_is_not_shown(tmp_path):
    window = {"first_step": 3, "steps": 7, "wall_s": 0.7, "energy_j": 350.0}
    assert summary(write_log(tmp_path / "r.jsonl", window=window)).energy_per_image_j is None


def test_several_processes_add_their_images_and_take_the_slowest_wall(tmp_path):
    slow = {"first_step": 3, "steps": 7, "wall_s": 1.4}
    write_log(tmp_path / "events.jsonl", size=2)
    write_log(tmp_path / "events.rank1.jsonl", size=2, rank=1, window=slow)
    assert summary(tmp_path).images_per_s == pytest.approx(2 * 32 * 7 / 1.4)


def test_a_killed_run_is_measured_over_its_steps(tmp_path):
    path = write_log(
        tmp_path / "r.jsonl", window=None, validation=None, epoch=None, memory=None, end=None
    )
    s = summary(path)
    assert s.state == "RUNNING"
    assert s.images_per_s == pytest.approx(320)
    assert s.peak_memory_bytes is None
    assert "no end" in s.notes[-1]


def test_a_run_of_warm_up_only_has_no_speed(tmp_path):
    s = summary(write_log(tmp_path / "r.jsonl", steps=2, window=None))
    assert s.images_per_s is None
    assert s.step_ms is None


def test_out_of_memory_is_a_state(tmp_path):
    end = {"outcome": "out_of_memory", "time": "2026-01-02T03:05:05", "error": "CUDA out of memory"}
    s = summary(write_log(tmp_path / "r.jsonl", steps=0, window=None, end=end))
    assert s.state == "OUT_OF_MEMORY"
    assert s.reason == "CUDA out of memory"


def test_the_memory_that_does_not_grow_with_the_batch_is_found(tmp_path):
    runs = [
        summary(
            write_log(
                tmp_path / f"{b}.jsonl", batch=b, memory={"process_peak_bytes": 1000 + 30 * b}
            )
        )
        for b in (4, 16, 64)
    ]
    fit = stats.fit_memory(runs)
    assert fit.fixed_bytes == pytest.approx(1000)
    assert fit.per_image_bytes == pytest.approx(30)
    assert stats.fit_memory(runs[:1]) is None
