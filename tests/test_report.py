"""Tables and figures say what the summary says."""

import dataclasses

import matplotlib as mpl
import pytest

mpl.use("Agg")
from test_stats import write_log

from dlojz import course
from dlojz.figures import report
from dlojz.runs import log, recorded
from dlojz.runs.stats import summary


@pytest.fixture
def sweep(tmp_path):
    """Four batch sizes on a GPU, the last out of memory."""
    runs = [
        write_log(
            tmp_path / f"{b:03d}.jsonl",
            batch=b,
            device=True,
            steps=43,
            window={"first_step": 3, "steps": 40, "wall_s": 4.0, "energy_j": 57.25 * b},
            memory={"device_peak_bytes": 10**9 + b * 10**8, "device_total_bytes": 80 * 10**9},
        )
        for b in (8, 16, 32)
    ]
    end = {"outcome": "out_of_memory", "time": "2026-01-02T03:05:05", "error": "CUDA out of memory"}
    return [
        *runs,
        write_log(tmp_path / "064.jsonl", batch=64, steps=0, window=None, memory=None, end=end),
    ]


def test_the_inspection_tells_what_was_measured(sweep):
    text = repr(report.inspect_run(sweep[1]))
    assert "resnet18, 64 px, batch 16, synthetic data; X1 (cuda:0)" in text
    assert "160 images/s (160 by the device's clock)" in text
    assert "100.0 ms (median of 40; 80 % within 100.0 to 100.0; device clock)" in text
    assert "2.6 GB of 80 GB, of the device" in text
    assert "J per image, 229 W" in text
    assert "backward      60.0% ████████████████████████" in text


def test_an_accuracy_on_a_few_synthetic_batches_is_not_shown(sweep, tmp_path):
    s = summary(sweep[1])
    assert s.synthetic
    assert "accuracy" not in repr(report.inspect_run(s))
    assert "40.0% in validation" in repr(report.inspect_run(dataclasses.replace(s, data="data")))


def test_the_inspection_of_a_failure_says_why(sweep):
    text = repr(report.inspect_run(sweep[-1]))
    assert "OUT_OF_MEMORY (CUDA out of memory)" in text
    assert "images/s" not in text


def test_html_escapes_what_comes_from_a_run(sweep):
    hostile = dataclasses.replace(summary(sweep[0]), model="<script>", reason="<b>", name="<i>")
    html = report.Inspection(hostile)._repr_html_() + report.compare_runs([hostile])._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html


def test_no_sensor_is_said_and_not_zero(tmp_path):
    text = repr(report.inspect_run(write_log(tmp_path / "r.jsonl")))
    assert "energy       no sensor here" in text


def test_a_batch_sweep_draws_each_point_and_marks_what_did_not_fit(sweep):
    axes = report.plot_batch_sweep(sweep)
    assert len(axes) == 3, "energy is known"
    line = axes[0].lines[0]
    assert list(line.get_xdata()) == [8, 16, 32]
    assert list(line.get_ydata()) == pytest.approx([summary(r).images_per_s for r in sweep[:3]])
    assert [t.get_text().strip() for t in axes[1].texts].count("out of memory") == 1
    tops = {round(p.get_y() + p.get_height(), 3) for p in axes[1].patches}
    assert {1.8, 2.6, 4.2} <= tops
    assert {p.get_x() + p.get_width() / 2 for p in axes[1].patches} == {3, 4, 5}, "on their ticks"
    assert "1 GB" in axes[1].get_title(loc="left")
    for ax in axes:
        assert "(" in ax.get_ylabel(), "units"
        assert ax.get_ylim()[0] == 0


def test_a_second_sweep_can_be_drawn_beside_the_first(sweep):
    axes = report.plot_batch_sweep(sweep, label="yours")
    report.plot_batch_sweep(sweep[:2], axes=axes, label="recorded")
    labels = [t.get_text() for t in axes[0].get_legend().get_texts()]
    assert labels == ["yours", "recorded"]
    middles = {round(p.get_x() + p.get_width() / 2, 3) for p in axes[1].patches}
    assert middles == {2.8, 3.8, 4.8, 3.2, 4.2}, "side by side"


def test_a_sweep_without_energy_has_two_panels(tmp_path):
    assert len(report.plot_batch_sweep([write_log(tmp_path / "r.jsonl")])) == 2


def test_a_job_without_a_log_spoils_no_sweep(sweep, tmp_path):
    cancelled = dataclasses.replace(summary(sweep[0]), state="CANCELLED", batch_size=0)
    axes = report.plot_batch_sweep([*sweep, cancelled])
    assert axes[0].get_xlim()[0] > 1


def test_thousands_of_steps_are_drawn_in_seconds(tmp_path):
    import time

    begin = time.monotonic()
    report.plot_steps(write_log(tmp_path / "r.jsonl", steps=5000)).figure.canvas.draw()
    assert time.monotonic() - begin < 10


def test_a_recording_says_that_it_is_one():
    run = recorded("h100/01-resnet50-fp32-b0256")
    assert "recorded on NVIDIA H100" in report.hardware_text(summary(run))
    assert "recorded on" in report.plot_clocks(run).get_xlabel()


def test_an_empty_sweep_says_what_to_give():
    with pytest.raises(ValueError, match="no runs to draw"):
        report.plot_batch_sweep([])


def test_the_steps_are_stacked_by_phase(tmp_path):
    ax = report.plot_steps(write_log(tmp_path / "r.jsonl"))
    assert len(ax.patches) >= 50
    measured = [p for p in ax.patches if p.get_x() > 2.5]
    assert max(p.get_y() + p.get_height() for p in measured) == pytest.approx(100)


def test_the_accuracy_of_each_epoch_is_drawn(tmp_path):
    ax = report.plot_accuracy([write_log(tmp_path / "r.jsonl")])
    assert list(ax.lines[0].get_ydata()) == [0.4]


def test_diff_shows_the_difference_and_nothing_else(course_folder):
    text = course.diff(course.trainer(), "01")
    assert "+    device = idr_torch.device()" in text
    assert "-    device = torch.device(" in text
    assert repr(course.diff(course.trainer(), "00")) == "no difference"
    assert "rgba" in text._repr_html_()


def test_the_phases_of_runs_stand_side_by_side(sweep, tmp_path):
    ax = report.plot_phases(sweep)
    assert [t.get_text().split("\n")[0] for t in ax.get_yticklabels()] == ["008", "016", "032"]
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(100)
    assert "640" not in ax.texts[0].get_text()
    assert report.save_figure(sweep[:1], tmp_path / "one.png").stat().st_size > 10_000


def test_every_recording_can_be_read_and_names_no_machine():
    for path in sorted((course.course_root() / "reference").rglob("*.jsonl")):
        s = summary(path)
        assert s.state in ("COMPLETED", "OUT_OF_MEMORY")
        assert s.versions["torch"]
        assert s.date
        assert '"hostname": "recorded"' in path.read_text()


def test_a_label_with_dollars_is_shown_as_it_is(tmp_path):
    axes = report.plot_batch_sweep([write_log(tmp_path / "r.jsonl")], label=r"a$\frac{$")
    axes[0].figure.canvas.draw()  # where matplotlib would look for a formula
    bars = report.plot_phases([write_log(tmp_path / "r.jsonl")], labels=[r"a$\frac{$"])
    bars.figure.canvas.draw()


@pytest.mark.parametrize("figure", [report.plot_steps, report.plot_clocks])
def test_a_figure_reads_a_log_once(figure, tmp_path, monkeypatch):
    read, files = log._read, []

    def counting(path, *more):
        files.append(path)
        return read(path, *more)

    monkeypatch.setattr(log, "_read", counting)
    path = write_log(tmp_path / "r.jsonl")
    figure(path)
    assert files == [path]
