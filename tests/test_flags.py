"""The trainer's flags: declared once, read by the launcher, obeyed in a job."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.codecache import FxGraphHashDetails

from dlojz.course import UserError
from dlojz.training import flags

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def parsed(monkeypatch):
    """Return the arguments of a command line: parsed("--test", words=["precision"])."""

    def parse(*line, words=()):
        monkeypatch.setattr(sys, "argv", ["dlojz.py", *line])
        return flags.parse(*words)

    with torch.compiler.config.patch(cache_key_tag="of an earlier run"):
        yield parse


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_compiled_code_is_found_again_in_its_own_precision_only(parsed, precision):
    line, words = ((), ()) if precision is None else (("--precision", precision), ["precision"])
    parsed("--model", "resnet18", *line, words=words)
    key = FxGraphHashDetails(torch.fx.symbolic_trace(torch.nn.ReLU()), [], {}, [])
    assert key.cache_key_tag == (precision or ""), "it is a part of the key"
    assert issubclass(autograd_cache.AOTAutogradCacheDetails, FxGraphHashDetails)


def test_a_deterministic_run_asks_torch_for_it(parsed, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        parsed("--deterministic")
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize(
    ("on_gpu", "precision", "mode"), [(True, "fp16", "default"), (False, "fp32", "off")]
)
def test_a_default_by_the_hardware_is_chosen_in_the_job(
    on_gpu, precision, mode, parsed, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    args = parsed(words=["precision", "compile"])
    assert (args.precision, args.compile) == (precision, mode)
    assert parsed("--compile", "aot_eager", words=["compile"]).compile == "aot_eager"


@pytest.mark.parametrize(("variable", "folder"), [("", "data"), ("elsewhere", "elsewhere")])
def test_images_are_where_the_environment_says_by_now(variable, folder, parsed, monkeypatch):
    monkeypatch.setenv("DLOJZ_DATA", variable)
    assert parsed().data == folder


def test_a_flag_is_known_once_a_step_has_added_it(parsed, capsys):
    with pytest.raises(SystemExit):
        parsed("--profile")
    told = "--profile; 04_profiler adds --profile: `dlojz catch-up 05_dataloader` begins after it"
    assert f"unrecognized arguments: {told}\n" in capsys.readouterr().err
    assert parsed("--profile", words=["profile"]).profile is True


@pytest.mark.parametrize(
    ("words", "told"),
    [("--sharding=fsdp", "--sharding=fsdp; 11_fsdp adds --sharding"), ("--shards", "--shards")],
)
def test_of_an_unknown_flag_the_step_is_named_if_one_adds_it(words, told, parsed, capsys):
    with pytest.raises(SystemExit):
        parsed(words)
    assert f"unrecognized arguments: {told}\n" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["precison", 2])
def test_an_unknown_name_of_a_flag_is_met_with_those_that_exist(word):
    with pytest.raises(UserError, match=rf"no flag {word!r}: expected some of 'precision', 'chan"):
        flags.parse(word)


# Helps -------------------------------------------------------------------------------------------

# A help is a noun phrase or a full clause, so that it can be read without the flag's name.
FRAGMENT = set(
    "about above after against as at before behind below beside between by during for from how if "
    "in inside into of off on or out over than that to under until upon what when where whether "
    "which who whom whose why with within without".split()
)


def helps():
    """Yield where each help text of a flag is, and the text."""
    files = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in files.stdout.split():
        for node in ast.walk(ast.parse((REPOSITORY / name).read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            texts = [word.value for word in node.keywords if word.arg == "help"]
            if getattr(node.func, "id", "") == "command":  # of `dlojz`: its name, function, help
                texts += node.args[2:3]
            for text in texts:
                parts = [n.value for n in ast.walk(text) if isinstance(n, ast.Constant)]
                yield f"{name}:{text.lineno}", " ".join(map(str, parts))
    for flag in flags.declared(*(flag.label[2:] for flag in flags.STEPS)):
        yield flag.label, flag.help


def test_a_help_begins_with_neither_a_preposition_nor_a_question_word():
    found = [*helps()]
    assert len(found) > 200, "the test would pass if it found no help at all"
    assert [f"{at}: {text}" for at, text in found if {*text.lower().split()[:1]} & FRAGMENT] == []
