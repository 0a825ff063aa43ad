"""The command `dlojz`: what a notebook does, from a terminal."""

import argparse
import json
import sys
from pathlib import Path

from dlojz import course, images, launch, presets
from dlojz.runs import log, suspects

BAD_INPUT = (launch.SubmitError, launch.SlurmError, images.DataError, log.LogError)


def main(argv=None) -> int:
    """Run one command; returns the exit status: 0 well, 1 the answer is bad news, 2 bad input."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        quoted = " ".join([*args.command, *unknown]) if args.run is _submit else ""
        tip = f'; the trainer\'s flags belong into the quotes: dlojz submit "{quoted}"'
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{tip if quoted else ''}")
    try:
        return args.run(args) or 0
    except (*BAD_INPUT, LookupError, OSError, ValueError) as error:
        told = error.args[0] if isinstance(error, KeyError) else error  # str() would quote it
        print(f"dlojz: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dlojz: interrupted; jobs go on (dlojz queue)", file=sys.stderr)
        return 130


def _parser():
    parser = argparse.ArgumentParser(
        prog="dlojz",
        description="The DLO-JZ workshop: make PyTorch training fast, one measured step at a time.",
        epilog='example: dlojz submit --wait "dlojz/dlojz.py --test --data synthetic -b 32"',
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name, run, summary):
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        sub.set_defaults(run=run)
        return sub.add_argument

    _add_job_commands(command)
    _add_course_commands(command)
    return parser


def _add_job_commands(command):
    add = command("doctor", _doctor, "what this machine can do, and what is wrong")
    add("--quick", action="store_true", help="measure no storage, ask no torch")
    add("--json", action="store_true", help="for programs")

    add = command("data", _data, "make an ImageNet-shaped set of images; no download")
    add("folder", help="where to, such as data")
    add("--preset", choices=sorted(presets.PRESETS), help="sizes (default: this machine's)")
    add("--classes", type=int, help="how many")
    add("--images-per-class", type=int, help="in train/")
    add("--val-images-per-class", type=int, help="in val/")
    add("--seed", type=int, default=0)
    add("--workers", type=int, help="processes (default: the CPUs of this one)")

    add = command("submit", _submit, "run the trainer as a job, when its turn comes")
    add("command", nargs="+", help='in quotes: "dlojz/dlojz.py --test -b 32"; several: in order')
    add("--n-gpu", type=int, default=1, help="GPUs, or processes where there is no GPU")
    add("--name", default="dlojz")
    add("--time-max", default="00:10:00", help="HH:MM:SS, then it is ended")
    add("--account", help="on a cluster: whose hours; xyz@a100 asks for nodes with A100s")
    add("--module", help="on a cluster: what to load, in place of its site's")
    add("--dry-run", action="store_true", help="show the script or the command, submit nothing")
    add("--wait", action="store_true", help="wait for the end and show the report")

    add = command("queue", _queue, "the jobs that wait or run, and the last ones")
    add("name", nargs="?", help="only jobs with this name")
    add("--last", type=int, default=5, help="how many that have ended")

    add = command("cancel", _cancel, "take a job from the queue, or end it")
    add("job", nargs="+", help="its number")

    add = command("report", _report, "what a job did: throughput, memory, energy")
    add("job", nargs="*", help="numbers, folders or recordings (default: the last submission)")
    add("--png", type=Path, help="draw it into this file")

    add = command("trace", _trace, "where the time of a step goes, from a profiler's trace")
    add("job", nargs="?", help="a number, a folder or a trace (default: the last submission)")
    add("--png", type=Path, help="draw one step into this file")


def _add_course_commands(command):
    add = command("check", _check, "the verdict: same training, faster, by the mechanism")
    add("step", help="01, 02, ...")
    add("job", nargs="?", help="its number (default: the last submission)")
    add("--pairs", type=int, help="runs before and after (default: 6 where a gain is asked)")
    add("--hint", action="store_true", help="help with what fails; each time more")
    add("--json", action="store_true", help="for programs")

    add = command("solution", _solution, "show the trainer as it is after a step")
    add("step", help="01, 02, ...")
    add = command("diff", _diff, "what differs between your trainer and a step's solution")
    add("step", help="01, 02, ...")
    add("--job", help="of this job instead of your trainer")
    add = command("catch-up", _catch_up, "put the starting point of a step; yours is saved first")
    add("step", help="01, 02, ...")


def _doctor(args):
    from dlojz.machine import doctor

    found = doctor.examine(quick=args.quick)
    print(json.dumps(found.to_dict(), indent=1, default=str) if args.json else found)
    return 1 if any(not problem.note for problem in found.problems) else 0


def _data(args):
    preset = presets.choose(args.preset)
    folder = images.generate(
        args.folder,
        classes=_or(args.classes, preset.classes),
        images_per_class=_or(args.images_per_class, preset.images_per_class),
        val_images_per_class=_or(args.val_images_per_class, preset.val_images_per_class),
        seed=args.seed,
        workers=args.workers,
    )
    print(f"{folder}: train it with --data {folder}, or set DLOJZ_DATA={folder}")


def _or(value, default):
    return default if value is None else value


def _submit(args):
    command = args.command if len(args.command) > 1 else args.command[0]
    jobs = launch.submit(
        command,
        args.n_gpu,
        args.name,
        args.time_max,
        module=args.module,
        account=args.account,
        dry_run=args.dry_run,
    )
    if args.dry_run:
        print(jobs)
        return 0
    jobs = jobs if isinstance(jobs, list) else [jobs]
    for job in jobs:
        print(f"job {job.id}: {job.command}", flush=True)
    if not args.wait:
        print("see `dlojz queue`, then `dlojz report`")
        return 0
    states = [_wait(job) for job in jobs]
    _show(jobs)
    return 0 if set(states) <= {launch.State.COMPLETED, launch.State.OUT_OF_MEMORY} else 1


def _wait(job):
    """Wait with a progress bar over the steps of the job."""
    from tqdm import tqdm

    bar = tqdm(total=None, unit="step", desc=f"job {job.id}", leave=False, disable=None)
    with bar:  # none where the output is no terminal
        for now in launch.follow(job):
            bar.total = now.total
            bar.set_postfix_str(str(now.state))
            bar.update(now.done - bar.n)
    return job.state


def _queue(args):
    print(launch.queue(args.name, args.last))


def _cancel(args):
    for job in [launch.find(number) for number in args.job]:
        job.cancel()
        print(f"job {job.id}: {'cancelling' if not job.state.final else job.state}")


def _run(text):
    """A job by its number; a folder or a file as it is."""
    return Path(text) if Path(text).exists() and not text.isdigit() else launch.find(text)


def _report(args):
    found = [_run(job) for job in args.job] if args.job else launch.latest()
    _show(found if isinstance(found, list) else [found], args.png)


def _trace(args):
    from dlojz.figures import timeline
    from dlojz.runs import trace

    found = timeline.open_trace(_run(args.job) if args.job else launch.latest())
    print(f"{trace.analyse(found).verdict}: {found.path}\n\n{timeline.times(found)}")
    if found.on_gpu:
        print(f"\n{timeline.waits(found)}")
    for suspect in suspects.suspects([found]):
        sign = ":" if suspect.fault == "none" else "?"
        print(f"\n{suspects.FAULTS[suspect.fault]}{sign} {suspect.evidence}")
    if args.png:
        timeline.plot_step(found).figure.savefig(args.png, dpi=150, bbox_inches="tight")
        print(f"wrote {args.png}")


def _show(runs, png=None):
    from dlojz.figures import report

    print(report.inspect_run(runs[0]) if len(runs) == 1 else report.compare_runs(runs))
    if png:
        print(f"wrote {report.save_figure(runs, png)}")


def _check(args):
    from dlojz.check import check

    verdict = check(args.step, args.job, args.pairs)
    print(json.dumps(verdict.to_dict(), indent=1) if args.json else verdict)
    if args.hint:
        print(verdict.hint())
    return 0 if verdict.passed else 1


def _solution(args):
    print(course.solution(args.step).read_text(), end="")


def _diff(args):
    print(repr(course.diff(launch.find(args.job) if args.job else course.trainer(), args.step)))


def _catch_up(args):
    saved = course.catch_up(args.step)
    print(f"{course.trainer()} is now where step {course.step(args.step)} begins")
    print(
        f"yours was saved: {saved}" if saved else "yours was a step of the course: nothing to save"
    )


if __name__ == "__main__":
    sys.exit(main())
