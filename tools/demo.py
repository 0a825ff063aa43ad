"""The course in a few minutes, from scratch: `make demo`.

Makes a small set of images. Runs the slow program of notebook 04c beside its repaired copy, which
is faster on any machine. Then submits the starter and the solution of its first step, and shows
their results and the verdict on the solution.
"""

import os
import statistics
import sys
import time
from dataclasses import replace

import matplotlib.pyplot as plt

from dlojz import course, images, launch
from dlojz.chapters.n04c_slow import cases
from dlojz.check import check
from dlojz.course import presets
from dlojz.figures import report
from dlojz.figures.look import PALETTE, style
from dlojz.runs import log, stats

ABOUT = "2 minutes, or 10 if other programs keep the machine busy"  # on two cores of a Xeon
COLOURS = {side: PALETTE[side] for side in ("before", "after")}
SIDES = {"before": "as it is handed out", "after": "six faults repaired"}


def main():
    begin = time.monotonic()
    sys.stdout.reconfigure(line_buffering=True)  # a log has each line as soon as a terminal
    runs = course.course_root() / "runs"
    # The verdict on the solution must not count as the trainee's.
    os.environ["DLOJZ_PROGRESS"] = str(runs / "demo-progress.json")
    preset = presets.choose()
    print(f"This takes about {ABOUT}.\n")
    print(f"1. images, as many as the preset {preset.name!r} asks for")
    make_images(preset)
    print("\n2. a slow program, before and after six repairs: you make them in notebook 04c")
    figure = show_repairs(runs / "demo.png")
    print("\n3. the trainer of the course, before and after step 01")
    before, after = run_trainers(preset)
    print(report.compare_runs([before, after]))
    if not presets.gpus():
        print("Step 01 moves the training to a GPU. There is none here, so both ran on the same")
        print("processor. What each step gains on a GPU: notebooks/images/ladder.png")
    print("\n4. the verdict: is the solution the same training, faster, by the mechanism?")
    print(check("01", after))
    print(f"\n{time.monotonic() - begin:.0f} s in all; figure: {figure}")
    print("next: `make lab`, and open notebooks/00_start.ipynb")


def make_images(preset):
    """Make the preset's images in the folder data, with a bar in a terminal only."""
    images.generate(
        "data",
        classes=preset.classes,
        images_per_class=preset.images_per_class,
        val_images_per_class=preset.val_images_per_class,
        progress=sys.stderr.isatty(),
    )


def run_trainers(preset) -> list:
    """Return the jobs of the starter, and of the solution of step 01."""
    sizes = presets.PRESETS["smoke"]  # enough where both train on the processor
    if presets.gpus():
        sizes = replace(preset, batch_size=preset.batch_size // 2, nsteps=min(8, preset.nsteps))
    trainers = [course.solution(step).relative_to(course.course_root()) for step in ("00", "01")]
    jobs = launch.submit([f"{t} --test {sizes.flags} --data data" for t in trainers], name="demo")
    for job in jobs:
        wait(job)
    return jobs


def wait(job):
    """Wait for a job, with its bar in a terminal; exit with its error if it failed."""
    print(f"   job {job.id}: {job.command}")
    begin = time.monotonic()
    if job.wait() != launch.State.COMPLETED:
        sys.exit(job.explain())
    print(f"   job {job.id} has ended, after {time.monotonic() - begin:.0f} s")


# The repairs -------------------------------------------------------------------------------------


def show_repairs(picture):
    """Run the slow program and the repaired one in turn, print their ratio, draw the picture."""
    handed_out = course.prepared(cases.NAME).relative_to(course.course_root())
    job = launch.submit(f"{handed_out} --pairs {cases.LOOK}", name="demo-repairs")
    wait(job)
    before, after = (1000 * statistics.median(found) for found in seconds(job).values())
    print(f"   before {before:,.0f} ms, after {after:,.0f} ms: {', '.join(gain_text(job))}")
    plot_gain(job).figure.savefig(picture, dpi=150)
    return picture


def seconds(job) -> dict[str, list[float]]:
    """Return the seconds of each run before and after the repairs, in pairs."""
    times = log.read(job).cases["times"]
    return {"before": times["mine_s"], "after": times["clean_s"]}


def gain_text(job) -> tuple[str, str]:
    """Return the repaired program's speed-up, and its interval, in words."""
    times, low, high = cases.ratio(*seconds(job).values())
    return f"{times:.1f} times as fast", f"95 % interval {low:.1f} to {high:.1f}"


def plot_gain(job):
    """Draw the time of a run before and after the repairs: medians as bars, runs as dots."""
    found, (gain, interval) = seconds(job), gain_text(job)
    with style(grid="x"):
        ax = plt.subplots(figsize=(8.4, 3.2))[1]
        for row, (side, spent) in enumerate(found.items()):
            ms, middle = [1000 * s for s in spent], 1000 * statistics.median(spent)
            ax.barh(row, middle, 0.56, color=COLOURS[side])
            ax.plot(ms, [row + 0.4] * len(ms), "o", color=COLOURS[side], ms=4.5)
            ax.text(middle, row, f"  {middle:,.0f} ms", va="center", fontsize=13)
        ax.set(ylim=(1.6, -0.45), xlim=(0, 1120 * max(found["before"])))
        labels = [rf"$\bf{{{side}}}$" + f"\n{SIDES[side]}" for side in found]
        ax.set_yticks((0, 1), labels, fontsize=11)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("time of a training epoch and its validation (ms); a dot for each run")
        ax.set_title(f"Six small repairs: {gain} on this machine", fontsize=15, pad=26)
        where = report.hardware_text(stats.summary(job))
        what = f"{interval}, {len(found['before'])} pairs of runs in turn; {where}"
        ax.text(0, 1.05, what, transform=ax.transAxes, fontsize=9.5, color="#55555F")
    return ax


if __name__ == "__main__":
    main()
