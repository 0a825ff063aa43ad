"""The progress of a run in text: a live line per step in a terminal, a line per epoch."""

import sys
import time


class Progress:
    """The text of one run, written line by line."""

    def __init__(self):
        self._live, self._shown = sys.stderr.isatty(), 0.0

    def step(self, fields):
        now = time.monotonic()
        if self._live and now - self._shown > 0.2:
            self._shown = now
            rate = 1000 * fields["images"] / sum(fields["host_ms"].values())
            print(
                f"\repoch {fields['epoch']} step {fields['step'] + 1}: loss {fields['loss']:.3f}, "
                f"{rate:,.0f} images/s \033[K",
                end="",
                file=sys.stderr,
            )

    def epoch(self, fields):
        if self._live:
            print("\r\033[K", end="", file=sys.stderr)
        print(
            f"epoch {fields['epoch']}: "
            f"train loss {fields['train_loss']:.3f}, accuracy {fields['train_accuracy']:.1%}; "
            f"validation loss {fields['val_loss']:.3f}, accuracy {fields['val_accuracy']:.1%}",
            flush=True,
        )
