"""One model, divided by several plans: images per second, memory, bytes sent, and waiting.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/splits.py", n_gpu=2).

All plans train the same model, and those of as many images do the same steps: each case has its
first losses. Sizes suit the device: on GPUs those of vit_2b, without its class token.
"""

import argparse
import gc
from dataclasses import replace

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n12_model_parallel import spread
from dlojz.chapters.n12_model_parallel.spread import Plan, Sizes
from dlojz.course import UserError
from dlojz.training import flags, models

ON_CPU = Sizes(layers=8, width=128, heads=4, hidden=512, tokens=32, batch=16, inputs=48, outputs=10)


def sizes_of(name: str, batch: int) -> Sizes:
    """Return the sizes of one of the course's larger models; "small": of one for processors."""
    if name == "small":
        return replace(ON_CPU, batch=batch)
    vit = models.LARGER[name]
    return Sizes(vit.layers, vit.width, vit.heads, vit.mlp, tokens=256, batch=batch)


def plans(processes: int, batch: int) -> dict[str, tuple[Plan, int]]:
    """Return the plans for this number of processes by name, each with the images of a step."""
    pipeline = {"stages": processes, "parts": 8}
    found = {
        "DDP": (Plan(), batch),
        "FSDP2": (Plan(sharding="fsdp"), batch),
        "TP": (Plan(tensor=processes), batch),
        "TP, sequence parallel": (Plan(tensor=processes, sequence=True), batch),
        "PP, 8 parts": (Plan(**pipeline), batch),
        "PP, interleaved": (Plan(**pipeline, chunks=2), batch),
        "PP, 16 parts, 2 x images": (Plan(**pipeline | {"parts": 16}), 2 * batch),
        "FSDP2, 1.5 x images": (Plan(sharding="fsdp"), 3 * batch // 2),
    }
    if processes % 4 == 0:
        found["TP x FSDP2"] = Plan(tensor=2, sequence=True, sharding="fsdp"), batch
        found["TP x PP, 8 parts"] = Plan(tensor=2, **pipeline | {"stages": processes // 2}), batch
    return found


def measured(plan, sizes, device, args) -> dict:
    """Return the fields of a plan's case."""
    dtype = session.DTYPES.get(args.precision, torch.float32)
    training = spread.Training(plan, sizes, device, dtype, args.compile)
    found = {"plan": vars(plan), "sizes": vars(sizes), "flops": sizes.flops()}
    losses = [training.step() for _ in range(2)]  # DDP makes its buckets again in the second one
    gc.freeze()  # or collections in a timed step would look at all that stays
    found["losses"] = [loss.item() for loss in losses if loss is not None]
    found["step_ms"] = session.in_turn({"": training.step}, device, args.rounds)[""]
    found |= {"bytes": training.held(), "peak_bytes": training.peak_bytes()}
    found["expected_bytes"] = training.expected_bytes()
    return found | spread.messages(training)


def main():
    device = idr_torch.device()
    args = parse_args(device.type == "cuda")
    with session.begin(args, device) as (run, _):
        if idr_torch.size < 2:
            raise UserError("plans need at least two processes: submit it with n_gpu=2 or more")
        session.set_float32(args.precision)
        with session.process_group(device):
            session.measure_product(run, device, args.precision, 3)
            todo = plans(idr_torch.size, args.batch_size)
            if device.type == "cpu":  # more images do not help there
                todo = {name: of for name, of in todo.items() if of[1] == args.batch_size}
            for name, (plan, images) in tqdm(todo.items(), unit="plan"):
                sizes = sizes_of(args.model, images)
                run.case(name, **measured(plan, sizes, device, args))


def parse_args(on_gpu):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model, batch, precision = "small", 16, "fp32"
    if on_gpu:
        model, batch, precision = "vit_2b", 56 * idr_torch.size, "bf16"
    add = parser.add_argument
    add("--model", default=model, choices=("small", *models.LARGER))
    add("-b", "--batch-size", type=flags.at_least(1), default=batch, help="images of a step")
    add("--precision", choices=("fp32", "tf32", "bf16"), default=precision)
    add("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="the blocks")
    add("--rounds", type=flags.at_least(2), default=5 if on_gpu else 3, help="timings of a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
