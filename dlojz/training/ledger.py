"""The order in which the tensors of a training step come and go, on a machine without a GPU.

Under torch's FakeTensorMode a tensor has a shape, a dtype and a storage, but no memory: a step of
a model of any size takes seconds. The ledger writes down each new storage and its end.

The tensors are on a fake "cpu", since the backward pass of fake "cuda" tensors needs a driver. So
`as_on_a_gpu` brings the choices that differ: autocast's list of float32 operations, and optimizers
that update all tensors with one kernel (foreach).
"""

import sys
import weakref
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")  # namespaces of operations
UNCLEAR = ("activations", "temporaries")  # parts by the moment only: a role counts more
# What autocast computes in float32 on a GPU but leaves alone on a processor.
FLOAT32 = (
    *("layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "softmax.int"),
    *("log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "rsqrt", "reciprocal", "softplus"),
    *("logsumexp", "dist", "renorm", "erfinv", "acos", "asin", "cosh", "sinh", "tan"),
)
WEIGHTS = ("parameters", "gathered")
SHAPES = "_propagate_tensor_meta_non_cached"
HALF = (torch.float16, torch.bfloat16)


class Ledger(TorchDispatchMode):
    """The storages of all tensors that are made while it is active.

    events: (number of a storage, its bytes, phase); negative bytes where it ends
    parts: of each storage, one of dlojz.runs.memory.PARTS
    """

    def __init__(self):
        super().__init__()
        self.events, self.parts, self.phase = [], {}, ""
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo = self.fake.fake_tensor_converter.meta_converter.tensor_memo
        self._live = {}  # by number: bytes, and the weak reference that tells the end
        self._context = ExitStack()

    def __enter__(self):
        resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # FSDP frees gathered weights so; no operation tells of it
            resize(storage, size)
            self._ended(getattr(storage, "_number", None))
            self._begun(storage)

        self._context.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        self._context.enter_context(as_on_a_gpu())
        self._context.enter_context(self.fake)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._context.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its shards come here one by one
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0.0  # of GradScaler: no infinity was found
        out = function(*args, **(kwargs or {}))
        self._memo.clear()  # its weak references would make Module.to refuse parameters
        if not function.is_view:
            self._see(function, args, kwargs, out)
        return out

    def _see(self, function, args, kwargs, out):
        part = "activations" if torch.is_grad_enabled() else "temporaries"
        if function is torch.ops.aten._to_copy.default and self.part(args[0]) in WEIGHTS:
            part = "casts"
        for tensor in tensors(out):
            self._begun(tensor.untyped_storage(), part)
        if function.namespace in COLLECTIVES:
            self.note("communication", (args, kwargs, out))

    def _begun(self, storage, part="temporaries"):
        number = getattr(storage, "_number", None)
        if number in self._live or not storage.nbytes():
            return
        if number is None:
            number = storage._number = len(self.parts)
            self.parts[number] = part
        size = -(-storage.nbytes() // 512) * 512
        self._live[number] = size, weakref.ref(storage, lambda _: self._ended(number))
        self.events.append((number, size, self.phase))

    def _ended(self, number):
        if number in self._live:
            size, _ = self._live.pop(number)
            self.events.append((number, -size, self.phase))

    def part(self, tensor) -> str:
        """Return the part of memory that a tensor is in."""
        return self.parts.get(getattr(tensor.untyped_storage(), "_number", None), "")

    def note(self, part: str, tree, over=UNCLEAR):
        """Note the part of memory that these tensors are in, if it was one of `over` so far."""
        for tensor in tensors(tree):
            self._begun(tensor.untyped_storage())
            if self.part(tensor) in over:
                self.parts[tensor.untyped_storage()._number] = part


def tensors(tree) -> list[torch.Tensor]:
    """Return the fake tensors of a tree; of a DTensor, this process's shard."""
    leaves = [t._local_tensor if isinstance(t, DTensor) else t for t in tree_leaves(tree)]
    return [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]


@contextmanager
def as_on_a_gpu():
    """Make torch choose for tensors on the processor as it does for those on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    for name in FLOAT32:
        operation, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, operation), overload or "default")
        library.impl(function, in_float32(function), "AutocastCPU")
    optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim hides its module of this name
    names = {"return_value": ["cpu", "cuda"]}
    devices = mock.patch.object(optimizer, "_get_foreach_kernels_supported_devices", **names)
    shapes = getattr(ShardingPropagator, SHAPES)
    types = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    for known in types:
        known.append(FakeTensor)
    try:
        with devices, mock.patch.object(ShardingPropagator, SHAPES, without_modes(shapes)):
            yield
    finally:
        for known in types:
            known.remove(FakeTensor)
        library._destroy()


def without_modes(function):
    """Return a function that runs unseen: DTensor asks it for shapes, with whole tensors."""

    def run(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def in_float32(function):
    """Return this operation as autocast runs it: with tensors of 16 bits cast to float32."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    chooses = any(argument.name == "dtype" for argument in function._schema.arguments)

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            if not chooses:
                args, kwargs = tree_map(widened, (args, kwargs))
            elif kwargs.get("dtype") is None and args[0].dtype in HALF:
                kwargs["dtype"] = torch.float32
            return function(*args, **kwargs)

    return run


def widened(leaf):
    """Return a tensor of 16 bits in float32, and anything else as it is."""
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF else leaf
