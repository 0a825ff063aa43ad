"""What is seen of torch.compile, and what an exercise makes of it."""

import argparse
import os
import re
import subprocess

import judged
import made
import pytest
import torch
from programs import experiment_file, load
from torch._dynamo.utils import counters

from dlojz.chapters.n09_compile import exercise as compiling
from dlojz.check import judge
from dlojz.check.exercise import Runs, State
from dlojz.runs import log, records
from dlojz.watch import compilation, profile


class Small(torch.nn.Module):
    """Two layers, and between them what a test asks for."""

    def __init__(self, between=lambda module, x: x):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.between, self.calls = between, 0

    def forward(self, x):
        return self.last(self.between(self, self.first(x))).sum()


@pytest.fixture(autouse=True)
def _forgotten():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def seen(model, steps=3, backend="aot_eager", sizes=(2,)):
    """What a run of a few steps logs of its compilations."""
    step = 0
    watched = compilation.Compilations(lambda: ("train", step))
    model.compile(backend=backend)
    for step in range(1, steps + 1):
        model(torch.randn(sizes[step % len(sizes)], 4)).backward()
    return watched.seen()


def again(found):
    run = log.Run("mine")
    run.compilation = found
    return compiling._again(run)


def test_a_clean_model_is_one_graph_compiled_in_the_first_step():
    found = seen(Small())
    assert [(c["id"], c["why"], c["mode"], c["step"]) for c in found.seen] == [
        ("0/0", "dynamo", "train", 1),
        ("0/0", "lazy_backward", "train", 1),
    ]
    assert (found.graphs, found.operations, found.differentiated, found.generated) == (1, 3, 1, 0)
    assert not found.breaks
    assert 0 < sum(one["seconds"] for one in found.seen) < 60
    assert not again(found)


def test_a_reset_hides_no_later_compilation():
    model = Small()
    watched = compilation.Compilations(lambda: ("train", 0))
    model.compile(backend="aot_eager")
    for _ in range(2):
        torch.compiler.reset()
        model(torch.randn(2, 4)).backward()
    assert len(watched.seen().seen) == 4, "both passes, twice"


def test_a_print_breaks_the_graph():
    def printed(module, x):
        print(end="")
        return x

    found = seen(Small(printed))
    assert found.graphs == 2
    assert ["print" in why or "builtin" in why for why in found.breaks] == [True]


def test_a_branch_on_values_breaks_the_graph():
    found = seen(Small(lambda module, x: x if x.sum() > 0 else -x))
    assert list(found.breaks) == ["Data-dependent branching"]


def test_a_number_on_the_module_is_compiled_again_up_to_the_limit():
    def counted(module, x):
        module.calls += 1
        return x * module.calls

    found = seen(Small(counted), steps=12)
    assert found.graphs == torch._dynamo.config.recompile_limit == 8
    assert [c["step"] for c in found.seen if c["why"] == "dynamo"][:8] == list(range(1, 9))
    assert again(found)[-1] == "Dynamo recompile limit exceeded"
    assert len(again(found)) >= 8


def test_another_batch_size_is_compiled_again_once_for_all_sizes():
    found = seen(Small(), steps=4, sizes=(2, 3, 5, 7))
    assert found.graphs == 2
    assert again(found) == ["graph 0/1"]


def test_the_backend_eager_differentiates_nothing():
    found = seen(Small(), backend="eager")
    assert (found.graphs, found.differentiated) == (1, 0)


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch 2.14 compiles them")
def test_modules_of_torch_compile_nothing():
    """In torch 2.11 to 2.13: a silent no-op, of which notebook 09 warns."""
    found = seen(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0)), steps=0)
    layer = torch.nn.Linear(4, 4)
    layer.compile(backend="aot_eager")
    layer(torch.randn(2, 4)).sum().backward()
    assert found == records.Compilation()
    assert counters["stats"]["unique_graphs"] == 0


def test_a_model_that_will_be_compiled_is_known():
    in_place, wrapped = Small(), torch.compile(Small())
    in_place.last.compile()
    found = [compilation.is_compiled(m) for m in (in_place, wrapped, Small())]
    assert found == [True, True, False]


def test_each_word_is_asked_of_torch_compile_without_compiling(monkeypatch):
    def compiled(model, args):
        if args.compile == "default":
            model.compile(mode=args.compile)
        elif args.compile == "aot_eager":
            return torch.compile(model, backend="aot_eager")
        elif args.compile == "max-autotune":
            model.compile(args.compile)

    monkeypatch.setattr("__main__.compiled", compiled, raising=False)
    found = compilation.words(Small(), argparse.Namespace(compile="off"))
    error = found.pop("max-autotune")
    assert error.startswith("TypeError: compile() takes")
    assert found == {"default": "mode default", "aot_eager": "backend aot_eager"}
    assert not counters["stats"]


def test_a_trainer_that_compiles_elsewhere_asks_nothing_here(monkeypatch):
    monkeypatch.setattr("__main__.compiled", lambda model, args: model, raising=False)
    assert compilation.words(Small(), argparse.Namespace(compile="off")) == {}


def test_products_outside_of_compiled_code_are_counted():
    inner, outer = Small(), torch.nn.Linear(4, 4)
    inner.compile(backend="aot_eager")

    def step():
        inner(outer(torch.randn(2, 4))).backward()

    step()
    profiler = profile.start_profiler()
    step()
    found = compilation.coverage(profile.stop_profiler(profiler))
    assert found["compiled_regions"] == 2, "forward and backward"
    assert found["uncompiled"] == {"matrix product": 2}, "the outer layer's forward, and its weight"


# What the exercise makes of it -------------------------------------------------------------------


def run(seen=(), regions=2, outside=0, wrapper=None, window=3, **counts):
    made = log.Run("mine")
    made.start = {"arguments": {"compile": "aot_eager"}}
    made.windows = [{"first_step": window, "steps": 4, "wall_s": 1.0}]
    made.compilation = records.Compilation(seen=list(seen), **{"differentiated": 1} | counts)
    products = [{"op": "matrix product", "dtype": "float32", "count": 20}]
    made.last = records.LastStep(
        compiled_regions=regions,
        uncompiled={"matrix product": outside} if outside else {},
        matrix_ops=products,
        wrapper=wrapper,
        calls={},
        graphs_alive=0,
        batches_alive=1,
    )
    return made


def compiled(step, number=0):
    why = {"why": "dynamo", "mode": "train", "seconds": 1.0}
    return {"id": f"0/{number}", "step": step} | why


def hints(mine, reference=None):
    found = compiling.mechanism(Runs(mine, reference or run([compiled(2)])))
    return [f.hint for f in found if f.state == State.FAILED]


def test_a_run_like_the_solutions_passes():
    assert not hints(run([compiled(2)]))


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (run(), []),  # compiled by another, before this run: no matter, if its regions ran
        (run([compiled(2), compiled(3, 1)]), ["again"]),
        (run([compiled(2), compiled(4, 1)]), ["again", "late"]),
        (run([compiled(4)]), ["late"]),
        (run([compiled(2)], breaks={"a print": 1}), ["breaks"]),
        (run([compiled(2)], breaks={"Dynamo recompile limit exceeded": 1}), ["again"]),
        (run(regions=0, outside=20, differentiated=0), ["nothing", "part"]),
        (run([compiled(2)], breaks={"Skip calling `torch.compiler.disable()`d function": 4}), []),
        (run([compiled(2)], outside=5), ["part"]),
        (run([compiled(2)], outside=4), []),
        (run([compiled(2)], differentiated=0), ["backend"]),
    ],
)
def test_each_fault_has_its_hint(mine, expected):
    assert hints(mine) == expected


def test_without_the_flag_nothing_is_compiled():
    extra = {compiling.OTHERWISE: (run([compiled(2)], graphs=2), run())}
    found = compiling.mechanism(Runs(run([compiled(2)]), run([compiled(2)]), extra))
    assert [f.hint for f in found if f.fails] == ["not-asked"]


def test_the_graph_must_be_cut_at_ddps_buckets():
    usual = run([compiled(2)], wrapper="DistributedDataParallel", differentiated=6)
    assert hints(run([compiled(2)], differentiated=6), usual) == []
    assert hints(run([compiled(2)], differentiated=2), usual) == ["buckets"]


# What it costs, in the verdict -------------------------------------------------------------------


def priced(folder, monkeypatch, gain, pairs=True, seconds=300.0):
    """The verdict on six pairs with this gain, of runs that compiled for these seconds."""
    asked = ("09_compile", "bf16", "cuda:0", "NVIDIA H200", made.RESNET)
    monkeypatch.setitem(judged.ASKED, "09", asked)
    exercise, folders = judged.made_runs(folder, "09", gain)
    if not pairs:
        folders = {n: f for n, f in folders.items() if n in ("solution", "float32", "yours")}
    for name in folders:
        seen = [compiled(2) | {"seconds": seconds}] if seconds else []
        made._add(folders[name], when="compilation", seen=seen, graphs=1)
    return judge.judge(exercise, made.ended(folders), judge.Standards())


def row(verdict):
    (found,) = (f for f in verdict.findings if f.what == "break-even")
    return found


def test_a_verdict_says_after_how_many_steps_the_compilation_has_paid_for_itself(
    tmp_path, monkeypatch
):
    """A step of 100 ms took 200 before: 300 s are won back in 3,000 steps."""
    verdict = priced(tmp_path, monkeypatch, 2.0)
    found = row(verdict)
    assert (found.part, found.state) == ("faster", State.NOT_ASKED)
    steps, least, most = (int(n.replace(",", "")) for n in re.findall(r"[\d,]+", found.yours))
    assert least < steps < most
    assert steps == pytest.approx(3000, rel=0.02)
    assert "compiling took 300.0 s" in found.expected
    assert "your job has 10 steps" in found.expected
    assert verdict.passed, "it is information, and not a bar"
    assert found.yours in repr(verdict)


@pytest.mark.parametrize(("gain", "text"), [(0.5, "never"), (1.0, "none seen")])
def test_only_a_loss_never_pays_and_an_open_gain_is_none_that_was_seen(
    tmp_path, monkeypatch, gain, text
):
    found = row(priced(tmp_path, monkeypatch, gain))
    assert found.yours == text
    assert found.expected.endswith("no gain is shown")


def test_what_compiled_nothing_has_no_break_even(tmp_path, monkeypatch):
    found = row(priced(tmp_path, monkeypatch, 2.0, seconds=0.0))
    assert (found.yours, found.expected) == ("none", "nothing was compiled")


def test_without_pairs_the_break_even_is_not_known(tmp_path, monkeypatch):
    found = row(priced(tmp_path, monkeypatch, 2.0, pairs=False))
    assert found.yours == "not known"
    assert "compiling took 300.0 s" in found.expected
    assert "pairs=6" in found.expected


def test_variants_that_are_compiled_alone_do_not_share_their_code():
    ddp = load("ddp")
    for way, graphs in (("shared", 1), ("alone", 9)):
        torch._dynamo.reset()
        counters.clear()
        for name in map(str, range(9)):
            model = Small()
            with torch._dynamo.config.patch(recompile_limit=18):  # as the experiment sets it
                if way == "alone":
                    ddp.compile_alone(name, model, "aot_eager")
                else:
                    model.compile(backend="aot_eager")
                model(torch.randn(2, 4))
        assert counters["stats"]["unique_graphs"] == graphs
    assert isinstance(model, Small)


@pytest.mark.slow
def test_each_way_to_compile_ddp_sends_all_gradients(tmp_path):
    ways = ["both", "both, graph not cut", "both, static graph", "both, compiled autograd"]
    flags = "--model squeezenet1_1 --image-size 32 -b 2 --rounds 1 --compile aot_eager --variants"
    file = experiment_file("ddp.py")
    command = made.torchrun(file, [*flags.split(), *ways], 2)
    environment = {**os.environ, "DLOJZ_RUN": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, timeout=180, capture_output=True)
    for run in log.read_ranks(tmp_path):
        sent = {name: [c["bytes"] for c in run.cases[name]["collectives"]] for name in ways}
        assert {name: sum(each) for name, each in sent.items()} == dict.fromkeys(ways, 4_941_984)
        assert len(sent["both, compiled autograd"]) > len(sent["both"]), "one for each weight"


def test_variants_of_a_compiled_graph_need_a_compiler(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ddp.py", "--variants", "DDP", "both, graph not cut"])
    with pytest.raises(SystemExit, match="both, graph not cut: add --compile default"):
        load("ddp").main()
