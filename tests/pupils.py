"""A simulated class: trainees who predict, check and answer, by the code that a notebook calls.

Only the clock and the jobs are made up; what is kept and shared is written by `progress.keep`.
    python tests/pupils.py FOLDER [HOW MANY]     # a class to look at
"""

import random
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

from dlojz.classroom import share as sharing
from dlojz.course import progress

STEPS = ("01_gpu", "02_amp", "03_channels_last")
GAINS = {"01_gpu": 11.0, "02_amp": 2.4, "03_channels_last": 1.5}
HINTS = {
    "01_gpu": ("model-on-cpu", "metrics", "sync"),
    "02_amp": ("scaler-update", "no-autocast"),
    "03_channels_last": ("weights-nchw",),
}


def verdict(passed, hint=None, ratio=None):
    """Return a verdict as `check` keeps it, with what a trainee must not share."""
    comparison = {"ratio": ratio, "low": ratio * 0.97, "high": ratio * 1.03} if ratio else None
    said = {"findings": [{"what": "device", "yours": "/home/jdupont/secret.py"}]}
    return said | {"passed": passed, "hint": hint, "comparison": comparison, "job": "0007"}


class Pupil:
    """A trainee at a clock of their own, whose answers are kept by the real `progress.keep`."""

    def __init__(self, home: Path, begin: datetime, seed: int):
        self.file, self.now, self.luck = home / "progress.json", begin, random.Random(seed)
        self.jobs = []

    def wait(self, minutes):
        self.now += timedelta(minutes=minutes * self.luck.lognormvariate(0, 0.35))

    def keep(self, *args, **more):
        with mock.patch.object(progress, "now", return_value=self.now):
            progress.keep(*args, **more)

    def run(self, queued=1.0, minutes=2.0):
        """Wait for a job in the queue, then until it ends."""
        submitted = self.now.timestamp()
        self.wait(queued)
        started = self.now.timestamp()
        self.wait(minutes)
        status = {"state": "COMPLETED", "started": started, "ended": self.now.timestamp()}
        self.jobs.append((submitted, status))

    def work(self, step, until=1.0):
        """Do a part of a notebook: the prediction, checks until one passes, the questions."""
        key = {"01_gpu": "01 gpu", "02_amp": "02 amp", "03_channels_last": "03 layout"}[step]
        quiz = {"01_gpu": "gpu-where", "02_amp": "amp-tf32", "03_channels_last": "layout-shape"}
        self.wait(8)
        self.keep("quizzes", quiz[step], 1, right=self.luck.random() < 0.6)
        guess = 90 * self.luck.lognormvariate(0.3, 0.7)
        self.keep("predictions", key, {"step_ms": guess, "peak_memory_gb": guess / 20})
        self.wait(12)
        self.run(queued=4 * self.luck.random())
        rows = (("step_ms", guess, 90 * self.luck.lognormvariate(0, 0.1)),)
        rows += (("peak_memory_gb", guess / 20, 6 * self.luck.lognormvariate(0, 0.1)),)
        names = ("name", "predicted", "measured", "word")
        self.keep("scores", key, [dict(zip(names, (*row, ""), strict=True)) for row in rows])
        while self.luck.random() < 0.45:
            self.run(queued=3)
            self.keep("verdicts", step, verdict(False, self.luck.choice(HINTS[step])))
            self.wait(6)
        if until < 1:
            return
        self.run(queued=3)
        ratio = GAINS[step] * self.luck.lognormvariate(0, 0.12)
        self.keep("verdicts", step, verdict(True, None, ratio))
        self.wait(7)
        self.keep("answers", f"{key[:2]} what if", "about 3 %, as /home/jdupont says")


def share(pupil, folder):
    """Share what a pupil has, by the command's own functions."""
    jobs = mock.patch("dlojz.launch.in_queue", return_value=pupil.jobs)
    with jobs, mock.patch("dlojz.classroom.share._submitted", float):
        sharing.begin(sharing.plan(folder, None))


def make_class(folder, homes, count=30, seed=0):
    """Have a class of this size share into a folder: it is in notebook 02 and 03 by now."""
    begin = datetime.now(UTC) - timedelta(minutes=150)
    for number in range(count):
        home = Path(homes) / str(number)
        home.mkdir(parents=True)
        pupil = Pupil(home, begin + timedelta(minutes=number % 7), seed + number)
        with mock.patch.dict("os.environ", {"DLOJZ_PROGRESS": str(pupil.file)}):
            for step in STEPS:
                if (datetime.now(UTC) - pupil.now).total_seconds() < 70 * 60:
                    break
                pupil.work(step, until=pupil.luck.random() * 4)
            if pupil.luck.random() < 0.3:
                since = datetime.now(UTC).timestamp() - 60 * pupil.luck.random() * 9
                pupil.jobs.append((since, {"state": "QUEUED"}))
            share(pupil, folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as homes:
        Path(sys.argv[1]).mkdir(exist_ok=True)
        make_class(sys.argv[1], homes, *map(int, sys.argv[2:]))
