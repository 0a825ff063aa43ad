"""The museum of mistakes that suit any step: all are refused. Right answers all pass."""

from dataclasses import replace

import made
import pytest
import wrong

from dlojz import course
from dlojz.check import exercise as exercises
from dlojz.check import judge, plan
from dlojz.launch import Request, series

SMALL = "--test --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 12"
FLAGS = {
    "01_gpu": f"{SMALL} --data synthetic",
    "02_amp": f"{SMALL} --data synthetic --precision tf32",  # on a processor this is float32
    "03_channels_last": f"{SMALL} --data synthetic --precision fp32",
    # The images of the tests make 9 batches.
    "05_dataloader": f"{SMALL} --data {course.data_folder()} --num-workers 1 --precision fp32 "
    "--test-nsteps 8",
    "06_ddp": f"{SMALL} --data synthetic --precision fp32",
}
pytestmark = pytest.mark.timeout(900)  # a fixture runs all tricks of a step


def entries(step, answers, folder_of):
    """A check's runs of these answers, without pairs: of each kind of flags the solution once."""
    found = {}
    for answer in answers:
        flags = [*FLAGS[step].split(), *answer.flags.split()]
        own = f"{answer.flags.replace(' ', '')}--" if answer.flags else ""
        usual = f"{own}solution"
        if usual not in found:
            solution = course.solution(step)
            found[usual] = series.Entry(usual, solution, flags, audit=plan.LEDGER)
            for name, more in exercises.find(step).beside.items():
                found[f"{own}{name}"] = series.Entry(f"{own}{name}", solution, [*flags, *more])
        trainer = wrong.put(answer, folder_of(answer.name))
        mine = series.Entry(f"{answer.name}--yours", trainer, flags, reference=usual)
        mine = plan.replayed(mine, {"keep": plan.UPDATES} | plan.MIDDLE)
        exercise = exercises.find(step)
        images = plan.few_images(exercise.processes)
        pair = plan.two_epochs(exercise, trainer, course.solution(step), flags, images)
        both = replace(pair[0], name=f"{own}{pair[0].name}")
        epochs = replace(pair[1], name=f"{answer.name}--{pair[1].name}", reference=both.name)
        found.setdefault(both.name, both)
        found |= {e.name: plan.placed(e, {}) for e in (mine, epochs)}
    return list(found.values())


ANSWERS = [a for a in (*wrong.museum(), *wrong.right()) if not (a.needs_gpu or a.needs_time)]


@pytest.fixture(scope="module", params=FLAGS)
def runs(request, tmp_path_factory):
    """(step, its answers, the folder of each run): all tricks of a step, in one job."""
    step = request.param
    answers = [answer for answer in ANSWERS if answer.step == step]
    wanted = entries(step, answers, tmp_path_factory.mktemp)
    n = exercises.find(step).processes
    job = series.submit(wanted, Request(name=f"museum-{step}", time_max_s=3600, n_gpu=n))
    job.wait()
    return step, answers, series.folders(job)


def verdict(runs, answer):
    step, _, folders = runs
    own = f"{answer.flags.replace(' ', '')}--" if answer.flags else ""
    found = {"solution": folders[f"{own}solution"]}
    found["two-epochs-solution"] = folders[f"{own}two-epochs-solution"]
    for name in ("yours", "two-epochs"):
        found[name] = folders[f"{answer.name}--{name}"]
    for name in exercises.find(step).beside:
        found[name] = folders[f"{own}{name}"]
    exercise = exercises.find(step)
    return judge.judge(exercise, made.ended(found), plan.standards(exercise))


def test_every_trick_is_refused_by_the_evidence_that_its_label_names(runs):
    missed = {}
    for answer in (a for a in runs[1] if a.path.parent.name != wrong.RIGHT):
        found = verdict(runs, answer)
        failing = [f.what for f in found.failing]
        if answer.caught_by not in failing or found.hint_key != answer.expect:
            missed[answer.name] = f"expected {answer.expect}, got {found.hint_key}\n{found}"
    assert not missed, "\n\n".join(f"{name}: {text}" for name, text in missed.items())


def test_every_right_answer_of_another_make_passes(runs):
    wrongly = {}
    for answer in (a for a in runs[1] if a.path.parent.name == wrong.RIGHT):
        found = verdict(runs, answer)
        if not found.passed:
            wrongly[answer.name] = str(found)
    assert not wrongly, "\n\n".join(f"{name}: {text}" for name, text in wrongly.items())


def test_the_page_shows_the_museum_as_it_is():
    assert wrong.PAGE.read_text() == wrong.page(), "run `python tools/wrong.py museum`"


def test_the_museum_is_large_and_every_trick_has_its_evidence():
    tricks = wrong.museum()
    assert len(tricks) >= 40
    assert all(trick.caught_by and trick.why for trick in tricks)
