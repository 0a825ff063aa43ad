"""The segment mean of notebook 04b: right answers pass, each wrong one gets its own hint."""

import inspect
import random
import statistics
from pathlib import Path

import made
import pytest
import torch
from programs import experiment_file

from dlojz import course, runs
from dlojz.chapters.n04b_roofline import exercise, job
from dlojz.check import check, judge
from dlojz.check import exercise as exercises
from dlojz.check.exercise import FASTER, State
from dlojz.course import progress
from dlojz.launch import submit
from dlojz.runs import log

REPOSITORY = Path(__file__).parent.parent
BROKEN = (experiment_file("segments.py")).read_text()
SOLVED = (REPOSITORY / "solutions/segments.py").read_text()

WHERE = "    where = ids[:, None].expand_as(x)\n"
SCATTER = WHERE + "    sums = x.new_zeros(segments, x.shape[1]).scatter_add_(0, where, x)\n"
INDEX = "    sums = x.new_zeros(segments, x.shape[1]).index_add_(0, ids, x)\n"
BINCOUNT = "    counts = torch.bincount(ids, minlength=segments)\n"
ONES = "    counts = x.new_zeros(segments).index_add_(0, ids, x.new_ones(len(ids)))\n"
DIVIDE = "    return sums / counts.clamp(min=1)[:, None]\n"
PREPARED = "    counts = torch.zeros_like(sums).scatter_add_(0, where, torch.ones_like(x))\n"
MEAN = BINCOUNT + DIVIDE

FAST = {
    "the solution": SOLVED.partition('each."""\n')[2].partition("\n\nif ")[0],
    "index_add_, ones like a column": f"""{INDEX}    ones = torch.ones_like(x[:, 0])
    counts = x.new_zeros(segments).index_add_(0, ids, ones)
{DIVIDE}""",
    "index_add_ and bincount": INDEX + MEAN,
    "scatter_add_ and bincount": SCATTER + MEAN,
    "scatter_add_, a one for each row": f"""{SCATTER}    ones = x.new_ones(len(ids))
    counts = x.new_zeros(segments).scatter_add_(0, ids, ones)
    return sums.div_(counts.clamp_(min=1)[:, None])
""",
    "scatter_reduce": f"""{WHERE}    out = x.new_zeros(segments, x.shape[1])
    return out.scatter_reduce(0, where, x, "mean", include_self=False)
""",
}
SLOW = {  # right, and slower on a processor than two scatter_add_
    "sorted, and segment_reduce": f"""{BINCOUNT}    rows = x[ids.argsort(stable=True)]
    return torch.segment_reduce(rows, "mean", lengths=counts, initial=0)
""",
    "a matrix of zeros and ones": "    belongs = torch.nn.functional.one_hot(ids, segments)\n"
    "    belongs = belongs.T.to(x.dtype)\n"
    "    return belongs @ x / belongs.sum(1, keepdim=True).clamp(min=1)\n",
    "index_reduce_": "    out = x.new_zeros(segments, x.shape[1])\n"
    '    return out.index_reduce_(0, ids, x, "mean", include_self=False)\n',
    "the prepared one, repaired": SCATTER + PREPARED + "    return sums.div(counts.clamp(min=1))\n",
}
CACHED = '    known = segment_mean.__dict__.setdefault("known", {})\n'
WRONG = {  # by hint, then by name: the lines of the function
    "sums": {
        "a division whose result is thrown away": f"""{SCATTER}{PREPARED}
    sums.div(counts.clamp(min=1))
    return sums
""",
    },
    "zeros": {
        "a sum whose result is thrown away": f"""    sums = x.new_zeros(segments, x.shape[1])
    sums.index_add(0, ids, x)
{MEAN}""",
    },
    "unsorted": {
        "neighbours are counted": f"""{INDEX}
    counts = torch.unique_consecutive(ids, return_counts=True)[1]
    return sums / counts[:, None]
""",
        "segment_reduce without a sort": f"""{BINCOUNT}
    return torch.segment_reduce(x, "mean", lengths=counts, initial=0)
""",
    },
    "counts": {
        "counts of other segments": INDEX + BINCOUNT + DIVIDE.replace("counts", "counts.flip(0)"),
        "zeros are counted, too": f"""{WHERE}    out = x.new_zeros(segments, x.shape[1])
    return out.scatter_reduce(0, where, x, "mean")
""",
        "a mean length": INDEX + "    return sums / (len(ids) / segments)\n",
        "one row more, against 0 / 0": f"""{INDEX}{BINCOUNT}    return sums / (counts + 1)[:, None]
""",
        "a small number against 0 / 0": f"""{INDEX}{ONES}    return sums / (counts + 1e-8)[:, None]
""",
    },
    "empty": {
        "0 / 0": INDEX + BINCOUNT + "    return sums / counts[:, None]\n",
        "an empty segment is 1": f"""{INDEX}{BINCOUNT}
    return torch.where(counts[:, None] > 0, sums / counts[:, None], 1.0)
""",
        "present segments only": f"""{INDEX}    _, counts = torch.unique(ids, return_counts=True)
    return sums / counts[:, None]
""",
    },
    "form": {
        "as many rows as there are ids": f"""{INDEX}{BINCOUNT}
    segments = int(ids.max()) + 1
    return (sums / counts.clamp(min=1)[:, None])[:segments]
""",
        "float32 for everything": f"""
    sums = torch.zeros(segments, x.shape[1]).index_add_(0, ids, x)
{MEAN}""",
        "no tensor": "    return x.tolist()\n",
    },
    "rounded": {
        "rounded to float32": INDEX + BINCOUNT + "    sums = sums.float().to(x.dtype)\n" + DIVIDE,
        "rounded to half precision": f"""{INDEX}{BINCOUNT}    sums = sums.half().to(x.dtype)
{DIVIDE}""",
        "added up in bfloat16": f"""    low = x.bfloat16()
    sums = low.new_zeros(segments, x.shape[1]).index_add_(0, ids, low).to(x.dtype)
{MEAN}""",
    },
    "whole": {
        "an integer division": INDEX + BINCOUNT + DIVIDE.replace("sums /", "sums //"),
        "rounded down": f"""{INDEX}{BINCOUNT}
    return torch.div(sums, counts.clamp(min=1)[:, None], rounding_mode="trunc")
""",
    },
    "gradient": {
        "detached": INDEX.replace("x)", "x.detach())") + MEAN,
        "without a gradient": f"""    with torch.no_grad():
    {INDEX}{MEAN}""",
        "a part is detached": f"""{INDEX}{BINCOUNT}    sums = sums / 2 + sums.detach() / 2
{DIVIDE}""",
    },
    "cached": {
        "counts kept by shape": f"""{CACHED}    if x.shape not in known:
    {BINCOUNT}        known[x.shape] = counts
    counts = known[x.shape]
{INDEX}{DIVIDE}""",
        "a result kept by tensor": f"""{CACHED}    if x.data_ptr() not in known:
    {INDEX}    {BINCOUNT}        known[x.data_ptr()] = x, sums / counts.clamp(min=1)[:, None]
    return known[x.data_ptr()][1]
""",
    },
    "arguments": {
        "x is changed": f"""    x.data.div_(2)
{INDEX}{BINCOUNT}    sums = sums * 2
{DIVIDE}""",
        "ids are sorted in place": f"""    order = ids.argsort()
    x = x[order]
    ids.copy_(ids[order])
{INDEX}{MEAN}""",
    },
    "loop": {
        "a loop over segments": """    rows = [x[ids == i] for i in range(segments)]
    return torch.stack([r.sum(0) / max(1, len(r)) for r in rows])
""",
        "a loop over features": f"""{BINCOUNT}
    sums = [x.new_zeros(segments).index_add_(0, ids, row) for row in x.T]
    sums = torch.stack(sums, 1)
{DIVIDE}""",
        "a loop over batches of rows": "    sums = x.new_zeros(segments, x.shape[1])\n"
        "    for i in range(0, len(x), 64):\n"
        "        sums = sums.index_add(0, ids[i : i + 64], x[i : i + 64])\n" + MEAN,
    },
    "values": {
        "the largest number of each": f"""{WHERE}
    return x.new_zeros(segments, x.shape[1]).scatter_reduce(0, where, x, "amax")
""",
        "an error in each call": "    return x.stops()\n",
    },
    "long": {
        "wrong in long lists only": f"""{INDEX}{BINCOUNT}
    sums = sums[:150].repeat(2, 1)[:segments] if segments > 150 else sums
{DIVIDE}""",
        "wrong operands in long lists only": f"""{BINCOUNT}    assert len(x) < 5000
{INDEX}{DIVIDE}""",
    },
}


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The verdict on a function of these lines, examined in this process."""

    def call(lines, pairs=6, calls=2):
        monkeypatch.setattr(job, "PAIRS", pairs)
        monkeypatch.setattr(job, "CALLS", calls)
        start, _, rest = SOLVED.partition("    sums =")
        source = f"{start}{lines}\n\nif {rest.partition('if ')[2]}"
        module = made.repaired(source, tmp_path, monkeypatch)
        job.examine(module.segment_mean)
        return judge.repaired(exercises.find("04_segments"), tmp_path / "run", "")

    return call


@pytest.mark.parametrize("name", FAST)
def test_a_right_answer_passes(verdict, name):
    found = verdict(FAST[name], job.PAIRS, job.CALLS)
    others = [f for f in found.failing if not f.open]  # a machine may be too busy to tell
    assert not others, found


@pytest.mark.filterwarnings("ignore:index_reduce")  # it is in beta
@pytest.mark.parametrize("name", SLOW)
def test_a_right_answer_that_is_slow_fails_for_its_time_only(verdict, name):
    found = verdict(SLOW[name])
    assert {f.part for f in found.failing} == {FASTER}, found
    assert found.hint_key in ("slower", "open"), "open: a machine may be too busy to tell"


@pytest.mark.parametrize(("hint", "name"), [(h, name) for h in WRONG for name in WRONG[h]])
def test_a_wrong_answer_gets_its_hint(verdict, hint, name):
    found = verdict(WRONG[hint][name])
    assert found.hint_key == hint, found


def test_an_error_is_shown_with_its_line(verdict):
    found = repr(verdict("    return x.stops()\n"))
    line = SOLVED.partition("    sums =")[0].count("\n") + 1
    assert f"neighbours: line {line}: AttributeError" in found
    assert f"a long list: line {line}: AttributeError" in found


def test_the_solution_differs_in_the_function_only():
    """So that the last hint shows nothing but the answer."""
    ends = {s.partition("    where =")[0].partition("    sums =")[0] for s in (BROKEN, SOLVED)}
    assert len(ends) == 1
    assert BROKEN.partition("if __name__")[2] == SOLVED.partition("if __name__")[2]


def test_the_baseline_is_the_prepared_function_with_its_division_kept():
    calls, divided = inspect.getsource(job.baseline), "sums / counts.clamp(min=1)"
    lines = [line for line in BROKEN.partition("features], ids")[2].splitlines() if "=" in line]
    assert [line for line in lines[:3] if line not in calls] == []
    assert "    sums.div(counts.clamp(min=1))\n    return sums\n" in BROKEN
    assert f"return {divided}" in calls


def test_each_hint_is_that_of_a_wrong_answer_or_of_what_no_answer_decides():
    known = {*exercises.find("04_segments").hints}
    assert known == {*WRONG, "failed", "slower", "open"}


@pytest.mark.parametrize(
    ("ratios", "state", "hint"),
    [
        ([2.0, 2.1, 2.0, 1.9, 2.0, 2.1], State.PASSED, None),
        ([1.0, 1.1, 0.9, 1.0, 1.05, 0.95], State.FAILED, "slower"),
        ([1.2, 1.2, 1.21, 1.19, 1.2, 1.2], State.FAILED, "slower"),
        ([0.3, 3.0, 1.0, 2.0, 0.5, 4.0], State.UNMEASURED, "open"),
    ],
)
def test_a_gain_is_proven_refused_or_left_open(ratios, state, hint):
    speed = {"device": "cpu", "forward": [[r, 1.0] for r in ratios], "backward": []}
    [found] = exercise._speed(speed)
    assert found.state == state
    assert not found.fails or found.hint == hint
    assert found.open == (hint == "open")


def test_on_a_gpu_a_speed_is_reported_and_nothing_is_asked():
    pairs = [[1.0, 2.0]] * 6
    found = [*exercise._speed({"device": "cuda", "forward": pairs, "backward": pairs})]
    assert {f.state for f in found} == {State.NOT_ASKED}
    assert "slower" in found[0].yours
    assert "no way recorded on a GPU is much faster" in found[0].expected
    cases = log.read(runs.recorded("h200/04-segments")).cases.items()
    ms = {way: statistics.median(case["ms"]) for way, case in cases}
    assert 1 < ms["two scatter_add_"] / min(ms.values()) < 1.2


@pytest.mark.parametrize("seed", range(3))
def test_cases_have_what_their_names_say(seed):
    torch.manual_seed(seed)
    found = {}
    for case in job.drawn(random.Random(seed), torch.device("cpu")):
        counts = torch.bincount(case.ids, minlength=case.segments)
        assert len(counts) == case.segments, "no id is too large"
        found[case.name] = case.x.shape, counts, bool((case.ids.diff() >= 0).all())
    assert {name for name, (_, counts, _) in found.items() if not counts.all()} == {
        *("empty", "unsorted, some empty", "one row")
    }
    assert {name for name, (_, _, ascending) in found.items() if ascending} == {
        *("neighbours", "empty", "one segment", "one row", "float64")
    }
    again = [found[name] for name in ("first", "same shapes", "same tensors")]
    assert len({shape for shape, _, _ in again}) == 1
    assert not torch.equal(again[0][1], again[1][1]), "counts that are kept would be wrong"
    assert len({shape for shape, _, _ in found.values()}) == len(found) - 2


# From the trainee's copy to the verdict ----------------------------------------------------------


def test_a_job_is_judged_and_its_verdict_kept(course_folder):
    file = course.own("04_segments")
    assert (course_folder / file).read_text() == BROKEN
    mine = submit(file, name="segments")
    mine.wait()
    found = check("04_segments", mine)
    assert found.hint_key == "sums"
    assert "neighbours: the sums, not the means" in repr(found)
    assert found.part("same values") == State.FAILED
    assert found.part("few operations") == State.PASSED
    assert progress.last("verdicts", "04_segments")["parts"]["same values"] == "failed"
    for _ in range(3):
        advice = found.hint()
    assert "-    sums.div(counts.clamp(min=1))" in str(advice.diff)
