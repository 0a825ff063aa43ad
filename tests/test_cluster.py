"""Figures of notebook 00c, its recordings, and the recipes of the containers."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import record_slurm

from conftest import REPOSITORY
from dlojz.chapters.n00c_cluster import figures, seen
from dlojz.launch import sites
from dlojz.launch.asking import WAITS

SCRIPT = (REPOSITORY / "slurm" / "job.sbatch").read_text()


@pytest.mark.parametrize("name", record_slurm.PARTS)
def test_a_recording_names_its_slurm_and_the_command_that_makes_it_again(name):
    found = figures.recorded(name)
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["slurm"])
    assert found["command"] == f"tools/record_slurm.py reference/slurm --only {name}"
    assert found[name]


def test_every_recorded_line_is_in_the_script_and_makes_a_difference():
    lines = figures.recorded("lines")["lines"]
    assert set(lines) - {"processes"} == set(record_slurm.LINES) == set(figures.LINES)
    for name, text in figures.LINES.items():
        written = figures.WHERE.get(name, name).removeprefix("srun --").split(" ... ")
        for word in written:
            assert word in SCRIPT, word
        assert text(lines[name]["with"]) != text(lines[name]["without"]), name


def test_the_changes_of_each_experiment_still_fit_the_script():
    """The script is edited; an experiment that no longer changes it would show no difference."""
    for old, _ in (*record_slurm.FOREGROUND, record_slurm.COUNTS, (record_slurm.SRUN, "")):
        assert SCRIPT.count(old) == 1, old


def test_a_table_of_lines_has_a_row_for_each():
    table = figures.lines()
    assert len(table) == len(figures.LINES)
    row = next(row for row in table.rows if row[0] == "--ntasks-per-node")
    assert row[1:] == ("tasks on the nodes: 2 and 2", "tasks on the nodes: 3 and 1")


def test_every_waiting_job_has_another_reason_and_each_is_explained():
    found = figures.waiting()
    reasons = [reason for _, reason in found]
    assert len(set(reasons)) == len(reasons) == 12
    assert set(reasons) == set(figures.REASONS) <= set(WAITS), "and `dlojz queue` has words for it"
    for name, _ in found:
        assert re.search(rf"^ +\d+ +{name} ", figures.squeue(), re.M)


def test_the_recorded_queue_answers_what_the_notebook_asks():
    priority = dict(re.findall(r"^ +(\d+) +\w+ +(\d+)", figures.sprio(), re.M))
    number = {
        name: re.search(r"JobId=(\d+)", figures.job(name))[1] for name, _ in figures.waiting()
    }
    wide, following, second = (int(priority[number[n]]) for n in ("wide", "next", "second"))
    assert wide > second > following
    assert 0.2 < following / wide < 0.3, "about a quarter"
    assert re.search(r"physics +root .* 0.200000", figures.sshare())
    with pytest.raises(LookupError, match="no job 'x' was recorded: expected one of needs"):
        figures.job("x")


def test_masks_say_what_the_notebook_says_of_them():
    found = {name: mask["cpus"] for name, mask in figures.recorded("masks")["masks"].items()}
    near = found["as in job.sbatch"]
    assert [len(cpus) for cpus in near] == [2, 2]
    assert [cpu // 4 for cpus in near for cpu in cpus] == [0, 0, 1, 1], "on the socket of its GPU"
    shared = found["without srun --cpus-per-task"]
    assert shared[0] == shared[1]
    assert len(shared[0]) == 4
    assert [len(cpus) for cpus in found["without --cpus-per-task"]] == [1, 1]
    assert {cpu // 4 for cpus in found["block by block"] for cpu in cpus} == {0}
    cores = {name: [len({c // 2 for c in cpus}) for cpus in found[name]] for name in found}
    assert (cores["nomultithread"], cores["without --hint"]) == ([2, 2], [1, 1])


def test_a_job_that_asks_for_less_waits_less():
    waits = figures.recorded("time")["time"]
    assert waits["1"] < 10 < 30 < waits["60"]


def test_figures_are_drawn_from_the_recordings():
    assert len(figures.plot_masks()) == len(figures.recorded("masks")["masks"])
    assert [bar.get_width() for bar in figures.plot_waits().patches] == [
        *figures.recorded("time")["time"].values()
    ]
    places = [p for site in figures.all_sites() for p in site.storage.values() if p.files]
    assert len(figures.plot_files().patches) == len(places)


def test_a_site_shows_what_is_in_its_file_and_a_question_mark_for_the_rest():
    snellius = sites.read(REPOSITORY / "slurm/sites/snellius.toml")
    a100, h100 = figures.nodes(snellius).rows
    assert a100 == ("snellius", "a100", "4", "18", "120 GB", "?", "120:00:00", "128 SBU")
    assert h100[-1] == "?"
    scratch = next(row for row in figures.storage(snellius).rows if row[0] == "scratch")
    assert scratch[-2:] == ("3,000,000", "after 14 days")
    generic = sites.read(REPOSITORY / "slurm/sites/generic.toml")
    assert "names no storage: add [storage.*]" in repr(figures.storage(generic))


def test_the_recorded_tasks_show_the_faults_of_the_script_as_handed_out():
    table = figures.tasks()
    rows = table.rows
    assert table.head[0] == "task (recorded)"
    assert sorted(row[1] for row in rows) == ["node1"] * 3 + ["node2"]
    assert {row[2] for row in rows} == {"1"}
    assert {row[4] for row in rows} == {"none"}
    assert {row[-1] for row in rows} == {"no"}


def test_the_cost_is_that_of_the_recorded_speed():
    from dlojz import runs
    from dlojz.runs.stats import summary

    run = summary(runs.recorded("h200/01-resnet50-fp32-b0256"))
    [row] = figures.cost([runs.recorded("h200/01-resnet50-fp32-b0256")], 3600, epochs=10).rows
    assert row[2] == f"{10 / run.images_per_s:.1f}"


def test_the_answer_of_notebook_00c_is_that_of_its_table():
    from dlojz import runs
    from dlojz.widgets.answer import ANSWERS

    names = ("01-resnet50-fp32-b0256", "03-resnet50-bf16-nhwc-b0256")
    rows = figures.cost([runs.recorded(f"h200/{name}") for name in names], 1_281_167).rows
    slow, fast = (float(row[2]) for row in rows)
    said = ANSWERS["00c from the figures"]
    assert f"{1.2 * slow:.0f} h for fp32" in said
    assert f"{1.2 * fast:.1f}" == "8.3"
    assert "8 h 20 min for bf16" in said
    assert f"{slow - fast:.0f} GPU hours less" in said


# Containers --------------------------------------------------------------------------------------

RECIPES = {name: (REPOSITORY / name).read_text() for name in ("Dockerfile", "slurm/apptainer.def")}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_python_that_the_course_supports(name):
    found = re.search(r"(?:FROM|From:) python:(3\.\d+)-slim-bookworm", RECIPES[name])
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert tuple(map(int, found[1].split("."))) >= tuple(
        map(int, wanted["requires-python"].removeprefix(">=").split("."))
    )


@pytest.mark.parametrize("name", RECIPES)
def test_debian_has_the_packages_that_a_recipe_installs(name):
    [packages] = re.findall(
        r"apt-get install -y --no-install-recommends (.+?)(?: \\)?$", RECIPES[name], re.M
    )
    if not shutil.which("apt-cache"):
        pytest.skip("not a Debian")
    for package in packages.split():
        shown = subprocess.run(["apt-cache", "show", package], capture_output=True, text=True)
        assert f"Package: {package}" in shown.stdout, package


def test_the_builder_of_the_image_gets_what_it_copies_and_no_more():
    """All else of a clone, such as images and runs, may be gigabytes."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    found = re.findall(r"^COPY (.+) \S+$", RECIPES["Dockerfile"], re.M)
    copied = {word for line in found for word in line.split()}
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_that_a_recipe_copies_are_all_that_the_package_needs(name, tmp_path):
    """They are made into a wheel, as pip and uv would, and it holds the whole package."""
    if name == "Dockerfile":
        copied = [
            w for line in re.findall(r"^COPY (.+) \S+$", RECIPES[name], re.M) for w in line.split()
        ]
    else:
        copied = re.findall(r"^    (\S+) /opt/dlojz/\S+$", RECIPES[name], re.M)
    for file in copied:
        source = REPOSITORY / file
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / file)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "-w", tmp_path / "out", tmp_path], check=True, capture_output=True)
    [wheel] = (tmp_path / "out").glob("dlojz-*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], check=True, capture_output=True, text=True
    ).stdout
    for file in (
        "dlojz/cli/jobs.py",
        "dlojz/chapters/n00c_cluster/hints.toml",
        "dlojz/chapters/n00c_cluster/seen.py",
    ):
        assert file in listed
    assert "-c /opt/dlojz/constraints.txt" in RECIPES[name]
    assert {"constraints.txt", "dlojz"} <= set(copied)


def test_seen_is_importable_without_torch():
    code = "import sys, dlojz.chapters.n00c_cluster.seen; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert seen.PATIENCE_S < 10
