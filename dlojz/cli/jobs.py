"""Jobs, from a terminal: submitted, listed and cancelled, and what they were like."""

import math
import sys
from pathlib import Path

from dlojz import launch
from dlojz.course import UserError, presets
from dlojz.launch import series, sites
from dlojz.runs.folder import events_file
from dlojz.table import harmless
from dlojz.traces import breakdown, suspects
from dlojz.traces.trace import open_traces

UNSEEN = (
    "no backward pass of torch in the process that was started, and those that it starts itself "
    "are not watched: let `-n 2` start two, in place of `mp.spawn`"
)


def add(command):
    """Add these commands to the parser."""
    for name, call in (("submit", _submit), ("watch", _watch)):
        _add_job(command(name, call), watch=name == "watch")

    arg = command("queue", _queue)
    arg("name", nargs="?", help="only jobs with this name")
    arg("--last", type=int, default=5, help="number of ended jobs to show")

    command("cancel", _cancel)("job", nargs="+", help="its number")

    arg = command("report", _report)
    arg("job", nargs="*", help="numbers, folders or recordings (default: the last submission)")
    arg("--all", action="store_true", help="all runs, one row each")
    arg("--png", type=Path, help="draw it into this file")

    arg = command("trace", _trace)
    arg("job", nargs="?", help="a number, a folder or a trace (default: the last submission)")
    arg("--png", type=Path, help="draw one step into this file")


def _add_job(arg, watch):
    arg("command", nargs="+", help='"train.py --epochs 1", in quotes; several run in order')
    arg("-n", "--n-gpu", type=int, default=1, help="GPUs, or processes where there is no GPU")
    arg("--name", default="dlojz", help="name in the queue and in tables")
    arg("--time-max", help="end it after HH:MM:SS or minutes (default: 00:10:00)")
    arg("--account", help="Slurm account to charge; xyz@a100 also requests A100 nodes")
    arg("--module", help="module to load on a cluster, instead of its site's")
    arg("--dry-run", action="store_true", help="show the script or the command, submit nothing")
    if not watch:
        arg("--wait", action="store_true", help="wait for the end and show the report")
        arg("--watch", action="store_true", help="write our log of a program of any make")


def _watch(args):
    """Submit a program under watch, wait for its end, and show what it was like."""
    args.wait = args.watch = True
    return _submit(args)


def _submit(args):
    command = args.command if len(args.command) > 1 else args.command[0]
    time_max, large = args.time_max or "00:10:00", too_large(args.command)
    given = {name: getattr(args, name) for name in ("module", "account", "watch", "dry_run")}
    jobs = launch.submit(command, args.n_gpu, args.name, time_max, **given)
    if args.dry_run:
        print(jobs)
        return 0
    jobs = jobs if isinstance(jobs, list) else [jobs]
    for job in jobs:
        print(f"job {job.id}: {harmless(job.command)}", flush=True)
        if job.beside:
            print(f"  {harmless(job.beside)}", flush=True)
    if args.time_max:
        print(f"each is ended after {_duration(sites.seconds(time_max))}")
    if large:
        print(large, file=sys.stderr)
    if not args.wait:
        print("see `dlojz queue`, then `dlojz report`")
        return 0
    states = [job.wait() for job in jobs]
    _show(jobs)
    if args.watch:
        _diagnose(jobs)
    return 0 if set(states) <= {launch.State.COMPLETED, launch.State.OUT_OF_MEMORY} else 1


def _diagnose(jobs):
    from dlojz.figures.diagnosis import diagnosis

    for job in jobs:
        if job.state == launch.State.FAILED:
            continue  # its error has been shown
        if events_file(job.directory).exists():
            print("", *diagnosis(job), sep="\n")
        else:
            ended = job.state == launch.State.COMPLETED
            why = UNSEEN if ended else "it ended before a backward pass of torch"
            print(f"\njob {job.id}: no training was seen: {why}")


def too_large(commands):
    """Return a note if a command would train with the default sizes, meant for a GPU, on a CPU."""
    preset = presets.choose()
    if preset.name != "cpu" or launch.launcher().name != "local":
        return ""
    trainers = [launch.trainer_and_flags(c)[0] for c in commands if "--model" not in c]
    if not any(map(launch.is_ours, trainers)):
        return ""
    return (
        "note: without --model the trainer takes resnet152 at 224 px, which is slow on a CPU; "
        f"sizes for this machine: {preset.flags}"
    )


def _duration(seconds):
    """Return "5 minutes" for 300."""
    hours, rest = divmod(seconds, 3600)
    parts = ((hours, "hour"), (rest // 60, "minute"), (rest % 60, "second"))
    return " ".join(f"{n} {unit}{'s' * (n > 1)}" for n, unit in parts if n)


def _queue(args):
    print(launch.queue(args.name, args.last))


def _cancel(args):
    for job in [launch.find(number) for number in args.job]:
        job.cancel()
        print(f"job {job.id}: {'cancelling' if not job.state.final else job.state}")


def _report(args):
    if args.all and args.png:
        raise ValueError("--png draws the runs that you name: dlojz report 12 13 --png FILE")
    if args.all:
        from dlojz.figures import report

        print(report.compare_runs([job for job in launch.jobs() if not job.is_series]))
        return
    found = [run for job in args.job for run in _runs_of(_run(job))] or launch.latest()
    _show(found if isinstance(found, list) else [found], args.png)


def _show(runs, png=None):
    from dlojz.figures import report

    print(report.inspect_run(runs[0]) if len(runs) == 1 else report.compare_runs(runs))
    if png:
        _figure(runs).savefig(png, dpi=150)
        print(f"wrote {png}")


def _figure(runs):
    """Return the figure that fits the runs: one run's steps, a sweep of batch sizes, or phases."""
    from dlojz.figures import batch_sweep, report
    from dlojz.runs.stats import summary

    if len(runs) == 1:
        return report.plot_steps(runs[0]).figure
    found = [summary(run) for run in runs]
    if len({s.batch_size for s in found}) == len(found):
        return batch_sweep.plot_sweep(found)[0].figure
    return report.plot_phases(found).figure


def _runs_of(job):
    """Return the runs of a series, such as a check's job; or else the job itself, in a list."""
    if not isinstance(job, launch.Job) or not job.is_series:
        return [job]
    return [run for run in series.folders(job).values() if events_file(run).exists()] or [job]


def _run(text):
    """Return the job with this number, or the folder or file with this path."""
    if text and Path(text).exists() and not text.isdigit():
        return Path(text)
    if "/" in text:
        raise FileNotFoundError(f"no {text}: expected a job's number, a run's folder or its log")
    return launch.find(text)


def last():
    """Return the last job; print a note if it is the last of a sweep."""
    found = launch.latest()
    if not isinstance(found, list):
        return found
    numbers = ", ".join(job.id for job in found)
    print(f"the last job of the last sweep ({numbers}); others by number", file=sys.stderr)
    return found[-1]


def _unprofiled_ms(run):
    """Return the mean of a run's steps without the profiler; infinity without a log of them."""
    from dlojz.runs import stats

    try:
        return stats.summary(run).mean_step_ms or math.inf
    except UserError:
        return math.inf


def _trace(args):
    from dlojz.figures import timeline

    run = _run(args.job) if args.job else last()
    traces = open_traces(run)
    found = traces[0]
    step_ms, whole = _unprofiled_ms(run), breakdown.analyse(found)
    reading = whole.without_profiler(step_ms)
    print(f"{reading.verdict}: {found.path}")
    for note in dict.fromkeys(note for each in traces for note in each.notes):
        print(f"note: {note}")
    if reading is not whole:
        print(
            f"note: a step took {whole.step_ms:.1f} ms here and {step_ms:.1f} ms without the "
            "profiler; the table has it whole, verdict and suspects without what that added"
        )
    print(f"\n{timeline.times(found)}")
    if found.on_gpu:
        print(f"\n{timeline.waits(found)}")
    for suspect in suspects.suspects(traces, step_ms):
        print(f"\n{suspects.sentence(suspect)}")
    if args.png:
        timeline.plot_step(found).figure.savefig(args.png, dpi=150, bbox_inches="tight")
        print(f"wrote {args.png}")
