"""Tables and figures say what the summary says."""

import contextlib
import dataclasses
import json
import re
from html import escape

import matplotlib as mpl
import numpy as np
import pytest
from logs import write_log
from programs import experiment_file

mpl.use("Agg")

from dlojz import course, launch
from dlojz.chapters import n01_gpu as n01
from dlojz.chapters import n04b_roofline as n04b
from dlojz.chapters.n06_ddp import figures
from dlojz.chapters.n11_fsdp import figures as sharding
from dlojz.course import UserError
from dlojz.figures import batch_sweep, report, timeline
from dlojz.figures.look import style
from dlojz.runs import log, recorded
from dlojz.runs.stats import summary
from dlojz.table import BAD_INK, GOOD_INK, QUIET_INK, Table


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


def test_a_loss_that_is_not_finite_is_named_wherever_the_speed_is_shown(tmp_path):
    file = write_log(tmp_path / "a.jsonl", losses=[2.0] + 9 * [float("nan")])
    found = report.inspect_run(file)
    told = "nan from step 2 of 10 on"
    assert f"  loss         {told}: such a run does not train. Try a smaller --lr" in repr(found)
    assert told in found._repr_html_()
    assert told in repr(report.compare_runs([file]))
    other = write_log(tmp_path / "b.jsonl")
    ax = report.plot_phases([other, file])
    assert [text.get_text().endswith("loss not finite") for text in ax.texts] == [False, True]
    assert f"loss not finite (a): {told}" in setting(ax)
    assert "loss" not in report.compare_runs([other]).head


@pytest.mark.parametrize(
    ("made", "scale", "losses", "told"),
    [
        (7, 8192.0, None, "skipped 3 of 10 updates for gradients that were not finite, as is"),
        (10, 65536.0, None, "skipped 0 of 10 updates; scale 65,536 at the end"),
        (1, 5.7e-14, [float("nan")] * 10, "gradients that were not finite; scale 5.7e-14 at"),
    ],
)
def test_a_scaler_that_skips_at_first_is_told_from_one_that_never_stops(
    made, scale, losses, told, tmp_path
):
    seen = {"when": "whole", "optimizer_steps": made, "scale": scale}
    text = repr(report.inspect_run(write_log(tmp_path / "a.jsonl", losses=losses, evidence=seen)))
    assert told in text
    assert ("or --precision bf16" in text) == bool(losses)


def test_a_learning_rate_that_is_far_too_large_is_seen_in_the_report(train, tmp_path):
    flags = "--test --test-nsteps 4 --data synthetic --model shufflenet_v2_x0_5 --image-size 32"
    train(course.trainer(), tmp_path, *flags.split(), "-b", 2, "--num-workers", 0, "--lr", "1e30")
    assert "  loss         nan from step 2 of 4 on: " in repr(report.inspect_run(tmp_path))


def test_a_validation_whose_loss_alone_is_not_finite_says_so():
    text = repr(report.inspect_run(recorded("h200/03-resnet152-fp16-nhwc-b0256")))
    assert ", and its loss is nan" in text
    assert "  loss " not in text


def test_the_inspection_of_a_failure_says_why(sweep):
    text = repr(report.inspect_run(sweep[-1]))
    assert "OUT_OF_MEMORY (CUDA out of memory)" in text
    assert "images/s" not in text


def test_gains_compare_runs_that_differ_in_one_flag(tmp_path):
    def run(precision, last, batch, images_per_s, losses=None):
        return write_log(
            tmp_path / f"{precision}-{last}-{batch}.jsonl",
            batch=batch,
            losses=losses,
            arguments={"precision": precision, "channels_last": last},
            window={"first_step": 3, "steps": 17, "wall_s": 17 * batch / images_per_s},
        )

    runs = [
        run("fp16", False, 8, 300),
        run("bf16", False, 8, 200),
        run("fp16", True, 8, 450),
        run("bf16", False, 16, 400),
        run("fp16", False, 16, 900, losses=[float("nan")] * 10),  # such a pair is no gain
    ]
    table = report.gains(runs, "precision", "fp16", than="bf16")
    assert (table.head, table.rows) == (
        ("model", "layout", "batch 8"),
        [("resnet18", "NCHW", "1.50")],
    )
    table = report.gains([*runs, run("bf16", True, 16, 200)], "channels_last", True, than=False)
    assert table.head == ("model", "precision", "batch 8", "batch 16")
    assert table.rows == [("resnet18", "fp16", "1.50", "-"), ("resnet18", "bf16", "-", "0.50")]


class Failed:
    """A job that ended at its flags."""

    def __init__(self, directory):
        self.directory = directory
        self.status = {"state": "FAILED", "reason": "exit code 2"}

    def explain(self):
        return f"job 1 FAILED: exit code 2\n  | error: no flag --qux\n  in {self.directory}"


@pytest.mark.parametrize(
    ("state", "colour"), [("CANCELLED", QUIET_INK), ("RUNNING", GOOD_INK), ("FAILED", BAD_INK)]
)
def test_only_bad_news_is_red(sweep, state, colour):
    found = dataclasses.replace(summary(sweep[0]), state=state)
    assert f"background:{colour}" in report.inspect_run(found)._repr_html_()


def test_a_slow_run_has_a_speed_with_a_decimal(sweep):
    slow = dataclasses.replace(summary(sweep[0]), images_per_s=1.14, device_images_per_s=None)
    assert "1.1 images/s" in repr(report.inspect_run(slow))
    assert "  1.1  " in repr(report.compare_runs([slow]))
    assert "1.1 images/s" in report.plot_phases([slow]).texts[0].get_text()


def test_a_number_stays_in_one_line_with_its_unit(sweep):
    cell = re.search("<td([^>]*)>100.0 ms<", report.compare_runs(sweep)._repr_html_())
    assert "white-space:nowrap" in cell[1]


@pytest.mark.parametrize(
    ("cell", "whole"),
    [
        ("t.py --checkpointing blocks -b 8", ["--checkpointing", "-b"]),
        ("05-resnet50-bf16-synthetic-1", ["05-resnet50-bf16-", "synthetic-1"]),
        ("&quot;" + 30 * "a" + "-b", []),
        ("-", []),
    ],
)
def test_a_cell_breaks_between_flags_and_in_long_names(cell, whole):
    html = Table(("",), [(cell,)], "<")._repr_html_()
    assert re.findall('nowrap">([^<]*)</span>', html) == whole
    assert escape(cell) in re.sub("</?span[^>]*>", "", html)


def test_a_failure_is_told_once(tmp_path):
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "arguments": {"model": "resnet18"}}
    lost = dict.fromkeys(("setup", "window", "validation", "epoch", "memory", "end"))
    write_log(tmp_path / "events.jsonl", steps=0, **lost | {"start": start})
    text = repr(report.inspect_run(Failed(tmp_path)))
    assert text.count("exit code 2") == 1
    assert "error: no flag --qux" in text
    assert "?" not in text, "what is not known is not shown"


def test_a_program_without_our_chronometer_is_reported_from_outside(script):
    script("""
        import warnings
        print(*(f"epoch {i} loss 2.3" for i in range(20)), sep="\\n")
        warnings.warn("a harmless one")
        """)
    job = launch.submit("t.py")
    assert job.wait(60) == launch.State.COMPLETED
    (job.directory / "outside.json").unlink()  # as of an older version
    file, seen = job.directory / "state.json", {"peak_memory_bytes": 9_100_000, "cpu_s": 0.25}
    state = json.loads(file.read_text()) | seen
    file.write_text(json.dumps(state | {"started": 100.0, "ended": 101.5}))
    text = repr(report.inspect_run(job))
    assert text.startswith("run 0001: COMPLETED (no Chronometer in it)\n")
    assert "  peak memory  9.1 MB, of the largest process, on the host\n" in text
    assert "  CPU time     0.25 s, in 1.5 s\n" in text
    assert "  steps        not measured: `dlojz watch` measures those of a training" in text
    assert "with `-n 2`" in text
    assert "  | epoch 19 loss 2.3\n  in " in text
    assert text.endswith("stdout.txt")
    assert "epoch 7 " not in text
    assert "harmless" not in text
    assert "did it" not in text
    assert "9.1 MB  COMPLETED" in repr(report.compare_runs([job]))


def test_a_job_that_measured_nothing_from_outside_has_no_such_lines(script):
    script("")
    job = launch.submit("t.py")
    job.wait(60)
    state = json.loads((job.directory / "state.json").read_text())
    left = {k: v for k, v in state.items() if k not in ("peak_memory_bytes", "cpu_s")}
    (job.directory / "state.json").write_text(json.dumps(left))  # as on a cluster
    (job.directory / "outside.json").unlink()
    assert repr(report.inspect_run(job)).splitlines()[2:] == [
        "",
        f"  in {job.directory}/stdout.txt",
    ]


def test_html_escapes_what_comes_from_a_run(sweep):
    hostile = dataclasses.replace(summary(sweep[0]), model="<script>", reason="<b>", name="<i>")
    html = report.Inspection(hostile)._repr_html_() + report.compare_runs([hostile])._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html


def test_no_sensor_is_said_and_not_zero(tmp_path):
    text = repr(report.inspect_run(write_log(tmp_path / "r.jsonl")))
    assert "energy       no sensor here" in text


def test_a_batch_sweep_draws_each_point_and_marks_what_did_not_fit(sweep):
    axes = batch_sweep.plot_sweep(sweep)
    assert len(axes) == 3, "energy is known"
    line = axes[0].lines[0]
    assert list(line.get_xdata()) == [8, 16, 32]
    assert list(line.get_ydata()) == pytest.approx([summary(r).images_per_s for r in sweep[:3]])
    assert [line.get_marker() for line in axes[1].lines].count("X") == 1
    assert legend_of(axes[1]).count("out of memory") == 1
    assert (
        title(axes)
        == "resnet18: batch 32 is 4 times as fast as batch 8, with 2.33 times its memory"
    )
    tops = {round(p.get_y() + p.get_height(), 3) for p in axes[1].patches}
    assert {1.8, 2.6, 4.2} <= tops
    assert {p.get_x() + p.get_width() / 2 for p in axes[1].patches} == {3, 4, 5}, "on their ticks"
    assert "resnet18: 1 GB + 100 MB an image" in axes[1].get_xlabel()
    for ax in axes:
        assert "(" in ax.get_ylabel(), "units"
        assert ax.get_ylim()[0] == 0


def title(axes):
    return np.ravel(axes)[0].figure.get_suptitle().replace("\n", " ")


def setting(axes):
    return np.ravel(axes)[0].figure.get_supxlabel()


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_sweeps_stand_side_by_side_in_one_figure(sweep):
    axes = batch_sweep.plot_sweep({"yours": sweep, "recorded": sweep[:2]})
    assert legend_of(axes[0]) == ["yours", "recorded"]
    assert "Band: 80 % of the steps" in setting(axes)
    assert title(axes).startswith("Batch 16: recorded is")
    middles = {round(p.get_x() + p.get_width() / 2, 3) for p in axes[1].patches}
    assert middles == {2.81, 3.81, 4.81, 3.19, 4.19}
    with pytest.raises(ValueError, match="no runs of recorded to draw"):
        batch_sweep.plot_sweep({"yours": sweep, "recorded": []})
    with pytest.raises(ValueError, match="no runs to draw"):
        batch_sweep.plot_sweep([])


def test_the_legend_of_a_sweep_lies_on_nothing(sweep):
    axes = batch_sweep.plot_sweep(sweep)
    axes[0].figure.canvas.draw()
    for drawn in (ax.get_legend() for ax in axes[:2]):
        box = drawn.get_window_extent()
        assert not any(box.overlaps(ax.get_window_extent()) for ax in axes)


@pytest.mark.parametrize("label", [r"a$\frac{$", "_hidden", "$x$"])
def test_a_label_is_text_and_no_formula(sweep, label, tmp_path):
    axes = batch_sweep.plot_sweep({label: sweep})
    axes[0].figure.savefig(tmp_path / "f.png")
    assert legend_of(axes[0])[0] == label
    report.plot_phases(sweep[:1], labels=[label]).figure.savefig(tmp_path / "f.png")


def on_two_cpus(path, others_cpu, steps=10, **changes):
    """The log of a run, and what others used of its two CPUs."""
    window = {"first_step": 3, "steps": 7, "wall_s": 0.7, "others_cpu": others_cpu}
    changes = {"window": window, "arguments": {"data": "data"}} | changes
    return write_log(path, steps=steps, about={"cpu_count": 2}, **changes)


def test_a_disturbed_run_is_named_wherever_its_speed_is_shown(tmp_path):
    busy, calm = on_two_cpus(tmp_path / "busy", 1.01), on_two_cpus(tmp_path / "calm", 0.1)
    sentence = "others kept 1.0 of 2 CPUs busy: repeat it"
    shown = [
        repr(report.inspect_run(busy)),
        report.inspect_run(busy)._repr_html_(),
        repr(report.compare_runs([calm, busy])),
        setting(report.plot_steps(busy)),
        setting(report.plot_phases([calm, busy])),
        setting(batch_sweep.plot_sweep([busy])),
    ]
    assert [sentence in text for text in shown] == [True] * len(shown)
    assert "disturbed" not in repr(report.inspect_run(calm))
    assert "disturbed" not in repr(report.compare_runs([calm]))
    words = [text.get_text() for text in report.plot_phases([calm, busy]).texts]
    assert ["disturbed" in word for word in words] == [False, True]
    both = setting(batch_sweep.plot_sweep([calm, busy]))
    assert both.endswith(f"disturbed (busy): {sentence}")


def test_the_rows_of_a_comparison_are_told_apart(tmp_path):
    commands = ("t.py -b 32 --test --lr 0.1", "t.py -b 8 --test --no-pin-memory --lr 0.2")
    for number, command in enumerate(commands):
        on_two_cpus(tmp_path / str(number) / "events.jsonl", 0)
        job = {"name": f"trial {number}", "command": command.split()}
        (tmp_path / str(number) / "job.json").write_text(json.dumps(job))
    table = report.compare_runs([tmp_path / "0", tmp_path / "1"])
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [row["name"] for row in rows] == ["trial 0", "trial 1"]
    assert [row["flags"] for row in rows] == ["--lr 0.1", "--no-pin-memory --lr 0.2"]
    assert rows[0]["px"] == "64"
    assert "precision" not in table.head, "no run says it"
    bf16 = dataclasses.replace(summary(tmp_path / "0"), arguments={"precision": "bf16"})
    assert "bf16" in repr(report.compare_runs([bf16]))


def test_a_sweep_without_energy_has_two_panels(tmp_path):
    assert len(batch_sweep.plot_sweep([write_log(tmp_path / "r.jsonl")])) == 2


def test_a_job_without_a_log_spoils_no_sweep(sweep, tmp_path):
    cancelled = dataclasses.replace(summary(sweep[0]), state="CANCELLED", batch_size=0)
    axes = batch_sweep.plot_sweep([*sweep, cancelled])
    assert axes[0].get_xlim()[0] > 1


def test_thousands_of_steps_are_drawn_in_seconds(tmp_path):
    import time

    begin = time.monotonic()
    report.plot_steps(write_log(tmp_path / "r.jsonl", steps=5000)).figure.canvas.draw()
    assert time.monotonic() - begin < 10


def test_a_recording_says_that_it_is_one():
    run = recorded("h100/01-resnet50-fp32-b0256")
    assert "recorded on NVIDIA H100" in report.hardware_text(summary(run))
    assert "recorded on" in setting(n01.plot_clocks(run))
    assert title(n01.plot_clocks(run)).endswith("by the device's")


def test_a_recording_from_before_the_fused_optimizer_says_so(tmp_path):
    """The starter has no other optimizer, so its recordings need no word of it."""
    starter, older = (f"h100/{name}-b0256" for name in ("01-resnet50-fp32", "03-vgg19-fp16-nchw"))
    assert "unfused" not in report.hardware_text(summary(recorded(starter)))
    assert "unfused" in report.hardware_text(summary(recorded(older)))
    own = write_log(tmp_path / "r.jsonl")
    assert "unfused" not in report.hardware_text(summary(own))


def test_the_steps_are_stacked_by_phase(tmp_path):
    ax = report.plot_steps(write_log(tmp_path / "r.jsonl"))
    assert len(ax.patches) >= 50
    measured = [p for p in ax.patches if p.get_x() > 2.5]
    assert max(p.get_y() + p.get_height() for p in measured) == pytest.approx(100)


def test_a_bar_that_is_cut_is_marked_and_its_value_written(tmp_path):
    ax = report.plot_steps(write_log(tmp_path / "r.jsonl"))  # three steps of 5 s, seven of 0.1
    (text,) = ax.texts
    assert text.get_text() == "warm-up: up to 5,000 ms"
    ax.figure.canvas.draw()
    below = text.get_window_extent().y0
    assert below >= ax.get_window_extent().y1, "above the bars, on which black can't be read"
    assert [round(np.mean(line.get_xdata())) for line in ax.lines] == [0, 1, 2]
    assert max(line.get_ydata().max() for line in ax.lines) < ax.get_ylim()[1]


def test_on_a_processor_there_is_no_copy_to_be_measured(train, tmp_path):
    experiment = experiment_file("tensors.py")
    train(experiment, tmp_path, "-b", 2, "--image-size", 8)
    labels = [label.get_text() for label in report.plot_measures(tmp_path).get_yticklabels()]
    assert len(labels) == 2
    assert not any("pinned" in label for label in labels)


def test_diff_shows_the_difference_and_nothing_else(course_folder):
    text = course.diff(course.trainer(), "01")
    assert "+    device = idr_torch.device()" in text
    assert "-    device = torch.device(" in text
    assert repr(course.diff(course.trainer(), "00")) == "no difference"
    assert "rgba" in text._repr_html_()


def test_the_phases_of_runs_stand_side_by_side(sweep):
    ax = report.plot_phases(sweep)
    assert [t.get_text().split("\n")[0] for t in ax.get_yticklabels()] == ["008", "016", "032"]
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(100)
    assert "640" not in ax.texts[0].get_text()
    assert "064 has no measured step: OUT_OF_MEMORY" in setting(ax), "why it has no bar"
    ax = report.plot_phases(sweep[2:], labels=["before", "after $"])
    assert "after $ has no measured step: OUT_OF_MEMORY" in setting(ax)
    assert title(report.plot_phases(sweep)).endswith("times as fast as 008, resnet18, batch 8")


def test_of_runs_on_different_hardware_it_is_said_which_ran_where(sweep):
    ran = report.plot_phases(sweep[:2], labels=["off", "on"]).figure.get_supxlabel()
    assert ran.count("X1") <= 1
    other = dataclasses.replace(summary(sweep[1]), device_name="another")
    ran = report.plot_phases([sweep[0], other], labels=["off", "on"]).figure.get_supxlabel()
    assert re.search(r"off: .*\non: another", ran)


def test_a_figure_that_fails_does_not_turn_off_all_others():
    """A notebook's first figure turns interactive mode on, as its backend is loaded."""
    before = mpl.is_interactive()
    try:
        mpl.interactive(False)
        with contextlib.suppress(UserError), style():
            mpl.interactive(True)
            report.plot_phases([])
        assert mpl.is_interactive()
    finally:
        mpl.interactive(before)


def test_every_recording_can_be_read_and_names_no_machine():
    """And those of one machine and series have one optimizer, so no figure mixes two."""
    optimizers = {}
    for path in sorted((course.course_root() / "reference").rglob("*.jsonl")):
        if path.name == "results.jsonl":  # of a race, which is no run
            continue
        s = summary(path)
        assert s.state in ("COMPLETED", "OUT_OF_MEMORY")
        assert s.versions["torch"]
        assert s.date
        assert '"hostname": "recorded"' in path.read_text()
        if (series := re.match(r"0[2-9]-(strong-)?", path.name)) and "precision" in s.arguments:
            optimizers.setdefault((path.parent, series[0]), set()).add(s.optimizer)
    found = [names - {"?"} for names in optimizers.values()]
    assert len(found) > 2
    assert max(map(len, found)) == 1, optimizers


@pytest.mark.parametrize("figure", [report.plot_steps, n01.plot_clocks])
def test_a_figure_reads_a_log_once(figure, tmp_path, monkeypatch):
    read, files = log._read, []

    def counting(path, *more):
        files.append(path)
        return read(path, *more)

    monkeypatch.setattr(log, "_read", counting)
    path = write_log(tmp_path / "r.jsonl")
    figure(path)
    assert files == [path]


FIGURES = {  # by which of its logs a job left before it failed
    "none": [report.plot_steps, report.plot_measures, sharding.plot_fits, figures.collectives],
    "cut": [report.plot_measures, sharding.plot_fits, n04b.plot_roofline],
    "no trace": [timeline.plot_step, timeline.waits],
}


@pytest.mark.parametrize(
    ("left", "figure"), [(left, figure) for left, found in FIGURES.items() for figure in found]
)
def test_a_figure_of_a_failed_job_is_a_sentence(left, figure, course_folder):
    """And not a traceback of sixty lines: IPython shows such an error as one line."""
    folder = course_folder / "runs" / "0001"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"command": ["t.py"], "n_gpu": 1}')
    (folder / "state.json").write_text('{"state": "FAILED", "reason": "exit code 1"}')
    (folder / "stderr.txt").write_text("Traceback\nValueError: planted\n")
    if left == "cut":
        lines = write_log(folder / "events.jsonl").read_text().splitlines(keepends=True)
        (folder / "events.jsonl").write_text(lines[0])
    with pytest.raises(course.UserError) as error:
        figure(launch.find(1))
    (told,) = error.value._render_traceback_()
    if left == "none":
        assert told.startswith(f"NoLogError: job 0001 is FAILED: {folder}/events.jsonl: no log to")
        assert told.endswith("ends with: ValueError: planted; `dlojz report 0001` says more")


def test_a_figure_of_a_job_that_runs_says_to_wait(course_folder, monkeypatch):
    job = launch.Job(course_folder / "runs" / "0001")
    monkeypatch.setattr(launch.Job, "status", {"state": "RUNNING"})
    with pytest.raises(log.LogError, match=r"job 0001 is RUNNING: .* job\.wait\(\), and again"):
        report.plot_steps(job)
