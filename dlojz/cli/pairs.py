"""Two programs compared, from a terminal."""

import json
import sys
from pathlib import Path

PAIR = """\
Each command in quotes, with its flags:

  dlojz pair before.py after.py
  dlojz pair "train.py --lr 0.1" "train.py --lr 0.2" --seeds 5 --read 'accuracy: ([0-9.]+)'
  dlojz pair 12 15

The first compares some steps of both: their work, losses and speed, and the parts of a step.
The third compares two jobs that there are, by their logs, so with less certainty.
The second compares whole trainings. Both programs are trained with `--seed 1`, `--seed 2`, ...
added. Where one takes its seed elsewhere, write {seed}: "train.py seed={seed}". On a cluster
trainings may run at the same time: if they write files, give each its own, as in
"train.py --seed {seed} --out a-{seed}.pt".

Trainings are kept: with --seeds 10 after --seeds 5, or with another --read, only those that are
missing are made. The sources and flags count: if data or packages have changed, add --again.
"""


def add(command):
    """Add these commands to the parser."""
    arg = command("pair", _pair, PAIR)
    arg("before", help='"train.py --lr 0.1", in quotes, or the number of a job')
    arg("after", help="another program, the same with other flags, or another job")
    arg("--pairs", type=int, default=6, help="pairs of timed runs (default: 6)")
    arg("--steps", type=int, default=60, help="steps of such a run (default: 60)")
    arg("--seeds", type=int, help="compare whole trainings, with seeds 1 to this number, such as 5")
    arg("--read", metavar="REGEX", help="the number: the one group of its last match in the output")
    arg("--check-seed", action="store_true", help="train before twice with seed 1: is it the same?")
    arg("--again", action="store_true", help="keep none of the earlier trainings")
    arg("-n", "--n-gpu", type=int, default=1, help="GPUs, or processes, of each training")
    arg("--time-max", default="01:00:00", help="end a training after HH:MM:SS (default: 01:00:00)")
    arg("--account", help="Slurm account to charge; xyz@a100 also requests A100 nodes")
    arg("--module", help="module to load on a cluster, instead of its site's")
    arg("--save", type=Path, metavar="PNG", help="draw it into this file")


def _pair_jobs(args, both):
    from dlojz.pairing.logs import by_logs

    if not both or args.seeds or args.read or args.save:
        raise ValueError(
            f"{args.before} and {args.after}: expected the numbers of two jobs and no flag but "
            "--json, or two commands in quotes"
        )
    found = by_logs(args.before, args.after)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return 0


def _pair(args):
    from dlojz.pairing.seeds import by_seed
    from dlojz.pairing.steps import by_steps

    where = {name: getattr(args, name) for name in ("n_gpu", "account", "module")}
    jobs = [text.isdigit() for text in (args.before, args.after)]
    if any(jobs):
        return _pair_jobs(args, all(jobs))
    if args.seeds is None:
        if args.read or args.save or args.check_seed:
            raise ValueError(
                "--read, --save and --check-seed are for whole trainings: add --seeds 5"
            )
        found = by_steps(args.before, args.after, args.pairs, args.steps, args.time_max, **where)
        print(json.dumps(found.to_dict(), indent=1) if args.json else found)
        return 0
    options = {"time_max": args.time_max, "check_seed": args.check_seed}
    options["again"] = args.again
    found = by_seed(args.before, args.after, args.seeds, args.read, **options, **where)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    if args.save:
        from dlojz.pairing import picture

        picture.plot_pairs(found).figure.savefig(args.save, dpi=150)
        print(f"wrote {args.save}", file=sys.stderr)
    return 1 if found.missing else 0
