"""The search of notebook 13: its workers, its journal, and the verdict on a study."""

import pytest
import steps
from programs import REPOSITORY, experiment_file

from dlojz import course, launch
from dlojz.chapters.n13_search import study as studies
from dlojz.check import check

BROKEN = experiment_file("search.py").read_text()
SOLVED = (REPOSITORY / "solutions/search.py").read_text()


def test_only_the_paragraphs_of_the_trainee_are_prepared():
    assert steps.problems(BROKEN, SOLVED, "13") == []
    assert BROKEN.count("# TODO 13") == BROKEN.count("raise NotImplementedError") == 2
    assert "TODO" not in SOLVED


def test_a_study_of_six_trials_with_two_workers_passes(course_folder):
    study = studies.search("solutions/search.py", "first", trials=6, workers=2)
    print(study)
    jobs = studies.again("solutions/search.py", study)
    found = check("13_search", study)
    print(found)
    assert found.passed
