"""What several tests make."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from dlojz import course
from dlojz.check.ending import EndedRun, Role
from dlojz.launch import Request, State, series
from dlojz.runs import records

H100, EPYC = "cuda: NVIDIA H100 80GB HBM3", "cpu: AMD EPYC"
RESNET = {"model": "resnet50", "image_size": 224, "batch_size": 256}

DAMAGED = {  # what may stand where a small file is expected, and what is said of it
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "link to itself": (lambda path: path.symlink_to(path), "Too many levels"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "large": (lambda path: path.write_bytes(b" " * (course.SMALL + 1)), "larger than 16,777,216"),
    **{
        repr(text[:20]): (lambda path, text=text: path.write_bytes(text), why)
        for text, why in (
            (b"", "Expecting value"),
            (b"{broken", "Expecting property name"),
            (b"\xff\xfe{", "truncated data"),
            (b"[1]", "holds no table"),
            (b"[" * 100_000, "nested too deeply"),
            (b'{"a": NaN}', "NaN is not a number"),
            (b'{"a": -Infinity}', "-Infinity is not a number"),
            (b'{"a": 1e999}', "1e999 is not a number"),
            (b'{"a": ' + b"7" * 400 + b"}", "77777777777777777777 is not a number"),
            (b'{"a": ' + b"7" * 5000 + b"}", "77777777777777777777 is not a number"),
        )
    },
}


def ended(folders) -> dict[str, EndedRun]:
    """The runs of a check in these folders, by name: "before-1", "two-epochs-solution"."""
    return {name: EndedRun(folder, entry(name)) for name, folder in folders.items()}


def entry(name) -> series.Entry:
    """The plan of a run with this name, as a check has it."""
    side, _, number = name.rpartition("-")
    role, usual = Role.BESIDE if side == "beside" else Role.EXTRA, f"{name}-solution"
    if number.isdigit():
        role, usual = Role(side), str(Role.SOLUTION)
    elif number == "solution":
        role, usual = Role.EXTRA_SOLUTION, side
    if name in set(Role):
        role, usual = Role(name), f"{name}-solution" if name == Role.EPOCHS else str(Role.SOLUTION)
    number = int(number) if number.isdigit() else 0
    return series.Entry(name, "t.py", (), role=role, number=number, reference=usual)


def torchrun(file, flags, processes) -> list[str]:
    """Return the command of a trainer on several processes, as a keeper starts it."""
    python = [os.environ["DLOJZ_PYTHON"], "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    return [*python, *options, str(file), *map(str, flags)]


def in_one_job(programs, n_gpu, all_complete=True):
    """Run {name: (file, flags)} one after the other; return {name: the folder of its run}."""
    wanted = [series.Entry(n, file, [*map(str, flags)]) for n, (file, flags) in programs.items()]
    job = series.submit(wanted, Request(name="in-one", time_max_s=3600, n_gpu=n_gpu))
    assert job.wait() == State.COMPLETED or not all_complete, job.explain()
    return series.folders(job)


def stopping(solution, folder):
    """Return a copy of a solution that ends once all processes have saved in an epoch."""
    file, text = folder / "stopping.py", solution.read_text()
    save = "            save(training, args, epoch, step + 1)\n"
    ends = "            torch.distributed.barrier(); raise SystemExit('stopped')\n"
    file.write_text(replaced(text, {save: save + ends}))
    for name in course.BESIDE.values():  # which it may import
        shutil.copy(solution.with_name(name), folder)
    return file


def audit(folder, images, steps):
    """Add to a log the losses of all steps, as an auditor would."""
    _add(folder, when="audit", images=[images] * steps, losses=[2.0] * steps)


def stopwatch(folder, images, steps, step_s):
    """Add to a log what a stopwatch would: a window from step 3 on."""
    count = steps - 5  # without the three first, and the two last
    window = {"first_step": 3, "steps": count, "images": images * count, "wall_s": count * step_s}
    _add(folder, when="stopwatch", windows=[window])


def replay(folder, images, steps):
    """Write the log of a replay that found nothing wrong."""
    folder.mkdir(parents=True)
    events = [
        {"event": "start", "schema": 2, "size": 1, "arguments": {}},
        {"event": "end", "outcome": "completed"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / "exit_code").write_text("0")
    _add(folder, when="replay", updates=updates(8), every=every(images, steps))


def updates(count) -> list[dict]:
    """Updates that are the solution's, as a replay logs them."""
    same = {"gradients": 0.0, "gradients_noise": 1e-4, "gradients_tensor": 0.0, "buffers": 0.0}
    same |= {"outputs": 0.0, "outputs_noise": 1e-4}
    same |= {"gradients_worst": None, "missing": [], "unexpected": [], "optimizer_worst": None}
    return [{"update": i, "optimizer_roundings": 0.0, "optimizer_share": 0.0} | same
            for i in range(count)]  # fmt: skip


def every(images, steps) -> dict:
    """What a replay logs of all steps, if they are the solution's."""
    settings = [{"momentum": 0.9, "weight_decay": 5e-4, "nesterov": False}]
    update = {"optimizer": "SGD", "settings": settings, "missing": [], "evaluating": 0}
    facts = [
        update | {"update": i, "lr": [0.1], "lr_off": 0.0, "random": [i]} for i in range(steps)
    ]
    none = [0.0] * steps
    return {"steps": [steps, steps], "images": [[images, images]] * steps, "pixels": none,
            "criterion": none, "scales": [1.0] * steps, "updates": facts,
            "usual": facts, "validation":
            {"pixels": [0.0, 0.0], "labels": [True, True], "buffers": 0.0}}  # fmt: skip


def replayed(updates, every) -> records.Replay:
    """The record of what a replay logged."""
    return records.Replay.read({"updates": updates, "every": every})


def _add(folder, **evidence):
    file = folder / "events.jsonl"
    *lines, end = file.read_text().splitlines()
    lines += [json.dumps({"event": "evidence", **evidence}), end]
    file.write_text("\n".join(lines) + "\n")


def replaced(source, changes):
    """Return the source with each of these texts replaced, which must be there once."""
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def repaired(source, folder, monkeypatch):
    """Import a trainee's file as its job would; what it logs goes to `folder`/run."""
    file = folder / "trainer.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("repaired", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr("sys.argv", [str(file), "--seed", "1"])
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setenv("DLOJZ_RUN", str(folder / "run"))
    monkeypatch.setitem(sys.modules, "repaired", module)
    spec.loader.exec_module(module)
    return module


def spoilt(content, draw, most=20, among=None):
    """Return bytes of which a few, drawn from the first ones, are others."""
    found = bytearray(content)
    for _ in range(draw.randint(1, most)):
        found[draw.randrange(min(len(found), among or len(found)))] = draw.randrange(256)
    return bytes(found)


def a_training(width=4):
    """All parts of a training, of a model small enough to save a thousand times."""
    import torch

    from dlojz.training import metrics

    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)
    return SimpleNamespace(
        model=model, optimizer=optimizer, scheduler=scheduler, metrics=metrics.build()
    )


def the_args(file):
    """The flags of a run that saves there, and goes on from there."""
    from dlojz.training import checkpoint

    flags = dict.fromkeys(checkpoint.SAME_FLAGS, 1)
    return SimpleNamespace(**flags, checkpoint=file, resume=file, checkpoint_every=0)
