"""09_repair: a network computes what it did, and torch.compile makes one graph of it, once."""

from dlojz.check.exercises import Finding, Prepared, State

VALUES, GRAPH = "same values", "one graph"
WARM = 10  # calls in which the counter may change the values
SAME = 1e-5  # of the largest number; the branch and the counter change values by a tenth and more
NOT_COMPARED = (State.UNMEASURED, "not compared", "compiled calls without an error", "eager")


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return findings on what `dlojz.training.repair` has logged."""
    file, eager, compiled = (cases[name] for name in ("file", "eager", "compiled"))
    return [
        *_values(file["large"], eager, compiled),
        _printed(eager),
        *_settings(file),
        *_compiled(compiled),
        _fullgraph(cases["fullgraph"], len(file["large"])),
    ]


def _values(large, eager, compiled):
    """Return findings on the values of both ways; compiled, a call may have failed."""
    calls = len(large)
    ways = [way for way in (eager, compiled) if "outputs" in way]
    looks = (
        (f"its first {WARM} calls", ways, "outputs", range(WARM), "ramp"),
        ("gradients of the weights", [eager], "gradients", range(calls), "gradients"),
        ("the same, compiled", ways[1:], "gradients", range(calls), "in-place"),
    )
    counts = [way["counted"] for way in ways]
    text = " and ".join("nothing" if n is None else f"{n:g}" for n in dict.fromkeys(counts))
    counted = all(n == calls for n in counts)
    yield Finding(VALUES, "calls counted", counted, text, str(calls), "counter")
    yield from _sides(large, ways)
    for what, by, name, chosen, hint in looks:
        errors = [way[name][call] for way in by for call in chosen]
        yield _equal(what, errors, hint) if errors else Finding(VALUES, what, *NOT_COMPARED)


def _sides(large, ways):
    """Return findings on both sides of the branch: if each call is wrong, it is more than that."""
    late = range(WARM, len(large))
    sides = [
        [way["outputs"][call] for way in ways for call in late if large[call] == side]
        for side in (False, True)
    ]
    hint = "values" if all(min(errors) > SAME for errors in sides) else "branch"
    for what, errors in zip(("small inputs", "large inputs"), sides, strict=True):
        yield _equal(what, errors, hint)


def _equal(what, errors, hint):
    wrong = [error for error in errors if error > SAME]
    text = f"{len(wrong)} of {len(errors)} differ"
    text += f", by up to {max(wrong):.2g} of the largest" if wrong else ""
    return Finding(VALUES, what, not wrong, text, "as in the prepared network", hint)


def _printed(eager):
    lines, wanted = eager["printed"], eager["wanted"]
    texts = [
        f"{count} lines: {found[0]}" if found else "nothing"
        for count, found in ((eager["lines"], lines), (len(wanted), wanted))
    ]
    return Finding(VALUES, "printed without a compiler", lines == wanted, *texts, "message")


def _settings(file):
    """Return findings on what a file does besides defining a network."""
    text = "suppress_errors" if file["suppressed"] else "none"
    yield Finding(GRAPH, "errors hidden by", not file["suppressed"], text, "none", "suppressed")
    text = f"the file: {', '.join(file['itself'])}" if file["itself"] else "the job"
    yield Finding(GRAPH, "compiled by", not file["itself"], text, "the job", "itself")


def _compiled(seen):
    """Return findings on the calls of the network as it is compiled."""
    graphs, ran = seen["graphs"], seen["graphs_run"]
    breaks = [
        f"line {found['line']}: {found['text']} ({found['reason']})" for found in seen["breaks"]
    ]
    again = seen["recompiles"]
    hint = "eager" if graphs else "nothing"
    yield Finding(GRAPH, "graphs", graphs == 1, str(graphs), "1", hint)
    yield Finding(GRAPH, "graph breaks", not breaks, "; ".join(breaks) or "none", "none", "breaks")
    text = f"{len(again)}, the first because of {again[0]}" if again else "none"
    yield Finding(GRAPH, "recompilations", not again, text, "none", "again")
    hidden = ", ".join(seen["opaque"])
    yield Finding(
        GRAPH, "in the graph, not compiled", not hidden, hidden or "none", "none", "opaque"
    )
    alone = sum(n == 1 for n in ran)
    text = f"{alone} of {len(ran)}" + (f"; {seen['error']}" if "error" in seen else "")
    ok = alone == len(ran) and "error" not in seen
    yield Finding(GRAPH, "calls that ran as one graph", ok, text, "all of them", "eager")


def _fullgraph(found, calls):
    text = f"call {found['call']}: {found['says']}" if found else f"{calls} calls"
    return Finding(GRAPH, "fullgraph=True", not found, text, f"{calls} calls", "fullgraph")


EXERCISE = Prepared("09_repair", (VALUES, GRAPH), findings, last="file")
