"""All private names of torch that the course uses, each behind a public name of ours.

A private name may go with any version of torch. Then a function raises `MissingNameError`, which
names the feature that needs it, or warns and returns what its substitute does, `otherwise`; its
docstring says what is lost. tests/test_private.py tries each both ways, and refuses private names
of torch in any other module. Nothing is imported before a call.
"""

import copyreg
import functools
import gc
import importlib
import pkgutil
import warnings
from collections import Counter, defaultdict
from contextlib import suppress

import torch

from dlojz.course import UserError
from dlojz.training.replaced import replaced

ESTIMATE, TREES = "dlojz estimate", "dlojz estimate and dlojz worth"  # features
COMPILATIONS = "a list of compilations"


class MissingNameError(UserError):
    """A private name that the installed torch does not have."""


def named(path: str, feature: str):
    """Return an object of torch; raise MissingNameError, which names the feature, if it is gone.

    path: a module to import, a colon, and names within it.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        raise MissingNameError(_sentence(feature, path.replace(":", "."))) from None


def _sentence(feature, name):
    return (
        f"{feature} needs {name}, which torch {torch.__version__} does not have: expected a "
        "version that this course was tested with, `pip install -c constraints.txt -e .`"
    )


def otherwise(instead):
    """Decorate a function with a substitute, called after a warning if a name is missing."""

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


# Operations, seen one by one ----------------------------------------------------------------------


def dispatch_mode() -> type:
    """Return the base class of modes that see each operation, which has no public name."""
    return named("torch.utils._python_dispatch:TorchDispatchMode", "a list of operations")


def without_modes():
    """Return a context in which no dispatch mode sees an operation."""
    return named("torch.utils._python_dispatch:_disable_current_modes", ESTIMATE)()


def in_backward() -> bool:
    """Return whether the present operation belongs to a backward pass."""
    return named("torch:_C._current_autograd_node", "a count of operations by pass")() is not None


def tree_map(function, tree):
    """Return nested lists, tuples and dicts with the function applied to each leaf."""
    return named("torch.utils._pytree:tree_map", TREES)(function, tree)


def tree_leaves(tree) -> list:
    """Return the leaves of nested lists, tuples and dicts."""
    return named("torch.utils._pytree:tree_leaves", TREES)(tree)


# The memory of a step ----------------------------------------------------------------------------


def fake_mode():
    """Return a mode in which tensors have shapes, dtypes and storages, but no memory."""
    mode = named("torch._subclasses.fake_tensor:FakeTensorMode", ESTIMATE)
    return mode(allow_non_fake_inputs=True)


def is_fake(value) -> bool:
    """Return whether this is a tensor without memory."""
    return isinstance(value, named("torch._subclasses.fake_tensor:FakeTensor", ESTIMATE))


def forget(mode):
    """Drop a fake mode's weak references to weights, with which Module.to refuses to convert.

    Without it only a trainer that converts its model, as to channels_last, ends with torch's error.
    """
    with suppress(AttributeError):
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def join_fake_group(size: int):
    """Join a process group as its first process; the others are fake."""
    store = named("torch.testing._internal.distributed.fake_pg:FakeStore", ESTIMATE)()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=size)


def local_tensors(size: int):
    """Return a context in which each operation runs once for each of `size` ranks."""
    return named("torch.distributed._local_tensor:LocalTensorMode", "notebook 12")(size)


def of_rank(tensor, rank: int):
    """Return a rank's tensor, where `local_tensors` has one for each rank."""
    several = named("torch.distributed._local_tensor:LocalTensor", "notebook 12")
    return tensor._local_tensors[rank] if isinstance(tensor, several) else tensor


def first_buckets():
    """Return a context in which DDP keeps its first buckets, as new ones need tensors' values."""
    reducer = named("torch.distributed:Reducer", ESTIMATE)
    named("torch.distributed:Reducer._rebuild_buckets", ESTIMATE)
    return replaced(reducer, _rebuild_buckets=lambda _: False)


def unseen_shapes():
    """Return a context that hides DTensor's search for shapes, which runs whole tensors."""
    owner = named("torch.distributed.tensor._sharding_prop:ShardingPropagator", ESTIMATE)
    name = "_propagate_tensor_meta_non_cached"
    shapes = named(f"{owner.__module__}:{owner.__name__}.{name}", ESTIMATE)

    def unseen(*args):
        with without_modes():
            return shapes(*args)

    return replaced(owner, **{name: unseen})


def has_no_values(tensor) -> bool:
    """Return whether a tensor is one of torch.compile's traced ones, which take no memory.

    Their type has no public name. Without it their bytes would be counted as memory.
    """
    return type(tensor).__module__.startswith("torch._subclasses")


# torch.compile -----------------------------------------------------------------------------------


@otherwise(lambda module: False)
def is_compiled(module) -> bool:
    """Return whether a module was given to torch.compile, by either way.

    Without it a run's log does not say that it compiles.
    """
    wrapper = named("torch._dynamo:OptimizedModule", "whether a model is compiled")
    return isinstance(module, wrapper) or module._compiled_call_impl is not None


def before_compiled_call(module, hook) -> bool:
    """Call `hook(module, args, kwargs)` before a module that `module.compile()` has compiled.

    Return False for another one. A hook of torch's would be compiled, too, and break the graph.
    """
    call = getattr(module, "_compiled_call_impl", None)
    if call is None:
        return False

    def noted(*args, **kwargs):
        hook(module, args, kwargs)
        return call(*args, **kwargs)

    module._compiled_call_impl = noted
    return True


@otherwise(lambda: defaultdict(Counter))
def compile_counters() -> dict:
    """Return torch.compile's counters: graphs, breaks by reason, hits of its cache.

    Without it all are 0: a run's log does not say that it compiled.
    """
    return named("torch._dynamo.utils:counters", "a count of graphs")


@otherwise(lambda starts, ends: None)
def on_compilations(starts, ends):
    """Register first callbacks for each compilation, which survive `torch.compiler.reset()`.

    Without it a run's log has nothing of its compilations.
    """
    handler = named("torch._dynamo.callback:callback_handler", "the times of compilations")
    handler.start_callbacks = _Kept([starts, *handler.start_callbacks])
    handler.end_callbacks = _Kept([ends, *handler.end_callbacks])


class _Kept(list):
    """A list of callbacks whose first survives `torch.compiler.reset()`."""

    def clear(self):
        del self[1:]


def compilations() -> list:
    """Return torch.compile's records of the compilations that ended with a graph."""
    noted = named("torch._dynamo.utils:get_compilation_metrics", COMPILATIONS)()
    return [each for each in noted if each.has_guarded_code]


def forget_compilations():
    """Empty the list of `compilations`."""
    named("torch._dynamo.utils:clear_compilation_metrics", COMPILATIONS)()


def explain(model, *inputs):
    """Return the places and reasons of a model's graph breaks."""
    return named("torch._dynamo:explain", "the reasons of graph breaks")(model)(*inputs)


def generated(call, *inputs) -> list[str]:
    """Call a compiled function; return the sources that the compiler wrote for it."""
    return named("torch._inductor.utils:run_and_get_code", COMPILATIONS)(call, *inputs)[1]


def backend(name: str):
    """Return a backend of torch.compile, to wrap in one of ours."""
    return named("torch._dynamo:lookup_backend", "a count of graphs")(name)


def ignores_errors() -> bool:
    """Return whether a failed compilation silently runs eager, as a repair may request."""
    return named("torch._dynamo.config:suppress_errors", "the check of a repair")


def empty_compile_cache(folder: str):
    """Return a context in which torch.compile's caches are in this folder, and empty in memory."""
    return named("torch._inductor.utils:fresh_cache", "dlojz worth")(dir=folder, delete=False)


# Attention in pieces -----------------------------------------------------------------------------


def flash(q, k, v) -> tuple:
    """Return attention over some keys, the logarithms of its weights' sums, and what is kept.

    The public function keeps these logarithms, by which pieces over other keys can be added.
    """
    out, logarithms, *kept = _flash(q)(q, k, v, 0.0, False)
    return out, logarithms, kept[:6]


def flash_gradients(gradient, q, k, v, out, logarithms, kept) -> tuple:
    """Return the gradients of q, and of these k and v; out and logarithms are those of all keys.

    kept: what `flash` returned, for as many keys
    """
    given = gradient, q, k, v, out, logarithms, *kept[:4]
    return _flash(q, "_backward")(*given, 0.0, False, *kept[4:])


def _flash(q, suffix=""):
    """Return the operation behind scaled_dot_product_attention on the device of q."""
    device = "_for_cpu" if q.device.type == "cpu" else ""
    name = f"torch:ops.aten._scaled_dot_product_flash_attention{device}{suffix}"
    return named(name, "attention in a ring")


# Many tensors in one call ------------------------------------------------------------------------


@otherwise(lambda tensors: [tensor.clone() for tensor in tensors])
def copies(tensors: list) -> list:
    """Return copies by one call; without it a hundred cost the host a millisecond."""
    return named("torch:_foreach_mul", "a quick copy of many tensors")(tensors, 1)


@otherwise(lambda tensors: [tensor.norm() for tensor in tensors])
def norms(tensors: list) -> list:
    """Return the norm of each by one call; without it the host needs more time."""
    return named("torch:_foreach_norm", "quick norms of many tensors")(tensors)


# The profiler, the clocks ------------------------------------------------------------------------


@otherwise(lambda: False)
def is_profiling() -> bool:
    """Return whether a profile is being recorded.

    Without it a profile does not mark the auditor's work.
    """
    return named("torch.autograd.profiler:_is_profiler_enabled", "the auditor's name in a profile")


@otherwise(lambda: torch.cuda.Event)
def event_type() -> type:
    """Return a type of CUDA events with methods in C, which no trainer can replace.

    Without it the type is torch.cuda.Event, whose methods a trainer could replace.
    """
    own = named("torch:_C._CudaEventBase", "a clock that no trainer can replace")
    methods = {name: getattr(own, name) for name in ("record", "query", "elapsed_time")}
    return type("Event", (torch.cuda.Event,), methods)


# A model and its training ------------------------------------------------------------------------


def own_buffers(module) -> dict:
    """Return a module's own buffers by name, without its methods, which a trainer may replace."""
    return _kept_by(module, "_buffers")


def children(module) -> dict:
    """Return a module's direct children by name; see `own_buffers`."""
    return _kept_by(module, "_modules")


def _kept_by(module, name):
    try:
        return vars(module)[name]
    except KeyError:
        raise MissingNameError(_sentence("the check of a run", f"torch.nn.Module.{name}")) from None


def leave_out(hook, module):
    """Keep the handle's hook before forward passes out of copies and files of a module.

    Without torch's two tables of hooks, a saved model cannot be read where the course is not.
    """
    make = copyreg.dispatch_table.get(type(module), lambda module: module.__reduce_ex__(2))

    def reduced(module):
        made = make(module)
        if isinstance(made, str) or len(made) < 3 or not isinstance(made[2], dict):
            return made
        state = dict(made[2])
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            if hook.id in state.get(name, ()):
                state[name] = state[name].copy()
                del state[name][hook.id]
        return (*made[:2], state, *made[3:])

    copyreg.pickle(type(module), reduced)


def scale(scaler):
    """Return a gradient scaler's factor as a tensor, without waiting for the device.

    Without torch's tensor it is a number, and each update waits.
    """
    return scaler._scale if hasattr(scaler, "_scale") else scaler.get_scale()


def ddp_facts(model) -> dict:
    """Return DDP's logging data; {} for another model, or without this method."""
    return getattr(model, "_get_ddp_logging_data", dict)()


def default_store():
    """Return the store through which the processes of a run met, for notes to each other."""
    path = "torch.distributed.distributed_c10d:_get_default_store"
    return named(path, "a note for the other processes")()


# DataLoader --------------------------------------------------------------------------------------


def _iterators() -> list:
    path = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
    kind = named(path, "the workers of loaders")
    return [thing for thing in gc.get_objects() if type(thing) is kind]


def _of(iterator, name):
    try:
        return getattr(iterator, name)
    except AttributeError:
        path = f"{type(iterator).__name__}.{name}"
        raise MissingNameError(_sentence("the workers of loaders", path)) from None


@otherwise(lambda: None)
def end_workers():
    """End the workers of all loaders, also of those kept alive by an error's frames.

    Where memory is pinned and workers persist, torch waits for each as Python exits: up to 5 s.
    Without it the process takes that long to end.
    """
    for iterator in _iterators():
        _of(iterator, "_shutdown_workers")()


@otherwise(lambda dataset, seed: None)
def be_worker_of(dataset, seed: int):
    """Make `get_worker_info` report this process as the data set's only worker.

    Without it a probed data set can recognize the probe, which has a loader of its own.
    """
    path = "torch.utils.data._utils.worker"
    make = named(f"{path}:WorkerInfo", "the probe of a data set in a worker")
    named(f"{path}:_worker_info", "the probe of a data set in a worker")
    info = make(id=0, num_workers=1, seed=seed, dataset=dataset)
    importlib.import_module(path)._worker_info = info


# DTensor -----------------------------------------------------------------------------------------


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
    # Tensors without values need it too: torch would make real, whole ones to find shapes.
    library = torch.library.Library("aten", "IMPL")
    for each in fused:
        library.impl(each, lambda *_, **__: None, "Meta")
    return library  # the implementation ends with it
