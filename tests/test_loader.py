"""The loader's profile: py-spy's words read, and the experiment with a py-spy that is made up."""

import sys

import pytest
from logs import with_cases, write_log
from programs import experiment_file, load

from dlojz.chapters.n05_dataloader import figures, spy
from dlojz.runs import log

WORKER = "<module> (a.py);_worker_loop (torch/utils/data/_utils/worker.py:250)"
STACKS = f"""\
{WORKER};fetch (fetch.py:1);convert (PIL/Image.py:2);load (PIL/ImageFile.py:3) 60
{WORKER};fetch (fetch.py:1);resize (torchvision/transforms/_functional_pil.py:9) 30
{WORKER};fetch (fetch.py:9);resize (torchvision/transforms/_functional_pil.py:8) 5
<module> (a.py);get (queue.py:3) 500
"""


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Have py-spy do this, a line of Python; `output` is the file that it is to write."""

    def make(line):
        program, output = tmp_path / "py-spy", "sys.argv[sys.argv.index('--output') + 1]"
        program.write_text(f"#!{sys.executable}\nimport sys\noutput = {output}\n{line}\n")
        program.chmod(0o755)
        monkeypatch.setattr(spy, "program", lambda: str(program))

    return make


def recorded(path, **outside):
    """A run of the experiment, by hand."""
    functions = [
        ["<method 'decode' of 'ImagingDecoder' objects>", 20, 0.06],
        ["<method 'resize' of 'ImagingCore' objects>", 10, 0.02],
    ]
    inside = {"seconds": 0.1, "images": 10, "functions": functions}
    return with_cases(path / "events.jsonl", {"cProfile": inside, "py-spy": outside})


def test_py_spy_runs_the_program_that_it_watches(tmp_path):
    found = spy.command("py-spy", tmp_path / "s.txt", ["python", "t.py"])
    assert found[:2] == ["py-spy", "record"]
    assert "--subprocesses" in found
    assert found[-3:] == ["--", "python", "t.py"]


def test_the_stacks_of_workers_are_counted_by_their_innermost_functions():
    load = ["ImageFile.py: load", "Image.py: convert", "fetch.py: fetch"]
    resize = ["_functional_pil.py: resize", "fetch.py: fetch", "worker.py: _worker_loop"]
    assert spy.innermost(STACKS, "_worker_loop") == [(load, 60), (resize, 35)]


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Error: Permission denied (os error 13)", "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("Error: Operation not permitted", "--cap-add SYS_PTRACE"),
        ("Error: Unsupported version of Python", "It said: Error: Unsupported version"),
        ("", "It said: nothing"),
    ],
)
def test_trouble_says_what_to_type(stderr, said):
    assert said in spy.trouble(stderr)


@pytest.mark.parametrize(
    ("names", "task"),
    [
        (["<method 'decode' of 'ImagingDecoder' objects>"], "decode"),
        (["ImageFile.py: ImageFile.load", "Image.py: Image.convert"], "decode"),
        (["<method 'resize' of 'ImagingCore' objects>"], "resize"),
        (["Image.py: Image.resize", "_functional_pil.py: resize"], "resize"),
        (["<method 'div' of 'torch._C.TensorBase' objects>"], "make a tensor, normalize"),
        (["_functional_tensor.py: normalize"], "make a tensor, normalize"),
        (["<built-in method torch.stack>"], "make a batch"),
        (["storage.py: _new_shared", "collate.py: collate_tensor_fn"], "make a batch"),
        (["transforms.py: RandomResizedCrop.get_params"], "the rest"),
    ],
)
def test_what_a_function_is_for(names, task):
    assert figures.task(names) == task


def test_both_views_are_shares_of_the_whole(tmp_path):
    seen = spy.innermost(STACKS, "_worker_loop")
    file = recorded(tmp_path, seen=seen)
    inside, outside = figures.shares(file).values()
    assert inside == pytest.approx(
        dict.fromkeys(figures.TASKS, 0) | {"decode": 0.6, "resize": 0.2, "the rest": 0.2}
    )
    assert outside["decode"] == pytest.approx(60 / 95)
    ax = figures.plot_tasks(file)
    assert [t.get_text() for t in ax.texts] == ["60%", "20%", "20%", "63%", "37%"]
    row = figures.functions(file).rows[0]
    assert row[1:] == ("2", "6.000", "60%")


def test_without_py_spy_the_figure_says_what_to_type(tmp_path):
    ax = figures.plot_tasks(recorded(tmp_path, trouble=spy.missing()))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["cProfile: no workers"]
    assert "pip install" in ax.figure.get_supxlabel()


def test_another_run_is_no_profile_of_a_loader(tmp_path):
    file = write_log(tmp_path / "r.jsonl")
    with pytest.raises(
        ValueError, match=r"no profile by cProfile .* expected a run of loader_profile"
    ):
        figures.functions(file)


def test_the_loader_is_seen_from_inside_and_from_outside(train, images, tmp_path, made_up):
    made_up(f"open(output, 'w').write({STACKS!r})")
    flags = ("--data", images, "--image-size", 32, "--batches", 2)
    train(experiment_file("loader_profile.py"), tmp_path / "run", *flags)
    seen = log.read(tmp_path / "run").cases
    assert seen["cProfile"]["images"] == 64
    assert any("ImagingDecoder" in name for name, _, _ in seen["cProfile"]["functions"])
    assert [count for _, count in seen["py-spy"]["seen"]] == [60, 35]


@pytest.mark.parametrize(
    ("line", "said"),
    [("sys.exit('Permission denied')", "may not look"), ("open(output, 'w')", "saw nothing")],
)
def test_a_py_spy_that_sees_nothing_says_why(tmp_path, made_up, line, said):
    made_up(line)
    assert said in load("loader_profile").outside(tmp_path / "stacks.txt")["trouble"]


def test_a_missing_py_spy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(spy, "program", lambda: None)
    found = load("loader_profile").outside(tmp_path / "stacks.txt")
    assert found == {"trouble": spy.missing()}
