"""The slides' snippets, as they stand there."""

import pytest


@pytest.fixture
def slides(course_folder, monkeypatch):
    from dlojz.idr_pytools import display_slurm_queue, gpu_jobs_submitter, search_log

    (course_folder / "notebooks").mkdir()
    monkeypatch.chdir(course_folder / "notebooks")
    (course_folder / "dlojz" / "dlojz.py").write_text("import sys; print(sys.argv[1:])")
    return {
        "gpu_jobs_submitter": gpu_jobs_submitter,
        "display_slurm_queue": display_slurm_queue,
        "search_log": search_log,
    }


SNIPPETS = """
MODULE = 'pytorch-gpu/py3/2.1.1'
n_gpu = 1
name = 'dlojz'
command = 'dlojz.py --batch-size 128 --image_size 176'
jobid = gpu_jobs_submitter(command, n_gpu, MODULE, name=name,
                           account="xyz@a100", time_max='05:00:00')
display_slurm_queue(name)
out = search_log(contains=jobid)[0]
err = search_log(contains=jobid, with_err=True)[0]
"""


def test_the_slides_snippets_run(slides, capsys):
    from dlojz import launch

    here = dict(slides)
    exec(SNIPPETS, here)
    [launch.find(i).wait(30) for i in here["jobid"]]
    assert here["out"].read_text() == "['--batch-size', '128', '--image-size', '176']\n"
    assert here["err"].is_file()
    assert launch.find(here["jobid"][0]).info["module"] == "pytorch-gpu/py3/2.1.1"
    assert "dlojz.py --batch-size 128 --image-size 176" in capsys.readouterr().out


def test_several_commands_are_several_jobs(slides):
    ids = slides["gpu_jobs_submitter"](["dlojz.py -b 1", "dlojz.py -b 2"], 1, None, name="two")
    assert len(ids) == 2
    from dlojz import launch

    [launch.find(i).wait(30) for i in ids]
    assert len(slides["search_log"](name="two")) == 2
    assert slides["search_log"](contains="9999") == []
