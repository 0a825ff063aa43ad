"""Several processes beside one: speeds, the link, variants of DDP, losses, statistics."""

import json
import re

import made
import matplotlib.pyplot as plt
import pytest
import steps
from logs import experiment, measure, write_log
from programs import experiment_file

from dlojz import course, launch
from dlojz import runs as recorded
from dlojz.chapters.n06_ddp import figures
from dlojz.course import UserError
from dlojz.runs.columns import PHASES
from dlojz.runs.folder import events_file


def ranks(folder, size, **changes):
    """The logs of a run of `size` processes, each of 320 images/s."""
    for rank in range(size):
        write_log(events_file(folder, rank), rank=rank, size=size, **changes)
    return folder


def edit(path, **values):
    """Change fields of all events of a log that have them, given by position."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name, column in values.items():
        for line, value in zip([e for e in lines if name in e], column, strict=True):
            line[name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# Speed -------------------------------------------------------------------------------------------


def test_speed_is_that_of_all_processes_and_a_failed_run_has_none(tmp_path):
    runs = [
        ranks(tmp_path / "one", 1),
        ranks(tmp_path / "two", 2, ms=dict.fromkeys(PHASES, 25)),  # 125 ms, not 100
        ranks(tmp_path / "failed", 1, steps=0, window=None),
    ]
    assert figures.speeds(runs) == {1: [pytest.approx(320)], 2: [pytest.approx(512)]}
    assert figures.efficiency(runs).rows == [
        ("1", "320", "320 to 320", "1", "100.0%"),
        ("2", "512", "512 to 512", "1", "80.0%"),
    ]
    ax = figures.plot_scaling(runs[:2])
    assert [t.get_text() for t in ax.texts] == ["320 images/s", "512 images/s"]
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0, 20]), "what is missing"
    assert ax.figure.get_suptitle() == "2 processes reach 80.0 % of linear scaling"


def test_without_one_process_there_is_nothing_to_compare_with(tmp_path):
    assert figures.efficiency([ranks(tmp_path / "two", 2)]).rows[0][-1] == "-"


# The link ----------------------------------------------------------------------------------------


@pytest.fixture
def all_reduce(tmp_path):
    """Four processes: 0.5 ms, and 2 GB/s of what each sends, which is 1.5 times the tensor."""
    sizes = [2**e for e in range(10, 28)]
    events = [
        measure("all_reduce", 0.5 + 1000 * 1.5 * s / 2e9, x=s) for s in sizes for _ in range(3)
    ]
    path = experiment(tmp_path / "r.jsonl", *events)
    edit(path, size=[4])
    return path


def test_the_model_of_the_link_finds_latency_and_bandwidth(all_reduce):
    link = figures.link(all_reduce)
    assert link.processes == 4
    assert link.latency_s == pytest.approx(0.5e-3)
    assert link.bandwidth == pytest.approx(2e9)
    assert link.sent(100) == 150
    assert link.milliseconds(1e9) == pytest.approx(750.5)
    assert str(link) == "4 processes: 0.5 ms + bytes sent / 2 GB/s"


def test_the_link_is_drawn_through_its_points(all_reduce):
    points, line = figures.plot_link([all_reduce]).lines
    assert list(points.get_ydata()) == pytest.approx(list(line.get_ydata()))


# Variants ----------------------------------------------------------------------------------------


def variant(name, step_ms, *sizes):
    collectives = [{"op": "all_reduce", "bytes": size} for size in sizes]
    return {"event": "case", "case": name, "step_ms": step_ms, "collectives": collectives}


def test_a_variant_is_what_it_adds_to_the_same_round_of_the_first(tmp_path):
    path = experiment(
        tmp_path / "r.jsonl",
        variant("alone", [100.0, 200.0, 100.0]),
        variant("DDP", [110.0, 210.0, 112.0], 25_000_000, 75_000_000),
        variant("other", [101.0, 201.0, 101.0]),
        **made.RESNET,
    )
    ax = figures.plot_variants(path, only=["DDP"])
    assert [bar.get_width() for bar in ax.patches] == [10.0]
    assert [t.get_text().split() for t in ax.texts] == [["+10.0%", "2", "calls,", "100", "MB"]]
    assert len(figures.plot_variants(path).patches) == 2
    against = figures.plot_variants(path, to="DDP").patches
    assert [bar.get_width() for bar in against] == [-10.0, -9.0]
    with pytest.raises(ValueError, match="no variant 'SyncBatchNorm' in it, only alone, DDP"):
        figures.plot_variants(path, only=["SyncBatchNorm"])
    assert figures.calls(path, ["DDP", "other"]).rows == [
        ("DDP", "all_reduce", "2", "100 MB", "75 MB")
    ]


# The same training -------------------------------------------------------------------------------


def test_the_batches_of_an_update_are_compared_whoever_computed_them(tmp_path):
    two, one = ranks(tmp_path / "two", 2, steps=3), ranks(tmp_path / "one", 1, steps=7)
    edit(events_file(two, 0), loss=[1.0, 3.0, 5.0])
    edit(events_file(two, 1), loss=[2.0, 4.0, 6.0])
    edit(events_file(one), loss=[1.0, 2.0, 3.0, 4.0, 5.0, 6.6, 9.0])
    arguments = {"model": "resnet18", "batch_size": 32, "image_size": 64, "accumulate": 2}
    edit(events_file(one), arguments=[arguments])
    assert figures.updates(two).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert figures.updates(one).tolist() == [[1, 2], [3, 4], [5, 6.6]], "the last ends no update"
    _, away = figures.plot_losses([two, one], ["two", "one"])
    assert list(away.lines[0].get_ydata()) == pytest.approx([1e-9, 1e-9, 0.1]), "the batch, 6.6"
    whole = ranks(tmp_path / "whole", 1, steps=3)
    edit(events_file(whole), loss=[1.5, 3.5, 11.0])
    _, away = figures.plot_losses([two, whole], ["two", "whole"])
    assert list(away.lines[0].get_ydata()) == pytest.approx([1e-9, 1e-9, 1.0]), "means"


def test_a_run_without_losses_is_named_before_anything_is_drawn(tmp_path):
    two, lost = ranks(tmp_path / "two", 2, steps=3), ranks(tmp_path / "lost", 1, steps=0)
    with pytest.raises(UserError, match=r"second: no update to draw; job\.explain"):
        figures.plot_losses([two, lost], ["first", "second"])
    with pytest.raises(UserError, match=r"second: no losses to draw: .*no log to read"):
        figures.plot_losses([two, tmp_path / "nowhere"], ["first", "second"])
    assert plt.get_fignums() == [], "half a figure"


def test_the_losses_of_a_run_that_was_ended_are_those_that_all_have(tmp_path):
    two = ranks(tmp_path / "two", 2, steps=3)
    write_log(events_file(two, 1), rank=1, size=2, steps=2)
    assert figures.updates(two).shape == (2, 2)


# Statistics, unused parameters -------------------------------------------------------------------


def seen(name, **fields):
    return {"event": "case", "case": name, **fields}


def test_statistics_are_compared_by_their_largest_distance(tmp_path):
    path = experiment(
        tmp_path / "events.jsonl",
        seen("running means", channels=[0.1, 0.2]),
        seen("mean", yours=[1.0, 2.2], one_process=[1.0, 2.0]),
        seen("variance", yours=[1.0, 2.0], one_process=[1.0, 2.00001]),
    )
    assert figures.statistics(path.parent).rows == [
        ("0", "mean", "0.1", "not the same"),
        ("0", "variance", "5e-06", "the same"),
    ]
    edit(path, yours=[[1.0, float("nan")], [1.0, 2.0]])
    assert figures.statistics(path.parent).rows[0] == ("0", "mean", "nan", "not the same")
    (points, _) = figures.plot_running_means(path.parent).lines
    assert list(points.get_ydata()) == [0.1, 0.2]


def test_a_search_is_its_time_or_what_ddp_said(tmp_path):
    path = experiment(
        tmp_path / "r.jsonl",
        seen("two heads, without", error="Expected to have finished. You can enable"),
        seen("two heads, with", step_ms=[1.0, 2.0, 9.0]),
    )
    assert figures.searches(path).rows == [
        ("two heads, without", "error", "Expected to have finished"),
        ("two heads, with", "2.00 ms", ""),
    ]


MEAN_OF_MEANS = """
    mean = x.mean((0, 2, 3))
    variance = x.var((0, 2, 3), unbiased=False)
    sums = torch.cat([mean, variance + mean**2])
    torch.distributed.all_reduce(sums)
    sums /= idr_torch.size
    mean = sums[: len(mean)]
    variance = sums[len(mean) :] - mean**2
"""


def test_the_statistics_of_the_solution_are_those_of_one_process_and_others_are_not(tmp_path):
    starter = experiment_file("batchnorm.py")
    solution = course.course_root() / "solutions" / "batchnorm.py"
    paragraph = re.search(r"    # 06f: .*?\n(.*?)\n    return", solution.read_text(), re.S)[1]
    wrong, coarse = tmp_path / "wrong.py", tmp_path / "coarse.py"
    wrong.write_text(solution.read_text().replace(paragraph, MEAN_OF_MEANS))
    coarse.write_text(solution.read_text().replace(".double()", ".float()"))
    trainers = {"solution": solution, "starter": starter, "wrong": wrong, "coarse": coarse}
    flags = "--model shufflenet_v2_x0_5 --steps 1".split()
    folders = made.in_one_job({name: (file, flags) for name, file in trainers.items()}, n_gpu=2)
    words = {name: {row[-1] for row in figures.statistics(folders[name]).rows} for name in trainers}
    other = {"not the same"}
    assert words == {
        "solution": {"the same"},
        "starter": other,
        "wrong": other,
        "coarse": {"the same"} | other,  # in float32 only the variance is lost
    }


def test_the_statistics_are_written_in_a_copy_that_is_never_overwritten(course_folder):
    with pytest.raises(launch.SubmitError, match=r'course\.own\("06_batchnorm"\) makes your copy'):
        launch.submit("batchnorm.py")
    copy = course_folder / course.own("06_batchnorm")
    assert copy.read_text() == course.prepared("06_batchnorm").read_text()
    copy.write_text("mine")
    assert course.own("06_batchnorm") == "batchnorm.py"
    assert copy.read_text() == "mine"


def test_the_solution_of_the_statistics_differs_only_in_its_paragraph():
    starter = experiment_file("batchnorm.py")
    solution = course.course_root() / "solutions" / "batchnorm.py"
    assert steps.problems(starter.read_text(), solution.read_text(), "06") == []


def test_an_experiment_that_did_not_end_says_so(tmp_path):
    path = experiment(tmp_path / "r.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"has not ended: wait for it, with job\.wait"):
        figures.link(path)


def test_variants_that_were_compiled_are_said_to_be():
    eager, compiled = (
        figures.plot_variants(recorded.recorded(f"h200/{step}-ddp-x2")).figure.get_supxlabel()
        for step in ("06", "09")
    )
    assert "compiled" in compiled
    assert "compiled" not in eager
