"""Logs of chapter 10's experiments, with made-up times, as their jobs would write them."""

from pathlib import Path

from logs import experiment, measure

CARD = {
    "multiprocessors": 132,
    "threads of a warp": 32,
    "threads of a multiprocessor, at most": 2048,
    "registers of a multiprocessor": 65536,
    "bytes of shared memory of a multiprocessor": 233472,
}
MEMORY, PRODUCT = 3000.0, 600.0  # GB/s, TFLOP/s
SPREAD = (1.0, 1.1, 0.95)  # of the rounds


def written(path: Path, cases: dict, card=None, **arguments) -> Path:
    """Write a log with these cases, and the ceilings of a GPU."""
    events = [measure("memory", MEMORY, "GB/s"), measure("matrix product", PRODUCT, "TFLOP/s")]
    events += [measure(what, value, "") for what, value in (card or {}).items()]
    events += [{"event": "case", "case": name, **case} for name, case in cases.items()]
    return experiment(path, *events, **arguments)


def spent(ms: float) -> list[float]:
    """Return the milliseconds of three rounds, whose median is ms."""
    return [ms * share for share in SPREAD]


def intensity(path: Path) -> Path:
    """Write the log of intensity.py: FLOP and bytes of two operations, at 90 % of the roof."""
    cases = {}
    for name, kind, flops, size in (
        ("ReLU", "elementwise", 2e8, 8e8),
        ("linear, batch 512", "matrix product", 4.3e9, 13.6e6),
    ):
        roof = min(MEMORY * 1e9 * flops / size, PRODUCT * 1e12)
        about = {"operation": name, "kind": kind, "flops": flops, "bytes": size}
        cases[name] = about | {"ms": spent(1000 * flops / roof / 0.9)}
    return written(path, cases, CARD, precision="bf16")


def softmax(path: Path, on_gpu=True) -> Path:
    """Write the log of softmax.py, for rows of 256 and 4,096."""
    cases = {}
    least = 2 * 4 * 2**26
    for columns in (256, 4096):
        for way, share in (
            ("PyTorch", 0.2),
            ("compiled", 0.7),
            ("torch.softmax", 0.8),
            ("Triton", 0.9),
            ("online", 0.85),
        ):
            case = {"way": way, "columns": columns, "rows": 2**26 // columns, "least": least}
            case |= {"kernels": 5 if way == "PyTorch" else 1, "error": [2.0**-23, 2.0**-24]}
            case |= {"moved": 4 * least if way == "PyTorch" else least, "flops": 5 * 2**26}
            case["ms"] = spent(least / MEMORY / 1e6 / share)
            if way in ("Triton", "online") and on_gpu:
                case |= {"registers": 24, "spills": 0, "shared_bytes": 64, "warps": 16}
            elif way in ("Triton", "online"):
                del case["ms"], case["moved"]
                rows, reads = 2**16 // columns, 8 if way == "online" else 4
                asked = {"launches": 1, "loads": rows * reads // 4, "stores": rows, "idle": 0}
                asked |= {"read_bytes": reads * 2**16, "written_bytes": 4 * 2**16}
                case |= {"rows": rows, "asked": asked}
            cases[f"{way}, {columns} columns"] = case
    return written(path, cases)


def normalize(path: Path, on_gpu=True) -> Path:
    """Write the log of normalize.py, with batches of 4 and of 256."""
    cases = {}
    for batch in (4, 256):
        least = batch * 3 * 224 * 224 * 3
        ways = {"loop": 40.0, "PyTorch": 4.0, "compiled": 1.1, "Triton": 1.0}
        for way, times in ways.items():
            if way == "Triton" and not on_gpu:
                continue
            ms = times * least / MEMORY / 1e6
            case = {"way": way, "batch": batch, "least": least, "units_off": 0.5, "kernels": 1}
            case["ms"] = spent(ms + 0.01)
            cases[f"{way}, {batch} images"] = case | ({"kernel_ms": spent(ms)} if on_gpu else {})
    if not on_gpu:
        about = {"way": "Triton", "batch": 4, "units_off": 0.998, "least": 1, "kernels": 1}
        cases["Triton, interpreted"] = about | {"asked": {"loads": 9}}
    return written(path, cases, image_size=224)


def shapes(path: Path) -> Path:
    """Write the log of shapes.py: a depthwise layer takes a quarter of the time."""
    cases = {}
    for channels in (16, 1024):
        for kind, fewer, ms in (("dense", 1, 0.4), ("depthwise", channels, 0.1)):
            flops = 18 * channels**2 * 50_000 // fewer
            about = {"shape": kind, "channels": channels, "layers": 1, "flops": flops}
            cases[f"{kind}, 1 of {channels}"] = about | {"bytes": 1000, "ms": spent(ms)}
    for channels, layers, ms in ((1024, 1, 0.4), (512, 4, 0.6), (256, 16, 1.2)):
        about = {"shape": "as many operations", "channels": channels, "layers": layers}
        cases[f"{layers} of {channels}"] = about | {"flops": 1, "bytes": 1, "ms": spent(ms)}
    return written(path, cases, precision="bf16")
