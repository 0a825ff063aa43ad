"""All private names of torch that the course uses, each behind a public name of ours.

A private name may go with any version of torch. So each function says what it is for and what
happens without it: it raises `Missing`, which names the feature that needs it, or it is decorated
with what to do `otherwise`, and warns once. tests/test_private.py tries each of them both ways, and
refuses private names of torch in any other module. Nothing is imported before it is called.
"""

import functools
import pkgutil
import warnings

import torch

from dlojz.course import UserError


class Missing(UserError):
    """A private name that the installed torch does not have."""


def named(path: str, feature: str):
    """Return an object of torch; raise Missing, which names the feature, if it is gone.

    path: a module to import, a colon, and names within it.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        raise Missing(
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
            except Missing as error:
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


@otherwise(lambda: None)
def shard_fused_sgd():
    """Have DTensor shard fused SGD, which works element by element, as it does fused Adam.

    torch 2.11 to 2.15 know only fused Adam. Without it fused SGD of shards ends with torch's error
    that no sharding strategy is registered; all else works.
    """
    feature = "fused SGD of weights in shards"
    packet = named("torch:ops.aten._fused_sgd_", feature)
    fused = [packet.default, packet.tensor_lr]
    ops = "torch.distributed.tensor._ops"
    try:  # since some version between 2.11 and 2.15
        register = named(f"{ops}._pointwise_ops:_register_single_dim_pointwise", feature)
    except Missing:
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
