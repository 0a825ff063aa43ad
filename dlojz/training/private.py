"""All private names of torch that the course uses, each behind a public name of ours.

A private name may go with any version of torch. So each function says what it is for and what
happens without it. Either it raises `MissingNameError`, which names the feature that needs it, or
it is decorated with what happens `otherwise`, after a warning. tests/test_private.py tries each
both ways, and refuses private names of torch in any other module. Nothing is imported before a
call.
"""

import functools
import pkgutil
import warnings
from contextlib import suppress

import torch

from dlojz.course import UserError
from dlojz.training.replaced import replaced


class MissingNameError(UserError):
    """A private name that the installed torch does not have."""


def named(path: str, feature: str):
    """Return an object of torch; raise MissingNameError, which names the feature, if it is gone.

    path: a module to import, a colon, and names within it.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        raise MissingNameError(
            f"{feature} needs {path.replace(':', '.')}, which torch {torch.__version__} does not "
            "have: expected a version that this course was tested with, `pip install -c "
            "constraints.txt -e .`"
        ) from None


def otherwise(instead):
    """Decorate a function with what is called instead where a name is missing, after a warning."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args):
            try:
                return function(*args)
            except MissingNameError as error:
                warnings.warn(str(error), stacklevel=2)
                return instead(*args)

        return call

    return decorate


def dispatch_mode() -> type:
    """Return the base class of a mode that sees each operation: it has no public name.

    Without it `dlojz estimate`, `dlojz worth` and notebook 04c end with a sentence.
    """
    return named(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "a list of a model's operations (dlojz estimate, dlojz worth, notebook 04c)",
    )


def without_modes():
    """Return a context in which no dispatch mode sees an operation.

    Without it `dlojz estimate` ends with a sentence.
    """
    return named("torch.utils._python_dispatch:_disable_current_modes", "dlojz estimate")()


def tree_map(function, tree):
    """Return lists, tuples and dicts within each other with a function of each leaf.

    Without it `dlojz estimate` and `dlojz worth` end with a sentence.
    """
    return named("torch.utils._pytree:tree_map", "dlojz estimate and dlojz worth")(function, tree)


def tree_leaves(tree) -> list:
    """Return the leaves of lists, tuples and dicts within each other; see `tree_map`."""
    return named("torch.utils._pytree:tree_leaves", "dlojz estimate and dlojz worth")(tree)


# The memory of a step: where no more is said, `dlojz estimate` ends with a sentence without a name.

ESTIMATE = "dlojz estimate"


def fake_mode():
    """Return a mode in which tensors have shapes, dtypes and storages, but no memory."""
    mode = named("torch._subclasses.fake_tensor:FakeTensorMode", ESTIMATE)
    return mode(allow_non_fake_inputs=True)


def is_fake(value) -> bool:
    """Return whether this is a tensor without memory."""
    return isinstance(value, named("torch._subclasses.fake_tensor:FakeTensor", ESTIMATE))


def forget(mode):
    """Drop a fake mode's weak references to weights, because of which Module.to refuses to convert.

    Without it only a trainer that converts its model, as to channels_last, ends with torch's error.
    """
    with suppress(AttributeError):
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def join_fake_group(size: int):
    """Join a process group as the first of its processes, of which the others are fake."""
    store = named("torch.testing._internal.distributed.fake_pg:FakeStore", ESTIMATE)()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=size)


def first_buckets():
    """Return a context in which DDP keeps its first buckets: new ones need values of tensors."""
    reducer = named("torch.distributed:Reducer", ESTIMATE)
    named("torch.distributed:Reducer._rebuild_buckets", ESTIMATE)
    return replaced(reducer, _rebuild_buckets=lambda _: False)


def unseen_shapes():
    """Return a context in which no mode sees how DTensor finds shapes: by running whole tensors."""
    owner = named("torch.distributed.tensor._sharding_prop:ShardingPropagator", ESTIMATE)
    name = "_propagate_tensor_meta_non_cached"
    shapes = named(f"{owner.__module__}:{owner.__name__}.{name}", ESTIMATE)

    def unseen(*args):
        with without_modes():
            return shapes(*args)

    return replaced(owner, **{name: unseen})


@otherwise(lambda: None)
def shard_fused_sgd():
    """Register fused SGD with DTensor, element by element, as fused Adam is.

    torch 2.11 to 2.15 know only fused Adam. Without it fused SGD of shards ends with torch's error
    that no sharding strategy is registered; all else works.
    """
    feature = "fused SGD of weights in shards"
    packet = named("torch:ops.aten._fused_sgd_", feature)
    fused = [packet.default, packet.tensor_lr]
    ops = "torch.distributed.tensor._ops"
    try:  # since some version between 2.11 and 2.15
        register = named(f"{ops}._pointwise_ops:_register_single_dim_pointwise", feature)
    except MissingNameError:
        schema = named("torch.distributed.tensor._op_schema:RuntimeSchemaInfo", feature)
        strategy = named(f"{ops}._pointwise_ops:list_pointwise_strategy", feature)
        register = named(f"{ops}.utils:register_op_strategy", feature)
        register(fused, schema_info=schema(needs_pytree=True))(strategy)
    else:
        for each in fused:
            register(each)
    # It is also missing for tensors without values: torch would make real ones, whole, to look.
    library = torch.library.Library("aten", "IMPL")
    for each in fused:
        library.impl(each, lambda *_, **__: None, "Meta")
    return library  # the implementation ends with it
