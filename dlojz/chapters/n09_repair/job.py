"""The trainee's network, repaired for torch.compile, call by call beside the prepared one.

A repaired file ends with `job.examine(Net)`, whose log is judged by the exercise of this folder.
Both networks get the same weights and inputs, new ones in each run.
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
LINE = 80  # characters to keep of a printed line
CALLS = 16
# Means that the branch compares with 0.5, in small and in large inputs: near enough to expose
# another condition, and too far for rounding to choose the other side.
MEANS = ((0.2, 0.45), (0.55, 2.0))


def examine(make):
    """Log this network's results and compilation. make: returns a network."""
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
    """Return (is it large, input) for each call; small and large take turns.

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
    """Return x times a factor, so that the branch compares this mean."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        above = torch.relu(layer(middle * x)).mean() > mean
        low, high = (low, middle) if above else (middle, high)
    return low * x


def same_weights(network, prepared):
    """Return a network with the weights of another one, and its own buffers."""
    network.load_state_dict(prepared.state_dict(), strict=False)
    return network


def called(network, run, calls) -> dict:
    """Return the outputs of all calls, the gradients, the printed lines, and the count.

    run: the network itself, or compiled.
    """
    outputs, gradients = [], []
    with redirect_stdout(io.StringIO()) as printed:
        for _, x in calls:
            network.zero_grad()
            out = run(x)
            out.square().sum().backward()
            outputs.append(out.detach().clone())
            weights = sorted(network.named_parameters())  # independent of the order of creation
            gradients.append([w.grad.clone() for _, w in weights if w.grad is not None])
    return {
        "outputs": outputs,
        "gradients": gradients,
        "printed": printed.getvalue().splitlines(),
        "counted": counted(network),
    }


def counted(network) -> float | None:
    """Return a network's own count of its calls; None without one."""
    calls = getattr(network, "calls", None)
    one = calls.numel() == 1 if isinstance(calls, torch.Tensor) else isinstance(calls, int | float)
    return float(calls) if one else None


def compared(found, expected) -> dict:
    """Return the error of each output and gradient, relative to the largest number."""
    outputs = map(harness.off, found["outputs"], expected["outputs"])
    gradients = map(off, found["gradients"], expected["gradients"])
    return {"outputs": [*outputs], "gradients": [*gradients], "counted": found["counted"]}


def said(found, expected) -> dict:
    """Return the number of printed lines, and the first ones, cut: a loop may print megabytes."""
    lines = [[line[:LINE] for line in way["printed"][: CALLS + 1]] for way in (found, expected)]
    return {"printed": lines[0], "wanted": lines[1], "lines": len(found["printed"])}


def off(found, expected) -> float:
    """Return the largest difference of several tensors; infinity if their numbers differ."""
    same = len(found) == len(expected)
    return max(map(harness.off, found, expected)) if same else math.inf


def watched(network, calls, expected) -> dict:
    """Return the results of the compiled network, and Dynamo's work in each call."""
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
    """Return the first error of fullgraph=True in these calls, and its call."""
    torch.compiler.reset()
    run = torch.compile(network, backend="eager", fullgraph=True)
    with redirect_stdout(io.StringIO()):
        for number, (_, x) in enumerate(calls, 1):
            try:
                run(x)
            except Exception as error:
                return {"call": number, "error": type(error).__name__, "says": first_line(error)}
    return {}
