"""The cost of DistributedDataParallel and of its options: a step in many variants.

Submitted by a notebook:

    dlojz/chapters/n06_ddp/experiments/ddp.py
    --model resnet18


All variants live in the same processes and are timed in turn, so that a disturbance affects all.
Then one step of each is profiled.
"""

import argparse
import statistics
from contextlib import nullcontext

import torch
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dlojz.chapters import session
from dlojz.watch import profile

MB_OF_ONE_BUCKET = 4096
# The options of DistributedDataParallel in each variant.
OPTIONS = {
    "DDP": {},
    "buckets of 1 MB": {"bucket_cap_mb": 1},
    "buckets of 5 MB": {"bucket_cap_mb": 5},
    "buckets of 50 MB": {"bucket_cap_mb": 50},
    "one bucket": {"bucket_cap_mb": MB_OF_ONE_BUCKET},
    "gradients live in the buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters looked for": {"find_unused_parameters": True},
    "buffers not sent": {"broadcast_buffers": False},
    "both": {"gradient_as_bucket_view": True, "broadcast_buffers": False},
}
COMPILED = {  # with --compile also these, for the cuts of the graph at buckets
    "both, buckets of 50 MB": OPTIONS["both"] | {"bucket_cap_mb": 50},
    "both, graph not cut": OPTIONS["both"],
    "both, static graph": OPTIONS["both"] | {"static_graph": True},
    "both, compiled autograd": OPTIONS["both"],
}
PYTHON = "python_reducer"  # DDP's messages from Python hooks, which compiled autograd follows
ACCUMULATED = 4
VARIANTS = (
    *("no communication", *OPTIONS, "gradients travel as bf16", "stream of high priority"),
    *("loss read in each step", "metrics summed in each step", "SyncBatchNorm"),
    *(f"update every {ACCUMULATED}", f"update every {ACCUMULATED}, reduced in each step"),
)
MODES = ("off", "aot_eager", "default", "reduce-overhead", "max-autotune")
NEED_GPU = ("stream of high priority", "SyncBatchNorm")
FEW = ("no communication", "DDP", "buckets of 1 MB", "one bucket")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, 32)
    parser.add_argument("--rounds", type=int, default=8, help="timings of each case")
    parser.add_argument("--steps", type=int, default=1, help="steps that are timed together")
    of = {"nargs": "+", "metavar": "VARIANT"}
    choices = (*VARIANTS, *COMPILED, "all")
    parser.add_argument("--variants", default=FEW, choices=choices, **of)
    parser.add_argument("--compile", choices=MODES, default="off", help="each model (default: off)")
    args = parser.parse_args()
    if args.compile == "off" and (needed := set(args.variants) & set(COMPILED)):
        raise SystemExit(f"--variants {', '.join(sorted(needed))}: add --compile default")
    with session.begin(args) as (run, device):
        session.set_float32(args.precision)
        torch.backends.cudnn.benchmark = True  # as in the solution of this step
        every = VARIANTS
        if args.compile != "off":
            every += tuple(COMPILED)
            torch._dynamo.config.recompile_limit = 2 * len(every)  # all have the same program
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        wanted = every if "all" in args.variants else args.variants
        wanted = [v for v in wanted if device.type == "cuda" or v not in NEED_GPU]
        with session.process_group(device):
            steps = {name: training(name, args, device) for name in wanted}
            for step in steps.values():
                for _ in range(3):  # DDP builds its final buckets in the second step
                    step()
            session.in_turn(steps, device, 1, args.steps)  # a warm-up
            for name, ms in session.in_turn(steps, device, args.rounds, args.steps).items():
                per_batch = [v / (ACCUMULATED if name.startswith("update") else 1) for v in ms]
                run.measure(name, statistics.median(per_batch), "ms per batch")
                run.case(name, step_ms=per_batch, **seen(steps[name]))


def training(name, args, device):
    """Return step(), a training step of a model of its own, in this variant."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    model = model.to(memory_format=torch.channels_last)
    if name == "SyncBatchNorm":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile != "off":
        compile_alone(name, model, args.compile)
    cut = how_cut(name)
    if name != "no communication":
        with torch._dynamo.config.patch(optimize_ddp=cut):
            model = wrapped(name, model, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images, labels = session.batch(args, device)
    images = images.to(memory_format=torch.channels_last)
    dtype = session.DTYPES.get(args.precision)
    accumulated = ACCUMULATED if name.startswith("update") else 1
    sums = torch.zeros(4, device=device)

    def step():
        optimizer.zero_grad()
        for i in range(accumulated):
            silent = name == f"update every {ACCUMULATED}" and i < accumulated - 1
            with model.no_sync() if silent else nullcontext():
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                with compiled_backward(args.compile) if cut == PYTHON else nullcontext():
                    (loss / accumulated).backward()
        optimizer.step()
        if name == "metrics summed in each step":
            torch.distributed.all_reduce(sums)
        if name in ("metrics summed in each step", "loss read in each step"):
            sums.tolist()  # waits for the device

    if args.compile != "off":  # now, because the way of cutting graphs is global
        with torch._dynamo.config.patch(optimize_ddp=cut):
            step()
    return step


def how_cut(name) -> bool | str:
    """Return the setting of Dynamo for DDP: cut graphs at its buckets, or another exchange."""
    return PYTHON if "compiled autograd" in name else "not cut" not in name


def compiled_backward(mode):
    """Return a context in which the whole backward pass is one graph, with DDP's messages.

    Source: https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html
    """
    return torch._dynamo.compiled_autograd._enable(torch.compile(**asked(mode)))


def asked(mode) -> dict:
    return {"backend": mode} if mode == "aot_eager" else {"mode": mode}


def compile_alone(name, model, mode):
    """Compile a model in place, with code of its own, because existing code is reused.

    torch keeps it for the model's class, even if it was cut for other buckets.
    """
    model.__class__ = type(name, (type(model),), {})
    model.compile(**asked(mode))


def wrapped(name, model, device):
    """Return the model in DDP, in this variant."""
    options = dict((OPTIONS | COMPILED).get(name, {}))
    ids = [device] if device.type == "cuda" else None
    if name == "stream of high priority":
        kind = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["process_group"] = torch.distributed.new_group(pg_options=kind)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    if name == "gradients travel as bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model


def seen(step):
    """Return the communication between the processes in one step, and its times."""
    torch.distributed.barrier()
    return profile.communication(profile.profiled(step))


if __name__ == "__main__":
    main()
