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
    copies, shards, more = (found[plan] for plan in ("DDP", "FSDP2", "FSDP2, 1.5 x images"))
    tensors, stages, longer = (
        found[plan] for plan in ("TP", "PP, 8 parts", "PP, 16 parts, 2 x images")
    )
    alike = [row for name, row in found.items() if " x images" not in name]
    assert max(alike, key=lambda row: row["peak_bytes"]) is copies
    assert max(alike, key=lambda row: row["images_per_s"]) is copies
    assert min(alike, key=lambda row: row["peak_bytes"]) is stages
    assert min(alike, key=lambda row: row["images_per_s"]) is stages
    yield f"memory, {copies['peak_bytes'] / 1e9:.0f} GB, for {copies['images_per_s']:.0f} images"
    yield f"(FSDP2) need {shards['peak_bytes'] / 1e9:.0f} GB"
    yield f"as fast as copies: {more['images_per_s']:.0f} images per second"
    yield f"send {tensors['sent_bytes'] / copies['sent_bytes']:.1f} times as much"
    yield f"they still reach {tensors['images_per_s']:.0f} images per second"
    yield f"holds least, {stages['peak_bytes'] / 1e9:.0f} GB"
    yield f"sends next to nothing, {stages['sent_bytes'] / 1e6:.0f} MB"
    yield f"with {stages['images_per_s']:.0f} images per second"
    yield f"a seventeenth, for {longer['images_per_s']:.0f}"
    ranks = log.read(runs.recorded("h100/12-splits-x2")).ranks
    measured = statistics.mean(m.value for rank in ranks for m in rank.measures)
    sold = n12.giants.rates(1).flops / n12.giants.MFU / 1e12
    yield f"{measured:.0f} TFLOP/s each, not to the {sold:.0f}"
    assert copies["mfu"] > 0.55, "the goal"


@claims(NOTEBOOK)
def test_the_map_is_too_fast():
    off = [row[-1] for row in n12.against(runs.recorded("h100/12-splits-x2")).rows]
    percent = sorted(int(text.strip("+%")) for text in off)
    yield f"The map is {percent[0]} to {percent[-1]} % too fast, most of all for stages"


@claims(NOTEBOOK)
def test_long_sequences_gain():
    cases = log.read(runs.recorded("h100/12-ring-x2")).cases.values()
    ms = {(case["way"], case["tokens"]): statistics.median(case["ms"]) for case in cases}
    gains = {round(ms["whole", 65536] / ms[way, 65536], 1) for way in ("ring", "Ulysses")}
    assert len(gains) == 1
    yield f"Two GPUs are then {gains.pop()} times as fast as one"
    shares = {
        case["tokens"]: statistics.median(case["messages_ms"])
        / statistics.median(case["compute_ms"])
        for case in cases
        if case["way"] == "ring"
    }
    assert abs(shares[8192] - 1 / 3) < 0.02
    yield f"a third of the work with 8,192 tokens, are {100 * shares[65536]:.0f} % with 65,536"


@claims(NOTEBOOK)
def test_predictions_are_as_far_off_as_told():
    off = {"memory": {}, "messages": {}}
    for name, case in log.read(runs.recorded("h100/12-predicted")).cases.items():
        off["memory"][name] = 100 * (max(case["predicted_bytes"]) / max(case["peak_bytes"]) - 1)
        off["messages"][name] = 100 * (max(case["predicted_sent"]) / max(case["sent_bytes"]) - 1)
    yield f"Messages are predicted to within {max(map(abs, off['messages'].values())):.1f} %"
    others = [abs(value) for name, value in off["memory"].items() if "FSDP" not in name]
    yield f"and memory to within {max(others):.1f} %, except for FSDP"
    shards = [value for name, value in off["memory"].items() if "FSDP" in name]
    assert min(shards) > 0
    yield f"there up to {max(shards):.0f} % too much"


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
