import json
import random
from collections import Counter

import cases
import pytest
from logs import write_log

from dlojz.chapters.n04_profiler import planted


@pytest.mark.parametrize("gpus", [1, 2])
def test_of_the_two_strengths_of_a_fault_one_is_sealed(gpus):
    named = cases.draw(cases.cases(gpus), gpus, random.Random(0))
    assert all(planted.NUMBERED.match(name) for name in named)
    pairs = Counter((c["fault"], c["model"], c["functions"]) for c in named.values())
    for case in named.values():
        if case["fault"] != "none":
            twin = [n for n, c in named.items() if c | {"strength": ""} == case | {"strength": ""}]
            assert sorted(n.split("-")[2] for n in twin) == ["open", "sealed"]
        else:
            assert pairs["none", case["model"], case["functions"]] == 1, "and each model is there"
    assert cases.draw(cases.cases(gpus), gpus, random.Random(1)) != named


def test_there_are_24_traces_of_six_models_and_six_causes_outside_the_classes():
    every = [case for gpus in (1, 2) for pair in cases.cases(gpus) for case in pair]
    assert len(every) >= 24
    assert len({case["model"] for case in every}) >= 6
    assert {case["fault"] for case in every} >= set(planted.SHOWN_AS)
    assert len(planted.SHOWN_AS) == 6


def test_a_command_names_an_experiment_and_a_log_does_not_tell_which(tmp_path):
    case = {"fault": "item", "model": "vit", "strength": "weak", "functions": True}
    assert "--fault item --strength weak --stack" in cases.command(case)
    run = write_log(tmp_path / "run" / "events.jsonl", steps=1).parent
    with open(run / "events.jsonl", "a") as file:
        measure = {"event": "measure", "what": "step", "value": 12.5, "unit": "ms"}
        file.write(json.dumps(measure) + "\n")
    (tmp_path / "kept").mkdir()
    assert cases.keep("04-trace-sealed-01", run, tmp_path / "kept") == 12.5
    text = (tmp_path / "kept" / "04-trace-sealed-01" / "events.jsonl").read_text()
    assert json.loads(text.splitlines()[0])["arguments"] == {}
    assert "measure" not in text, "a small batch would give itself away"


def test_labels_are_read_as_they_were_written_and_say_what_a_trace_can_tell(tmp_path):
    case = {"model": "vit", "strength": "weak", "functions": False}
    named = {
        "04-trace-open-01": case | {"fault": "none"},
        "04-trace-open-02": case | {"fault": "garbage"},
        "04-trace-open-03": case | {"fault": "sleep"},
        "04-trace-open-04": case | {"fault": "item"},
    }
    steps_ms = dict(zip(named, (10.0, 13.0, 10.1, 12.0), strict=True))
    labels = cases.labelled(named, steps_ms)
    (tmp_path / "04-trace-open.toml").write_text(cases.toml(labels))
    found = {name: planted.right(tmp_path / name) for name in named}
    assert list(found.values()) == [{"none"}, {"elsewhere"}, {"elsewhere", "none"}, {"item"}]
    assert planted.fault(tmp_path / "04-trace-open-02") == "garbage"
