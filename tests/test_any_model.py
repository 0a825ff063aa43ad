"""`dlojz estimate` and `dlojz worth` for models of one's own, of timm and of transformers."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from dlojz import cli
from dlojz.chapters.n09b_modes import measuring, worth
from dlojz.chapters.n09b_modes import worth_figures as tables
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.runs import source, stats
from dlojz.traces.trace import Event, Trace
from dlojz.training import any_model

MINE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x, *, scale):
        return x + scale * self.layer(x).relu()


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens, targets=None):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        logits = self.head(x)
        if targets is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Named(nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


def language():
    return Language()


def named():
    return Named(16, 4)


def by_values():
    return nn.Dropout(torch.linspace(0, 0.5, 3)[1].item()) and nn.Linear(16, 4)


def number():
    return 3


def asks(width, depth=2):
    return nn.Linear(width, depth)


def fails():
    return nn.Linear(16, None)


def branches():
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x[x.sum(1) > 0])

    return Branches(16, 4)
"""
TIMM = """
from torch import nn

__version__ = "1.0"


def list_models():
    return ["resnet18", "vit_tiny"]


def is_model(name):
    return name in list_models()


def create_model(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    model.pretrained_cfg = {"input_size": (3, 8, 8)}
    return model
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "timm.py").write_text(TIMM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["estimate"])
    for name in ("mine", "timm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ("mine", "timm"):
        sys.modules.pop(name, None)


def plan(model, *flags, **more):
    usual = {"gpus": 1, "sharding": "ddp", "batch": 4, "image_size": None, "checkpointing": "off"}
    return estimate.Plan(model, **usual | {"precision": "fp32", "flags": flags} | more)


# The memory of a step ----------------------------------------------------------------------------


def test_a_language_model_is_counted_with_its_shared_weights_and_its_own_loss():
    row = estimate.result(any_model, plan("mine:language", "--tokens", "32"))
    weights = 100 * 64 + 3 * (64 * 64 + 64)
    update = row["peaks"]["update"]
    assert row["parameters"] == weights
    assert update["parameters"] == update["gradients"] == 4 * weights + 3 * 256, "in 512 bytes each"
    assert update["optimizer"] == pytest.approx(8 * weights, abs=512 * 10), "two moments, and steps"
    assert row["batch"] == "AdamW, 4 sequences of 32 tokens"
    assert update["buffers"] == 2 * 4 * 32 * 8, "tokens and labels"


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"checkpointing": "blocks"}, "activations"),
        ({"gpus": 4, "sharding": "fsdp", "precision": "bf16"}, "parameters"),
    ],
)
def test_blocks_called_with_names_are_recomputed_or_sharded(more, less):
    peaks = [
        estimate.measured(any_model, plan("mine:language", "--tokens", "32", **options))
        for options in ({}, more)
    ]
    usual, other = (found["forward ends"].parts[less] for found in peaks)
    assert other < 0.75 * usual


def test_mappings_and_models_that_read_their_own_values_are_taken():
    for function in ("named", "by_values"):
        row = estimate.result(any_model, plan(f"mine:{function}", "--input", "16"))
        assert row["parameters"] == 16 * 4 + 4
        assert row["batch"] == "AdamW, 4 inputs of 16"


def test_a_model_of_timm_has_inputs_of_its_own_size_and_the_optimizer_that_is_asked_for():
    row = estimate.result(any_model, plan("timm:resnet18", "--optimizer", "sgd"))
    assert row["batch"] == "SGD with momentum, 4 inputs of 3 x 8 x 8"
    update = row["peaks"]["update"]
    assert update["optimizer"] == update["parameters"]


def test_a_batch_of_images_of_classes_has_a_loss():
    loss = any_model.loss_of(torch.zeros(2, 5, 4, 4, requires_grad=True), None)
    assert loss.item() == pytest.approx(torch.tensor(5.0).log().item())


# What can't be estimated -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere:build", "no module 'nowhere' in this folder .* expected nowhere.py here"),
        ("mine:languag", "mine.py has no function 'languag'; did you mean language?"),
        ("mine:", "mine:: expected module:function, timm:NAME or hf:NAME"),
        ("mine.py:language", "expected mine:language, without .py"),
        ("3a:c", "3a:c: expected module:function"),
        ("mine:language --input 3xa", "--input 3xa: expected the sizes of one input"),
        ("mine:language --tokens 0", "--tokens 0: expected a whole number"),
        ("mine:language --tokens 9 --input 3", "--input and --tokens: each says what enters"),
        ("mine:language --flags=--seed=3", "needs no trainer: leave out --trainer and --flags"),
        ("resnet18 --tokens 9", "--model resnet18 takes images: expected --image-size"),
        ("trains:build", "trains.py, line 3: was not run, as it would train"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_runs(model, message, capsys, monkeypatch):
    Path("trains.py").write_text("def build(): ...\nloss = 1\nloss.backward()\n")
    monkeypatch.setattr(cli.tools, "_run_program", pytest.fail)
    assert cli.main(["estimate", *shlex.split(f"--model={model}")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_package_that_is_not_installed_is_told_with_what_to_type(monkeypatch, capsys):
    monkeypatch.setattr(source, "LIBRARIES", {"hf": "transformers_not_here"})
    assert cli.main(["worth", "compile", "hf:gpt2 -b 8"]) == 2
    told = "needs transformers_not_here, which is not installed: pip install transformers_not_here"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mine:number", "mine:number returns int: expected a torch.nn.Module"),
        ("mine:asks", "mine:asks needs width: expected no argument without a default"),
        ("mine:fails", r"mine:fails can't be built: mine.py, line \d+: TypeError"),
        ("mine:named", "fails on a batch of 4 x 3 x 224 x 224 float32: .*Another shape: --input"),
        ("mine:branches", "reads values, which an estimate does not have: mine.py, line"),
        ("timm:resnet81", "timm 1.0 has no model 'resnet81'; did you mean resnet18?"),
    ],
)
def test_a_model_that_can_t_be_had_is_told_with_the_place(model, message):
    flags = ("--input", "16") if "branches" in model else ()
    with pytest.raises(UserError, match=message):
        estimate.result(any_model, plan(model, *flags))


# Whether compiling pays --------------------------------------------------------------------------


def test_a_step_of_any_model_is_trained_for_worth():
    training = measuring.Training("mine:language", ["-b", "2", "--tokens", "8"])
    before = training.model.words.weight.detach().clone()
    training.step()
    assert not torch.equal(before, training.model.words.weight)
    tokens, labels = training.batch
    assert tokens.shape == labels.shape == (2, 8)
    calls, spans = measuring.counted(training)
    assert len(calls) > spans["blocks.0"][1] > spans["blocks.0"][0]


def watched(monkeypatch, *updates):
    """Make a run whose second step has these updates."""
    found = Trace(
        Path("t"), None, [Event(f"ProfilerStep#{i}", 13 * i, 13 * i + 13, "1") for i in (0, 1)]
    )
    ops = [
        ("aten::mm", 1, 5),
        ("aten::relu", 5, 7),
        ("aten::batch_norm", 7, 8),
        ("aten::add_", 9, 12),
    ]
    found.ops = [Event(name, 13 + begin, 13 + end, "1") for name, begin, end in ops]
    found.ranges = [Event("Optimizer.step#SGD.step", 13 + b, 13 + e, "1") for b, e in updates]
    monkeypatch.setattr(worth, "open_traces", lambda path: [found])
    summary = stats.Summary("7", "COMPLETED", None, device_name="AMD EPYC", step_ms=13.0)
    monkeypatch.setattr(stats, "summary", lambda run: summary)
    return Path("7")


def test_a_watched_run_says_what_compiling_would_gain_and_not_what_it_costs(monkeypatch):
    run = watched(monkeypatch, (9, 13))
    profile = worth.of_a_run(run, 13.0)
    assert profile.device_ms == {"matrix": 4, "normalization": 1, "rest": 2}
    assert (profile.update_ms, profile.step_ms) == (3, 13)
    told = tables.of_a_run(run, "default")
    assert "13.00 ms a step, eager" in told
    assert "A minute of compiling would" in told
    assert "How long compiling takes, graph breaks and recompilations are not in a run" in told


def test_a_watched_run_of_several_updates_in_a_step_is_refused(monkeypatch):
    with pytest.raises(UserError, match="job 7: 2 updates in the recorded step; expected one"):
        worth.of_a_run(watched(monkeypatch, (8, 9), (9, 13)), 13.0)
