"""What the exercise about the profiler finds."""

from logs import write_log

from dlojz.chapters.n04_profiler import exercise
from dlojz.check.exercise import State
from dlojz.runs import log


def test_a_trace_that_was_never_written_is_none(tmp_path):
    """And not the path of a file that is not there."""
    run = log.read(write_log(tmp_path / "events.jsonl"))
    (finding,) = exercise._trace(run, ["NONE", "RECORD"])
    assert (finding.yours, finding.state, finding.hint) == ("none", State.FAILED, "saved")
    (tmp_path / "trace.json.gz").write_bytes(b"")
    (finding,) = exercise._trace(run, ["NONE", "RECORD"])
    assert 'no "traceEvents"' in finding.yours
