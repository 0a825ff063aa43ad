"""Every check is itself tested: starters fail, and each wrong answer gets its hint.

That solutions pass is seen in the solved notebooks: conftest.py.
"""

import os
from dataclasses import replace

import made
import pytest
import wrong

from dlojz import course
from dlojz.check import ending, judge, plan
from dlojz.check import exercise as exercises
from dlojz.launch import Request, series

FLAGS = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 --test-nsteps 6"
OWN = {
    "01_gpu": " -b 8",
    "02_amp": " -b 4 --precision bf16",
    "03_channels_last": " -b 16 --precision fp32",
    "04_profiler": " -b 8 --precision fp32 --profile --test-nsteps 8",
    "05_dataloader": f" -b 12 --precision fp32 --num-workers 1 --data {os.environ['DLOJZ_DATA']}",
    "06_ddp": " -b 8 --precision fp32",
    "07_augmentation": " -b 8 --precision fp32 --mix cutmix",
    "08_large_batch": " -b 8 --precision fp32 --optimizer lamb --warm-up 0.1 --schedule cosine",
    "09_compile": " -b 8 --precision fp32 --model squeezenet1_1 --compile aot_eager",
    "10_kernels": " -b 8 --precision fp32 --normalize triton --test-nsteps 4",
    "11_fsdp": " -b 8 --precision bf16 --model vit_tiny --sharding fsdp --checkpointing blocks",
}
# Which hints need an extra run: it is left out for a wrong answer with another one, to save
# minutes. `make verify` leaves nothing out.
NEED = {
    "01_gpu": {"rehearsal": {*exercises.read_hints("01_gpu"), "item", "later", "unmoved"}},
    "02_amp": {
        "fp16-clipped": {"scaler", "scaler-step", "scaler-update", "unscale", "format", "momentum"}
        | {"waits", "clip"},
        "tf32": {"enabled"},
    },
    "06_ddp": {"accumulates": {"accumulate", "deal", "mean", "schedule", "no-sync"}},
    "08_large_batch": {
        "finder": {"table", "weights-kept", "buffers-kept", "states-kept", "rates-kept", "tried"}
        | {"updates-kept", "geometric", "steps-between", "stop", "first-rise", "micro-batches"}
        | {"warm-up"},
    },
    "11_fsdp": {
        "two-batches": {"clip", "no-sync", "all-write", "accumulate", "goes-on", "shard"},
        "copies": {"not-asked"},
    },
}
pytestmark = pytest.mark.timeout(900)  # a fixture runs all answers of a step
EXPECTED = {  # of the trainer as it is before the step
    "01_gpu": "device",
    "02_amp": "flag",
    "03_channels_last": "flag",
    "04_profiler": "flag",
    "05_dataloader": "decode",
    "06_ddp": "share",
    "07_augmentation": "flag",
    "08_large_batch": "flag",
    "09_compile": "flag",
    "10_kernels": "flag",
    "11_fsdp": "flag",
}

CRASHED = ending.Ending(ending.How.FAILED, "crashed")

# The hints that only a replay gives: the other answers are judged without one, to save minutes.
REPLAYED = {
    *("pixels", "rate", "settings", "frozen", "criterion", "gradients", "update", "batch-norm"),
    *("evaluation", "later", "touched", "cached", "drawn", "built", "ratio"),
}
# Those that need the run of two epochs, besides.
TWO_EPOCHS = {
    "02_amp": {"scaler-always", "enabled", "tf32", "mean"},
    "03_channels_last": {"autotuner", "not-asked"},
    "04_profiler": {"always", "not-there"},
    "05_dataloader": {"validation"},
    "06_ddp": {"epoch", "one-writer", "gather", "train-mode", "names"},
    "07_augmentation": {"metrics", "randaugment"},
    "08_large_batch": {"by-epochs", "peak", "warm-up", "schedule", "scaled"} | {"two-schedulers"},
    "09_compile": {"backends", "not-asked", "mode"},
}


def entries(step, prefix, trainer, flags, expect):
    """What a check runs of one trainer."""
    mine = replace(made.entry("yours"), name=f"{prefix}yours", trainer=trainer, flags=flags)
    if expect in REPLAYED:
        mine = plan.placed(plan.replayed(mine, {"keep": 6}), {})
    _, epochs = two_epochs(step, trainer, flags)
    found = [mine, plan.placed(epochs, {})] if expect in REPLAYED else [mine]
    if expect in TWO_EPOCHS.get(step, ()):
        found.append(replace(epochs, replay=None))
    for extra in exercises.find(step).extras(False):
        if expect in NEED.get(step, {}).get(extra.name, ()):
            found.append(plan.short(extra, trainer))
    return [replace(e, name=f"{prefix}{e.name.removeprefix(prefix)}") for e in found]


def two_epochs(step, trainer, flags):
    """The runs of two epochs: the solution's, and this trainer's."""
    exercise = exercises.find(step)
    images = plan.few_images(exercise.processes)
    return plan.two_epochs(exercise, trainer, course.solution(step), flags, images)


def judged(step):
    """The answers of a step that are wrong on this machine, and not left to `make verify`."""
    return [answer for answer in wrong.judged_here(step) if not answer.needs_time]


@pytest.fixture(scope="module", params=exercises.STEPS)
def runs(request, tmp_path_factory):
    """(step, its job): solution, starter and all wrong answers of a step, run in one job."""
    step = request.param
    flags = (FLAGS + OWN[step]).split()
    solution = course.solution(step)
    wanted = [series.Entry("solution", solution, flags, audit=plan.LEDGER)]
    for name, more in exercises.find(step).beside.items():
        wanted.append(series.Entry(name, solution, [*flags, *more]))
    wanted.append(two_epochs(step, solution, flags)[0])
    wanted += entries(step, "starter--", course.before(step), flags, EXPECTED[step])
    for extra in exercises.find(step).extras(False):
        wanted.append(plan.short(extra, solution, of_solution=True))
    for answer in judged(step):
        trainer = wrong.put(answer, tmp_path_factory.mktemp(answer.name))
        wanted += entries(step, f"{answer.name}--", trainer, flags, answer.expect)
    n = exercises.find(step).processes
    job = series.submit(wanted, Request(name=f"wrong-{step}", time_max_s=3600, n_gpu=n))
    job.wait()
    return step, job


def verdict(runs, who):
    step, job = runs
    folders = {}
    for name, folder in series.folders(job).items():
        prefix, _, own = name.rpartition("--")
        if prefix in ("", who):
            folders[own] = folder
    exercise = exercises.find(step)
    return judge.judge(exercise, made.ended(folders), plan.standards(exercise))


def test_the_starter_fails(runs):
    found = verdict(runs, "starter")
    assert not found.passed
    assert found.hint_key == EXPECTED[runs[0]], found


def test_each_wrong_answer_fails_with_its_own_hint(runs):
    answers = judged(runs[0])
    assert len(answers) >= 5
    missed = {}
    for answer in answers:
        found = verdict(runs, answer.name)
        if found.passed or found.hint_key != answer.expect:
            missed[answer.name] = f"expected {answer.expect}, got {found.hint_key}\n{found}"
    assert not missed, "\n\n".join(f"{name}: {text}" for name, text in missed.items())


def test_a_job_that_crashes_gets_the_same_hint_with_nothing_beside_it(runs):
    folders, exercise = series.folders(runs[1]), exercises.find(runs[0])
    for answer in judged(runs[0]):
        own = folders[f"{answer.name}--yours"]
        if (own / "exit_code").read_text().strip() != "0":
            assert judge.crashed(exercise, own, CRASHED).hint_key == answer.expect, answer.name


def test_a_wrong_answer_names_a_hint_of_its_exercise(subtests):
    for answer in (*wrong.every(), *wrong.museum()):
        with subtests.test(f"{answer.step}-{answer.name}"):
            assert answer.expect in exercises.find(answer.step).hints
            assert wrong.sources(answer) != wrong.solved(answer.step)
