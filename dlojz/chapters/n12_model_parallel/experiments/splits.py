"""One model, divided by several plans: images per second, memory, bytes sent, and waiting.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/splits.py", n_gpu=2).

All plans train the same model on the same images; a plan's record has its first losses, which must
be the same. Its sizes suit the device: on GPUs those of vit_2b, with a token less.
"""

import argparse

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n12_model_parallel import spread
from dlojz.chapters.n12_model_parallel.spread import Plan, Sizes
from dlojz.course import UserError
from dlojz.training import flags, models
from dlojz.watch import profile

ON_CPU = Sizes(layers=4, width=128, heads=4, hidden=512, tokens=64, batch=16, inputs=48, outputs=10)


def sizes_of(name: str, batch: int) -> Sizes:
    """Return the sizes of one of the course's larger models; "small": of one for processors."""
    if name == "small":
        return ON_CPU
    vit = models.LARGER[name]
    return Sizes(vit.layers, vit.width, vit.heads, vit.mlp, tokens=256, batch=batch)


def plans(processes: int) -> dict[str, Plan]:
    """Return the plans for this number of processes, by name."""
    found = {
        "DDP": Plan(),
        "FSDP2": Plan(sharding="fsdp"),
        "TP": Plan(tensor=processes),
        "TP, sequence parallel": Plan(tensor=processes, sequence=True),
        "PP, 8 parts": Plan(stages=processes, parts=8),
        "PP, interleaved": Plan(stages=processes, parts=8, chunks=2),
    }
    if processes % 4 == 0:
        found["TP x FSDP2"] = Plan(tensor=2, sequence=True, sharding="fsdp")
    return found


def measured(plan, sizes, device, args) -> dict:
    """Return the fields of a plan's case."""
    dtype = session.DTYPES.get(args.precision, torch.float32)
    training = spread.Training(plan, sizes, device, dtype, args.compile)
    found = {"plan": vars(plan), "sizes": vars(sizes), "flops": sizes.flops()}
    losses = [training.step() for _ in range(3)]
    found["losses"] = [loss.item() for loss in losses if loss is not None]
    found["expected_bytes"] = training.expected_bytes()
    found["step_ms"] = session.in_turn({"": training.step}, device, args.rounds)[""]
    found |= {"bytes": training.held(), "peak_bytes": training.peak_bytes()}
    torch.distributed.barrier()
    return found | spread.messages(profile.profiled(training.step), training)


def main():
    device = idr_torch.device()
    args = parse_args(device.type == "cuda")
    with session.begin(args, device) as (run, _):
        if idr_torch.size < 2:
            raise UserError("plans need at least two processes: submit it with n_gpu=2 or more")
        session.set_float32(args.precision)
        with session.process_group(device):
            sizes = sizes_of(args.model, args.batch_size)
            session.measure_product(run, device, args.precision, 3)
            for name, plan in tqdm(plans(idr_torch.size).items(), unit="plan"):
                run.case(name, **measured(plan, sizes, device, args))


def parse_args(on_gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model, batch, precision = ("vit_2b", 64, "bf16") if on_gpu else ("small", 16, "fp32")
    add = parser.add_argument
    add("--model", default=model, choices=("small", *models.LARGER))
    add("-b", "--batch-size", type=flags.at_least(1), default=batch, help="images of a step")
    add("--precision", choices=("fp32", "tf32", "bf16"), default=precision)
    add("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="the blocks")
    add("--rounds", type=flags.at_least(2), default=6, help="timings of a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
