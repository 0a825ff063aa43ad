import json
import subprocess
import sys
import textwrap

import pytest
from traces import busy

from dlojz.traces import trace

# Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_zipped_or_not(tmp_path, name):
    found = trace.read(busy().write(tmp_path / name))
    assert found.device == "NVIDIA H100"
    assert [e.name for e in found.steps] == ["ProfilerStep#5", "ProfilerStep#6"]
    begin = found.steps[0].begin
    assert found.work[1].begin - begin == pytest.approx(2), "milliseconds"
    assert len(found.work) == len(found.calls) == 10


@pytest.mark.parametrize("before", ["", "\ufeff", "\r\n"])
def test_a_bare_list_of_events_is_a_trace(tmp_path, before):
    file = tmp_path / "t.json"
    file.write_text(before + json.dumps(busy().events), encoding="utf-8")
    assert len(trace.read(file).work) == 10


def test_the_steps_of_another_thread_are_left_out(tmp_path):
    made = busy()
    alone = len(trace.read(made.write(tmp_path / "alone.json")).steps)
    made.step(5, 1, 3)
    made.events[-1]["tid"] = 77
    found = trace.read(made.write(tmp_path / "t.json"))
    assert len(found.steps) == alone
    assert "left out: steps of other threads, 1;" in found.notes[-1]


def test_an_event_across_two_chunks_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "CHUNK", 50)
    assert len(trace.read(busy().write(tmp_path / "t.json")).work) == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'no "traceEvents"'),
        ('{"a": 1}', 'no "traceEvents"'),
        ('{"traceEvents": [{"ph": "X", "na', "cut short"),
        ('{"traceEvents": [', "cut short"),
        ('{"traceEvents": []}', "no operation, call or kernel in it"),
    ],
)
def test_what_is_no_trace_says_so(tmp_path, text, said):
    file = tmp_path / "a'; echo foo.json"
    file.write_text(text)
    with pytest.raises(trace.TraceError, match=said) as error:
        trace.read(file)
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there_or_cut_in_its_zip_says_so(tmp_path):
    with pytest.raises(trace.TraceError, match="can't be read"):
        trace.read(tmp_path / "none.json")
    file = busy().write(tmp_path / "t.json.gz")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(trace.TraceError, match="can't be read"):
        trace.read(file)


def test_30_mb_are_read_in_3_s_and_300_mb(tmp_path):
    made = busy()
    one = ",".join(json.dumps(e) for e in made.events[1:11])
    file = tmp_path / "large.json"
    with open(file, "w") as out:
        out.write('{"traceEvents": [' + json.dumps(made.events[0]))
        while out.tell() < 30e6:
            out.write("," + ",".join([one] * 1000))
        out.write("]}")
    # Not ru_maxrss: a process inherits that from the one that started it.
    script = """
        import re, sys, time
        from pathlib import Path
        from dlojz.traces import breakdown, trace
        begin = time.process_time()
        breakdown.analyse(trace.read(sys.argv[1]))
        spent = time.process_time() - begin
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
        print(spent, int(peak) / 1e6)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), file], capture_output=True, text=True
    )
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 3
    assert gigabytes < 0.3
