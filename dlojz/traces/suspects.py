"""The fault of a training run, from its traces.

Each rule looks for one piece of evidence. Its threshold lies about midway, on a logarithmic scale,
between the weakest trace of that fault and all the others in reference/*/04-trace-fault-* and
-open-*. Traces called held-out, unseen and sealed are of other training runs, and no number is
fitted to them, with two exceptions after a wrong result: the straggler must have a longer hole than
held-out-none-x2 has, since unseen-none-x2 was taken for one; and `host.AWAY_RECORDED_MS` was added
after sealed-11. The rules were tried on a simulated host and device (tests/simulated.py), too.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dlojz.traces import breakdown, host, kinds, spans, trace

# What a trace shows, in any training run: the faults of notebook 04's mysteries, and others.
WORDS = {
    "none": "no known fault",
    "item": "the host reads many numbers from the device",
    "unpinned": "batches are copied from memory that is not pinned",
    "one-worker": "the loader does not keep up",
    "updates": "the optimizer launches kernels for each tensor on its own",
    "small-calls": "one operation launches very many small kernels",
    "small-batch": "the work is too small for its launches, such as that of a small batch",
    "nchw": "tensor cores get the layout NCHW",
    "print": "tensors are printed",
    "straggler": "one process is late in each step",
    "garbage": "Python's garbage collector visits many objects",
    "elsewhere": "the host does something else for a while",
    "waits": "the host waits for the device",
    "allocator": "memory is taken from the device and given back",
    "copies": "the host prepares the copies to the device itself, or waits for them",
    "communication": "nothing is computed while the processes exchange data",
    "pauses": "the device pauses between kernels that it was asked for in time",
}
WITH_FUNCTIONS = "record again with Python's functions (with_stack=True): they name the line"
CHEAP = (
    "time the step without it: in this trace it costs little, but a profiler slows the host, which "
    "hides a part of it"
)
LATE = "compare the processes: the others came late, and the trace does not tell why"
RECORD_ALL = "record all processes: they may wait for one that is late, which is no exchange"
LOOK = "look at the trace in https://ui.perfetto.dev: another stream or process may hold it up"
ALONE = "_SingleProcessDataLoaderIter"  # torch's range for a loader without workers
SEVERAL = "_MultiProcessingDataLoaderIter"  # a loader with workers
# A trace does not show the speed that operations could have.
ON_A_PROCESSOR = (
    "train once on a batch in memory: if the step is shorter, the loader's workers take the cores "
    "from the training, and no trace shows that"
)


@dataclass(frozen=True)
class Suspect:
    """A probable fault of a trace, with its evidence."""

    fault: str  # one of WORDS
    share: float  # its cost, relative to the step
    evidence: str  # a sentence
    settle: str = ""  # the next test if the evidence is no proof, else ""

    @property
    def sure(self) -> str:
        """Return the degree of certainty, in a word."""
        return "probable" if self.settle else "certain"


@dataclass(frozen=True)
class Witness:
    """The trace of one process, and its reading."""

    trace: trace.Trace
    reading: breakdown.Reading  # at the speed of a step that is not profiled, if that is known
    traced_ms: float  # a step in the trace


# In each comment: the value measured with the fault, and without it. Shares are of the step.
DATA_SHARE = 0.2  # 0.97 with one worker, else at most 0.05
COLLECTOR_SHARE = 0.05  # 0.53, else 0
PAGEABLE_SHARE = 0.005  # 0.06, else 0.0004
READS = 5  # by .item() and the like, per step: 19 or more, else at most 1
PRINTS = 1  # numbers that are read to be printed: 14 or more, else none
READS_SHARE = 0.003  # of either: 0.004 where the host is never ahead
KERNELS_SHARE = 0.25  # of one asker: 0.57, else at most 0.11
SMALLER = 5  # times than all others: 30, else all are small
SMALL_MS = 0.01  # a kernel of that asker, on average: 0.0016, else 0.044
LAUNCH_SHARE = 0.5  # 0.84, else 0.36 with a host that keeps up
NCHW_SHARE = 0.03  # 0.41, else 0.002
OTHER_SHARE = 0.03  # of a cause outside the classes: 0.085, else at most 0.01
NCHW = re.compile(
    r"nchwto|nhwcto|bn_[fb]w_(?!.*nhwc)"
    r"|batch_norm_(backward|collect_statistics|transform_input)_kernel",
    re.I,
)
LATE_SHARE = 0.05  # one process's longer wait in collectives: 0.08, but also 0.13 without the fault
AWAY_SHARE = 0.045  # the longest hole of the straggler: 0.066, else 0.03
EXCHANGE_SHARE = 0.1  # in the process that waits least: 0.033 where all are well
LATE_EXCHANGE_SHARE = 0.2  # in the process that waits most, without other faults: 0.133
WORKED_SHARE = 0.5  # longer work of its device, relative to its delay: else 0.03


def suspects(traces: Sequence[trace.Trace], step_ms: float = math.inf) -> list[Suspect]:
    """Return the faults in the traces of all processes, the most expensive first.

    step_ms: a step without the profiler, on average, if that was timed.

    Small work comes last of the expensive ones: it remains once the host does nothing but launch.
    And a straggler's other activity is the reason of its delay, not another fault.
    """
    witnesses = [_witness(t, step_ms) for t in traces]
    late = _straggler(witnesses)
    found = [rule(w) for w in witnesses for rule in RULES]
    found = [s for s in found if s and not (late and s.fault == "elsewhere")]
    found += filter(None, [late or _communication(witnesses, alone=not found)])
    worst = {}
    for suspect in sorted(map(_doubted, found), key=_rank):
        worst.setdefault(suspect.fault, suspect)
    return list(worst.values()) or [_nothing(witnesses[0])]


def _witness(found, step_ms):
    reading = breakdown.analyse(found)
    return Witness(found, reading.without_profiler(step_ms), reading.step_ms)


def _cheap(suspect):
    return suspect.share < OTHER_SHARE


def _rank(suspect):
    return _cheap(suspect), suspect.fault == "small-batch", -suspect.share


def _doubted(suspect):
    """Return a suspect as only probable if it costs too little for certainty."""
    return replace(suspect, settle=CHEAP) if _cheap(suspect) and not suspect.settle else suspect


def _garbage(witness) -> Suspect | None:
    share = witness.reading.lost.get(host.COLLECTOR, 0)
    return _if(
        share >= COLLECTOR_SHARE,
        "garbage",
        share,
        f"while the garbage collector ran, {share:.0%} of the step, nothing was computed",
    )


def _one_worker(witness) -> Suspect | None:
    share = witness.reading.lost.get(host.DATA, 0)
    words = f"for {share:.0%} of the step the process waited for its next batch"
    settle = "watch the loader's workers with py-spy, and count them"
    if any(ALONE in e.name for e in witness.trace.ranges):
        words += ", which it prepares alone: the loader has no workers"
        settle = ""
    return _if(share >= DATA_SHARE, "one-worker", share, words, settle)


def _reads(witness) -> Suspect | None:
    """Return a suspect if the host reads results, named by the most frequent way.

    The share is that of all reads, because the first one costs most: with it the host loses its
    lead, and the others need not wait for that again.
    """
    found = witness.reading
    share = found.lost.get(host.READS, 0)
    count = Counter()
    for wait in found.waits:
        count[wait.why] += wait.count / found.steps
    for fault, why, times, what in (
        ("print", "print", PRINTS, "waited {:.0f} times for numbers to print"),
        ("print", host.MAYBE_PRINT, PRINTS, "read {:.0f} numbers as print(tensor) reads them"),
        ("item", ".item()", READS, "read a number {:.0f} times and waited for it"),
    ):
        if count[why] >= times and share >= READS_SHARE:
            return Suspect(
                fault,
                share,
                f"in each step the host {what.format(count[why])}, "
                f"which left the device idle for {share:.1%} of the step",
                WITH_FUNCTIONS if why == host.MAYBE_PRINT else "",
            )
    return _waits(found)


def _waits(reading) -> Suspect | None:
    """Return a suspect if the host waits for the device, for any reason."""
    mine = [w for w in reading.waits if w.why not in ("a copy", host.DDP)]
    if not mine:
        return None
    share = sum(w.idle_ms for w in mine) / reading.steps / reading.step_ms
    count = sum(w.count for w in mine) / reading.steps
    worst = mine[0]
    where = f" in {worst.line}" if worst.line else ""
    return _if(
        share >= (READS_SHARE if count >= READS else OTHER_SHARE),
        "waits",
        share,
        f"in each step the host waits {count:.3g} times for "
        f"the device, first of all by {worst.why or worst.call}{where}, "
        f"which leaves it idle for {share:.1%} of the step",
    )


def _elsewhere(witness) -> Suspect | None:
    share = witness.reading.lost.get(host.AWAY, 0)
    if min(share, _away_in_each_step(witness)) < OTHER_SHARE:
        return None
    longest = max(host.absences(witness.trace), key=lambda e: e.ms)
    phase = host.phase_of(witness.trace, longest)
    place = f", in {longest.name}" if longest.name else f", in the phase {phase!r}" if phase else ""
    why = "" if longest.name else " (Python code, a sleep, a garbage collection, another process?)"
    return Suspect(
        "elsewhere",
        share,
        f"the host ran nothing that the trace tells for {longest.ms:.1f} ms at a stretch{place}"
        f"{why}; nothing was computed for {share:.0%} of the step",
        "" if longest.name else WITH_FUNCTIONS,
    )


def _away_in_each_step(witness):
    """Return the smallest share of a step in which the host was busy elsewhere.

    A fault recurs in each step; another process that takes the core for a moment does not.
    """
    away = spans.of(host.absences(witness.trace))
    least = min(spans.common([(s.begin, s.end)], away) for s in witness.trace.steps)
    return least / witness.traced_ms


def _allocator(witness) -> Suspect | None:
    share = witness.reading.lost.get(host.ALLOCATOR, 0)
    calls = host.allocations(witness.trace)
    times = len(calls) / witness.reading.steps
    return _if(
        share >= OTHER_SHARE,
        "allocator",
        share,
        f"in each step memory was taken from the device or given back {times:.0f} times, "
        f"which left the device idle for {share:.0%} of the step",
        "look for empty_cache(), and for a device whose memory is nearly full",
    )


def _copies(witness) -> Suspect | None:
    """Return a suspect if the host spends its time on copies, though from pinned memory."""
    found = witness.reading
    share = found.idle.get(host.COPIES, 0) / found.step_ms
    return _if(
        share >= OTHER_SHARE and found.pageable_ms < PAGEABLE_SHARE * found.step_ms,
        "copies",
        share,
        f"the host pinned memory, or waited for its copies, while the device was idle for "
        f"{share:.0%} of the step",
    )


def _unpinned(witness) -> Suspect | None:
    ms = witness.reading.pageable_ms
    share = ms / witness.reading.step_ms
    return _if(
        share >= PAGEABLE_SHARE,
        "unpinned",
        witness.reading.lost.get(host.COPIES, 0),
        f"in each step copies from memory that is not pinned took {ms:.1f} ms, "
        f"{share:.0%} of the step, and nothing was computed meanwhile",
    )


def _small_batch(witness) -> Suspect | None:
    """Return a suspect if the device waits for launches longer than it works.

    Recorded Python functions make a launch up to twice as long. Then as much time would be lost
    with kernels twice as long, and the threshold is higher.
    """
    found = witness.reading
    if found.few:
        return None
    share = found.lost.get(breakdown.LAUNCHES, 0)
    slowed = "record again without Python's functions: they slow each launch"
    kernel_us = 1000 * sum(found.kinds.values()) / found.launches
    launch_us = kernel_us + 1000 * share * found.step_ms / found.launches
    return _if(
        share >= (LAUNCH_SHARE + 1) / 2 if found.functions else share >= LAUNCH_SHARE,
        "small-batch",
        share,
        f"a kernel took {kernel_us:.1f} µs on average and its launch {launch_us:.1f}, "
        f"so the device was idle for {share:.0%} of the step",
        slowed if found.functions else "",
    )


def _asker(witness) -> Suspect | None:
    """Return a suspect if the device waits for launches, most of them of one asker's small kernels.

    Such are an optimizer's without foreach or fused, and a loop over tensors.
    """
    found = witness.reading
    name, (count, ms) = next(iter(breakdown.launching(witness.trace).items()), ("", (0, 0)))
    updates = host.OPTIMIZER.match(name)
    share = found.lost.get(breakdown.LAUNCHES, 0)
    others = found.launches - count
    smaller = updates or SMALLER * ms * others < sum(found.kinds.values()) - count * ms
    many = not found.few and count >= KERNELS_SHARE * found.launches and ms < SMALL_MS and smaller
    return _if(
        many and share >= OTHER_SHARE,
        "updates" if updates else "small-calls",
        share,
        f"{name} asks for {count:,.0f} of the {found.launches:,.0f} kernels of a step, of "
        f"{1000 * ms:.1f} µs each, and for {share:.0%} of the step the device waits for launches"
        + (": foreach=True or fused=True make them few" if updates else ""),
    )


def _pauses(witness) -> Suspect | None:
    share = witness.reading.lost.get(breakdown.PAUSES, 0)
    return _if(
        share > 1 - breakdown.BOUND,
        "pauses",
        share,
        f"for {share:.0%} of the step it was idle, though the host had asked for the next kernel",
        LOOK,
    )


def _nchw(witness) -> Suspect | None:
    found = witness.reading
    step = [e for e in breakdown.in_steps(witness.trace) if NCHW.search(e.name)]
    share = sum(e.ms for e in step) / found.steps / found.step_ms
    turned = sum(e.ms for e in step if kinds.kind(e.name) == kinds.LAYOUT) / found.steps
    return _if(
        share >= NCHW_SHARE and (found.tensor_cores or 0) > 0.5,  # else NCHW does no harm
        "nchw",
        share,
        f"kernels for NCHW take {share:.0%} of the step: {turned:.1f} ms only convert tensors to "
        "the layout that tensor cores want and back, the rest normalize",
    )


RULES: tuple[Callable, ...] = (
    _garbage,
    _one_worker,
    _reads,
    _unpinned,
    _elsewhere,
    _allocator,
    _copies,
    _asker,
    _small_batch,
    _pauses,
    _nchw,
)


def _communication(witnesses, alone: bool) -> Suspect | None:
    """Return a suspect if the processes exchange data for long without computing.

    alone: there is no other suspect. The process that waits least comes last to a collective, so
    only its time is that of the exchange; the others wait for it as well.
    """
    exposed = [w.reading.lost.get(kinds.COMMUNICATION, 0) for w in witnesses]
    least, most = min(exposed), max(exposed)
    if least < EXCHANGE_SHARE and not (alone and most >= LATE_EXCHANGE_SHARE):
        return None
    share = least if least >= EXCHANGE_SHARE else most
    ms = share * witnesses[exposed.index(share)].reading.step_ms
    who = f"process {exposed.index(share)}" if share > least else "the process"
    return Suspect(
        "communication",
        share,
        f"in each step {who} spends {ms:.1f} ms, {share:.0%} of it, in collectives, with nothing "
        "to compute meanwhile. Larger batches and gradients that are accumulated (no_sync) or sent "
        "in bf16 make that less, and so does a faster link",
        RECORD_ALL if len(witnesses) == 1 else LATE if share > least else "",
    )


def _straggler(witnesses) -> Suspect | None:
    """Return a suspect if the last process in collectives was idle for long, or worked longer.

    The last process to reach a collective waits least in it. A process with only slow launches is
    late as well, but has many short holes.
    """
    first = max(witnesses, key=lambda w: w.reading.exposed_ms)
    last = min(witnesses, key=lambda w: w.reading.exposed_ms)
    late_ms = first.reading.exposed_ms - last.reading.exposed_ms
    share = late_ms / first.reading.step_ms
    if share < LATE_SHARE or not (reason := _why_late(first, last, late_ms)):
        return None
    return Suspect(
        "straggler",
        share,
        f"process {witnesses.index(first)} waited {late_ms:.1f} ms longer in the collectives of a "
        f"step than process {witnesses.index(last)}, the straggler, whose device {reason}",
    )


def _why_late(first, last, late_ms):
    """Return a clause on the device of the last process, which explains its delay, or None."""
    away_ms = _longest_hole(last)
    if away_ms >= AWAY_SHARE * last.reading.step_ms:
        longest = max(host.absences(last.trace), key=lambda e: e.ms, default=None)
        place = longest and (longest.name or host.phase_of(last.trace, longest))
        did = f", while its host did something else in {place!r}" if place else ""
        return f"was idle for {away_ms:.1f} ms at a stretch{did}"
    more_ms = _worked_ms(last) - _worked_ms(first)
    return f"worked {more_ms:.1f} ms longer" if more_ms >= WORKED_SHARE * late_ms else None


def _worked_ms(witness):
    return sum(ms for kind, ms in witness.reading.kinds.items() if kind != kinds.COMMUNICATION)


def _longest_hole(witness):
    steps = witness.reading.steps
    return sum(sorted(e - b for b, e in breakdown.holes(witness.trace))[-steps:]) / steps


def _if(proven, fault, share, evidence, settle=""):
    return Suspect(fault, share, evidence, settle) if proven else None


def _nothing(witness):
    """Return the suspect "none", with the bottleneck of the step."""
    reading = witness.reading
    if reading.unseen or reading.verdict == breakdown.TOO_FEW:
        return Suspect("none", 0.0, f"this trace can't show one ({reading.verdict})")
    several = any(SEVERAL in e.name for e in witness.trace.ranges)
    who = "device" if reading.device else "processor"
    computed = 1 - sum(reading.lost.values())
    poor = reading.lost and computed < breakdown.BOUND
    only = "only " if poor else ""
    words = f"the {who} computes for {only}{computed:.0%} of the step"
    if poor:
        cause, share = next(iter(reading.lost.items()))
        words += f"; most of the rest is lost to: {cause}, {share:.0%}"
        if cause == breakdown.LAUNCHES:
            words += ", which are fewer with larger batches or torch.compile"
    return Suspect("none", 0.0, words, ON_A_PROCESSOR if several and not reading.device else "")


def sentence(suspect: Suspect) -> str:
    """Return a suspect in words: the fault, its evidence, its certainty and the next test."""
    sure = f" ({suspect.sure})" if suspect.fault != "none" else ""
    words = f"{WORDS[suspect.fault]}{sure}: {suspect.evidence}"
    return f"{words}. To settle it: {suspect.settle}" if suspect.settle else words
