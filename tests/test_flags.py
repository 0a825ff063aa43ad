"""What all trainers' flags have in common."""

import argparse
import os
import sys

import pytest
import torch
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.codecache import FxGraphHashDetails

from dlojz.training import flags


@pytest.mark.parametrize("precision", ["bf16", "fp16", None])
def test_compiled_code_is_found_again_in_its_own_precision_only(monkeypatch, precision):
    before = torch.compiler.config.cache_key_tag
    monkeypatch.setattr(sys, "argv", ["dlojz.py"])
    parser = argparse.ArgumentParser()
    if precision:
        parser.add_argument("--precision", default=precision)
    parser.add_argument("--model", default="resnet18")
    try:
        flags.keep_apart("of an earlier run")
        flags.parse(parser)
        key = FxGraphHashDetails(torch.fx.symbolic_trace(torch.nn.ReLU()), [], {}, [])
        assert key.cache_key_tag == (precision or ""), "it is a part of the key"
    finally:
        flags.keep_apart(before)
    assert issubclass(autograd_cache.AOTAutogradCacheDetails, FxGraphHashDetails)


def test_a_deterministic_run_asks_torch_for_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dlojz.py", "--deterministic"])
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        flags.parse(flags.parser())
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
