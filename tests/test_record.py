import gzip
import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import record
import recordings

from dlojz import course
from dlojz.figures import report
from dlojz.traces import trace

REPOSITORY = Path(__file__).parent.parent
FAULTS = recordings.at("faults.py")


def test_a_recording_is_made_by_a_file_that_is_there():
    for step, commands in record.RECORDINGS.items():
        for name, command in commands.items():
            assert name.startswith(f"{step}-") or (step == "cpu" and "-cpu-" in name)
            trainer = command.removeprefix(record.variables(command)).split()[0]
            assert (REPOSITORY / trainer).exists(), command


def test_a_log_is_kept_without_its_machine():
    line = json.dumps({"event": "start", "hostname": "vm-7", "command": "x", "git": "0a1b"})
    kept = json.loads(record.anonymous(line + "\n", "solutions/a.py -b 8"))
    assert kept == {
        "event": "start",
        "hostname": "recorded",
        "command": "solutions/a.py -b 8",
        "git": "0a1b",
    }
    storage = json.dumps({"event": "case", "case": "storage", "folder": "/home/ada/runs/0007"})
    assert json.loads(record.anonymous(storage, "a.py"))["folder"] == "recorded"


def test_a_trace_is_kept_without_the_paths_of_its_machine():
    root = course.course_root()
    names = [
        f"{root}/runs/7/trainer.py(3): main",
        "/home/me/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py(9): f",
    ]
    packed = gzip.compress(json.dumps({"traceEvents": [{"name": n} for n in names]}).encode())
    kept = json.loads(gzip.decompress(record.anonymous_trace(packed)))
    assert [e["name"] for e in kept["traceEvents"]] == [
        "runs/7/trainer.py(3): main",
        "torch/nn/modules/module.py(9): f",
    ]


def test_a_kept_trace_has_what_is_read_of_it_and_no_more():
    def kept(event):
        packed = gzip.compress(json.dumps({"traceEvents": [event]}).encode())
        return json.loads(gzip.decompress(record.anonymous_trace(packed)))["traceEvents"]

    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1234567.891, "dur": 3.456}
    slim = kernel | {"args": {"stream": 7}, "ts": 0.0, "dur": 3.46}
    assert kept(kernel | {"args": {"stream": 7, "grid": [1, 1, 1]}}) == [slim]
    attribute = kernel | {"cat": "cuda_runtime", "name": "cudaFuncGetAttributes"}
    assert not kept(attribute), "a call that neither launches nor waits"
    thread = {"ph": "M", "name": "thread_name", "args": {"name": "python"}}
    assert kept(thread) == [thread]
    mine, torchs = "trainer.py(3): main", "torch/nn/modules/module.py(9): f"
    times = {"ph": "X", "ts": 1.0, "dur": 2.0}
    assert kept(times | {"cat": "python_function", "name": mine})
    assert kept(times | {"cat": "python_function", "name": trace.GARBAGE})
    assert not kept(times | {"cat": "python_function", "name": torchs})
    assert not kept({"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1})


def test_a_trace_is_recorded_with_its_log(tmp_path, course_folder):
    there = course_folder / FAULTS
    there.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / FAULTS, there)
    small = "--model shufflenet_v2_x0_5 --image-size 32 -b 4 --precision fp32 --steps 2"
    command = f"{FAULTS} --fault none {small}"
    record.record({"04-trace-fault-none": command}, tmp_path, "record-04", 1)
    folder = tmp_path / "04-trace-fault-none"
    assert len(trace.open_trace(folder).steps) == 2
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[0])["command"] == command
    assert "COMPLETED" in str(report.compare_runs([folder]))


def test_what_is_complete_when_the_time_is_over_is_kept(tmp_path, course_folder, monkeypatch):
    trial = course_folder / "trial.py"
    trial.write_text(
        "import sys, time\nfrom types import SimpleNamespace\nfrom dlojz.runs import log\n"
        "run = log.open_run(SimpleNamespace())\ntime.sleep(float(sys.argv[1]))\nrun.end()\n"
    )
    plan = {"09-short": "trial.py 0", "09-long": "trial.py 60", "09-other": "trial.py 0"}
    monkeypatch.setattr(record, "RECORDINGS", {"09": plan})
    words = ["record.py", "09", str(tmp_path), "--only", "short", "long", "--minutes", "0.1"]
    monkeypatch.setattr(sys, "argv", words)
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=r"(?s)TIMEOUT.*call again to go on"):
        record.main()
    assert time.monotonic() - begin < 40
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["09-short.jsonl"]


def test_variables_are_there_when_torch_is_imported(tmp_path, course_folder, monkeypatch):
    trial = course_folder / "trial.py"
    trial.write_text(
        "from types import SimpleNamespace\nfrom torch._inductor import config\n"
        "from dlojz.runs import log\nassert config.coordinate_descent_tuning\n"
        "log.open_run(SimpleNamespace()).end()\n"
    )
    tuned = "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 trial.py"
    monkeypatch.setattr(record, "RECORDINGS", {"09": {"09-tuned": tuned}})
    monkeypatch.setattr(sys, "argv", ["record.py", "09", str(tmp_path)])
    record.main()
    assert json.loads((tmp_path / "09-tuned.jsonl").read_text().splitlines()[0])["command"] == tuned


def test_a_run_finds_no_code_of_another_unless_it_repeats_it():
    names = ["09-ladder-resnet50-5-default", "09-ladder-resnet50-5-reduce-overhead", "09-ddp-x2"]
    names += ["09-compiled-resnet50-bf16-x1-1", "09-compiled-resnet50-bf16-x2-1"]
    commands = record.RECORDINGS["09"]
    found = [record._entry(name, commands[name], "/tmp/caches").environment for name in names]
    assert len({*(e["TORCHINDUCTOR_CACHE_DIR"] for e in found)}) == len(names)
    again = names[-1].replace("x2-1", "x2-3")
    assert record._entry(again, commands[again], "/tmp/caches").environment == found[-1]


def test_words_in_quotes_stay_together_in_a_recorded_command():
    entry = record._entry("09-ddp-x2", record.RECORDINGS["09"]["09-ddp-x2"], "/tmp/caches")
    assert entry.flags[-2:] == ["both, buckets of 50 MB", "both, graph not cut"]
