"""The map's arithmetic, held against what was measured."""

from dlojz.chapters.n12_model_parallel import choosing, giants
from dlojz.chapters.n12_model_parallel.figures import speeds
from dlojz.estimate import estimate
from dlojz.figures import report
from dlojz.runs import log
from dlojz.table import Table


def against(run) -> Table:
    """Return a table of the plans of `experiments/splits.py` beside the speed the map predicts.

    The map knows no interleaved schedule, and neither tensors without sequence parallelism.
    """
    ranks, found, rows = log.read(run).ranks, speeds(run), []
    rates = giants.rates(max(giants.NETWORKS.values()))  # of one node: the network does not count
    for name, case in ranks[0].cases.items():
        plan = case["plan"]
        if plan["chunks"] > 1 or (plan["tensor"] > 1 and not plan["sequence"]):
            continue
        copies = len(ranks) // (plan["tensor"] * plan["stages"])
        same = {key: plan[key] for key in ("tensor", "stages", "parts")}
        what = ranks[0].start["arguments"]["model"], len(ranks), plan["sharding"]
        sizes = case["sizes"]["batch"] // copies, 224, "off", "bf16"
        predicted = estimate.Plan(*what, *sizes, flags=("--optimizer", "adamw"), **same)
        speed = len(ranks) * choosing.speed(predicted, rates)
        texts = map(report.speed_text, (measured := found[name]["images_per_s"], speed))
        rows.append((name, *texts, f"{speed / measured - 1:+.0%}"))
    return Table(("plan", "images/s", "predicted", "error"), rows, "<>>>")
