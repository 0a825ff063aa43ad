"""What notebook 12 says of recordings is what they hold."""

import matplotlib as mpl

mpl.use("Agg")

import statistics

from claims import claims

from dlojz.chapters import n12_model_parallel as n12
from dlojz.runs import log, recorded

NOTEBOOK = "12_model_parallel"


@claims(NOTEBOOK)
def test_bubbles_are_little_larger_than_predicted():
    cases = n12.figures._schedules(recorded("cpu/12-cpu-schedules-x4"), 8)
    pairs = [n12.bubble(case) for case in cases]
    apart = [100 * (counted - predicted) for counted, predicted in pairs if predicted is not None]
    yield f"the bubbles are {min(apart):.0f} to {max(apart):.0f} percentage points larger"
    kept = {case["schedule"]: n12.live(case) for case in cases}
    assert kept["1F1B"] == [4, 3, 2, 1]
    assert kept["GPipe"] == kept["zero bubble"] == [8] * 4


@claims(NOTEBOOK)
def test_real_launches_make_bubbles_longer():
    cases = n12.figures._schedules(recorded("h200/12-schedules-x4"), 8)
    waited = {case["schedule"]: n12.bubble(case)[0] for case in cases}
    yield f"1F1B waited for {100 * waited['1F1B']:.0f} % of the time"
    ends = {
        case["schedule"]: max(max(a[4] for a in rank) for rank in case["actions"]) for case in cases
    }
    assert max(ends, key=ends.get) == "zero bubble"


@claims(NOTEBOOK)
def test_plans_on_four_gpus():
    found = n12.speeds(recorded("h200/12-splits-x4"))
    copies, shards, more = (found[plan] for plan in ("DDP", "FSDP2", "FSDP2, 1.5 x images"))
    tensors, sequence, stages, longer = (
        found[plan]
        for plan in ("TP", "TP, sequence parallel", "PP, 8 parts", "PP, 16 parts, 2 x images")
    )
    both = [found[plan] for plan in ("TP x FSDP2", "TP x PP, 8 parts")]
    assert max(found.values(), key=lambda row: row["images_per_s"]) is copies
    assert sorted(found.values(), key=lambda row: row["images_per_s"])[:2] == both[::-1]
    assert min(found.values(), key=lambda row: row["peak_bytes"]) is both[1]
    yield f"need {copies['peak_bytes'] / 1e9:.0f} GB, for {copies['images_per_s']:.0f} images"
    yield f"(FSDP2) need {shards['peak_bytes'] / 1e9:.0f} GB"
    yield f"as fast as copies: {more['images_per_s']:.0f} images per second"
    held = (tensors["peak_bytes"] / 1e9, sequence["peak_bytes"] / 1e9)
    yield "{:.0f} GB, or {:.0f} with sequence parallelism".format(*held)
    yield f"send {tensors['sent_bytes'] / copies['sent_bytes']:.1f} times as much"
    yield f"No computation hides these messages: {tensors['images_per_s']:.0f} images per second"
    yield f"needs {stages['peak_bytes'] / 1e9:.0f} GB"
    yield f"sends next to nothing, {stages['sent_bytes'] / 1e6:.0f} MB"
    yield f"are bubble: {stages['images_per_s']:.0f} images per second"
    yield f"it is 3 of 19, for {longer['images_per_s']:.0f}"
    yield "here: {:.0f} and {:.0f} images per second".format(*(row["images_per_s"] for row in both))
    yield f"TP x PP holds least, {both[1]['peak_bytes'] / 1e9:.0f} GB"
    yield f"made its step {both[1]['busy_ms'] / both[1]['step_ms']:.1f} times as long"
    assert tensors["busy_ms"] < tensors["step_ms"], "profiled, it took no longer"
    assert stages["sent_bytes"] < tensors["sent_bytes"] / 100
    waits = [row["exposed_ms"] / row["step_ms"] for row in (tensors, stages)]
    assert 0.34 > waits[0] > waits[1] > 0.28, "a third of a step, and nearly as long"
    yield f"only {stages['images_per_s'] / tensors['images_per_s']:.1f} times as fast"
    ranks = log.read(recorded("h200/12-splits-x4")).ranks
    measured = statistics.mean(m.value for rank in ranks for m in rank.measures)
    sold = n12.giants.rates(1).flops / n12.giants.MFU / 1e12
    yield f"{measured:.0f} TFLOP/s each, not to the {sold:.0f}"
    assert copies["mfu"] > 0.6
    waits = [int(row[-2].strip("%")) for row in n12.splits(recorded("h200/12-splits-x4")).rows]
    assert max(waits) < 100, "of a profiled step, which may take longer"


@claims(NOTEBOOK)
def test_the_map_is_near_what_was_measured():
    off = {
        row[0]: int(row[-1].strip("%")) for row in n12.against(recorded("h200/12-splits-x4")).rows
    }
    both = off.pop("TP x FSDP2")
    yield f"The map is right to within {max(map(abs, off.values()))} %"
    yield f"and is {both} % too fast"
    two = {
        row[0]: int(row[-1].strip("%")) for row in n12.against(recorded("h100/12-splits-x2")).rows
    }
    yield f"On two H100 it was {min(two.values())} to {max(two.values())} % too fast"
    assert max(two, key=two.get).startswith("PP")
    assert len(off) + len(two) >= 10, "points of the map"


@claims(NOTEBOOK)
def test_long_sequences_gain():
    cases = log.read(recorded("h200/12-ring-x4")).cases.values()
    ms = {(case["way"], case["tokens"]): statistics.median(case["ms"]) for case in cases}
    ring, ulysses = (ms["whole", 65536] / ms[way, 65536] for way in ("ring", "Ulysses"))
    yield f"then {ring:.1f} times as fast as one, and {ulysses:.1f} times with Ulysses"
    shares = {
        case["tokens"]: statistics.median(case["messages_ms"])
        / statistics.median(case["compute_ms"])
        for case in cases
        if case["way"] == "ring"
    }
    told = (100 * shares[8192], 100 * shares[65536])
    yield "{:.0f} % of the work with 8,192 tokens, are {:.0f} % with 65,536".format(*told)


@claims(NOTEBOOK)
def test_predictions_are_as_far_off_as_told():
    off = {"memory": {}, "messages": {}}
    for name, case in log.read(recorded("h100/12-predicted")).cases.items():
        off["memory"][name] = 100 * (max(case["predicted_bytes"]) / max(case["peak_bytes"]) - 1)
        off["messages"][name] = 100 * (max(case["predicted_sent"]) / max(case["sent_bytes"]) - 1)
    yield f"messages are predicted to within {max(map(abs, off['messages'].values())):.1f} %"
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
    cells = n12.cells(recorded("cpu/12-map"))
    plan = next(iter(cells.values()))["bloom", 256]["plan"]
    assert (plan["tensor"], plan["stages"]) == (4, 8)
    for network in cells.values():
        assert all(cell["plan"]["tensor"] <= 8 for cell in network.values() if cell["plan"])
