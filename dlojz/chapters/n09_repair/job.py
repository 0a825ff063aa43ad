"""The network that a trainee repairs for torch.compile, call by call beside the prepared one.

A repaired file ends with `job.examine(Net)`. What that logs is judged by
the exercise of this folder. Both networks get the same weights and inputs, new ones in each run.
"""

import copy
import io
import math
import random
from contextlib import redirect_stdout

import torch

from dlojz import course
from dlojz.chapters import harness, session
from dlojz.chapters.n09_compile.dynamo import Watch, breaks, compiled_functions, first_line
from dlojz.training import imports, private

NAME = "09_repair"
WIDTH, BATCH = 16, 4
LINE = 80  # characters of a printed line that are kept
CALLS = 16
# What the branch compares with 0.5, in small and in large inputs: near enough to tell another
# condition, and too far for rounding to choose the other side.
MEANS = ((0.2, 0.45), (0.55, 2.0))


def examine(make):
    """Log what this network computes and how it is compiled. make: returns a network."""
    args = harness.parser(__doc__).parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        torch.manual_seed(args.seed)
        prepared = imports.from_file(course.prepared(NAME), "prepared").Net()
        calls = drawn(args.seed, prepared.first)
        networks = [same_weights(make(), prepared) for _ in ("eager", "compiled", "fullgraph")]
        expected = called(prepared, prepared, calls)
        private.forget_compilations()
        eager = called(networks[0], networks[0], calls)
        itself = compiled_functions()
        run.case("eager", **compared(eager, expected), **said(eager, expected))
        run.case("compiled", **watched(networks[1], calls, expected))
        run.case("fullgraph", **in_one_graph(networks[2], calls))
        # Last, as a call may change it.
        suppressed = private.ignores_errors()
        large = [large for large, _ in calls]
        run.case("file", suppressed=suppressed, itself=itself, large=large)


def drawn(seed, layer) -> list[tuple[bool, torch.Tensor]]:
    """Return whether the input of each call is large, and the input. Small and large take turns.

    layer: before the branch.
    """
    first = random.Random(seed).randrange(2)
    found = []
    for call in range(CALLS):
        side = (first + call) % 2
        x = scaled(torch.randn(BATCH, WIDTH), layer, MEANS[side][call // 2 % 2])
        found.append((bool(side), x))
    return found


@torch.no_grad()
def scaled(x, layer, mean):
    """Return x times a factor with which this is the mean that the branch compares."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        above = torch.relu(layer(middle * x)).mean() > mean
        low, high = (low, middle) if above else (middle, high)
    return low * x


def same_weights(network, prepared):
    """Return a network with the weights of another one; a buffer of its own stays."""
    network.load_state_dict(prepared.state_dict(), strict=False)
    return network


def called(network, run, calls) -> dict:
    """Return the outputs of all calls, the gradients, what was printed, and what was counted.

    run: the network itself, or compiled.
    """
    outputs, gradients = [], []
    with redirect_stdout(io.StringIO()) as printed:
        for _, x in calls:
            network.zero_grad()
            out = run(x)
            out.square().sum().backward()
            outputs.append(out.detach().clone())
            weights = sorted(network.named_parameters())  # in whatever order they were made
            gradients.append([w.grad.clone() for _, w in weights if w.grad is not None])
    return {
        "outputs": outputs,
        "gradients": gradients,
        "printed": printed.getvalue().splitlines(),
        "counted": counted(network),
    }


def counted(network) -> float | None:
    """Return how many calls a network says that it had; None if it does not say."""
    calls = getattr(network, "calls", None)
    one = calls.numel() == 1 if isinstance(calls, torch.Tensor) else isinstance(calls, int | float)
    return float(calls) if one else None


def compared(found, expected) -> dict:
    """Return how far each output and each gradient is off, as a share of the largest number."""
    outputs = map(harness.off, found["outputs"], expected["outputs"])
    gradients = map(off, found["gradients"], expected["gradients"])
    return {"outputs": [*outputs], "gradients": [*gradients], "counted": found["counted"]}


def said(found, expected) -> dict:
    """Return how many lines were printed, and the first ones, cut: a loop may print megabytes."""
    lines = [[line[:LINE] for line in way["printed"][: CALLS + 1]] for way in (found, expected)]
    return {"printed": lines[0], "wanted": lines[1], "lines": len(found["printed"])}


def off(found, expected) -> float:
    """Return the largest difference of several tensors; infinity if there are more or fewer."""
    same = len(found) == len(expected)
    return max(map(harness.off, found, expected)) if same else math.inf


def watched(network, calls, expected) -> dict:
    """Return what the network computes as Dynamo compiles it, and what became of each call."""
    untouched = copy.deepcopy(network)
    with Watch() as watch:
        run, ran, seen = torch.compile(network, backend=watch.backend), [], {}

        def one(x):
            before = watch.ran
            out = run(x)
            ran.append(watch.ran - before)
            return out

        try:
            seen = compared(called(network, one, calls), expected)
        except Exception as error:  # Dynamo's errors have no common class that is public
            seen["error"] = f"call {len(ran) + 1}: {type(error).__name__}: {first_line(error)}"
        seen |= {"graphs": watch.graphs, "recompiles": watch.recompiles, "graphs_run": ran}
        seen["opaque"] = list(dict.fromkeys(watch.opaque))
    why = breaks(untouched, calls[0][1]) if watch.graphs > 1 else []
    return seen | {"breaks": why, "warnings": watch.warnings}


def in_one_graph(network, calls) -> dict:
    """Return what fullgraph=True says in these calls: the first error, and in which call."""
    torch.compiler.reset()
    run = torch.compile(network, backend="eager", fullgraph=True)
    with redirect_stdout(io.StringIO()):
        for number, (_, x) in enumerate(calls, 1):
            try:
                run(x)
            except Exception as error:
                return {"call": number, "error": type(error).__name__, "says": first_line(error)}
    return {}
