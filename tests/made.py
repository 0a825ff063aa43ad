"""What several tests make."""

import os


def torchrun(file, flags, processes) -> list[str]:
    """Return the command of a trainer on several processes, as a keeper starts it."""
    python = [os.environ["DLOJZ_PYTHON"], "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    return [*python, *options, str(file), *map(str, flags)]
