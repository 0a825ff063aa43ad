"""What the exercises have in common: findings that are drawn from the trainee's own run."""

import re

import pytest

from dlojz.chapters.n01_gpu import exercise
from dlojz.chapters.n06_ddp import exercise as ddp
from dlojz.chapters.n11_fsdp import exercise as fsdp
from dlojz.check import common
from dlojz.check.exercise import Runs, State, Unseen
from dlojz.runs import log, records
from dlojz.runs.folder import group_file


@pytest.mark.parametrize(
    ("arguments", "state", "yours", "hint"),
    [
        ({"channels_last": True}, State.PASSED, "yes", "which"),
        ({"channels_last": False}, State.FAILED, "no", "which"),
        ({"model": "resnet18"}, State.FAILED, "not known", "flag"),
    ],
)
def test_a_flag_counts_only_if_the_trainer_knows_it(tmp_path, arguments, state, yours, hint):
    """The solution's default is no evidence of the trainee's flag."""
    mine = log.Run(tmp_path, start={"arguments": arguments})
    found = common.flag(mine, "--channels-last", bool, "yes", "which")
    assert (found.state, found.yours, found.hint) == (state, yours, hint)


@pytest.mark.parametrize(
    ("values", "text", "reached"),
    [
        ([], "none", False),
        ([None, None], "None", False),
        ([None, "cpu"], "None, cpu", True),
        (["none"], "none", True),
    ],
)
def test_what_no_process_reached_is_no_value(tmp_path, values, text, reached):
    """Nor is a value that reads like it unreached."""
    runs = log.Run(tmp_path), log.Run(tmp_path)
    found = common.like("mechanism", "key", "", *runs, lambda run: common.words(values), "hint")
    assert (str(found.yours), found.reached) == (text, reached)


def run(train=12, val=12, **whole):
    seen = [
        {"mode": mode, "shape": [8, 3, 32, 32], "count": n, "grad": mode == "train"}
        for mode, n in (("train", train), ("val", val))
        if n
    ]
    return log.Run("mine", whole=records.WholeRun(inputs=seen, **whole))


@pytest.mark.parametrize(
    ("train", "val", "hints"),
    [
        (24, 0, {"eval-mode"}),  # model.eval() is forgotten
        (6, 18, {"train-mode"}),  # model.train() is
        (0, 0, {"called", "validation"}),  # model.forward(...)
        (6, 12, {"images"}),
        (12, 6, {"validation"}),
    ],
)
def test_images_that_did_not_come_have_the_hint_of_their_reason(train, val, hints):
    found = common.same_work(run(train, val), run())
    assert {f.hint for f in found if f.fails and f.what.startswith("images in")} == hints


@pytest.mark.parametrize(
    ("train", "val", "found"),
    [
        (12, 12, {}),
        (24, 0, {"training-mode": "eval-mode", "validated": "eval-mode"}),
        (6, 18, {"training-mode": "train-mode", "validated": "train-mode"}),
        (11, 12, {"training-mode": "frozen"}),
        (12, 6, {"validated": "validation"}),
    ],
)
def test_another_run_than_the_jobs_has_the_solutions_passes(train, val, found):
    rows = common.still_trains("two-epochs", run(train, val), run())
    assert {row.key: row.hint for row in rows if row.fails} == found
    assert all(row.what.endswith("run two-epochs") for row in rows)


def test_images_are_the_same_by_their_indices():
    one, other = run(drawn=[3, 4]), run(drawn=[3, 5])
    assert common.same_images()
    assert common.same_images(one, one)
    assert not common.same_images(one, other)


def test_each_pass_belongs_into_its_phase():
    usual = {"forward": ["forward"], "backward": ["backward"], "update": ["update"]}
    late = usual | {"backward": ["backward", "forward"]}
    found = common.no_brake(run(phases=late), run(phases=usual))[0]
    assert (found.fails, found.hint) == (True, "phases")
    assert "backward in backward and forward" in found.yours
    assert not common.no_brake(run(phases=usual), run(phases=usual))[0].fails
    crashed = run(phases={"forward": ["forward"]})
    assert not common.no_brake(crashed, run(phases=usual))[0].fails, "it never came to the others"


def test_more_threads_are_no_faster_step():
    found = common.no_brake(run(threads=4), run(threads=2))[1]
    assert (found.fails, found.hint) == (True, "threads")


@pytest.mark.parametrize(("last", "middle", "passes"), [(2, 0, True), (0, 2, True), (0, 1, False)])
def test_what_copies_a_batch_ahead_copies_none_in_the_last_step(last, middle, passes):
    def a_run(last, middle=None):
        steps = records.LastStep(non_blocking=last), records.MiddleStep(non_blocking=middle)
        return log.Run("run", last=steps[0], middle=steps[1])

    (found,) = exercise._copies(Runs(a_run(last, middle), a_run(2), {}))
    assert (found.state == State.PASSED) is passes


def kept(graphs=0, batches=1, **loader):
    """A run's log, with the graphs and batches that are in memory after its last step."""
    last = records.LastStep(graphs_alive=graphs, batches_alive=batches)
    probe = records.Probe(loader=records.Loader(**loader))
    return log.Run("mine", last=last, probe=probe)


@pytest.mark.parametrize(
    ("mine", "hints"),
    [
        (kept(), set()),
        (kept(graphs=common.LOCALS, batches=1 + common.LOCALS), set()),
        (kept(graphs=common.LOCALS + 1), {"kept"}),
        (kept(batches=common.LOCALS + 2), {"piled"}),
        (kept(batches=10, num_workers=2, prefetch_factor=3), set()),  # six of them are ready
        (kept(batches=11, num_workers=2, prefetch_factor=3), {"piled"}),
    ],
)
def test_a_loop_may_hold_the_last_step_and_no_more(mine, hints):
    asked = {"kept", "piled"}
    assert {f.hint for f in common.no_brake(mine, kept()) if f.fails} & asked == hints


@pytest.mark.parametrize(
    ("loss", "outputs", "hints"),
    [
        ("float32", ["float32"], set()),
        ("float64", ["float32"], set()),
        ("bfloat16", ["float32"], {"loss-dtype"}),
        ("float32", ["float16", "float32"], {"val-dtype"}),
    ],
)
def test_nothing_may_be_in_16_bits_that_is_not_so_in_the_solution(loss, outputs, hints):
    seen = run(losses=[{"mode": "val", "dtype": loss}], val_dtypes=outputs)
    usual = run(losses=[{"mode": "train", "dtype": "float32"}], val_dtypes=["float32"])
    asked = {"loss-dtype", "val-dtype"}
    assert {f.hint for f in common.same_work(seen, usual) if f.fails} & asked == hints
    assert not {f.hint for f in common.same_work(seen, seen) if f.fails} & asked


def exchanged(folder, *collectives):
    """The logs of two processes that exchanged these in their last step."""
    last = records.LastStep(collectives=[{"op": op, "bytes": size} for op, size in collectives])
    return [log.Run(folder / "events.jsonl", last=last) for _ in range(2)]


@pytest.mark.parametrize(
    ("also", "fails"),
    [
        ([], False),
        ([("all_reduce", 4096)], False),  # another bucket
        ([("barrier", 4)], True),
        ([("barrier", 4096)], True),
        ([("all_reduce", 16)], True),  # losses and counts
    ],
)
def test_processes_meet_in_a_step_for_gradients_only(tmp_path, also, fails):
    gradients = ("all_reduce", 4_100_000)
    found = ddp._others(*(exchanged(tmp_path, gradients, *more) for more in (also, [])))
    assert (found.fails, found.hint) == (fails, "barrier")
    both = exchanged(tmp_path, gradients, *also)
    assert not ddp._others(both, both).fails


def test_processes_that_did_not_leave_their_group_are_counted(tmp_path):
    ranks = exchanged(tmp_path)
    assert ddp._still_there(ranks) == "none"
    group_file(tmp_path, 1).touch()
    assert ddp._still_there(ranks) == 1


@pytest.mark.parametrize(
    ("yours", "hint"),
    [
        (["bfloat16"] * 3, None),
        (["bfloat16"] * 2, None),  # the last block stays whole
        (["bfloat16"], "blocks"),
        (["bfloat16"] * 4, "blocks"),
        (["float32"] * 3, "policy"),
        (["bfloat16", "bfloat16", "float32"], "policy"),
    ],
)
def test_a_block_is_gathered_as_often_as_in_the_solution_but_for_the_last(yours, hint):
    def gathered(dtypes):
        seen = [{"op": "all_gather", "dtype": dtype} for dtype in dtypes]
        seen.append({"op": "reduce_scatter", "dtype": "float32"})
        return [log.Run("mine", last=records.LastStep(collectives=seen))]

    found = fsdp._gathered(gathered(yours), gathered(["bfloat16"] * 3))
    assert (found.hint if found.fails else None) == hint


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("ValueError: Invalid rank 2, rank should be in the interval [0, 1]", "rank"),
        ("TypeError: build() got an unexpected keyword argument 'num_replicas'", "rank"),
        ("AttributeError: 'Mine' object has no attribute 'num_replicas'", None),  # a sampler
    ],
)
def test_a_sampler_of_ones_own_is_not_told_of_ranks(error, hint):
    found = [key for pattern, key in ddp.EXERCISE.errors if re.search(pattern, error)]
    assert found == ([hint] if hint else [])


def test_where_a_process_left_no_checksum_of_its_weights_nothing_is_said_of_them():
    assert ddp._agree(["a", "a", "b"]) == 2
    assert ddp._agree(["a", None]) is Unseen.UNKNOWN
