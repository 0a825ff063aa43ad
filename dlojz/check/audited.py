"""Runs of a check that were audited and done again: see `dlojz.watch.auditor` and `.replay`."""

from dataclasses import dataclass, replace
from pathlib import Path

from dlojz.runs import log, records

# Bytes of weights, gradients and momenta, of which a check keeps twelve: ResNet-50's are 0.3e9.
MOST_STATE = 5e8
EACH_STEP = ("images", "pixels", "criterion", "scales")  # fields of a replay


def precision_of(run: log.Run, hardware: str = "") -> str:
    """Return the precision that a run computed in; a processor has no TF32.

    hardware: the check's, such as "cuda: NVIDIA H100", if it differs from the run's.
    """
    found = run.start["arguments"].get("precision", "fp32")
    on_gpu = (hardware or run.setup["device"]).startswith("cuda")
    return "fp32" if found == "tf32" and not on_gpu else found


def too_large(run: log.Run) -> str:
    """Return the reason why whole updates of such a job can't be replayed; "" if they can."""
    if (held := state_of(run)) <= MOST_STATE:
        return ""
    model = run.start["arguments"].get("model")
    return f"weights, gradients and momenta of {model} take {held / 1e9:.1f} GB in a process"


def state_of(run) -> int:
    return sum(run.share.held.values()) or 3 * run.setup.get("parameter_bytes", 0)


@dataclass(frozen=True)
class Audited:
    """An audited run and its replay, of one process."""

    mine: log.Run
    replay: log.Run
    precision: str

    @property
    def folder(self) -> Path:
        """Return the folder of the run's logs, one for each process."""
        return self.mine.path.parent

    @property
    def updates(self) -> list[records.Update]:
        return self.replay.replay.updates

    @property
    def every(self) -> records.Every:
        return self.replay.replay.every

    @property
    def first_epoch(self) -> "Audited":
        """Return the audited run cut to its first epoch."""
        every, epochs = self.every, self.mine.start.get("arguments", {}).get("epochs", 1)
        if not every or epochs == 1:
            return self
        steps, updates = every.steps[1] // epochs, len(every.usual) // epochs
        val, seen = every.validation, len(every.validation.pixels) // epochs
        cut = {name: getattr(val, name)[:seen] for name in ("pixels", "labels")}
        every = records.Every(
            steps=[min(count, steps) for count in every.steps],
            **{name: getattr(every, name)[:steps] for name in EACH_STEP},
            updates=every.updates[:updates],
            usual=every.usual[:updates],
            validation=records.Validation(**cut),
        )
        kept = [u for u in self.updates if u.update < updates]
        return replace(self, replay=replace(self.replay, replay=records.Replay(kept, every)))


def audited(mine: log.Run, replay: log.Run, precision: str) -> list[Audited]:
    """Return each process of an audited run, with its replay."""
    pairs = zip(mine.ranks, replay.ranks, strict=True)
    return [Audited(mine, again, precision) for mine, again in pairs]
