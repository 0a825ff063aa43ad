"""09_repair: a network keeps its values, and torch.compile makes one graph of it, once."""

from dlojz.check.exercise import Finding, Prepared, State
from dlojz.check.wording import share

VALUES, GRAPH = "same values", "one graph"
WARM = 10  # calls in which the counter may change the values
SAME = 1e-5  # of the largest number; branch and counter change values by a tenth and more
NOT_COMPARED = (State.UNMEASURED, "not compared", "compiled calls without an error", "eager")


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return findings on the log of `dlojz.chapters.n09_repair.job`."""
    file, eager, compiled = (cases[name] for name in ("file", "eager", "compiled"))
    return [
        *_values(file["large"], eager, compiled),
        _printed(eager),
        *_settings(file),
        *_compiled(compiled),
        _fullgraph(cases["fullgraph"], len(file["large"])),
    ]


def _values(large, eager, compiled):
    """Yield findings on the values, eager and compiled, where a call may have failed."""
    calls = len(large)
    ways = [way for way in (eager, compiled) if "outputs" in way]
    looks = (
        ("ramp", f"its first {WARM} calls", ways, "outputs", range(WARM)),
        ("gradients", "gradients of the weights", [eager], "gradients", range(calls)),
        ("in-place", "the same, compiled", ways[1:], "gradients", range(calls)),
    )
    counts = [way["counted"] for way in ways]
    text = " and ".join("nothing" if n is None else f"{n:g}" for n in dict.fromkeys(counts))
    counted = all(n == calls for n in counts)
    yield Finding(VALUES, "counter", "calls counted", counted, text, str(calls), "counter")
    yield from _sides(large, ways)
    for key, what, by, name, chosen in looks:
        errors = [way[name][call] for way in by for call in chosen]
        yield (
            _equal(key, what, errors, key) if errors else Finding(VALUES, key, what, *NOT_COMPARED)
        )


def _sides(large, ways):
    """Return findings on both sides of the branch, with another hint if each call is wrong."""
    late = range(WARM, len(large))
    sides = [
        [way["outputs"][call] for way in ways for call in late if large[call] == side]
        for side in (False, True)
    ]
    hint = "values" if all(min(errors) > SAME for errors in sides) else "branch"
    for size, errors in zip(("small", "large"), sides, strict=True):
        yield _equal(size, f"{size} inputs", errors, hint)


def _equal(key, what, errors, hint):
    wrong = [error for error in errors if error > SAME]
    text = f"{len(wrong)} of {len(errors)} differ"
    text += f", by up to {share(max(wrong), 'the largest')}" if wrong else ""
    return Finding(VALUES, key, what, not wrong, text, "as in the prepared network", hint)


def _printed(eager):
    lines, wanted = eager["printed"], eager["wanted"]
    texts = [
        f"{count} lines: {found[0]}" if found else "nothing"
        for count, found in ((eager["lines"], lines), (len(wanted), wanted))
    ]
    what = "printed without a compiler"
    return Finding(VALUES, "printed", what, lines == wanted, *texts, "message")


def _settings(file):
    ok = not file["suppressed"]
    text = "none" if ok else "suppress_errors"
    yield Finding(GRAPH, "suppressed", "errors hidden by", ok, text, "none", "suppressed")
    text = f"the file: {', '.join(file['itself'])}" if file["itself"] else "the job"
    yield Finding(GRAPH, "itself", "compiled by", not file["itself"], text, "the job", "itself")


def _compiled(seen):
    graphs, ran = seen["graphs"], seen["graphs_run"]
    breaks = [
        f"line {found['line']}: {found['text']} ({found['reason']})" for found in seen["breaks"]
    ]
    again = seen["recompiles"]
    hint = "eager" if graphs else "nothing"
    yield Finding(GRAPH, "graphs", "graphs", graphs == 1, str(graphs), "1", hint)
    text = "; ".join(breaks) or "none"
    yield Finding(GRAPH, "breaks", "graph breaks", not breaks, text, "none", "breaks")
    text = f"{len(again)}, the first because of {again[0]}" if again else "none"
    yield Finding(GRAPH, "again", "recompilations", not again, text, "none", "again")
    text, what = ", ".join(seen["opaque"]) or "none", "in the graph, not compiled"
    yield Finding(GRAPH, "opaque", what, not seen["opaque"], text, "none", "opaque")
    alone = sum(n == 1 for n in ran)
    text = f"{alone} of {len(ran)}" + (f"; {seen['error']}" if "error" in seen else "")
    ok = alone == len(ran) and "error" not in seen
    yield Finding(GRAPH, "whole", "calls that ran as one graph", ok, text, "all of them", "eager")


def _fullgraph(found, calls):
    text = f"call {found['call']}: {found['says']}" if found else f"{calls} calls"
    asked = f"{calls} calls"
    return Finding(GRAPH, "fullgraph", "fullgraph=True", not found, text, asked, "fullgraph")


EXERCISE = Prepared("09_repair", (VALUES, GRAPH), findings, last="file")
