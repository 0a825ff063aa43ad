"""Torch's private names: each works, each is done without, and no other module has one."""

import ast
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from dlojz.training import private

PACKAGE = Path(__file__).parent.parent / "dlojz"
ONES = [torch.ones(2), torch.ones(3)]
MODEL = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
HERE = "dlojz/training/private.py"
# Facts asks any Python's torch, without the package, and notes an error as such.
ELSEWHERE = {"machine/facts.py": {"_C", "_cuda_getArchFlags"}}
# The rest of an interpreter's private names, which are not torch's.
PYTHONS = {"_exit", "_registry", "_replace"}


@pytest.fixture
def without(monkeypatch):
    """Every private name of torch is gone."""

    def gone(path):
        raise AttributeError(path)

    monkeypatch.setattr(pkgutil, "resolve_name", gone)


@pytest.mark.parametrize(
    ("name", "arguments", "instead"),
    [
        ("is_compiled", (MODEL,), False),
        ("compile_counters", (), {}),
        ("on_compilations", (print, print), None),
        ("copies", (ONES,), ONES),
        ("norms", ([torch.ones(4)],), [torch.tensor(2.0)]),
        ("is_profiling", (), False),
        ("event_type", (), torch.cuda.Event),
        ("end_workers", (), None),
        ("be_worker_of", ([], 0), None),
        ("shard_fused_sgd", (), None),
    ],
)
def test_a_name_that_is_gone_is_done_without_after_a_warning(name, arguments, instead, without):
    with pytest.warns(UserWarning, match=r"which torch .* does not have: expected"):
        found = getattr(private, name)(*arguments)
    torch.testing.assert_close(found, instead) if isinstance(found, list) else None
    assert isinstance(found, list) or found == instead


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dispatch_mode", ()),
        ("without_modes", ()),
        ("in_backward", ()),
        ("tree_map", (len, [])),
        ("tree_leaves", ([],)),
        ("compilations", ()),
        ("forget_compilations", ()),
        ("explain", (MODEL, torch.ones(2, 2))),
        ("generated", (len, [])),
        ("backend", ("eager",)),
        ("ignores_errors", ()),
        ("empty_compile_cache", ("/nowhere",)),
        ("default_store", ()),
        ("local_tensors", (8,)),
        ("of_rank", (torch.ones(1), 0)),
        ("flash", (torch.ones(1, 1, 1, 1),) * 3),
        ("flash_gradients", (torch.ones(1, 1, 1, 1),) * 7),
    ],
)
def test_a_name_that_is_gone_ends_one_feature_with_a_sentence(name, arguments, without):
    with pytest.raises(private.MissingNameError, match=r"needs torch\.\S+, which torch .* install"):
        getattr(private, name)(*arguments)


def test_what_torch_keeps_in_an_object_may_be_gone_too():
    with pytest.raises(private.MissingNameError, match=r"needs torch\.nn\.Module\._buffers"):
        private.own_buffers(lambda: None)
    assert private.ddp_facts(MODEL) == {}
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert torch.is_tensor(private.scale(scaler))
    assert private.scale(SimpleNamespace(get_scale=lambda: 8.0)) == 8


def test_modes_are_seen_past():
    seen = Counter()

    class Mode(private.dispatch_mode()):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen[function.overloadpacket.__name__, private.in_backward()] += 1
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Mode():
        y = x.sin()
        with private.without_modes():
            y = y.sin()
        y.sum().backward()
    assert seen["sin", False] == 1, "the second one is unseen"
    assert seen["cos", True] == 2, "of both"


def test_leaves_are_found_in_a_tree():
    tree = [1, {"two": (2, 3)}]
    assert private.tree_leaves(tree) == [1, 2, 3]
    assert private.tree_map(str, tree) == ["1", {"two": ("2", "3")}]


def test_many_tensors_are_copied_and_measured_at_once():
    (copy, _), (norm, _) = private.copies(ONES), private.norms(ONES)
    assert copy.data_ptr() != ONES[0].data_ptr()
    assert norm == pytest.approx(2**0.5)


def test_attention_over_pieces_has_the_gradients_of_the_whole():
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(4))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    wanted = torch.autograd.grad(expected, (q, k, v), gradient)
    q, k, v, gradient = (x.detach() for x in (q, k, v, gradient))
    out, logarithms, kept = private.flash(q, k, v)
    torch.testing.assert_close(out, expected.detach())
    pieces = [
        private.flash_gradients(gradient, q, *some, out, logarithms, kept)
        for some in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
    ]
    of_q, of_k, of_v = zip(*pieces, strict=True)
    torch.testing.assert_close((sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)), wanted)


def test_a_profile_is_noticed():
    assert not private.is_profiling()
    with torch.profiler.profile():
        assert private.is_profiling()


def test_buffers_and_children_are_those_of_torch():
    assert private.children(MODEL) == dict(MODEL.named_children())
    assert private.own_buffers(MODEL[0]) == dict(MODEL[0].named_buffers())


def test_an_event_has_the_methods_of_c():
    own = private.event_type()
    assert issubclass(own, torch.cuda.Event)
    assert {own.record, own.query, own.elapsed_time}.isdisjoint(vars(torch.cuda.Event).values())


def test_a_loaders_workers_are_ended():
    loader = DataLoader(range(64), num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    next(batches)
    private.end_workers()
    assert not batches._workers[0].is_alive()


class Asked(torch.utils.data.Dataset):
    def __getitem__(self, index):
        private.be_worker_of("another set", 7)
        info = get_worker_info()
        return info.dataset, info.id, info.num_workers, info.seed


def test_a_worker_tells_of_another_data_set():
    (found,) = DataLoader(Asked(), batch_size=None, sampler=[0], num_workers=1)
    assert found == ["another set", 0, 1, 7]


def private_names(source):
    """Yield (line, name) of each private name that is not the module's own."""
    tree, own = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    for node in ast.walk(tree):
        for name in names_of(node):
            if name.startswith("_") and not name.startswith("__") and name not in own | PYTHONS:
                yield node.lineno, name


def names_of(node):
    """Return the names that a node asks for: of a module, or of an object other than its own."""
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.ImportFrom):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Attribute):
        return [] if getattr(node.value, "id", "") in ("self", "cls") else [node.attr]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
        return [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
    if isinstance(node, ast.Subscript) and getattr(node.value, "func", None):
        called, key = getattr(node.value.func, "id", ""), getattr(node.slice, "value", None)
        return [key] if called == "vars" and isinstance(key, str) else []
    return []


PRIVATE = (
    "import torch._dynamo",
    "from torch._inductor import config",
    "from torch.utils import _pytree",
    "torch._C.name()",
    "iterator._data_queue",
    "optimizer._opt_called = True",
    'getattr(model, "_get_ddp_logging_data", None)',
    'vars(module)["_buffers"]',
)
OWN = (
    "self._x = 1\nother._x",
    "def _own(): pass\nmodule._own()",
    "self._name()",
    "os._exit(0)",
    "type(x).__name__",
)


def test_a_private_name_is_told_from_ones_own():
    assert [source for source in PRIVATE if not [*private_names(source)]] == []
    assert [source for source in OWN if [*private_names(source)]] == []


def test_no_other_module_has_a_private_name():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        known = ELSEWHERE.get(name, set())
        mine = f"dlojz/{name}" == HERE or "/experiments/" in name
        if not mine and "torch" in (source := path.read_text()):
            found += [f"{name}:{a}: {b}" for a, b in private_names(source) if b not in known]
    assert found == [], f"move them to {HERE}"


def test_importing_it_imports_torch_alone():
    code = (
        "import sys, torch; known = set(sys.modules); import dlojz.training.private; "
        "sys.exit(str([m for m in set(sys.modules) - known if m.startswith('torch')] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
