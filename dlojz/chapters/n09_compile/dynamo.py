"""Dynamo's work on a small model, call by call, for the experiments of notebook 09.

The backend aot_eager captures graphs and generates no code, so it takes seconds. It is wrapped in
one of our own that counts Dynamo's graphs, and the calls of each.
"""

import linecache
import logging
import re
from pathlib import Path

import torch

from dlojz.training import private

OPERATOR = type(torch.ops.aten.add.Tensor)
KNOWN = ("aten", "prims")  # namespaces of operators known to a compiler
WARNING = "torch._dynamo.convert_frame"  # the logger that reports the limit of graphs


class Watch(logging.Handler):
    """Dynamo's work from here on: graphs, calls of a compiled graph, warnings."""

    def __init__(self):
        super().__init__()
        torch.compiler.reset()
        private.compile_counters().clear()
        private.forget_compilations()
        self.graphs = self.ran = 0
        self.warnings, self.opaque = [], []

    def __enter__(self):
        logging.getLogger(WARNING).addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger(WARNING).removeHandler(self)

    def emit(self, record):
        """Keep the first line of a warning; the job's stderr.txt has it in full."""
        self.warnings.append(first_line(record.getMessage()))

    def backend(self, graph, inputs):
        """Return a graph compiled by aot_eager, as a function that counts its calls."""
        self.graphs += 1
        self.opaque += opaque(graph)
        compiled = private.backend("aot_eager")(graph, inputs)

        def run(*args):
            self.ran += 1
            return compiled(*args)

        return run

    @property
    def frames(self) -> int:
        """Return the number of functions that Dynamo has compiled."""
        return private.compile_counters()["frames"]["ok"]

    @property
    def recompiles(self) -> list[str]:
        """Return the guards that failed before each graph but the first."""
        done = private.compilations()
        return [guard(m.recompile_reason) for m in done if m.recompile_reason]


def opaque(graph) -> list[str]:
    """Return a graph's calls that are opaque to a compiler: custom operators, and `item`."""
    targets = [node.target for node in graph.graph.nodes if node.op.startswith("call_")]
    custom = [t.name() for t in targets if isinstance(t, OPERATOR) and t.namespace not in KNOWN]
    return custom + [f".{target}()" for target in targets if target in ("item", "tolist")]


def compiled_functions() -> list[str]:
    """Return the functions compiled since the metrics were cleared.

    torch's own are left out: `torch.cond` compiles one.
    """
    own = str(Path(torch.__file__).parent)
    done = private.compilations()
    return list(dict.fromkeys(m.co_name for m in done if not m.co_filename.startswith(own)))


def breaks(model, x) -> list[dict]:
    """Return the reasons and lines of the graph breaks in a first call, as Dynamo explains them."""
    torch.compiler.reset()
    explained = private.explain(model, x)
    places = {}  # a break in a function that forward calls is explained twice
    for found in explained.break_reasons:
        where = place(found.user_stack[-1])
        places.setdefault(where["line"], {"reason": first_line(found.reason), **where})
    return list(places.values())


def place(frame) -> dict:
    """Return the line of a stack's frame, and its text."""
    text = linecache.getline(frame.filename, frame.lineno).strip()
    return {"file": Path(frame.filename).name, "line": frame.lineno, "text": text}


def guard(reason) -> str:
    """Return the failed guard in Dynamo's reason, without its number, source and hint."""
    found = re.sub(r"^\d+/\d+: ", "", first_line(reason))
    return re.split(r" # | \(HINT", re.sub(r"\s+", " ", found))[0].strip()


def first_line(text) -> str:
    """Return the first line of a message with text."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
