"""Two programs that anyone may have written, compared by whole trainings with the same seeds."""

import dataclasses
import json
import re

import numpy as np
import pytest

from dlojz import cli, launch
from dlojz.course import UserError
from dlojz.pairing.differences import Pairs
from dlojz.pairing.picture import plot_pairs
from dlojz.pairing.seeds import by_seed

READ = "accuracy: ([0-9.]+)"
TRAIN = """
import argparse
import numpy as np
import helper

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--gain", type=float, default=0)
args = parser.parse_args()
print("accuracy: 1.5%")  # of an earlier epoch
accuracy = helper.ACCURACY + 3 * np.sin(args.seed) + args.gain * (1 + 0.1 * np.sin(7 * args.seed))
print(f"\\x1b[32maccuracy: {accuracy:.2f}%")
"""


@pytest.fixture
def train(script):
    """A program of two files, which prints an accuracy."""
    script("ACCURACY = 90", "helper.py")
    return script(TRAIN, "train.py")


def commands():
    return [job.command for job in launch.jobs()]


def test_trainings_alternate_and_are_kept_and_more_seeds_train_only_those_missing(train):
    found = by_seed("train.py", "train.py --gain 2", 2, READ)
    assert commands() == [
        "train.py --seed 1",
        "train.py --gain 2 --seed 1",
        "train.py --gain 2 --seed 2",
        "train.py --seed 2",
    ]
    assert found.values[1] == (92.52, 94.66)
    more = by_seed("train.py", "train.py --gain 2", 3, READ, check_seed=True)
    assert commands()[4:] == [
        "train.py --seed 1",
        "train.py --seed 3",
        "train.py --gain 2 --seed 3",
    ]
    assert {seed: more.values[seed] for seed in (1, 2)} == found.values
    assert more.shown
    assert re.fullmatch(
        r"after is [\d.]+ points higher \(95 % interval .*, 3 seeds\)", more.finding
    )
    assert "before gave 92.52 again with seed 1: it is seeded" in more.notes
    assert [*more.seconds] == [1, 2, 3], "each pair ran in one go"
    assert 0.01 < more.seconds[1][0] < 60
    (train.parent / "helper.py").write_text("ACCURACY = 80")
    assert by_seed("train.py", "train.py --gain 2", 1, READ).values == {1: (82.52, 84.66)}
    by_seed("train.py", "train.py --gain 2", 1, READ, again=True)
    assert len(commands()) == 11


def test_a_pair_from_a_terminal(train, capsys, tmp_path):
    command = ["pair", "train.py", "train.py --gain 1", "--seeds", "2", "--read", READ]
    assert cli.main([*command, "--save", str(tmp_path / "pair.png")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == (
        "seed before after difference time before time after times as fast".split()
    )
    assert "2 seeds)" in out
    assert "whole runs, after: " in out
    assert (tmp_path / "pair.png").stat().st_size > 10_000
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "points"
    assert found["text"][0] in out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["pair", "train.py", "--gain", "1", "train.py", "--seeds", "2"])
    assert "put each program in quotes with its flags" in capsys.readouterr().err


def test_an_interrupted_pair_awaits_the_jobs_that_it_submitted(train, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("dlojz.pairing.seeds._as_they_end", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            by_seed("train.py", "train.py --gain 2", 1, READ)
    assert by_seed("train.py", "train.py --gain 2", 1, READ).values == {1: (92.52, 94.66)}
    assert len(commands()) == 2


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("acuracy: (.*)", r"'acuracy: \(\.\*\)' matches nothing in its stdout.txt or stderr.txt"),
        ("(accuracy): ", "found 'accuracy', which is not a number"),
        (None, "no validation accuracy in a log of ours: --read finds a number in the output"),
    ],
)
def test_without_a_number_the_output_is_shown_and_the_trainings_are_kept(train, read, said):
    with pytest.raises(UserError, match=f"before, seed 1: .*{said}") as error:
        by_seed("train.py", "train.py", 1, read)
    assert "expected one group around the number, as in --read 'accuracy: (" in str(error.value)
    assert "  | accuracy: 92.52%" in str(error.value)
    by_seed("train.py", "train.py", 1, READ)
    assert len(commands()) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"read": "accuracy: .*"}, "has 0 groups: expected one group around the number"),
        ({"read": "(a|b): (.*)"}, "has 2 groups: expected one group"),
        ({"read": "accuracy: ("}, "is not a regular expression"),
        ({"after": "gone.py"}, "no trainer 'gone.py' in"),
        ({"after": "torn.py"}, "torn.py, line 1: '\\(' was never closed"),
        ({"seeds": 0}, "--seeds 0: expected at least 1"),
        ({"time_max": "soon"}, "soon"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(train, script, given, said):
    script("print(", "torn.py")
    with pytest.raises(UserError, match=said):
        by_seed(**{"before": "train.py", "after": "train.py", "read": READ} | given)
    assert launch.jobs() == []


def test_a_program_without_the_seed_flag_shows_its_usage_and_the_rest_is_cancelled(script):
    script("print('accuracy: 0.5')", "takes.py")
    own = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rng')\n"
    script(f"{own}print('accuracy: 0.' + parser.parse_args().rng)", "other.py")
    with pytest.raises(UserError, match=r"after, seed 1: .* --seed was added") as error:
        by_seed("takes.py", "other.py", 9, READ)
    assert "write {seed} where its own takes the seed\n  | usage: other.py" in str(error.value)
    assert "error: unrecognized arguments: --seed 1" in str(error.value)
    states = [job.wait() for job in launch.jobs()]
    assert states.count("CANCELLED") >= 14
    found = by_seed("takes.py", "other.py --rng 1{seed}", 2, READ)
    assert found.values == {1: (0.5, 0.11), 2: (0.5, 0.12)}
    assert found.notes == ("before gave 0.5 with each seed: is it coarse, or the seed unused?",)


def test_a_training_that_fails_is_shown_and_the_others_count(script):
    script("import sys; print('accuracy:', sys.argv[2])", "good.py")
    script("import sys; seed = int(sys.argv[2]); print('accuracy:', 1 / (seed - 2))", "bad.py")
    found = by_seed("good.py", "bad.py", 3, "accuracy: (.*)")
    assert found.values == {1: (1, -1), 3: (3, 1)}
    (failure,) = found.missing
    assert re.match("after, seed 2: job 0003 FAILED: exit code 1", failure)
    assert "ZeroDivisionError" in failure
    script("print('accuracy: nan')", "nan.py")
    with pytest.raises(UserError, match=r"before, seed 1: gave nan\n  \| accuracy: nan"):
        by_seed("nan.py", "good.py", 1, "accuracy: (.*)")


def test_a_program_whose_seed_does_not_fix_its_number_is_named(script):
    script("import os; print('accuracy:', os.getpid())", "unseeded.py")
    script("import logging, sys; logging.error('accuracy: 0.%s', sys.argv[2])", "logs.py")
    found = by_seed("unseeded.py", "logs.py", 1, READ, check_seed=True)
    assert re.search("before gave .*, then .*, with seed 1: the seed does not fix", found.notes[0])
    assert found.values[1][1] == 0.1, "many programs log to stderr"
    assert "one seed: an interval needs at least 2" in found.finding


def test_a_trainer_of_the_course_needs_no_regular_expression(course_folder):
    flags = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4"
    command = f"dlojz/dlojz.py {flags} --test-nsteps 2"
    found = by_seed(command, command, 1)
    assert found.unit == "points"
    assert found.differences == [0]


def test_a_pair_on_slurm(on_slurm, train):
    found = by_seed("train.py", "train.py --gain 2", 2, READ, time_max="00:05:00")
    assert found.values[1] == (92.52, 94.66)
    assert all("slurm" in job.info for job in launch.jobs())
    by_seed("train.py", "train.py --gain 2", 2, READ)
    assert len(commands()) == 4


# The statistics ----------------------------------------------------------------------------


def pairs(differences, unit="points"):
    values = {seed: (90.0, 90.0 + x) for seed, x in enumerate(differences, 1)}
    return Pairs("a.py", "b.py", values, dict.fromkeys(values, (2.0, 1.0)), unit)


def test_in_100_pairs_of_equal_programs_at_least_93_show_no_difference():
    rng = np.random.default_rng(0)
    found = [pairs(rng.normal(size=5)) for _ in range(100)]
    assert sum("no difference of over" in each.finding for each in found) >= 93


def test_the_seeds_that_are_planned_show_the_difference_in_4_of_5_tries():
    rng = np.random.default_rng(1)
    first = pairs(rng.normal(size=5))
    error = np.std(first.differences, ddof=1)
    tries = rng.normal(first.not_excluded / 2, error, (500, first.seeds_for_half))
    assert 0.75 < np.mean([pairs(each).shown for each in tries]) < 0.9


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (
            [1.0, 1.2, 1.1],
            "after is 1.10 points higher (95 % interval 0.85 to 1.35 points, 3 seeds)",
        ),
        ([-1.0, -1.2, -1.1], "after is 1.10 points lower (95 % interval -1.35 to -0.85 points, 3"),
        (
            [-0.2, 0.3, 0.1],
            "no difference of over 0.69 points shown (mean +0.07 points, 95 % interval -0.56 to "
            "0.69 points, 3 seeds)",
        ),
        ([0.0, 0.0], "equal with each of 2 seeds"),
        ([0.5, 0.5], "after is 0.500 points higher"),
        ([0.5], "+0.500 points with one seed: an interval needs at least 2"),
    ],
)
def test_the_finding_in_words(differences, said):
    found = pairs(differences)
    assert found.finding.startswith(said)
    assert plot_pairs(found).figure._suptitle.get_text().lower().startswith(said[:30].lower())
    assert "whole runs, after: 2.00" in repr(found)
    assert "<p>" in found._repr_html_()


def test_without_a_difference_more_seeds_are_planned():
    assert pairs([-0.2, 0.3, 0.1]).lines[1] == (
        "to show a difference of half that, 0.35 points, takes about 7 seeds"
    )
    assert len(pairs([1.0, 1.2, 1.1]).lines) == 2


def test_times_that_a_busy_machine_spread_are_not_compared():
    seconds = {1: (110.0, 15.0), 2: (224.0, 120.0), 3: (19.0, 33.0)}
    found = dataclasses.replace(pairs([0.0, 1.0, 2.0]), seconds=seconds)
    assert "0.58 to 7.33 times as fast, too far apart to compare" in repr(found)
    apart = dataclasses.replace(found, seconds={})
    assert "whole runs, after: no two of a seed ran in turn" in repr(apart)
