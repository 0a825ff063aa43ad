"""The ladder: from the verdicts that passed, or from the recordings, and never from both."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest
from logs import write_log
from PIL import Image

mpl.use("Agg")
import made
import readme_figure
from matplotlib.colors import to_hex

from dlojz import check, course
from dlojz.check import exercise
from dlojz.course import progress
from dlojz.figures import ladder
from dlojz.runs import reached
from dlojz.runs.reached import Reached

REPOSITORY = Path(__file__).parent.parent
MINE = Reached(
    device_name="X1", model="resnet18", image_size=64, batch_size=32, data="synthetic data",
    torch="2.11.0", memory_of="device", runs=6, images_per_s=100.0, interval=[98.0, 102.0],
    peak_memory_bytes=2 * 10**9, energy_per_image_j=0.5,
)  # fmt: skip


@pytest.fixture
def folder(course_folder):
    """A course folder with the recordings."""
    (course_folder / "reference").symlink_to(REPOSITORY / "reference")
    return course_folder


def keep(step, found=None, passed=True):
    """Keep a verdict on a step as a check does, with what the steps reached."""
    kept = {of: r.written() for of, r in (found or {}).items()}
    progress.keep("verdicts", step, {"passed": passed, "job": "0001", "reached": kept})


def words(ax):
    return [text.get_text() for text in ax.texts]


def hatched(ax):
    """Return the rows of the bars that are hatched."""
    return [round(bar.get_y() + bar.get_height() / 2) for bar in ax.patches if bar.get_hatch()]


def below(axes):
    return axes[0].figure.get_supxlabel()


def test_what_a_step_reached_survives_being_kept(tmp_path):
    runs = [write_log(tmp_path / f"{i}.jsonl", device=True) for i in range(3)]
    found = reached.of(runs, runs, "-b 32")
    assert found.images_per_s == pytest.approx(320)
    assert found.interval == pytest.approx([320, 320])
    assert (found.data, found.runs, found.flags) == ("synthetic data", 3, "-b 32")
    assert Reached.read(found.written()) == found


def test_an_interval_of_equal_speeds_can_be_drawn():
    """By rounding, the mean may lie outside of it."""
    found = dataclasses.replace(MINE, images_per_s=100.0, interval=[100 + 1e-12, 100 + 2e-12])
    shown = ladder.Ladder("mine", {"01_gpu": found}, "not passed yet")
    assert "100" in words(ladder.plot_ladder(shown=shown)[0])


def test_a_speed_that_something_disturbed_has_a_star(tmp_path):
    window = {"first_step": 3, "steps": 7, "wall_s": 0.7}
    about = {"cpu_count": 2}
    runs = [
        write_log(tmp_path / f"{i}.jsonl", about=about, window=window | {"others_cpu": busy})
        for i, busy in enumerate((0.0, 0.9, 0.0))
    ]
    quiet = reached.of(runs[::2], runs[::2])
    found = {"01_gpu": quiet, "02_amp": reached.of(runs, runs)}
    axes = ladder.plot_ladder(shown=ladder.Ladder("mine", found, "not passed yet"))
    assert [words(axes[0]).count(text) for text in ("320", "320*")] == [1, 1]
    below = axes[0].figure._supxlabel.get_text()
    assert below.endswith("* Disturbed while it was timed: 02 amp (1 of 3 runs).")


def test_two_runs_have_no_interval(tmp_path):
    runs = [write_log(tmp_path / f"{i}.jsonl") for i in range(2)]
    assert reached.of(runs, runs).interval == []


def test_the_memory_is_that_of_the_job_and_not_of_the_runs_that_an_auditor_was_in(tmp_path):
    def log(name, peak):
        return write_log(tmp_path / name, memory={"process_peak_bytes": peak})

    found = reached.of([log("timed.jsonl", 9)], [log("job.jsonl", 7)])
    assert found.peak_memory_bytes == 7
    assert reached.of([log("timed.jsonl", 9)], []).peak_memory_bytes is None


@pytest.mark.parametrize(
    ("step", "steps"),
    [("01_gpu", ["00_start", "01_gpu"]), ("02_amp", ["02_amp"])],
)
def test_the_first_check_times_the_start_of_the_course_too(tmp_path, step, steps):
    runs = {name: tmp_path / name for name in ("solution", "before-1", "after-1", "after-2")}
    for path in runs.values():
        write_log(path / "events.jsonl")
        step_s = 0.2 if path.name == "before-1" else 0.1
        made.stopwatch(path, images=32, steps=10, step_s=step_s)
    job = SimpleNamespace(directory=runs["after-1"], info={"command": ["t.py", "--test"]})
    found = check._reached(exercise.find(step), job, made.ended(runs))
    assert list(found) == steps
    assert (found[step].runs, found[step].flags) == (2, "--test")
    if step == "01_gpu":
        assert found[step].images_per_s == pytest.approx(2 * found["00_start"].images_per_s)


def test_without_a_verdict_the_recorded_ladder_says_what_will_be_here(folder):
    axes = ladder.plot_ladder()
    assert "Yours will be drawn here" in axes[0].figure.get_suptitle()
    assert {"854", "2,226", "×2.61", "3,927", "3,948", "5,461"} <= set(words(axes[0]))
    assert {"23.1", "11.9"} <= set(words(axes[1]))
    assert {"0.198", "no sensor"} <= set(words(axes[2]))
    assert "needs two GPUs: see notebook 06" in words(axes[0])
    assert all(bar.get_width() > 0 for bar in axes[2].patches), "no sensor is not zero"
    axes[0].figure.canvas.draw()
    assert hatched(axes[0]) == [], "one session on one machine"
    text = " ".join(below(axes).split())
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0" in text
    assert "Hatched" not in text
    assert "09 compile: 6.39 times as fast as 01 gpu" in axes[0].figure.get_suptitle()


def test_the_recorded_ladder_ends_where_the_notebook_does(folder):
    axes = ladder.plot_ladder("02")
    assert "3,927" not in words(axes[0])
    assert words(axes[0]).count("later in the course") == 9
    axes = ladder.plot_ladder("00_start")
    assert (words(axes[0])[0], hatched(axes[0])) == ("17", [])


def test_yours_is_drawn_from_verdicts_alone_and_outlives_the_runs(folder):
    keep("01_gpu", {"01_gpu": MINE})
    keep("02_amp", {"02_amp": dataclasses.replace(MINE, images_per_s=150.0, interval=[])})
    keep("02_amp", {}, passed=False)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    axes = ladder.plot_ladder("02")
    assert axes[0].figure.get_suptitle().splitlines()[-1] == ladder.YOURS
    assert axes[0].figure.get_suptitle().startswith("02 amp: 1.5 times as fast as 01 gpu")
    assert words(axes[0])[:3] == ["100", "150", "×1.50"]
    assert [bar.get_width() for bar in axes[0].patches] == [100, 150], "and no recorded bar"
    assert "not passed yet" in words(axes[0])


def test_the_last_verdict_that_passed_counts(folder):
    keep("01_gpu", {"01_gpu": MINE})
    keep("01_gpu", {"01_gpu": dataclasses.replace(MINE, images_per_s=120.0)})
    assert ladder.yours().found["01_gpu"].images_per_s == 120


def test_one_step_alone_is_a_ladder_with_nothing_to_compare(folder):
    keep("01_gpu", {"01_gpu": MINE})
    axes = ladder.plot_ladder("01")
    assert not [text for ax in axes for text in words(ax) if text.startswith("×")]
    assert "×" not in below(axes)
    axes[0].figure.canvas.draw()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 64}, "batch 64"),
        ({"device_name": "X2"}, "on X2"),
        ({"processes": 2}, "2 processes"),
        ({"data": "images from files"}, "images from files"),
        ({"model": "resnet50"}, "resnet50"),
        ({"torch": "2.12.0"}, "torch 2.12.0"),
    ],
)
def test_a_step_of_another_setting_is_hatched_without_a_ratio(folder, change, said):
    other = dataclasses.replace(MINE, images_per_s=400.0, **change)
    keep("01_gpu", {"01_gpu": MINE})
    keep("02_amp", {"02_amp": dataclasses.replace(MINE, images_per_s=150.0)})
    keep("03_channels_last", {"03_channels_last": other})
    axes = ladder.plot_ladder()
    assert hatched(axes[0]) == [course.CHAIN.index("03_channels_last")]
    assert "×4.00" not in words(axes[0])
    assert f"03 channels last ({said})" in below(axes)


def test_a_ratio_is_explained_only_where_one_is_drawn(folder):
    keep("02_amp", {"02_amp": MINE})
    keep("06_ddp", {"06_ddp": dataclasses.replace(MINE, processes=2)})
    axes = ladder.plot_ladder()
    assert not [text for ax in axes for text in words(ax) if text.startswith("×")]
    assert "×" not in below(axes)
    assert "(1 process)" in below(axes)


def test_of_two_settings_the_later_is_the_one_to_go_on_with():
    start = dataclasses.replace(MINE, device_name="a processor", memory_of="process")
    assert ladder.base({"00_start": start, "01_gpu": MINE}) == "01_gpu"
    assert ladder.base({"00_start": start, "01_gpu": start, "02_amp": MINE}) == "00_start"


def test_a_verdict_without_figures_says_how_to_get_them(folder):
    keep("01_gpu")
    axes = ladder.plot_ladder()
    assert ladder.UNKEPT in words(axes[0])
    axes[0].figure.canvas.draw()


def test_a_solid_bar_has_the_colour_of_its_figure(folder):
    keep("01_gpu", {"01_gpu": MINE})
    found = [to_hex(ax.patches[0].get_facecolor()).upper() for ax in ladder.plot_ladder()]
    assert found == [colour for _, _, colour, _ in ladder.PANELS.values()]


def test_the_figure_of_the_readme_is_drawn_from_what_is_recorded_today():
    _, words = readme_figure.draw()
    with Image.open(readme_figure.PICTURE) as picture:
        assert picture.text["Description"] == words, "draw it: python tools/readme_figure.py"
    assert readme_figure.PICTURE.name in (REPOSITORY / "README.md").read_text()
