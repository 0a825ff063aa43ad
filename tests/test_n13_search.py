"""The search of notebook 13: its workers, its journal, and the verdict on a study.

Most studies here have a trainer that trains nothing: jobs, logs and workers are real.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import made
import optuna
import pytest
import steps
from programs import REPOSITORY, experiment_file

from conftest import fill
from dlojz import launch
from dlojz.chapters import n13_search as n13
from dlojz.chapters.n13_search import exercise, journal, kept, worker
from dlojz.chapters.n13_search import study as studies
from dlojz.check import CheckError, check
from dlojz.check.exercise import State
from dlojz.jobs import processes

BROKEN = experiment_file("search.py").read_text()
SOLVED = (REPOSITORY / "solutions/search.py").read_text()

# Its accuracy depends on lr alone, and is highest one epoch before the end.
TRAINER = """
import argparse, math, os, time
from pathlib import Path
from dlojz.runs import log
from dlojz.runs.columns import PHASES

parser = argparse.ArgumentParser()
for name, default in (("lr", 0.1), ("mom", 0.9), ("wd", 5e-4), ("pace", 0.02)):
    parser.add_argument(f"--{name}", type=float, default=default)
parser.add_argument("-e", "--epochs", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--data", default="data")
args = parser.parse_args()
run = log.open_run(args)
best = 0.9 - 0.1 * abs(math.log10(max(args.lr, 1e-4)) + 1.5)
for epoch in range(args.epochs):
    time.sleep(args.pace)
    if args.lr < 0:
        raise ValueError("a negative learning rate")
    fall = 0.1 if epoch == args.epochs - 1 else 0
    accuracy = best * (1 - 0.5 ** (epoch + 1)) - fall + 1e-4 * args.seed
    ms = dict.fromkeys(PHASES, 1.0)
    run.step({"epoch": epoch, "step": epoch, "images": 8, "lr": args.lr, "loss": 1.0}, ms, None, 0)
    train = {"accuracy": accuracy + 0.05, "loss": 1.0}
    run.epoch(epoch, train, {"accuracy": accuracy, "loss": 1.0})
run.end()
"""


@pytest.fixture
def quick(course_folder):
    """A course folder with a trainer that takes no time."""
    (course_folder / "quick.py").write_text(TRAINER)
    for name in ("train", "val"):
        (course_folder / "data" / name).mkdir(parents=True)
    (course_folder / "unseen" / "val").mkdir(parents=True)
    return course_folder


def search(folder, edits=(), trials=6, workers=2, name="first", flags=""):
    """Search by the solution with these edits."""
    (folder / "search.py").write_text(made.replaced(SOLVED, dict(edits)))
    return n13.search("search.py", name, trials, workers, f"quick.py {flags}".strip())


def test_only_the_paragraphs_of_the_trainee_are_prepared():
    assert steps.problems(BROKEN, SOLVED, "13") == []
    assert BROKEN.count("# TODO 13") == BROKEN.count("raise NotImplementedError") == 2
    assert "TODO" not in SOLVED


def test_a_study_of_the_trainer_passes_and_is_kept_as_one_log(course_folder):
    study = n13.search("solutions/search.py", "first", trials=6, workers=2)
    jobs = n13.again("solutions/search.py", study)
    assert [job.state for job in jobs] == ["COMPLETED"] * 3
    found = check("13_search", study)
    assert found.passed, found
    assert "(study first)" in repr(found)
    seconds = [row[4] for row in study.trials.rows]
    assert all(float(each) > 0 for each in seconds)
    said = {each.user_attrs["worker"]["pid"] for each in study.found}
    assert len(said) == 2
    assert check("13_search").job == check("13_search", "first").job == study
    assert check("13_search", jobs[0]).job == study
    keep = [sys.executable, REPOSITORY / "tools/keep_study.py", course_folder / "kept.jsonl"]
    subprocess.run(keep, check=True)
    held = kept.read(course_folder / "kept.jsonl")
    assert [t["accuracies"][-1] for t in held.complete] == pytest.approx(
        [t.value for t in study.found if t.state.name == "COMPLETE"], abs=1e-4
    )
    assert len(held.trials) == 6
    assert len(held.again) == 3
    assert held.seconds["complete"] > 0 < min(case["seconds"] for case in held.again)
    [start, *_] = map(json.loads, (course_folder / "kept.jsonl").read_text().splitlines())
    assert start["command"].startswith("search.py --study first --trials 6 --workers 2 --command")
    assert "lr" not in start["arguments"]


# Wrong and right answers --------------------------------------------------------------------------

REPORT = "        trial.report(accuracy, epoch)\n"
ASK = "        if trial.should_prune():\n"
CANCEL = "            job.cancel()\n"
PRUNE = "            raise optuna.TrialPruned\n"
LR = 'trial.suggest_float("lr", 1e-3, 1, log=True)'
RETURN = "    return accuracy\n"
SUBMIT = 'worker.submit(trial, f"--lr {lr} --mom {mom} --wd {wd}")'
EPOCHS = "    for epoch, accuracy in worker.epochs(job):\n"
FLAGS = 'flags = " ".join(f"--{name} {value}" for name, value in best.params.items())\n'
SEEDS = "for seed in (1, 2, 3)]"

WRONG = {  # by hint: name, and what to replace
    "memory": {"a study in memory": {"storage=storage": "storage=None"}},
    "direction": {"the lowest accuracy": {'        direction="maximize",\n': ""}},
    "fixed": {"suggested, and not passed on": {SUBMIT: 'worker.submit(trial, "")'}},
    "outside": {
        "numbers of one's own": {
            LR: "10 ** random.uniform(-3, 0)",
            "import optuna\n": "import random\n\nimport optuna\n",
        }
    },
    "linear": {
        "rates by their value": {", log=True)\n    mom": ")\n    mom"},
        "from zero": {LR: 'trial.suggest_float("lr", 0, 1)'},
    },
    "twins": {"one seed in all workers": {"seed=seed": "seed=0"}},
    "told-complete": {"the accuracy so far": {PRUNE: "            return accuracy\n"}},
    "zero": {
        "a failed job is worth 0": {
            SUBMIT: SUBMIT.replace("{lr}", "{lr if lr > 0.02 else -1}"),
            EPOCHS: "    job.wait()\n    if job.state != 'COMPLETED':\n        return 0.0\n"
            + EPOCHS,
        }
    },
    "unrun": {"a job that no trial knows": {"worker.submit(trial, f": "submit_by_hand(f"}},
    "early": {
        "the first epoch": {REPORT: REPORT + "        return accuracy\n"},
        "after a while": {
            EPOCHS: "    import time\n    for epoch, accuracy in worker.epochs(job):\n",
            PRUNE: PRUNE + "        if epoch == 2:\n            break\n",
        },
    },
    "rounded": {
        "three decimals": {"--lr {lr}": "--lr {lr:.3f}"},
        "zero for some": {"--lr {lr}": "--lr {lr:.1f}"},
        "a few digits": {"--wd {wd}": "--wd {wd:.4g}"},
    },
    "flags": {
        "one was forgotten": {" --wd {wd}": ""},
        "one for another": {"--wd {wd}": "--wd {lr}"},
    },
    "seed": {"the number of the trial": {"--wd {wd}": "--wd {wd} --seed {trial.number}"}},
    "budget": {
        "epochs are suggested": {
            "--wd {wd}": "--wd {wd} -e {epochs}",
            LR: LR + '\n    epochs = trial.suggest_int("epochs", 2, 6)',
        }
    },
    "images": {
        "two folders": {
            LR: LR + '\n    data = ("data", "unseen")[trial.number % 2]',
            "--wd {wd}": "--wd {wd} --data {data}",
        }
    },
    "best-epoch": {
        "the best epoch": {
            RETURN: "    return best\n",
            EPOCHS: "    best = 0\n" + EPOCHS + "        best = max(best, accuracy)\n",
        }
    },
    "value": {
        "the training's accuracy": {
            RETURN: "    from dlojz.runs import log\n"
            '    return log.read(job).epochs[-1]["train_accuracy"]\n'
        }
    },
    "reports": {
        "in percent": {"report(accuracy,": "report(100 * accuracy,"},
        "epochs from zero": {"report(accuracy, epoch)": "report(accuracy, epoch - 1)"},
    },
    "left": {"the job goes on": {CANCEL: ""}},
    "unpruned": {"nobody is asked": {ASK + CANCEL + PRUNE: ""}},
    "again": {
        "one run": {SEEDS: "for seed in (1,)]"},
        "other flags": {FLAGS: FLAGS.replace("{value}", "{value / 2}")},
        "rounded flags": {FLAGS: FLAGS.replace("{value}", "{value:.3g}")},
    },
    "again-seeds": {"the seed of the search": {"--seed {seed}": "--seed 0"}},
    "judge": {"the same images": {" --data {data}": ""}},
}
RIGHT = {
    "the solution": {},
    "the exponent of the rate": {
        LR: '10 ** trial.suggest_float("exponent", -3, 0)',
        FLAGS: 'rates = {"lr": 10 ** best.params["exponent"], **best.params}\n'
        '    flags = " ".join(f"--{n} {rates[n]}" for n in ("lr", "mom", "wd"))\n',
    },
    "rates of a list, by random search": {
        LR: 'trial.suggest_categorical("lr", [0.003, 0.01, 0.03, 0.1, 0.3])',
        "TPESampler(n_startup_trials=5, seed=seed)": "RandomSampler(seed)",
    },
    "by Hyperband": {"SuccessiveHalvingPruner(min_resource=1, ": "HyperbandPruner(1, 4, "},
    "one rate only": {
        '    mom = trial.suggest_float("mom", 0.5, 0.99)\n'
        '    wd = trial.suggest_float("wd", 1e-5, 1e-2, log=True)\n': "",
        SUBMIT: 'worker.submit(trial, f"--lr {lr}")',
    },
    "five seeds, and an error that cancels": {
        "(1, 2, 3)": "range(7, 12)",
        CANCEL + PRUNE: "            try:\n"
        "                raise optuna.TrialPruned\n"
        "            finally:\n"
        "                job.cancel()\n",
    },
}
ANSWERS = [(hint, name) for hint, answers in WRONG.items() for name in answers]
LAST = ("again", "again-seeds", "judge")  # of runs after the search
BY_HAND = """

def submit_by_hand(flags):
    from dlojz.launch import submit

    return submit(f"quick.py {flags}", name="mine")


def again("""


def judged(folder, edits, again=True, **more):
    """Search, repeat the best trial, and return the verdict."""
    edits = {"\n\ndef again(": BY_HAND} | edits if "submit_by_hand" in str(edits) else edits
    study = search(folder, edits, **more)
    if again:
        n13.again("search.py", study, "unseen")
    return check("13_search", study)


def test_rungs_are_epochs_done_and_the_last_one_stops_nothing(quick):
    halving = "SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)"
    every = {halving: "ThresholdPruner(lower=2)", ASK: "        if asked(trial):\n"}
    every["\n\ndef again("] = """

def asked(trial):
    stop = trial.should_prune()
    trial.set_user_attr("stops", [*trial.user_attrs.get("stops", ()), stop])
    return False


def again("""
    (trial,) = search(quick, every, trials=1, workers=1).found
    assert [*trial.intermediate_values] == [1, 2, 3, 4]
    assert trial.user_attrs["stops"] == [True, True, True, False]


def test_each_hint_has_a_wrong_answer():
    others = {"unwritten", "failed", "few"}  # tested below
    assert {*exercise.EXERCISE.hints} == {*WRONG} | others


@pytest.mark.parametrize(("hint", "name"), ANSWERS)
def test_a_wrong_answer_gets_its_own_hint(quick, hint, name):
    slow = "--pace 0.5" if hint == "left" else ""
    found = judged(quick, WRONG[hint][name], again=hint in LAST, flags=slow)
    assert found.hint_key == hint, found


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(quick, name):
    found = judged(quick, RIGHT[name], trials=8)
    assert found.passed, found


def test_an_objective_that_is_still_to_be_written_says_so(quick):
    (quick / "search.py").write_text(BROKEN)
    with pytest.raises(
        n13.SearchError, match=r"0 of 2 trials have ended(.|\n)*NotImplementedError"
    ):
        n13.search("search.py", "first", 2, 1, "quick.py")
    found = check("13_search", "first")
    assert found.hint_key == "unwritten"
    assert all(found.part(part).fails for part in exercise.PARTS)
    assert search(quick, trials=1, workers=1).finished == 1, "the repaired file goes on"


# Workers that end early, and disks ----------------------------------------------------------------


@contextmanager
def searching(folder, trials, workers=2, flags="--pace 0.4"):
    """A search in a process of its own, once a worker's job is running."""
    (folder / "search.py").write_text(SOLVED)
    words = f"search.py --study first --trials {trials} --workers {workers} --command"
    argv = [sys.executable, *words.split(), f"quick.py {flags}"]
    study = n13.Study(folder / "runs/studies/first")
    with subprocess.Popen(argv, stdout=-1, stderr=-1, text=True) as process:
        try:
            until(lambda: running(study))
            yield process, study
        finally:
            process.kill()


def running(study):
    """The trials whose jobs run."""
    found = [each for each in study.found if each.state.name == "RUNNING"]
    jobs = [worker.job_of("first", each) for each in found]
    return [t for t, job in zip(found, jobs, strict=True) if job and job.state == "RUNNING"]


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def nothing_goes_on(study):
    states = {each.state.name for each in study.found}
    return "RUNNING" not in states and all(job.state.final for job in launch.jobs())


def test_the_trial_of_a_killed_worker_is_run_again_by_another(quick):
    with searching(quick, trials=4) as (process, study):
        (lost, *_) = running(study)
        os.kill(lost.user_attrs["worker"]["pid"], signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert study.finished == 4
    assert nothing_goes_on(study)
    assert study.found[lost.number].state.name == "FAIL"
    assert worker.job_of("first", lost).state == "CANCELLED"
    params = [each.params for each in study.found]
    assert params.count(params[lost.number]) == 2
    assert check("13_search", study).part(exercise.TRIALS) == State.PASSED


def test_the_epochs_of_running_trials_are_shown(quick):
    with searching(quick, trials=1, workers=1) as (_, study):
        until(lambda: any(each.last_step for each in study.found))
        assert re.fullmatch(r"trial 0: [1-4] epochs", studies._going(study.found))


def test_workers_end_with_the_process_that_waits_for_them(quick):
    with searching(quick, trials=4) as (process, study):
        process.kill()
        process.wait()
        until(lambda: nothing_goes_on(study))
    assert search(quick, trials=4, flags="--pace 0.4").finished == 4


def test_an_interrupted_search_cancels_its_jobs_and_goes_on_later(quick):
    with searching(quick, trials=2, workers=1) as (process, study):
        with pytest.raises(CheckError, match="study first has a worker: wait"):
            check("13_search", study)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert nothing_goes_on(study)
    (given_up, waiting) = study.found
    assert (given_up.state.name, waiting.state.name) == ("FAIL", "WAITING")
    assert [row[1] for row in study.trials.rows] == ["interrupted", "waiting"]
    assert search(quick, trials=2, flags="--pace 0.4").found[1].params == given_up.params


def test_a_worker_of_another_machine_is_gone_once_its_job_has_long_ended(quick, monkeypatch):
    study = search(quick, trials=1, workers=1)
    (done,) = study.found
    trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
    trial.user_attrs = done.user_attrs
    monkeypatch.setattr(processes, "is_alive", lambda who: None)
    assert worker.is_busy("first", trial)
    later = time.time() + worker.SILENT_S
    monkeypatch.setattr(time, "time", lambda: later)
    assert not worker.is_busy("first", trial)
    assert not worker.is_busy("first", optuna.trial.create_trial(state=trial.state))


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path):
    file = tmp_path / "journal.log"
    reader = optuna.create_study(study_name="first", storage=journal.storage(file))
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":4,"worker_id":"a-1","study_id":0,"date')
    writer = optuna.load_study(study_name="first", storage=journal.storage(file))
    writer.ask()
    assert file.read_bytes().startswith(whole + b'{"op_code":4,"worker_id":"')
    assert len(reader.trials) == len(writer.trials) == 1
    lines = file.read_text().splitlines()
    assert [json.loads(line)["op_code"] for line in lines] == [0, 4]


def test_a_damaged_journal_is_named(quick):
    study = search(quick, trials=1, workers=1)
    study.journal.write_text("nonsense\n" + study.journal.read_text())
    with pytest.raises(journal.JournalError, match=r"damaged .* move .*first away"):
        _ = n13.Study(study.directory).optuna


def test_after_a_full_disk_the_search_goes_on(small_disk, quick):
    with searching(quick, trials=40) as (process, study):
        until(lambda: study.finished)
        fill(small_disk)
        said = process.communicate(timeout=60)
    assert process.returncode, said
    assert "the disk is full" in said[1]
    before = [each.params for each in study.found if each.state.name == "COMPLETE"]
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    wanted = study.finished + 2
    study = search(quick, trials=wanted, flags="--pace 0.4")
    assert study.finished == wanted
    assert before == [each.params for each in study.found if each.params in before]
    assert nothing_goes_on(study)


# Errors -------------------------------------------------------------------------------------------


def test_three_failed_jobs_in_a_row_end_a_search(quick):
    with pytest.raises(n13.SearchError, match=r"3 trials in a row failed(.|\n)*again goes on"):
        search(quick, trials=8, flags="-e none")
    assert check("13_search", "first").hint_key == "failed"


def test_a_study_keeps_its_objective_and_its_command(quick):
    study = search(quick, trials=2)
    assert study.finished == len(study.found) == 2
    assert check("13_search", study).hint_key == "few"
    assert search(quick, {SEEDS: "for seed in (7, 8, 9)]"}, trials=3).finished == 3
    with pytest.raises(n13.SearchError, match=r"another name, or put .*trainer.py back"):
        search(quick, {"0.99": "0.9"}, trials=4)
    with pytest.raises(n13.SearchError, match=r"are 'quick\.py', and 'quick\.py -e 2' was asked"):
        search(quick, trials=4, flags="-e 2")


@pytest.mark.parametrize("name", ["", "a'; echo foo", "../up", "1", "a" * 60])
def test_a_name_that_is_no_folders_is_refused(quick, name):
    with pytest.raises(n13.SearchError, match="expected a letter, then"):
        search(quick, name=name)
    assert not (quick / "runs").exists()


def test_a_study_that_is_not_there_is_named(quick):
    with pytest.raises(LookupError, match="no study 'x' in runs/studies: expected one of none yet"):
        n13.find("x")
    with pytest.raises(LookupError, match="no study"):
        check("13_search")
    with pytest.raises(n13.SearchError, match=r"no study 'x' .* n13.search begins one"):
        _ = n13.Study(quick / "runs/studies/x").optuna
    with pytest.raises(n13.SearchError, match="trials=0, workers=2: expected at least 1"):
        search(quick, trials=0)


def test_a_study_is_kept_with_its_best_trial_again(quick):
    study = search(quick, trials=1, workers=1)
    with pytest.raises(n13.SearchError, match=r"no run of its best trial again: n13\.again first"):
        list(kept.events(study))


def test_new_images_are_drawn_only_for_a_set_of_ours(quick):
    study = search(quick, trials=1, workers=1)
    with pytest.raises(n13.SearchError, match="was not made by `dlojz data`"):
        n13.again("search.py", study)


def test_without_optuna_the_remedy_is_named(quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(n13.SearchError, match="pip install"):
        search(quick)


def test_a_terminal_shows_the_study(quick):
    (quick / "search.py").write_text(SOLVED)
    words = "search.py --study first --trials 4 --workers 1 --command quick.py"
    done = subprocess.run([sys.executable, *words.split()], capture_output=True, text=True)
    assert done.stdout.startswith("study first\ntrial  state"), done.stderr
    found = subprocess.run(["dlojz", "check", "13_search", "first"], capture_output=True, text=True)
    assert "13_search: not yet (study first)" in found.stdout, found.stderr
