"""The main job of the course, from scratch: `make demo`.

Makes a small set of images, submits the trainer as it is handed out and the solution of its first
step, and shows what their logs say and the verdict on the solution.
"""

import os
import sys
import time
from dataclasses import replace

from dlojz import course, images, launch, presets
from dlojz.check import check
from dlojz.figures import report
from dlojz.runs import stats


def main():
    begin = time.monotonic()
    runs = course.course_root() / "runs"
    # The verdict on the solution must not count as the trainee's.
    os.environ["DLOJZ_PROGRESS"] = str(runs / "demo-progress.json")
    preset = presets.choose()
    sizes = replace(preset, batch_size=preset.batch_size // 2, nsteps=min(8, preset.nsteps))
    print(f"1. images, as many as the preset {preset.name!r} asks for", flush=True)
    folder = images.generate(
        "data",
        classes=preset.classes,
        images_per_class=preset.images_per_class,
        val_images_per_class=preset.val_images_per_class,
    )

    print(f"2. two jobs, on {folder}: half the preset's batch, {sizes.nsteps} steps", flush=True)
    trainers = [course.solution(step).relative_to(course.course_root()) for step in ("00", "01")]
    jobs = launch.submit([f"{t} --test {sizes.flags} --data data" for t in trainers], name="demo")
    for job in jobs:
        print(f"   job {job.id}: {job.command}", flush=True)
        for now in launch.follow(job):
            if sys.stderr.isatty():
                print(f"\r   {now.state} {now.done}/{now.total} steps ", end="", file=sys.stderr)
        if job.state != launch.State.COMPLETED:
            sys.exit(job.explain())

    print("\n3. what their logs say\n")
    print(report.compare_runs(jobs))
    for note in disturbed(jobs):
        print(note)
    if not presets.gpus():
        print(
            "No GPU here: the solution uses the device that it finds, which is the same processor."
        )

    print("\n4. the verdict: is the solution the same training, faster, by the mechanism?\n")
    print(check("01", jobs[1]))
    figure = report.save_figure(jobs, runs / "demo.png")
    print(f"\nfigure: {figure}   ({time.monotonic() - begin:.0f} s in all)")
    print("next: `make lab`, and open notebooks/00_start.ipynb")


def disturbed(jobs) -> list[str]:
    """Return a note for each job during which other programs used the processor."""
    found = [stats.summary(job) for job in jobs]
    return [
        f"note: other programs kept {s.others_cpu:.1f} of this machine's {s.cpus} CPUs busy while "
        f"job {s.name} ran: its speed says nothing, run `make demo` again when they have ended"
        for s in found
        if s.others_cpu and s.cpus and s.others_cpu > stats.OTHERS_CPU * s.cpus
    ]


if __name__ == "__main__":
    main()
