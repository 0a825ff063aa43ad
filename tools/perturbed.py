"""Run a trainer whose initial weights are off by one rounding error: `perturbed.py SEED FILE ...`.

Each weight is multiplied by 1, or by 1 plus or minus float32's epsilon. How far the losses then
move shows what rounding does to this training: the envelope of the verdict.
"""

import runpy
import sys

import torch
import torchvision


def main():
    seed, trainer = int(sys.argv[1]), sys.argv[2]
    get_model = torchvision.models.get_model

    def perturbed_model(*args, **kwargs):
        model = get_model(*args, **kwargs)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                steps = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + steps * torch.finfo(torch.float32).eps)
        return model

    torchvision.models.get_model = perturbed_model
    sys.argv = sys.argv[2:]
    runpy.run_path(trainer, run_name="__main__")


if __name__ == "__main__":
    main()
