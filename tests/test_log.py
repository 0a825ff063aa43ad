"""The run log: what is written is what is read."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlojz import course, launch
from dlojz.figures import report
from dlojz.runs import log, origin, records, stats
from dlojz.runs.folder import events_file

SAMPLES = [line for line in log.__doc__.splitlines() if line.startswith("{")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(SAMPLES) + "\n")
    return path


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """The log of a run in this process."""
    monkeypatch.setattr("sys.excepthook", None)
    return log.RunLog(tmp_path, SimpleNamespace())


def test_the_samples_of_the_docstring_show_every_event():
    assert {json.loads(s)["event"] for s in SAMPLES} == set(log.EVENTS)


def test_the_samples_of_the_docstring_can_be_read(file):
    run = log.read(file)
    assert list(run.steps.loss) == [2.31, 2.29]
    assert list(run.steps.device_ms["backward"]) == [31.5]
    assert run.start["arguments"]["model"] == "resnet18"
    assert run.windows[0]["energy_j"] == 640.2
    assert run.rates.rates == [1e-5, 0.01, 10.0]
    assert run.rates.losses[:2] == [2.31, 2.29]
    assert math.isnan(run.rates.losses[2])
    assert run.end["outcome"] == "completed"
    assert run.notes == []


def test_a_folder_is_read_by_its_first_rank(file):
    assert log.read(file.parent).path == file


def test_a_cut_last_line_is_a_note(file):
    file.write_text(file.read_text()[:-30])
    run = log.read(file)
    assert f"line {len(SAMPLES)} was cut" in run.notes[0]
    assert "no end" in run.notes[1]
    assert len(run.steps) == 2


def test_a_log_can_be_cut_anywhere(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        log.read(file)  # never raises


STEP = SAMPLES[2]

# What a log may hold that it should not, after its start and setup; and what is said of it.
BROKEN = {
    "no JSON": ("nonsense", ":3: not a JSON object: 'nonsense"),
    "cut in the middle": (STEP[:50], ":3: not a JSON object"),
    "unknown event": ('{"event": "lunch"}', ":3: unknown event 'lunch', expected one of start"),
    "step without fields": ('{"event": "step", "step": 1}', ":3: no field 'epoch'"),
    "no event": ('{"step": 1}', ":3: no field 'event'"),
    "empty object": ("{}", ":3: no field 'event'"),
    "a list": ("[1, 2]", ":3: not a JSON object"),
    "a number": ("5", ":3: not a JSON object"),
    "nested": ("[" * 100_000, ":3: nested too deeply"),
    "later schema": ('{"event": "start", "schema": 99}', ":3: schema 99, expected 2: another"),
    "too many images": (STEP.replace('"images": 32', f'"images": {10**30}'), ":3: "),
    "text for a number": (STEP.replace('"epoch": 0', '"epoch": "x"'), ":3: "),
    "number for an object": (STEP[: STEP.index('{"data"')] + "5}", ":3: "),
    "size": (SAMPLES[0].replace('"size": 1', '"size": "x"'), ":3: size is 'x', expected a whole"),
    "no process": (SAMPLES[0].replace('"size": 1', '"size": 0'), ":3: size is 0, expected one"),
    "window": ('{"event": "window", "first_step": "x"}', ":3: first_step is 'x', expected a whole"),
    "end": ('{"event": "end"}', ":3: no field 'outcome'"),
    "evidence": (
        '{"event": "evidence", "when": "probe", "layers": 5}',
        ":3: layers is 5, expected a list",
    ),
    "part of evidence": (
        '{"event": "evidence", "when": "probe", "gradients": 5}',
        ":3: gradients is 5, expected an object",
    ),
    "unknown evidence": (
        '{"event": "evidence", "when": "dawn"}',
        ":3: unknown evidence 'dawn', expected one of samples, probe",
    ),
    "measure": ('{"event": "measure", "what": "a", "unit": "ms"}', ":3: no field 'value'"),
}


@pytest.fixture
def job(file):
    """The job of a log, as the launcher sees it: it has ended well."""
    state = launch.State.COMPLETED
    return SimpleNamespace(directory=file.parent, state=state, status={"state": str(state)})


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_log_is_named_with_file_and_line(file, job, line, message):
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(log.LogError) as caught:
        log.read(file)
    assert f"{file}{message}" in str(caught.value)
    assert "update the course" in str(caught.value) or "submit the run again" in str(caught.value)
    assert str(caught.value) in repr(report.inspect_run(job)), "the report of the job says so, too"
    assert list(launch.follow(job))[-1].state == "COMPLETED", "and who follows it goes on"


UNFINISHED = {
    "empty": ("", "an empty log"),
    "no start": (SAMPLES[1] + "\n", "'setup' before the run's start"),
    "no end": ("\n".join(SAMPLES[:4]) + "\n", "no end"),
    "other processes": (
        SAMPLES[0].replace('"size": 1', '"size": 4') + "\n",
        "events.rank1.jsonl: no",
    ),
    "no time passed": (re.sub(r"\d+\.\d", "0.0", "\n".join(SAMPLES[:4])) + "\n", "no end"),
}


@pytest.mark.parametrize(("text", "message"), UNFINISHED.values(), ids=UNFINISHED)
def test_the_report_of_a_job_that_completed_says_what_its_log_lacks(file, job, text, message):
    file.write_text(text)
    assert message in repr(report.inspect_run(job))
    assert list(launch.follow(job))[-1].state == "COMPLETED"


def test_a_job_that_was_ended_needs_no_note_on_a_missing_end(file, job):
    file.write_text("\n".join(SAMPLES[:4]) + "\n")
    job.status["state"] = "CANCELLED"
    assert "no end" not in repr(report.compare_runs([job]))
    assert stats.summary(job).notes == ()


def test_only_the_first_process_asks_git(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr(origin, "_git_state", lambda: "abc")
    for rank in (0, 1):
        monkeypatch.setattr(log.idr_torch, "rank", rank)
        monkeypatch.setattr(log.idr_torch, "is_master", rank == 0)
        log.RunLog(tmp_path, SimpleNamespace()).end()
    asked = [
        json.loads(events_file(tmp_path, r).read_text().splitlines()[0])["git"] for r in (0, 1)
    ]
    assert asked == ["abc", None]


def test_evidence_is_read_as_it_was_written(tmp_path, writer):
    probe = records.Probe(
        weights="00ff",
        gradients=records.Gradients({"float32": 2}, 0, 1.5),
        layers=[{"in": "float32"}],
    )
    writer.evidence(probe)
    writer.measure("bf16", 1.0, "ms", x=8)
    writer.case("both", step_ms=[1.0])
    found = log.read(tmp_path)
    assert found.probe == probe
    assert found.probe
    assert not found.last, "nothing was seen of it"
    assert found.probe.numerics.cudnn is None
    assert found.measures == [records.Measure("bf16", 1.0, "ms", 8)]
    assert found.cases == {"both": {"step_ms": [1.0]}}
    written = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[1])
    assert set(written) == {"event", "when", "weights", "gradients", "layers"}, "else absent"


def test_a_missing_log_says_so(tmp_path):
    with pytest.raises(log.LogError, match=r"no log to read .*: did the run start"):
        log.read(tmp_path)
    (tmp_path / "stderr.txt").write_text("Traceback\nModuleNotFoundError: No module named 'x'\n\n")
    with pytest.raises(log.LogError, match="its stderr ends with: ModuleNotFoundError: No module"):
        log.read(tmp_path)


def test_a_run_that_goes_on_after_a_cut_line_can_be_read(file, monkeypatch):
    file.write_text(file.read_text()[:-30])
    monkeypatch.setattr("sys.excepthook", None)
    log.RunLog(file.parent, SimpleNamespace(model="resnet18")).end()
    run = log.read(file)
    assert run.end["outcome"] == "completed"
    assert "was cut" in run.notes[0]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_all_ways_to_run_out_of_memory_are_one_outcome(error, tmp_path, writer, capsys):
    writer._on_error(type(error), error, None)
    assert log.read(tmp_path).end["outcome"] == "out_of_memory"


def test_a_log_ends_once(tmp_path, writer):
    """A check may end it before the trainer's `finally` does."""
    calls = []
    writer.before_end(lambda: calls.append("before the end"))
    writer.end()
    writer.end()
    written = (tmp_path / "events.jsonl").read_text()
    assert (written.count('"end"'), len(calls)) == (1, 1)
    writer._on_error(RuntimeError, RuntimeError("after its end"), None)
    assert log.read(tmp_path).end["outcome"] == "failed"
    assert len(calls) == 1


def test_a_job_that_went_on_has_one_row_of_steps(file):
    file.write_text(file.read_text() * 2)
    run = log.read(file)
    assert len(run.steps) == 4
    assert [w["first_step"] for w in run.windows] == [3, 5]
    assert run.notes == []


def test_a_tensor_of_one_number_is_written_as_that_number(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.excepthook", None)
    run = log.RunLog(tmp_path, SimpleNamespace(data=Path("data"), weights=torch.zeros(2)))
    metrics = {"loss": torch.tensor(1.5), "accuracy": np.float32(0.25)}
    run.epoch(0, metrics, metrics)
    found = log.read(tmp_path)
    assert (found.epochs[0]["train_loss"], found.epochs[0]["val_accuracy"]) == (1.5, 0.25)
    assert found.start["arguments"] == {"data": "data", "weights": "tensor([0., 0.])"}


def test_a_loss_that_is_nan_is_kept(file):
    event = json.loads(SAMPLES[2]) | {"loss": float("nan")}
    file.write_text(SAMPLES[0] + "\n" + json.dumps(event) + "\n")
    assert str(log.read(file).steps.loss[0]) == "nan"


def test_all_ranks_are_read(tmp_path):
    start = json.loads(SAMPLES[0]) | {"size": 3}
    for rank in range(3):
        events_file(tmp_path, rank).write_text(json.dumps(start | {"rank": rank}) + "\n")
    assert [run.start["rank"] for run in log.read_ranks(tmp_path)] == [0, 1, 2]


def test_a_window_tells_what_the_sensors_saw_between_its_ends(tmp_path, writer, monkeypatch):
    class Sensors:
        def __init__(self, device, size):
            self.seen = {"others_cpu": 0.25, "throttled": [], "of": [device, size]}

        def window(self):
            return self.seen

    monkeypatch.setattr(log.meters, "Sensors", Sensors)
    writer._device = "cpu"
    writer.window_opens()
    writer.window(first_step=3, steps=9, wall_s=1.5)
    window = log.read(tmp_path).windows[0]
    assert (window["wall_s"], window["others_cpu"], window["throttled"]) == (1.5, 0.25, [])
    assert window["of"] == ["cpu", 1]


def test_replacing_a_file_leaves_no_other(tmp_path):
    course.write_atomically(tmp_path / "state.json", "old")
    course.write_atomically(tmp_path / "state.json", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "new"


def test_a_case_that_is_missing_is_named(file):
    with pytest.raises(log.LogError, match=r"no case 'tiny' in it: did the run end before"):
        log.read(file).cases["tiny"]
    assert log.read(file).cases.get("tiny") is None
