"""What notebook 12 says of recordings is what they hold."""

import matplotlib as mpl

mpl.use("Agg")

import statistics

from claims import claims

from dlojz import runs
from dlojz.chapters import n12_model_parallel as n12
from dlojz.runs import log

NOTEBOOK = "12_model_parallel"


@claims(NOTEBOOK)
def test_bubbles_are_little_larger_than_predicted():
    cases = n12.figures._schedules(runs.recorded("cpu/12-cpu-schedules-x4"), 8)
    pairs = [n12.bubble(case) for case in cases]
    apart = [100 * (counted - predicted) for counted, predicted in pairs if predicted is not None]
    yield f"the bubbles are {min(apart):.0f} to {max(apart):.0f} percentage points larger"
    kept = {case["schedule"]: n12.live(case) for case in cases}
    assert kept["1F1B"] == [4, 3, 2, 1]
    assert kept["GPipe"] == kept["zero bubble"] == [8] * 4


@claims(NOTEBOOK)
def test_plans_on_two_gpus():
    found = n12.speeds(runs.recorded("h100/12-splits-x2"))
    copies, tensors, stages = (found[plan] for plan in ("DDP", "TP", "PP, 8 parts"))
    assert max(found.values(), key=lambda row: row["images_per_s"]) is copies
    assert max(found.values(), key=lambda row: row["peak_bytes"]) is copies
    assert min(found.values(), key=lambda row: row["peak_bytes"]) is stages
    yield f"with {copies['images_per_s']:.0f} images per second"
    yield f"the most memory, {copies['peak_bytes'] / 1e9:.0f} GB"
    yield f"send {tensors['sent_bytes'] / copies['sent_bytes']:.1f} times as much"
    yield f"they still reach {tensors['images_per_s']:.0f} images per second"
    yield f"holds least, {stages['peak_bytes'] / 1e9:.1f} GB"
    yield f"sends next to nothing, {stages['sent_bytes'] / 1e6:.0f} MB"
    ranks = log.read(runs.recorded("h100/12-splits-x2")).ranks
    measured = statistics.mean(m.value for rank in ranks for m in rank.measures)
    sold = n12.giants.rates(1).flops / n12.giants.MFU / 1e12
    yield f"{measured:.0f} TFLOP/s each, not to the {sold:.0f}"
    of = [f"{100 * row['mfu'] * measured / sold:.0f} %" for row in (copies, tensors, stages)]
    yield f"reached {of[0]} (DDP), {of[1]} (TP) and {of[2]} (PP)"


@claims(NOTEBOOK)
def test_long_sequences_gain():
    cases = log.read(runs.recorded("cpu/12-cpu-ring-x2")).cases.values()
    ms = {(case["way"], case["tokens"]): statistics.median(case["ms"]) for case in cases}
    gains = {key: ms["whole", key[1]] / value for key, value in ms.items() if key[0] != "whole"}
    both = {round(gains[way, 2048], 1) for way in ("ring", "Ulysses")}
    assert len(both) == 1
    yield f"With 2,048 tokens both are {both.pop()} times as fast"
    assert all(gain < 1 for (_, tokens), gain in gains.items() if tokens <= 512)
    assert max(case.get("away", 0) for case in cases) < 1e-6


@claims(NOTEBOOK)
def test_predictions_are_as_far_off_as_told():
    off = {"memory": {}, "messages": {}}
    for name, case in log.read(runs.recorded("cpu/12-cpu-predicted")).cases.items():
        off["memory"][name] = 100 * (max(case["predicted_bytes"]) / max(case["peak_bytes"]) - 1)
        off["messages"][name] = 100 * (max(case["predicted_sent"]) / max(case["sent_bytes"]) - 1)
    yield f"messages are predicted to within {max(map(abs, off['messages'].values())):.1f} %"
    others = [abs(value) for name, value in off["memory"].items() if "FSDP" not in name]
    yield f"and memory to within {max(others):.1f} %, except for FSDP"
    assert all(value < -9.5 for name, value in off["memory"].items() if "FSDP" in name)


@claims(NOTEBOOK)
def test_giants_saw_as_many_tokens_as_told():
    giants = n12.giants.giants()
    for name, told in (("bloom", "{:.0f} tokens for each"), ("llama_70b", "Llama 3 70B {:.0f}")):
        yield told.format(giants[name].trained_tokens / giants[name].parameters)
    cells = n12.cells(runs.recorded("cpu/12-map"))
    plan = next(iter(cells.values()))["bloom", 256]["plan"]
    assert (plan["tensor"], plan["stages"]) == (4, 8)
    for network in cells.values():
        assert all(cell["plan"]["tensor"] <= 8 for cell in network.values() if cell["plan"])
