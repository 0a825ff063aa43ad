"""The run log: what is written is what is read."""

import json

import pytest

from dlojz import course
from dlojz.runs import log
from dlojz.runs.folder import events_file

SAMPLES = [line for line in log.__doc__.splitlines() if line.startswith("{")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(SAMPLES) + "\n")
    return path


def test_the_samples_of_the_docstring_show_every_event():
    assert {json.loads(s)["event"] for s in SAMPLES} == set(log.EVENTS)


def test_the_samples_of_the_docstring_can_be_read(file):
    run = log.read(file)
    assert list(run.steps.loss) == [2.31, 2.29]
    assert list(run.steps.device_ms["backward"]) == [31.5]
    assert run.start["arguments"]["model"] == "resnet18"
    assert run.windows[0]["energy_j"] == 640.2
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", ":3: not a JSON object: 'nonsense"),
        ('{"event": "lunch"}', ":3: unknown event 'lunch', expected one of start"),
        ('{"event": "step", "step": 1}', ":3: no field 'epoch'"),
        ('{"step": 1}', ":3: no field 'event'"),
        ("[1, 2]", ":3: "),
        ('{"event": "start", "schema": 99}', ":3: schema 99, expected 1 or 2: update the course"),
        (
            '{"event": "step", "epoch": "x", "step": 0, "images": 1, "lr": 1, "loss": 1}',
            ":3: ",
        ),
    ],
)
def test_a_malformed_line_is_named_with_its_number(file, line, message):
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(log.LogError, match=message.replace("[", r"\[")):
        log.read(file)


def test_a_missing_log_says_so(tmp_path):
    with pytest.raises(log.LogError, match="no log to read"):
        log.read(tmp_path)


def test_a_run_that_goes_on_after_a_cut_line_can_be_read(file, monkeypatch):
    from types import SimpleNamespace

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
def test_all_ways_to_run_out_of_memory_are_one_outcome(error, tmp_path, monkeypatch, capsys):
    from types import SimpleNamespace

    monkeypatch.setattr("sys.excepthook", None)
    run = log.RunLog(tmp_path, SimpleNamespace())
    run._on_error(type(error), error, None)
    assert log.read(tmp_path).end["outcome"] == "out_of_memory"


def test_a_job_that_went_on_has_one_row_of_steps(file):
    file.write_text(file.read_text() * 2)
    run = log.read(file)
    assert len(run.steps) == 4
    assert [w["first_step"] for w in run.windows] == [3, 5]
    assert run.notes == []


def test_a_loss_that_is_nan_is_kept(file):
    event = json.loads(SAMPLES[2]) | {"loss": float("nan")}
    file.write_text(SAMPLES[0] + "\n" + json.dumps(event) + "\n")
    assert str(log.read(file).steps.loss[0]) == "nan"


def test_all_ranks_are_read(tmp_path):
    start = json.loads(SAMPLES[0]) | {"size": 3}
    for rank in range(3):
        events_file(tmp_path, rank).write_text(json.dumps(start | {"rank": rank}) + "\n")
    assert [run.start["rank"] for run in log.read_ranks(tmp_path)] == [0, 1, 2]


def test_a_window_tells_what_the_sensors_saw_between_its_ends(tmp_path, monkeypatch):
    from types import SimpleNamespace

    class Sensors:
        def __init__(self, device, size):
            self.seen = {"others_cpu": 0.25, "throttled": [], "of": [device, size]}

        def window(self):
            return self.seen

    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr(log.meters, "Sensors", Sensors)
    run = log.RunLog(tmp_path, SimpleNamespace())
    run._device = "cpu"
    run.window_opens()
    run.window(first_step=3, steps=9, wall_s=1.5)
    window = log.read(tmp_path).windows[0]
    assert (window["wall_s"], window["others_cpu"], window["throttled"]) == (1.5, 0.25, [])
    assert window["of"] == ["cpu", 1]


def test_replacing_a_file_leaves_no_other(tmp_path):
    course.write_atomically(tmp_path / "state.json", "old")
    course.write_atomically(tmp_path / "state.json", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert (tmp_path / "state.json").read_text() == "new"
