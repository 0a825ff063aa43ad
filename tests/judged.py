"""Runs of a check, as its judge reads them."""

import dataclasses
import random

import made
from logs import write_log
from made import RESNET

from dlojz.check import exercise as exercises

LIGHT = {"model": "shufflenet_v2_x0_5", "image_size": 64, "batch_size": 32}
VGG = RESNET | {"model": "vgg19"}
ASKED = {  # (step, precision, hardware and sizes) for which a bar asks for something
    "01": ("01_gpu", "fp32", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
    "01 on an A100": ("01_gpu", "fp32", "cuda:0", "NVIDIA A100-SXM4-80GB", RESNET),
    "02 on an A100": ("02_amp", "fp16", "cuda:0", "NVIDIA A100-SXM4-80GB", RESNET),
    "03 with a VGG": ("03_channels_last", "fp16", "cuda:0", "NVIDIA H100 80GB HBM3", VGG),
    "09": ("09_compile", "bf16", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
    "02": ("02_amp", "fp16", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
    "03": ("03_channels_last", "fp16", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
    "03 on a CPU": ("03_channels_last", "fp32", "cpu", "AMD EPYC", RESNET),
    "05 on a CPU": ("05_dataloader", "fp32", "cpu", "AMD EPYC", LIGHT),
    "06": ("06_ddp", "bf16", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
    "07": ("07_augmentation", "bf16", "cuda:0", "NVIDIA H100 80GB HBM3", RESNET),
}
UNASKED = {"02 on a CPU": ("02_amp", "bf16", "cpu", "AMD EPYC", LIGHT)}


def made_runs(folder, asked, gain=10.0):
    """The solution and six pairs, all of them right and `gain` times as fast; and the exercise."""
    step, precision, device, name, sizes = (ASKED | UNASKED)[asked]
    folders = {}
    pairs = [f"{side}-{i}" for i in range(1, 7) for side in ("before", "after")]
    for own in ["solution", "two-epochs-solution", "two-epochs", "yours", *pairs]:
        ms = (
            20.0
            * (gain if own.startswith("before") else 1)
            * random.Random(own).uniform(0.99, 1.01)
        )
        arguments = sizes | {"precision": precision, "data": "data", "test_nsteps": 10}
        arguments |= {"precision": "fp32", "epochs": 2} if own.startswith("two-epochs") else {}
        write_log(
            folder / own / "events.jsonl",
            batch=32,
            device=device.startswith("cuda"),
            ms=dict.fromkeys(("data", "transfer", "forward", "backward", "update"), ms),
            start={"schema": 2, "time": "2026-01-02T03:04:05", "rank": 0, "size": 1,
                   "versions": {}, "arguments": arguments, "threads": 2, "cpu_count": 1},
            setup={"device": device, "device_name": name, "warmup_steps": 3, "steps": 10},
            evidence={"when": "whole", "optimizer_steps": 10},
        )  # fmt: skip
        (folder / own / "exit_code").write_text("0")
        if own in pairs:
            made.stopwatch(folder / own, images=32, steps=10, step_s=ms / 200)
        else:
            made.audit(folder / own, images=32, steps=10)
        if own in ("two-epochs", "yours"):
            made.replay(folder / own / "replay", images=32, steps=10)
        folders[own] = folder / own
    exercise = dataclasses.replace(exercises.find(step), mechanism=lambda runs: [])
    return exercise, folders
