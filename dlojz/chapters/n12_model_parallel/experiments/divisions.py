"""The memory of each process and the bytes that it sends, by plan: measured, or predicted.

Submitted by a notebook: submit("dlojz/chapters/n12_model_parallel/experiments/divisions.py",
n_gpu=2).

With --predict RUN one process, without a GPU, has `dlojz estimate` predict what that run measured.
The measured model has the blocks of this chapter, the predicted one torchvision's of those sizes.
"""

import argparse
import warnings
from dataclasses import asdict

import torch
from tqdm import tqdm

from dlojz import course, idr_torch, runs
from dlojz.chapters import session
from dlojz.chapters.n12_model_parallel import spread
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.runs import log, memory
from dlojz.training import flags, imports, models

SIZES = {"vit_b_16": models.ViT(16, 12, 12, 768, 3072), **models.LARGER}
# Images with an odd number of patches on each side: with the class token, tokens are even.
ON_GPU = {"model": "vit_600m", "image_size": 210, "batches": [16, 48], "precision": "tf32"}
ON_CPU = {"model": "vit_b_16", "image_size": 80, "batches": [4], "precision": "fp32"}
FLAGS = ("--optimizer", "adamw")  # of the trainer


def plans(args):
    """Yield the plans to measure, in the words of `dlojz estimate`."""
    n = idr_torch.size
    # Each pair of GPUs shares tensors: with the class token, tokens are even.
    tensor = {"tensor": 2} | ({"sharding": "fsdp"} if n > 2 else {})
    divided = ({"sharding": "ddp"}, {"sharding": "fsdp"}, tensor, {"stages": n, "parts": 4})
    for batch in args.batches:
        for how in divided:
            alike = batch * how.get("tensor", 1) * how.get("stages", 1) // n
            same = {"model": args.model, "gpus": n, "batch": alike, "image_size": args.image_size}
            same |= {"checkpointing": "off", "precision": args.precision, "flags": FLAGS}
            yield estimate.Plan(**{"sharding": "ddp"} | same | how)


def measured(plan, device) -> dict:
    """Return the fields of a plan that was tried."""
    vit = SIZES[plan.model]
    tokens = (plan.image_size // vit.patch) ** 2 + 1
    batch, inputs = plan.batch * plan.replicas, 3 * vit.patch**2
    sizes = spread.Sizes(vit.layers, vit.width, vit.heads, vit.mlp, tokens, batch, inputs)
    way = spread.Plan(plan.tensor, plan.tensor > 1, plan.stages, plan.parts, 1, plan.sharding)
    training = spread.Training(way, sizes, device)
    for _ in range(2):  # DDP makes its buckets again in the second one
        training.step()
    found = {"peak_bytes": training.peak_bytes(), "bytes": training.held()}
    found |= spread.messages(training)
    return found | {"expected_bytes": training.expected_bytes()}


def predict(run, path):
    """Write a case for each of that run: its plan, what was measured, and what is predicted."""
    warnings.filterwarnings("ignore")  # DDP's on tensors without values
    trainer, ranks = imports.trainer(course.solution(course.CHAIN[-1])), log.read_ranks(path)
    on_a_cpu = ranks[0].setup["device"] == "cpu"
    for name, case in tqdm(ranks[0].cases.items(), unit="plan"):
        plan = case["plan"] | {"flags": tuple(case["plan"]["flags"])}
        found = estimate.result(trainer, estimate.Plan(**plan), by_blocks=True)
        stages = found.pop("stages")
        for stage in stages:
            for phase, parts in stage["peaks"].items():
                if on_a_cpu:  # without a workspace, and without whole blocks of memory
                    parts |= {"cublas": 0, "unsplit": 0}
                if phase.startswith("forward") and plan["stages"] == 1:
                    parts["gradients"] = 0  # the trainer keeps them longer than `spread` does
        cases = [rank.cases[name] for rank in ranks]
        both = {"peak_bytes": [case["peak_bytes"] for case in cases]}
        both["sent_bytes"] = [case["sent_bytes"] or case["expected_bytes"] for case in cases]
        both["predicted_bytes"] = [
            max(sum(parts.values()) for parts in stage["peaks"].values()) for stage in stages
        ]
        both["predicted_sent"] = [sum(stage["sent"].values()) for stage in stages]
        run.case(name, plan=found["plan"], **both)


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, positive = parser.add_argument, flags.at_least(1)
    add("--model", choices=SIZES, help="a vision transformer")
    add("--image-size", type=positive, help="pixels")
    add("--batches", type=positive, nargs="+", help="images of a step, on all GPUs together")
    add(
        "--precision",
        choices=("fp32", "tf32"),
        help="format of the products; weights are in float32",
    )
    add("--predict", metavar="RUN", help="a recording, such as h100/12-divisions-x2")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu") if args.predict else device) as (run, _):
        if args.predict:
            predict(run, runs.recorded(args.predict))
            return
        if idr_torch.size < 2:
            raise UserError("plans need at least two processes: submit it with n_gpu=2 or more")
        session.set_float32(args.precision)
        with session.process_group(device):
            for plan in tqdm([*plans(args)], unit="plan"):
                name = f"{memory.means(asdict(plan))}, {plan.batch} images"
                run.case(name, plan=asdict(plan), **measured(plan, device))


if __name__ == "__main__":
    main()
