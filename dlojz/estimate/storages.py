"""The lifetimes of the tensors of a training step, found on a machine without a GPU.

In torch's fake mode a tensor has a shape, a dtype and a storage, but no memory: a step of a model
of any size takes seconds. `Storages` records each new storage and its end.

The tensors are on a fake "cpu", since the backward pass of fake "cuda" tensors needs a driver. So
`as_on_a_gpu` brings the choices that differ: autocast's list of float32 operations, and optimizers
that update all tensors with one kernel (foreach).
"""

import weakref
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dlojz.training import private, sharding
from dlojz.training.replaced import replaced

VALUE, CAST = "aten._local_scalar_dense.default", "aten._to_copy.default"  # operations
COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")  # namespaces of operations
UNCLEAR = ("activations", "temporaries")  # parts by the phase alone, which a role replaces
# Operations that autocast computes in float32 on a GPU but not on a processor: it casts their
# arguments, or sets their argument dtype, if there is one.
WIDENED = (
    *("layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "norm.Scalar"),
    *("norm.ScalarOpt_dim", "exp", "expm1", "log", "log10", "log2", "log1p", "pow.Tensor_Scalar"),
    *("pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "reciprocal", "softplus", "logsumexp", "dist"),
    *("renorm", "erfinv", "acos", "asin", "cosh", "sinh", "tan"),
)
WITH_DTYPE = (
    *("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList"),
    "linalg_vector_norm",
)
WEIGHTS = ("parameters", "gathered")
HALF = (torch.float16, torch.bfloat16)


class Storages(private.dispatch_mode()):
    """The storages of all tensors that are made while it is active.

    events: (number of a storage, its bytes, phase); negative bytes where it ends
    parts: by storage, one of dlojz.runs.memory.PARTS
    """

    def __init__(self):
        super().__init__()
        self.events, self.parts, self.phase = [], {}, ""
        self._fake = private.fake_mode()
        self._live = {}  # by number: bytes, and the weak reference that reports the end
        self._context = ExitStack()
        self._value = 0.0  # of each tensor: for GradScaler no infinity, for Adam its first step

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP frees gathered weights this way, without an operation
            resize(storage, size)
            self._ended(getattr(storage, "dlojz_number", None))
            self._begun(storage)

        for each in (replaced(torch.UntypedStorage, resize_=resized), as_on_a_gpu(), self._fake):
            self._context.enter_context(each)
        for register, value in (
            (register_optimizer_step_pre_hook, 1.0),
            (register_optimizer_step_post_hook, 0.0),
        ):
            hook = register(lambda *_, value=value: setattr(self, "_value", value))
            self._context.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._context.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its shards follow one by one
        if str(function) == VALUE:
            return self._value
        out = function(*args, **(kwargs or {}))
        private.forget(self._fake)
        if not function.is_view:
            self._see(function, args, kwargs, out)
        return out

    def _see(self, function, args, kwargs, out):
        part = "activations" if torch.is_grad_enabled() else "temporaries"
        if str(function) == CAST and self.part(args[0]) in WEIGHTS:
            part = "casts"
        for tensor in tensors(out):
            self._begun(tensor.untyped_storage(), part)
        if function.namespace in COLLECTIVES:
            self.note("communication", (args, kwargs, out))

    def _begun(self, storage, part="temporaries"):
        number = getattr(storage, "dlojz_number", None)
        if number in self._live or not storage.nbytes():
            return
        if number is None:
            number = storage.dlojz_number = len(self.parts)
            self.parts[number] = part
        size = -(-storage.nbytes() // 512) * 512
        self._live[number] = size, weakref.ref(storage, lambda _: self._ended(number))
        self.events.append((number, size, self.phase))

    def _ended(self, number):
        if number in self._live:
            size, _ = self._live.pop(number)
            self.events.append((number, -size, self.phase))

    def part(self, tensor) -> str:
        """Return a tensor's part of memory."""
        return self.parts.get(getattr(tensor.untyped_storage(), "dlojz_number", None), "")

    def note(self, part: str, tree, over=UNCLEAR):
        """Note the part of memory of these tensors, if it was one of `over` so far."""
        for tensor in tensors(tree):
            self._begun(tensor.untyped_storage())
            if self.part(tensor) in over:
                self.parts[tensor.untyped_storage().dlojz_number] = part

    def note_left(self, part: str):
        """Note the part of memory of all that is still unclear and alive."""
        self.parts |= {n: part for n in self._live if self.parts[n] in UNCLEAR}


def tensors(tree) -> list[torch.Tensor]:
    """Return the fake tensors of a tree; for a DTensor, this process's shard."""
    leaves = (sharding.own(leaf) for leaf in private.tree_leaves(tree))
    return [leaf for leaf in leaves if private.is_fake(leaf)]


@contextmanager
def as_on_a_gpu():
    """Make torch treat tensors on the processor as it would on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    for name in WIDENED + WITH_DTYPE:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(operation, in_float32(operation, name in WITH_DTYPE), "AutocastCPU")
    foreach = register_optimizer_step_pre_hook(with_one_kernel)
    attention = torch.nn.functional.scaled_dot_product_attention

    def fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **named):
        # A GPU's kernels draw the dropout without keeping the scores, unlike a processor's.
        return attention(query, key, value, attn_mask, 0.0, is_causal, **named)

    try:
        with replaced(torch.nn.functional, scaled_dot_product_attention=fused):
            yield
    finally:
        foreach.remove()
        del library  # ends its implementations, even if an error keeps this frame alive


def in_float32(operation, with_dtype: bool):
    """Return this operation as autocast runs it on a GPU: with tensors of 16 bits as float32."""

    def run(*args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            if not with_dtype:
                args, kwargs = private.tree_map(widened, (args, kwargs))
            elif kwargs.get("dtype") is None and args[0].dtype in HALF:
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def widened(leaf):
    """Return a tensor of 16 bits in float32, and anything else unchanged."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf


def with_one_kernel(optimizer, *_):
    """Turn on foreach in an optimizer whose flags are the defaults, as on a GPU."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and group.get("fused") is None:
            group["foreach"] = True
