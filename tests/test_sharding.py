"""Experiments and figures of notebook 11: sharding, padding, checkpointing, what fits."""

import json
import math
import os
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from claims import claims
from logs import with_cases, write_log
from made import in_one_job, torchrun
from programs import experiment_file, load, run_main
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils import flop_counter

from dlojz import course, runs
from dlojz.chapters.n11_fsdp import figures
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.figures import plans as memory
from dlojz.runs import log
from dlojz.runs.folder import events_file
from dlojz.training import imports, models

REPOSITORY = Path(__file__).parent.parent
ZERO3, ZERO2, ROOT = "FSDP2", "FSDP2, kept whole after forward", "FSDP2, root only"
PARAMETERS = 809_354  # of the small model
BLOCK = 4 * 128 * 129 + 2 * 128 * 512 + 512 + 128 + 4 * 128  # of one of its four blocks


# Sharding, in two processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_twos():
    """The folders of experiments/sharding.py in two processes, each way and in two parts."""
    common = "-b 2 --rounds 1"
    flags = {"two": f"{common} --steps 3", "parts": f"{common} --compare parts --steps 2"}
    program = experiment_file("sharding.py")
    return in_one_job({name: (program, words.split()) for name, words in flags.items()}, n_gpu=2)


@pytest.fixture
def two(in_twos):
    return in_twos["two"]


def called(run, way):
    """Each pass's operations with their bytes, in the order of their calls."""
    calls = log.read(run).cases[way]["collectives"]
    by_pass = {"forward": [], "backward": []}
    for call in calls:
        by_pass[call["phase"]].append((call["op"], call["bytes"]))
    return by_pass


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [
        ("DDP", {}, {"all_reduce": 2}),
        (ZERO3, {"all_gather": 5}, {"all_gather": 4, "reduce_scatter": 5}),
        (ZERO2, {"all_gather": 5}, {"reduce_scatter": 5}),
        (ROOT, {"all_gather": 1}, {"reduce_scatter": 1}),
    ],
)
def test_each_way_calls_its_own_collectives(two, way, forward, backward):
    found = called(two, way)
    assert Counter(op for op, _ in found["forward"]) == forward
    assert Counter(op for op, _ in found["backward"]) == backward


def test_the_root_is_gathered_first_and_each_block_when_it_is_needed(two):
    found = called(two, ZERO3)
    (_, root), *blocks = found["forward"]
    assert [size for _, size in blocks] == 4 * [4 * BLOCK]
    assert root >= 4 * (PARAMETERS - 4 * BLOCK), "padded"
    scattered = [size for op, size in found["backward"] if op == "reduce_scatter"]
    assert scattered == 4 * [4 * BLOCK] + [root], "the root's come last"
    assert called(two, ROOT)["forward"] == [("all_gather", root + 16 * BLOCK)], "all at once"
    summed = sum(size for _, size in called(two, "DDP")["backward"])
    assert summed == 4 * PARAMETERS


def test_each_way_trains_the_same_model(two):
    cases = log.read(two).cases
    for case in cases.values():
        assert case["losses"] == pytest.approx(cases["DDP"]["losses"], rel=1e-6)
        assert case["gradient_away"] < 1e-6
    assert len(set(cases["DDP"]["losses"])) == 3, "it trains"


def test_a_process_holds_its_share_and_a_block_at_a_time(two):
    ranks = log.read_ranks(two)
    assert len(ranks) == 2
    whole, root = 4 * PARAMETERS, called(two, ZERO3)["forward"][0][1]
    for way in (ZERO3, ZERO2, ROOT):
        shares = [rank.cases[way]["bytes"] for rank in ranks]
        assert sum(share["parameters"] for share in shares) == whole, "each number in one process"
        for share in shares:
            assert share["gradients"] == share["parameters"]
            assert share["optimizer"] == pytest.approx(2 * share["parameters"], rel=1e-3)
            # The next block's weights are on their way in the backward pass.
            most = root + (2 * 4 if way == ZERO3 else 16) * BLOCK
            assert share["gathered"] == most
    for rank in ranks:
        held = rank.cases["DDP"]["bytes"]
        assert (held["parameters"], held["gradients"], held["gathered"]) == (whole, whole, 0)


def test_what_is_drawn_of_a_run_is_in_its_log(two):
    rows = {row[0]: row[1:] for row in figures.collectives(two).rows}
    assert rows["DDP"][:2] == ("nothing", "2 all-reduces")
    assert rows[ZERO3][:2] == ("5 all-gathers", "4 all-gathers, 5 reduce-scatters")
    assert rows[ROOT][:2] == ("1 all-gather", "1 reduce-scatter")
    assert rows[ZERO3][-1] == "x 1.50"
    peaks = figures.held(two)
    assert peaks["DDP, process 0"].bytes == pytest.approx(16 * PARAMETERS, rel=1e-3)
    assert peaks[f"{ZERO3}, process 1"].bytes < 0.7 * peaks["DDP, process 1"].bytes
    ax = figures.plot_held(two)
    assert "without activations" in ax.figure.get_supxlabel()
    assert "(MB)" in ax.get_xlabel()
    assert [row[0] for row in figures.equality(two).rows] == ["DDP", ZERO3, ZERO2, ROOT]


# Copies of shards, and a batch in parts ----------------------------------------------------------


def test_a_ring_of_all_leaves_each_node_once_and_rings_of_a_shard_with_each_message():
    n, nodes = 8, 2

    def crossing(ring, sent):
        """What goes from the first node to the other one if each member sends to the next."""
        return sum(sent for a, b in zip(ring, ring[1:] + ring[:1], strict=True) if a < 4 <= b)

    def call(group, members):
        return {"op": "all_gather", "bytes": 800, "group": group, "members": members}

    own = n // nodes
    for group, rings in (
        ("all", [[*range(n)]]),
        ("shards", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("copies", [[rank, rank + own] for rank in range(own)]),
    ):
        sent = (len(rings[0]) - 1) / len(rings[0]) * 800
        case = {"collectives": [call(group, len(rings[0]))]}
        inside, outside = figures.between(case, n, nodes)
        assert outside == sum(crossing(ring, sent) for ring in rings)
        assert inside + outside == own * sent, "each process of the node sends as much"


def test_hybrid_sharding_sends_least_between_nodes_and_holds_half():
    run = runs.recorded("cpu/11-nodes-x4")
    outside = {way: between for way, (_, between) in figures.sent(run).items()}
    assert outside["HSDP, 2 copies"] < outside["DDP"] < outside["FSDP2"]
    cases = log.read(run).cases
    calls = Counter((c["op"], c["group"]) for c in cases["HSDP, 2 copies"]["collectives"])
    assert calls[("all_reduce", "copies")] == calls[("reduce_scatter", "shards")] == 5
    held = {way: case["bytes"]["parameters"] for way, case in cases.items()}
    assert held["HSDP, 2 copies"] == pytest.approx(2 * held["FSDP2"], rel=0.03)
    assert all(case["gradient_away"] < 1e-5 for case in cases.values())
    ax = figures.plot_sent(run)
    assert [text.get_text() for text in ax.get_yticklabels()] == [*cases]


def test_four_processes_train_two_copies_in_two_shards(tmp_path):
    flags = "--compare nodes -b 2 --steps 1 --rounds 1".split()
    environment = os.environ | {"DLOJZ_RUN": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = torchrun(experiment_file("sharding.py"), flags, 4)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    recorded = log.read(runs.recorded("cpu/11-nodes-x4")).cases
    for name, case in log.read(tmp_path).cases.items():
        assert case["gradient_away"] < 1e-5
        found, expected = (
            [(c["op"], c["group"], c["phase"], c["bytes"]) for c in each["collectives"]]
            for each in (case, recorded[name])
        )
        assert found == expected


@pytest.fixture
def in_parts(in_twos):
    return in_twos["parts"]


def test_one_exchange_saves_reduce_scatters_and_keeps_whole_gradients(in_parts):
    each, once = "FSDP2, in 2 parts", "FSDP2, in 2 parts, one exchange"
    rows = {row[0]: row[1:3] for row in figures.collectives(in_parts).rows}
    assert rows[each] == ("10 all-gathers", "8 all-gathers, 10 reduce-scatters")
    assert rows[once] == ("10 all-gathers", "8 all-gathers, 5 reduce-scatters")
    cases = log.read(in_parts).cases
    kept = {way: case["bytes"]["unreduced"] for way, case in cases.items()}
    assert kept[once] == 4 * PARAMETERS
    assert kept[each] == kept["DDP, in 2 parts"] == 0
    assert all(case["gradient_away"] < 1e-5 for case in cases.values())
    assert "unreduced" in figures.held(in_parts)[f"{once}, process 0"].parts
    with pytest.raises(UserError, match="no copies"):
        figures.plot_sent(in_parts)


def test_the_norm_of_all_gradients_is_that_of_ddp_and_one_of_shards_is_smaller(in_parts):
    whole, *shards = ([*map(float, row[1:])] for row in figures.norms(in_parts).rows)
    assert whole[0] == whole[1]
    for norm, own in shards:
        assert norm == pytest.approx(whole[0], rel=1e-4)
        assert own < norm
    squares = [
        rank.cases["FSDP2, in 2 parts"]["own_norm"] ** 2 for rank in log.read_ranks(in_parts)
    ]
    assert sum(squares) ** 0.5 == pytest.approx(whole[0], rel=1e-4)


def test_copies_hold_more_and_pad_less():
    plans = figures.predicted(runs.recorded("cpu/11-meshes"))
    one, many = (plans[name] for name in (
        "1,024 GPUs, FSDP, checkpointing",
        "1,024 GPUs, FSDP, 64 copies of 16 shards, checkpointing",
    ))  # fmt: skip
    assert many.parts["parameters"] == pytest.approx(64 * one.parts["parameters"], rel=0.3)
    assert many.parts["gathered"] < 0.2 * one.parts["gathered"]
    plan = estimate.Plan("vit_tiny", 10, "fsdp", 2, 224, "off", "fp32", copies=4)
    trainer = imports.trainer(course.solution("11"))
    with pytest.raises(UserError, match="equal numbers"):
        estimate.check(trainer, plan)


def test_what_the_host_keeps_is_copied_three_times_a_step():
    copy = runs.recorded("h100/01-tensors")
    fits = runs.recorded("cpu/11-fits")
    rows = {row[0]: row[1:] for row in figures.offloaded(fits, copy).rows}
    parameters = next(iter(log.read(fits).cases.values()))["parameters"]
    *_, copied, _ = rows["2 GPUs, FSDP, checkpointing"]
    assert float(copied.split()[0]) == pytest.approx(6 * parameters / 1e9, rel=0.01)
    assert "DDP" not in " ".join(rows)
    with pytest.raises(UserError, match="no copy"):
        figures.offloaded(fits, fits)


@claims("11b_hybrid")
def test_what_notebook_11b_says_of_shards_on_the_host_is_so():
    cases = log.read(runs.recorded("h200/11-offload-x2")).cases
    here, offloaded = (cases[name] for name in ("FSDP2", "FSDP2, offloaded"))
    copied = 3 * here["bytes"]["parameters"]
    seconds = copied / figures._copy_speed(runs.recorded("h100/01-tensors"))
    ms, longer = (statistics.median(case["step_ms"]) for case in (here, offloaded))
    yield f"a step takes {ms:.0f} ms. Each of them would copy {copied / 1e9:.1f} GB"
    yield f"which is {seconds:.2f} s"
    yield f"**{longer:.0f} ms, {longer / ms:.1f} times as long.**"
    yield f"explain a tenth of the {longer - ms:.0f} ms more"
    assert 1000 * seconds == pytest.approx((longer - ms) / 10, rel=0.1)
    peaks = (case["peak_bytes"] / 1e9 for case in (here, offloaded))
    yield "peak fell from {:.1f} to {:.1f} GB".format(*peaks)


@claims("11b_hybrid")
def test_what_notebook_11b_says_of_two_nodes_is_so():
    sent = figures.sent(runs.recorded("cpu/11-nodes-x4"))
    ddp, fsdp2, hsdp = (sent[way][1] for way in ("DDP", "FSDP2", "HSDP, 2 copies"))
    whole = ddp / (2 * 3 / 4)
    yield f"All gradients together take {whole / 1e6:.2f} MB"
    yield f"to the next one: {ddp / 1e6:.2f} MB"
    yield f'predict(\\"11b between\\", ratio={2 * (whole / 2) / ddp:.2f})'
    assert hsdp / ddp == pytest.approx(2 / 3, rel=0.02)
    assert fsdp2 / ddp == pytest.approx(1.5, rel=0.02)
    assert max(sent, key=lambda way: sent[way][0]) == "HSDP, 2 copies"
    yield "less than half of FSDP2's bytes, and two thirds of DDP's"
    assert hsdp < fsdp2 / 2
    ddp, fsdp2, _ = (sum(sent) for sent in figures.sent(runs.recorded("h200/11-nodes-x4")).values())
    assert fsdp2 == pytest.approx(ddp, rel=0.001), "as much as DDP"
    cases = log.read(runs.recorded("h200/11-nodes-x4")).cases
    ms = [statistics.median(cases[way]["step_ms"]) for way in ("FSDP2", "HSDP, 2 copies")]
    yield "took {:.0f} ms with FSDP2, and {:.0f} with HSDP".format(*ms)


def way(peak_bytes=None, **more):
    """A case of experiments/sharding.py on two processes."""
    held = {"parameters": 1e9, "gradients": 1e9, "optimizer": 2e9, "gathered": 0}
    calls = [{"op": "all_reduce", "bytes": 4e9, "phase": "backward", "begin_ms": 0, "ms": 1}]
    case = {"bytes": held, "collectives": calls, "losses": [1.0, 2.0], "gradient_away": 0.0}
    case |= {"step_ms": [3.0], "backward_ms": [0, 1]} | more
    return case | ({"peak_bytes": peak_bytes} if peak_bytes else {})


def test_on_a_gpu_the_rest_of_the_peak_is_activations(tmp_path):
    run = with_cases(tmp_path / "s.jsonl", {"DDP": way(9e9)})
    assert figures.held(run)["DDP, process 0"].parts["activations"] == 5e9
    ax = figures.plot_held(run)
    assert "all the rest of the peak" in ax.figure.get_supxlabel()
    assert "9 GB" in ax.texts[0].get_text()


def trained(folder, held, peak_bytes=None):
    """The logs of the trainer in two processes that hold as much."""
    memory = {"device_peak_bytes": peak_bytes} if peak_bytes else {"process_peak_bytes": 9e9}
    share = {"when": "share", "placements": {}, "held": held, "whole": held, "units": 0, "again": 0}
    for rank in (0, 1):
        file = events_file(folder, rank)
        write_log(file, 0, rank=rank, size=2, window=None, evidence=share, memory=memory)
    return folder


def test_what_the_trainer_held_is_drawn_by_process(tmp_path):
    whole = {"parameters": 8e6, "gradients": 8e6, "optimizer": 16e6}
    before = trained(tmp_path / "before", whole)
    after = trained(tmp_path / "after", {part: size / 2 for part, size in whole.items()})
    found = figures.trained([before, after], ["DDP", "FSDP2"])
    assert [*found] == [f"{way}, process {rank}" for way in ("DDP", "FSDP2") for rank in (0, 1)]
    assert [peak.bytes for peak in found.values()] == [32e6, 32e6, 16e6, 16e6]
    ax = figures.plot_trained([before, after], ["DDP", "FSDP2"])
    assert "without activations" in ax.figure.get_supxlabel(), "a process's peak is not theirs"
    assert [text.get_text().strip() for text in ax.texts] == 2 * ["32 MB"] + 2 * ["16 MB"]
    on_gpu = trained(tmp_path / "gpu", whole, 40e6)
    peak = figures.trained([on_gpu], ["DDP"])["DDP, process 1"]
    assert peak.parts == whole | {"activations": 8e6}
    crashed = trained(tmp_path / "crashed", {})
    with pytest.raises(UserError, match="does not say what it holds; did it complete"):
        figures.trained([crashed], ["DDP"])


def test_in_a_ring_a_sharded_step_sends_half_as_much_again(tmp_path):
    gather = {"op": "all_gather", "bytes": 4e9, "begin_ms": 0, "ms": 1}
    scatter = gather | {"op": "reduce_scatter", "phase": "backward"}
    calls = [gather | {"phase": "forward"}, gather | {"phase": "backward"}, scatter]
    assert figures.exchanged(way(), 4) == {("backward", "all_reduce"): (1, 6e9)}
    found = figures.exchanged(way(collectives=calls), 4)
    assert found["forward", "all_gather"] == (1, 3e9)
    assert sum(size for _, size in found.values()) == 9e9


def test_losses_and_gradients_are_compared_with_the_first_way(tmp_path):
    other = way(losses=[1.0, 2.2], gradient_away=0.02, step_ms=[1.0, 9.0, 2.0])
    run = with_cases(tmp_path / "s.jsonl", {"DDP": way(), "other": other})
    assert figures.equality(run).rows[1] == ("other", "0.1", "0.02", "2.0 ms")


# Padding -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padding(tmp_path_factory):
    """The run of experiments/padding.py on up to 64 GPUs."""
    folder = tmp_path_factory.mktemp("padding")
    return run_main(experiment_file("padding.py"), folder, "--gpus", 2, 8, 64)


def test_a_dimension_that_is_too_short_is_padded_to_one_for_each_gpu(padding):
    for case in log.read(padding).cases.values():
        names = {row["name"]: row for row in case["parameters"] if row["part"] == "root"}
        for row in case["parameters"]:
            shape = [*row["shape"]]
            even = [dim for dim, size in enumerate(shape) if size % case["gpus"] == 0]
            cut = even[0] if case["placement"] != "dimension 0" and even else 0
            shape[cut] = math.ceil(shape[cut] / case["gpus"])  # of each part
            assert row["bytes"] == 4 * math.prod(row["shape"])
            assert row["held"] == 4 * math.prod(shape)
            assert row["gathered"] == case["gpus"] * row["held"]
        assert names["encoder.pos_embedding"]["shape"] == [1, 257, 1024]


def test_padding_is_drawn_by_placement_and_its_parameters_are_listed(padding):
    found = figures.padded(padding)
    assert {n: round(size / 2**20, 1) for n, size in found["dimension 0"].items()} == {
        2: 8.2,
        8: 14.3,
        64: 70.8,
    }
    assert {round(size / 2**20, 1) for size in found["an even dimension"].values()} == {7.2}
    rows = {row[0]: row[1:] for row in figures.padding(padding).rows}
    assert rows["encoder.pos_embedding (root)"] == (
        *("[1, 257, 1024]", "1.05 MB", "2.11 MB", "8.42 MB", "67.4 MB", "1.05 MB"),
    )
    assert not any("(block)" in name for name in rows), "1024 is a multiple of 64"
    lines = figures.plot_padding(padding).lines
    assert [line.get_label() for line in lines] == ["dimension 0", "an even dimension"]
    assert lines[0].get_ydata()[-1] == pytest.approx(74.25, abs=0.01)


def test_fsdp2_refuses_to_cut_another_dimension_unevenly():
    """If this fails, a new version of PyTorch can do it: rewrite that part of notebook 11."""
    layer = torch.nn.Linear(3200, 1, bias=False)
    with estimate.group(1024) as mesh, pytest.raises(NotImplementedError, match="uneven sharding"):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))


# Checkpointing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recompute(tmp_path_factory):
    """The run of experiments/recompute.py, with a small batch."""
    folder = tmp_path_factory.mktemp("recompute")
    return run_main(experiment_file("recompute.py"), folder, "-b", 2, "--rounds", 2)


def test_what_is_kept_is_less_and_the_gradients_are_the_same(recompute):
    cases = log.read(recompute).cases
    off, blocks, but_products = cases.values()
    assert blocks["kept_bytes"] < 0.2 * off["kept_bytes"]
    assert blocks["kept_bytes"] < but_products["kept_bytes"] < 0.8 * off["kept_bytes"]
    for case in cases.values():
        assert case["gradient_away"] < 1e-6
        assert case["gradient_bytes"] == 4 * PARAMETERS, "all else is freed by the backward pass"
        assert case["peak_bytes"] >= case["kept_bytes"]


def test_what_is_kept_is_what_autograd_saves(recompute):
    module = load("recompute")
    args = log.read(recompute).start["arguments"]
    for way in ("off", "blocks"):  # hooks do not see what a selective checkpoint keeps
        training, saved = training_of(module, way, args), {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = training.forward()
        assert loss.item() > 0
        weights = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
        weights.add(training.images.untyped_storage().data_ptr())
        total = sum(storage.nbytes() for at, storage in saved.items() if at not in weights)
        kept = log.read(recompute).cases[way]["kept_bytes"]
        states = 4 * torch.get_rng_state().nbytes * (way == "blocks")  # one for each block
        assert kept == pytest.approx(total + states, abs=1000), way


def training_of(module, way, arguments):
    """A Training of experiments/recompute.py with the arguments of a run."""
    args = type("Arguments", (), arguments)
    return module.Training(way, args, torch.device("cpu"))


def test_a_block_is_computed_again_up_to_what_was_saved_last(recompute):
    """Without this early stop it would be all of the forward pass: a third of the step."""
    cases, module = log.read(recompute).cases, load("recompute")
    off, blocks, but_products = (case["flops"] for case in cases.values())
    assert but_products == off, "no matrix product is computed again"
    tokens, width, mlp = 2 * 65, 128, 512
    again = 2 * tokens * (4 * width * width + width * mlp)  # not the second layer of the MLP
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_counter.flop_registry:
        again += 2 * 2 * tokens * 65 * width  # a processor's attention: counted in 2.15, not 2.11
    assert blocks - off == 4 * again
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        training = training_of(module, "blocks", log.read(recompute).start["arguments"])
        assert training.seen()["flops"] - off == 4 * (again + 2 * tokens * width * mlp)


def test_what_checkpointing_keeps_and_costs_is_drawn_beside_each_other(tmp_path):
    def case(kept, flops, *ms):
        return {"kept_bytes": kept, "peak_bytes": 9e9, "flops": flops, "step_ms": [*ms]}

    cases = {"off": case(8e9, 300, 10.0, 20.0, 10.0), "blocks": case(1e9, 390, 13.0, 26.0, 50.0)}
    run = with_cases(tmp_path / "r.jsonl", cases)
    assert figures.factors(run)["blocks"] == {"kept": 0.125, "operations": 1.3, "time": 1.3}
    row = figures.recomputed(run).rows[1]
    assert row == ("blocks", "1 GB", "9 GB", "x 1.30", "26.0 ms", "x 1.30")
    keeps, costs = figures.plot_recompute(run)
    assert [bar.get_width() for bar in keeps.patches] == [8000, 1000]
    assert [bar.get_width() for bar in costs.patches] == [1, 1.3, 1, 1.3]


# What fits ---------------------------------------------------------------------------------------


def test_a_prediction_from_equal_blocks_is_that_of_the_whole_model(train, tmp_path, monkeypatch):
    tiny = models.ViT(patch=8, layers=14, heads=2, width=64, mlp=256)
    monkeypatch.setitem(models.LARGER, "vit_tiny", tiny)
    flags = "--model vit_tiny --image-size 32 -b 4 --precision fp32 --gpus 8 --ways blocks".split()
    train(experiment_file("fits.py"), tmp_path, *flags)
    ((name, peak),) = figures.predicted(tmp_path).items()
    assert name == "8 GPUs, FSDP, checkpointing"
    trainer = imports.trainer(course.solution(course.CHAIN[-1]))
    (case,) = log.read(tmp_path).cases.values()
    whole = estimate.result(trainer, estimate.Plan(**case["plan"] | {"flags": ()}))
    assert peak.bytes == pytest.approx(memory.highest(whole)[1].bytes, rel=0.01)


def test_what_fits_is_drawn_with_the_cards():
    run = runs.recorded("cpu/11-fits")
    ax = figures.plot_fits(run)
    drawn = [label.get_text() for label in ax.get_yticklabels()]
    assert [name for name in drawn if "DDP" in name] == ["1,024 GPUs, DDP"]
    assert {n for n in drawn if "DDP" not in n} == {
        n for n in figures.predicted(run) if "DDP" not in n
    }
    assert [figures.AGAIN in name for name in drawn] == 6 * [False] + 5 * [True]
    (enlarged,) = ax.child_axes
    assert [text.get_text() for text in enlarged.texts] == ["12.6 GB", "5.6 GB", "6.75 GB"]
    named = {text.get_text() for text in ax.get_legend().get_texts()}
    assert {"parameters", "activations", "casts"} < named
    assert "buffers" not in named, "too small to see"
    assert {line.get_xdata()[0] for line in ax.lines} == {80, 141}
    assert ax.figure.get_suptitle().startswith("Of 11 plans 7 fit 80 GB, 11 fit 141 GB")
    said = [text.get_text() for text in ax.texts]
    assert {"80 GB", "141 GB"} < set(said)
    peaks = {name: peak.bytes for name, peak in figures.predicted(run).items()}
    assert peaks["8 GPUs, DDP"] == pytest.approx(peaks["1,024 GPUs, DDP"]), "more GPUs do not help"
    assert peaks["8 GPUs, FSDP, checkpointing"] < peaks["8 GPUs, FSDP"] < 80e9 < peaks["1 GPU"]


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        (figures.collectives, "sharding"),
        (figures.plot_held, "sharding"),
        (figures.plot_recompute, "recompute"),
        (figures.plot_fits, "fits"),
        (figures.padding, "padding"),
    ],
)
def test_a_run_of_another_experiment_is_refused(figure, name):
    other = runs.recorded("cpu/11-fits" if name == "padding" else "cpu/11-padding")
    with pytest.raises(UserError, match=rf"expected a run of {name}\.py"):
        figure(other)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("sharding", "", "shards need at least two processes: submit it with n_gpu=2"),
        ("padding", "--gpus 8 0", "--gpus 0: expected whole numbers of at least 1"),
        ("fits", "--gpus 0", "--gpus 0: expected a whole number of at least 1"),
        ("fits", "--image-size 225", "expected a multiple, such as 224"),
    ],
)
def test_a_wrong_size_is_named_with_what_was_expected(name, flags, message, train, tmp_path):
    with pytest.raises(UserError, match=message):
        train(experiment_file(f"{name}.py"), tmp_path, *flags.split())


def test_the_recordings_have_no_paths_of_their_machine():
    found = [*runs.recordings("cpu/11-*")]
    for path in [*(p for p in found if p.is_file()), *runs.recordings("cpu/11-*/events*")]:
        for line in path.read_text().splitlines():
            if (event := json.loads(line))["event"] == "start":
                assert event["hostname"] == "recorded"
            assert str(REPOSITORY) not in line
