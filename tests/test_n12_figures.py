"""Chapter 12's experiments send what they must, and its figures say what their logs say."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from logs import with_cases
from made import in_one_job
from programs import experiment_file, load

mpl.use("Agg")

from dlojz.chapters import n12_model_parallel as n12
from dlojz.chapters.n12_model_parallel import figures, spread
from dlojz.course import UserError
from dlojz.runs import log

REFERENCE = Path(__file__).parent.parent / "reference" / "cpu"
SCHEDULES = REFERENCE / "12-cpu-schedules-x4"
SPLITS = REFERENCE / "12-cpu-splits-x2"
PREDICTED = REFERENCE / "12-cpu-predicted.jsonl"
RING = REFERENCE / "12-cpu-ring-x2"


@pytest.fixture(scope="module")
def two():
    """The folders of three experiments, each in two processes."""
    flags = {
        "schedules": "--parts 4 --wait 1",
        "splits": "--rounds 2 -b 16",
        "ring": "--lengths 64 --rounds 2",
    }
    programs = {
        name: (experiment_file(f"{name}.py"), words.split()) for name, words in flags.items()
    }
    return in_one_job(programs, n_gpu=2)


def title(axes):
    return np.ravel(axes)[0].figure.get_suptitle()


def actions(run, name):
    return [[a[:3] for a in rank.cases[name]["actions"]] for rank in log.read(run).ranks]


def test_each_schedule_has_its_order(two):
    first, last = actions(two["schedules"], "1F1B, 4 parts")
    assert [kind for kind, *_ in first] == list("FFBFBFBB")
    assert [kind for kind, *_ in last] == list("FBFBFBFB")
    first, _ = actions(two["schedules"], "GPipe, 4 parts")
    assert [kind for kind, *_ in first] == list("FFFFBBBB")
    for rank in actions(two["schedules"], "zero bubble, 4 parts"):
        assert sorted(kind for kind, *_ in rank) == list("F" * 8 + "I" * 8 + "W" * 8)


def test_gpipe_keeps_all_parts_and_1f1b_no_more_than_stages_follow(two):
    cases = {case["schedule"]: case for case in figures._schedules(two["schedules"])}
    assert n12.live(cases["GPipe"]) == [4, 4]
    assert n12.live(cases["1F1B"]) == [2, 1]


def test_all_plans_do_the_same_steps_and_send_what_was_computed(two):
    ranks, means = log.read(two["splits"]).ranks, {}
    for name in ranks[0].cases:
        cases = [rank.cases[name] for rank in ranks]
        for case in cases:
            assert case["sent_bytes"] == pytest.approx(case["expected_bytes"], rel=1e-9), name
        losses = [case["losses"] for case in cases if case["losses"]]
        if " x " not in name:
            means[name] = np.mean(losses, axis=0)
    for name, found in means.items():
        assert found == pytest.approx(means["DDP"], rel=1e-5), name


def test_tensor_parallel_blocks_exchange_twice_in_each_pass(two):
    cases, layers = log.read(two["splits"]).cases, 8
    assert cases["TP"]["calls"]["all_reduce"][0] == 4 * layers
    calls = {op: number for op, (number, _) in cases["TP, sequence parallel"]["calls"].items()}
    assert calls == {
        "all_gather": 4 * layers + 2,
        "reduce_scatter": 4 * layers,
        "all_reduce": 1,  # the gradients of all norms
    }
    halves = [cases[name]["bytes"]["parameters"] for name in ("FSDP2", "TP", "PP, 8 parts")]
    assert max(halves) < 0.51 * cases["DDP"]["bytes"]["parameters"]


def test_divided_attention_has_the_gradients_of_the_whole(two):
    cases = log.read(two["ring"]).cases
    for name in ("ring, 64", "Ulysses, 64"):
        assert cases[name]["away"] < 1e-5
        assert cases[name]["output_away"] < 1e-5
    own = 4 * 32 * 32 * 4  # bytes of the keys of 32 tokens
    assert cases["ring, 64"]["sent_bytes"] == (3 * 2 - 2) * 2 * own
    assert cases["Ulysses, 64"]["sent_bytes"] == 8 * own / 2


def test_copies_in_float32_learn_what_16_bits_would_round_off():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = spread.Optimizer([weight], fused=False)
    for _ in range(30):  # each step of 1e-4 is less than half of what bfloat16 resolves at 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.grad is None
    assert (weight < 1).all()


def test_operations_are_those_of_six_for_each_weight_and_token():
    sizes = spread.Sizes(2, 64, 4, 256, 16, batch=3, inputs=8, outputs=8)
    weights = 2 * (4 * 64**2 + 2 * 64 * 256) + 2 * 64 * 8
    assert sizes.flops() == 6 * 3 * 16 * weights + 3 * 2 * 12 * 16**2 * 64


def test_a_bubble_is_the_time_without_actions():
    case = {"stages": 1, "parts": 1}
    case["actions"] = [[["F", 0, 0, 0, 1, 1], ["B", 0, 0, 3, 4, 0]], [["F", 1, 0, 1, 2, 1]]]
    case["actions"][1].append(["B", 1, 0, 2, 3, 0])
    assert n12.bubble(case) == (0.5, 0.5)
    case["actions"][1].append(["W", 1, 0, 3, 4, 0])
    assert n12.bubble(case) == (0.375, None)


def test_the_time_line_has_a_row_for_each_process_and_names_the_bubbles():
    axes = n12.plot_schedules(SCHEDULES)
    assert title(axes).startswith("4 processes, 8 parts: the bubble of GPipe 29%, 1F1B 30%")
    assert [len(ax.get_yticks()) for ax in axes] == [4] * 4
    assert axes[2].get_yticklabels()[0].get_text() == "stages 0, 4"
    assert n12.gpipe_bubble(SCHEDULES) == pytest.approx(0.292, abs=0.001)
    table = n12.bubbles(SCHEDULES)
    assert ("GPipe", "8", "1,358.3 ms", "29.2%", "27.3%", "8, 8, 8, 8") in table.rows


def test_live_activations_are_drawn_for_each_process():
    ax = n12.plot_live(SCHEDULES, 16)
    assert title(ax) == "GPipe keeps all 16 parts, and 1F1B 4 in the first process, 1 in the last"


def test_plans_are_compared_by_speed_memory_and_messages():
    found, axes = n12.speeds(SPLITS), n12.plot_splits(SPLITS)
    best = max(found, key=lambda name: found[name]["mfu"])
    assert title(axes).startswith(f"{best}: {found[best]['mfu']:.0%} MFU")
    rows = {row[0]: row for row in n12.splits(SPLITS).rows}
    assert rows["TP"][4:6] == ("8.39 MB", "8.39 MB")
    assert rows["TP"][-2:] == ("-", "-"), "a processor has no kernels to wait for"


def test_messages_stand_beside_the_work():
    axes = n12.plot_sequences(RING)
    cases = log.read(RING).cases.values()
    ring = [case for case in cases if case["way"] == "ring"]
    drawn = axes[1].lines[0].get_ydata()
    told = [100 * np.median(np.divide(c["messages_ms"], c["compute_ms"])) for c in ring]
    assert drawn == pytest.approx(told)
    assert "as fast as the whole on one" in title(axes)
    assert n12.sequences(RING).rows[0][:2] == ("256", "whole")


def test_predictions_stand_beside_what_the_fullest_process_measured(tmp_path):
    case = {"peak_bytes": [100e6, 200e6], "predicted_bytes": [210e6]}
    case |= {"sent_bytes": [50e6], "predicted_sent": [25e6, 50e6]}
    table = n12.errors(with_cases(tmp_path / "a.jsonl", {"TP": case}))
    assert table.rows == [("TP", "200 MB", "210 MB", "+5.0%", "50 MB", "50 MB", "+0.0%")]
    assert len(n12.errors(PREDICTED)) == 8


def test_a_run_of_another_experiment_is_refused():
    with pytest.raises(UserError, match=r"expected a run of schedules\.py"):
        n12.plot_schedules(SPLITS)


def test_divisions_are_planned_in_the_words_of_the_estimate(monkeypatch):
    divisions = load("divisions")
    monkeypatch.setattr(divisions.idr_torch, "size", 2, raising=False)
    args = type("Args", (), divisions.ON_CPU)
    found = [(p.sharding, p.tensor, p.stages, p.parts, p.batch) for p in divisions.plans(args)]
    assert found[0] == ("ddp", 1, 1, 1, 2)
    assert found[2:] == [("ddp", 2, 1, 1, 4), ("ddp", 1, 2, 4, 4)]
    monkeypatch.setattr(divisions.idr_torch, "size", 4)
    _, _, tensors, stages = divisions.plans(args)
    assert (tensors.tensor, tensors.sharding, tensors.batch, tensors.replicas) == (2, "fsdp", 2, 2)
    assert (stages.stages, stages.batch) == (4, 4)
