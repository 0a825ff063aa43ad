"""The score of `dlojz worth compile`: predicted, then compiled for real, model by model.

    python tools/worth.py runs/worth.json --minutes 9 --flags "-b 64 --precision bf16"
    python tools/worth.py runs/worth.json --fit

The first adds each model to the file, and goes on where it stopped when it is called again. The
second fits the coefficients of each device and mode to these models, writes them to the chapter's
worth.toml, and prints for each model the prediction by a fit of all others.

A GPU and its host are fitted apart, each to the steps that it decides. So measure some models with
large batches, which keep the GPU busy, and some with small ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from dlojz import course
from dlojz.chapters.n09b_modes import worth
from dlojz.chapters.n09b_modes import worth_figures as figures

MODELS = (  # the quick ones first, with kinds mixed
    *("resnet50", "vit_b_16", "convnext_tiny", "mobilenet_v3_large", "vgg16", "resnet18"),
    *("squeezenet1_1", "regnet_y_1_6gf", "shufflenet_v2_x1_0", "swin_t", "mnasnet1_0"),
    *("resnext50_32x4d", "densenet121", "efficientnet_v2_s", "resnet152"),
)
TRAINER = "solutions/dlojz_09_compile.py"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("file", type=Path, nargs="+", help="JSON: models, predicted and measured; --fit: several")
    add("--models", nargs="+", default=MODELS, help="models of torchvision (default: fifteen)")
    add(
        "--flags",
        default="-b 64 --image-size 224 --precision bf16",
        help="the trainer's, in quotes",
    )
    add("--mode", default="default", help="mode of torch.compile")
    add("--minutes", type=float, default=60, help="stop after this time")
    add("--fit", action="store_true", help="measure nothing: fit, and print the errors")
    args = parser.parse_args()
    if args.fit:
        fit([row for file in args.file for row in read(file)])
    else:
        measure(args, args.file[0])


def measure(args, file):
    """Add each model that the file lacks."""
    end, rows = time.monotonic() + 60 * args.minutes, read(file)
    done = {(row["model"], row["mode"], row["flags"]) for row in rows}
    for model in args.models:
        if (model, args.mode, args.flags) in done:
            continue
        left = end - time.monotonic()
        found = measured(model, args, left) if left > 0 else None
        if found is None:
            sys.exit(f"{model}: no time left; call again to go on")
        rows.append({"model": model, "mode": args.mode, "flags": args.flags} | found)
        course.write_atomically(file, _one_a_line(rows))
        print(model, found.get("error") or figures.measured_text(found["measured"]), flush=True)


def measured(model, args, left) -> dict | None:
    """Return the measurements of a model, from a new process; None if the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "worth.json"
        program = "dlojz.chapters.n09b_modes.measuring"
        command = [sys.executable, "-m", program, "--measure", "--mode", args.mode, "--into", into]
        command += [course.course_root() / TRAINER, "--model", model, *args.flags.split()]
        try:
            done = subprocess.run(command, timeout=left, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}
        return json.loads(into.read_text())


def _one_a_line(rows):
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def read(file) -> list[dict]:
    """Return the models of a file, none if there is no file."""
    return json.loads(file.read_text()) if file.exists() else []


def fit(rows):
    """Fit each device and mode of these models, write the coefficients, and print the errors."""
    known = {(found.device, found.mode): found for found in worth.fits()}
    for name, mine in figures.of_devices(rows).items():
        known[name] = worth.fit(mine, "; ".join(dict.fromkeys(map(command, mine))))
        print(f"{name[0]}, {name[1]}:\n{figures.scores(mine)}\n")
    course.write_atomically(worth.FITS, "\n".join(toml(found) for found in known.values()))
    print(f"wrote {worth.FITS}")


def command(row) -> str:
    """Return the command that measures a model, and all with the same flags."""
    threads = f"OMP_NUM_THREADS={row['threads']} " if row["threads"] else ""
    return f"{threads}python tools/worth.py FILE --mode {row['mode']} --flags '{row['flags']}'"


def toml(found: worth.Fit) -> str:
    """Return a fit as TOML."""
    lines = [f"{field.name} = {_value(getattr(found, field.name))}" for field in fields(found)]
    return "\n".join(["[[fit]]", *lines, ""])


def _value(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {number:.4g}" for name, number in value.items()) + " }"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    main()
