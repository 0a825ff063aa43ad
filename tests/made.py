"""What several tests make."""

import os

H100, EPYC = "cuda: NVIDIA H100 80GB HBM3", "cpu: AMD EPYC"
RESNET = {"model": "resnet50", "image_size": 224, "batch_size": 256}


def torchrun(file, flags, processes) -> list[str]:
    """Return the command of a trainer on several processes, as a keeper starts it."""
    python = [os.environ["DLOJZ_PYTHON"], "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    return [*python, *options, str(file), *map(str, flags)]
