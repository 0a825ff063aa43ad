"""Logs of runs and of experiments, as their jobs would write them."""

import json

from dlojz.runs.columns import PHASES


def write_log(
    path,
    steps=10,
    warmup=3,
    batch=32,
    device=False,
    ms=None,
    rank=0,
    size=1,
    losses=None,
    arguments=(),
    about=(),
    **changes,
):
    """A log of equal steps, of a run with these arguments, of which its start says `about`.

    `changes` replace whole events, None leaves one out.
    """
    ms = ms or dict(zip(PHASES, (10, 1, 20, 60, 9), strict=True))  # 100 ms in all
    given = {"model": "resnet18", "batch_size": batch, "image_size": 64, "data": "synthetic"}
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "rank": rank, "size": size}
    start |= {"arguments": given | dict(arguments), "versions": {"torch": "2.11.0"}} | dict(about)
    window = {"first_step": warmup, "steps": steps - warmup}
    events = {
        "start": start,
        "setup": {"device": "cuda:0" if device else "cpu", "device_name": "X1", "optimizer": "SGD",
                  "warmup_steps": warmup, "parameter_bytes": 1000, "train_images": 6400,
                  "steps": steps},
        "window": window | {"wall_s": (steps - warmup) * sum(ms.values()) / 1000},
        "validation": {"seconds": 2.0},
        "epoch": {"epoch": 0, "train_loss": 1.0, "train_accuracy": 0.5, "val_loss": 1.0,
                  "val_accuracy": 0.4},
        "memory": {"process_peak_bytes": 500_000_000},
        "end": {"outcome": "completed", "time": "2026-01-02T03:05:05"},
    } | changes  # fmt: skip
    events["end"] = events.pop("end")  # the last, whatever was added
    lines = []
    for kind, event in events.items():
        if event is not None:
            lines.append({"event": kind, **event})
        if kind == "setup":
            lines += [_step(i, batch, ms, i < warmup, device, losses) for i in range(steps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _step(i, batch, ms, is_warmup, device, losses):
    step = {"event": "step", "epoch": 0, "step": i, "images": batch, "lr": 0.1}
    step |= {"loss": losses[i] if losses else 2.0}
    step |= {"host_ms": {p: v * (50 if is_warmup else 1) for p, v in ms.items()}}
    return step | ({"device_ms": ms, "ahead_ms": 40.0} if device else {})


def trial(path, workers, batch=32, ms=100, threads=2, cores=2, code="aa", **changes):
    """The log of a training with this many workers."""
    phases = dict(zip(PHASES, (0.1 * ms, 0, 0.2 * ms, 0.6 * ms, 0.1 * ms), strict=True))
    arguments = {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 3}
    arguments |= {"pin_memory": True, "non_blocking": True, "drop_last": False, "data": "data"}
    about = {"time": f"2026-01-02T03:04:{workers:02}", "threads": threads}
    about |= {"cpu_count": cores, "trainer_sha256": code}
    window = {"first_step": 3, "steps": 40, "wall_s": 40 * ms / 1000}
    window |= {"host_memory_bytes": 912 * 10**6}
    changes = {"arguments": arguments, "about": about, "window": window, "steps": 43} | changes
    path = write_log(path, batch=batch, ms=phases, **changes)
    lines = path.read_text().splitlines()
    probe = {"event": "evidence", "when": "probe", "loader": {"num_workers": min(workers, cores)}}
    path.write_text("\n".join([*lines[:2], json.dumps(probe), *lines[2:]]) + "\n")
    return path


def experiment(path, *events, device="NVIDIA A100-SXM4-80GB", **arguments):
    """The log of an experiment that ran on this device."""
    start = {"event": "start", "schema": 2, "time": "2026-01-02T03:04:05", "rank": 0, "size": 1}
    start |= {"versions": {}, "arguments": arguments}
    setup = {"event": "setup", "device": "cuda:0", "device_name": device}
    end = {"event": "end", "outcome": "completed", "time": "2026-01-02T03:05:05"}
    path.write_text("".join(json.dumps(e) + "\n" for e in (start, setup, *events, end)))
    return path


def with_cases(path, cases, **arguments):
    """The log of an experiment: what it measured of each case, by name."""
    events = ({"event": "case", "case": name, **case} for name, case in cases.items())
    return experiment(path, *events, **arguments)


def measure(what, value, unit="ms", **where):
    """What an experiment measured once."""
    return {"event": "measure", "what": what, "value": value, "unit": unit, **where}
