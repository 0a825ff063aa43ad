"""A trainer around any model, for `dlojz estimate` and `dlojz worth`: steps on one synthetic batch.

A model is named by

    mymodels:build      a function that returns a torch.nn.Module, imported as `python -m` does
    timm:resnet50       a name of timm's
    hf:gpt2             a type or a class of transformers with its defaults; or a folder with a
                        config.json, or a name on the hub, of which only the config is read

It has the functions of the course's trainer that these commands call, and makes its own batch.
"""

import argparse
import difflib
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from dlojz import idr_torch
from dlojz.course import UserError
from dlojz.runs import memory
from dlojz.training import private
from dlojz.training.imports import last_line

LABELS = ("labels", "targets", "target")  # arguments with which a model computes its own loss
TASKS = ("IMAGE_CLASSIFICATION", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")  # by preference
TOKENS = 1024  # of a sequence at most, unless --tokens asks for more
NAMES = {"adamw": "AdamW", "sgd": "SGD with momentum"}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # of autocast
# Errors of tensors without memory, by their class.
NO_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")


def parse_args():
    usage = '"module:function, timm:NAME or hf:NAME [flags]"'
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("--model", help=argparse.SUPPRESS)
    add("-b", "--batch", type=int, default=32)
    add("--precision", choices=memory.PRECISIONS, default="fp32")
    memory.add_flags_of_inputs(add)
    args = parser.parse_args()
    memory.must_be_positive(args)
    memory.must_be_inputs(args)
    return args


def set_numerics(args):
    torch.manual_seed(0)
    float32 = "ieee" if args.precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.conv.fp32_precision = float32


def set_device():
    return idr_torch.device()


def build_training(args, device, *_):
    model = build_model(args).to(device)
    optimizer = {
        "adamw": lambda weights: torch.optim.AdamW(weights, 1e-5),
        "sgd": lambda weights: torch.optim.SGD(weights, 1e-5, 0.9),
    }[args.optimizer](model.parameters())
    takes = inspect.signature(model.forward).parameters
    return SimpleNamespace(
        model=model,
        own=model,  # without DDP around it
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=args.precision == "fp16"),
        metrics=torch.nn.Identity(),
        labels=next((name for name in LABELS if name in takes), None),
    )


def batch(model, args, count: int, device):
    """Return a synthetic batch and its labels: tokens, or floats of the shape that the model takes.

    Labels are those of each token, or one for each input.
    """
    shape, tokens = inputs(model, args)
    if not tokens:
        found = torch.randn(count, *shape, device=device)
        return found, torch.zeros(count, dtype=torch.int64, device=device)
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    most = next((table.num_embeddings for table in tables), 1)  # the first one is that of the words
    found = torch.randint(most, (count, *shape), device=device)
    kind = type(model).__name__  # of transformers, if it classifies whole sequences
    whole = "Classification" in kind and "Token" not in kind
    return found, (torch.zeros_like(found[:, 0]) if whole else found.clone())


def inputs(model, args) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a single input, and whether it is one of tokens.

    As the flags say, or the model's own attributes in transformers or timm, or 3 x 224 x 224.
    """
    size, takes = args.image_size, getattr(model, "main_input_name", "pixel_values")
    if args.tokens:
        return (args.tokens,), True
    if args.input or size:
        return memory.shape_of(args.input) if args.input else (3, size, size), False
    config = getattr(model, "config", None)
    if takes == "input_ids":
        return (min(TOKENS, getattr(config, "max_position_embeddings", TOKENS)),), True
    if takes != "pixel_values":
        raise UserError(
            f"{args.model} takes {takes}: expected their shape, such as --input 80x3000"
        )
    if side := getattr(config, "image_size", None):
        sides = (side, side) if isinstance(side, int) else (*side,)
        return (getattr(config, "num_channels", 3), *sides), False
    return (*getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)),), False


def described(model, args) -> str:
    """Return an update in words: "AdamW, 8 sequences of 1,024 tokens"."""
    shape, tokens = inputs(model, args)
    size = f"{shape[0]:,} tokens" if tokens else " x ".join(map(str, shape))
    each = f"{'sequence' if tokens else 'input'}{'s' * (args.batch > 1)}"
    return f"{NAMES[args.optimizer]}, {args.batch:,} {each} of {size}"


def train_step(step, training, given, labels, args, chrono):
    chrono.forward()
    dtype = DTYPES.get(args.precision)
    with torch.autocast(given.device.type, dtype, enabled=dtype is not None):
        try:
            named = {training.labels: labels} if training.labels else {}
            loss = loss_of(training.model(given, **named), args)
        except Exception as error:
            raise _explained(error, f"{args.model} fails on {_shape(given)}") from error
    chrono.backward()
    training.optimizer.zero_grad()
    training.scaler.scale(loss).backward()
    chrono.update()
    loss = loss.detach()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return loss


def loss_of(out, args):
    """Return the loss that a model has computed, or else the cross entropy of its first output.

    out: a tensor, or tuples, lists and mappings of tensors. The classes are in the last dimension,
        or for images of classes, [N, C, H, W], in the second.
    """
    leaves = [leaf for leaf in private.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    found = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.requires_grad]
    if not found:
        raise UserError(
            f"{args.model} returns {type(out).__name__} without a gradient: expected a tensor of "
            "floats that depends on its weights, or a tuple or mapping with one"
        )
    if own := [leaf for leaf in found if leaf.numel() == 1 and leaf.ndim <= 1]:
        return own[0].sum()
    first = found[0]
    if first.ndim == 1:
        return first.float().mean()
    first = first if first.ndim == 4 else first.flatten(0, -2)
    labels = torch.zeros(len(first), *first.shape[2:], dtype=torch.int64, device=first.device)
    return cross_entropy(first, labels)


# The model ----------------------------------------------------------------------------------------


def build_model(args, *_):
    """Return the model that --model names. On meta, if it can be built there. Raises UserError."""
    kind, _, name = args.model.partition(":")
    make = {"timm": of_timm, "hf": of_transformers}.get(kind, lambda name: called(kind, name))
    try:
        model = make(name)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise _explained(error, f"{args.model} can't be built") from error
        with torch.device("cpu"):  # it reads values of its own tensors
            model = make(name)
    except (Exception, SystemExit) as error:
        raise _explained(error, f"{args.model} can't be built") from error
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{args.model} returns {type(model).__name__}: expected a torch.nn.Module")
    return model


def called(module: str, function: str):
    """Return the result of a function of a module. Raises UserError."""
    found = importlib.import_module(module)
    build = getattr(found, function, None)
    if not callable(build):
        raise UserError(f"{module} has no function {function!r}{_near(function, vars(found))}")
    parameters = inspect.signature(build).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if missing := [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]:
        raise UserError(
            f"{module}:{function} needs {', '.join(missing)}: expected no argument without a "
            f"default, as in `def build(): return {function}(...)`"
        )
    return build()


def of_timm(name: str):
    """Return a model of timm's, with random weights."""
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise UserError(
            f"timm {timm.__version__} has no model {name!r}{_near(name, timm.list_models())}"
        )
    return timm.create_model(name)


def of_transformers(name: str):
    """Return a model of transformers, with random weights: only a config is read."""
    transformers = importlib.import_module("transformers")
    types = transformers.CONFIG_MAPPING
    if Path(name).is_dir() or "/" in name:
        config = _config(transformers, name)
    elif name in types:
        config = types[name]()
    elif isinstance(kind := getattr(transformers, name, None), type) and hasattr(
        kind, "config_class"
    ):
        return kind(_trained(kind.config_class()))
    else:
        raise UserError(
            f"hf:{name}: no folder here, and no type or class of transformers "
            f"{transformers.__version__}{_near(name, types)}; expected one like hf:gpt2, "
            "hf:BertForMaskedLM, hf:./folder or hf:OWNER/NAME"
        )
    for own in getattr(config, "architectures", None) or ():
        return getattr(transformers, own)(_trained(config))
    tables = (getattr(transformers, f"MODEL_FOR_{task}_MAPPING") for task in TASKS)
    tables = (*tables, transformers.MODEL_MAPPING)
    return next(table[type(config)] for table in tables if type(config) in table)(_trained(config))


def _config(transformers, name):
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        where = (
            "its config.json can't be read" if Path(name).is_dir() else "no folder here, nor found"
        )
        raise UserError(
            f"hf:{name}: {where} ({' '.join(str(error).split())[:200]}). Without a network: "
            "a folder with its config.json, or a type with its defaults, such as hf:gpt2"
        ) from error


def _trained(config):
    """Return a config without the cache of keys and values, which only generation needs."""
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _near(name, names):
    near = difflib.get_close_matches(name, [n for n in names if not n.startswith("_")], 3, 0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _shape(given):
    return f"a batch of {' x '.join(map(str, given.shape))} {str(given.dtype).rpartition('.')[2]}"


def _explained(error, what):
    """Return an error as a line for the reader; one of memory, or one that is a line, as it is."""
    if isinstance(error, UserError | MemoryError | torch.OutOfMemoryError):
        return error
    if "allocate memory" in str(error):
        return error
    why = ": it reads values, which an estimate does not have" * (type(error).__name__ in NO_VALUES)
    hint = "" if "built" in what else ". Another shape: --input 3x32x32, or 128, or --tokens 1024"
    return UserError(f"{what}{why}: {last_line(error).rstrip('.')}{hint}")
