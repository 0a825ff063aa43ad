"""The times and sizes of messages between processes."""

import matplotlib.pyplot as plt
import pytest
from logs import write_log

from dlojz.chapters.n06_ddp import figures
from dlojz.course import UserError
from dlojz.runs.columns import PHASES
from dlojz.runs.folder import events_file

BUCKETS = [  # op, bytes, begin_ms, ms
    ("broadcast", 4_096, 0.1, 0.5),
    ("all_reduce", 1_000_000, 30.0, 10.0),
    ("all_reduce", 25_000_000, 50.0, 20.0),
]


def write(folder, size, slow=None, evidence=True, **last):
    """The logs of `size` processes; the others wait 15 ms for `slow`."""
    for rank in range(size):
        late = 5.0 if rank != slow else 0.0
        collectives = [
            {"backend": "gloo", "op": op, "bytes": bytes_, "dtype": "float32", "begin_ms": begin,
             "ms": ms + late}
            for op, bytes_, begin, ms in BUCKETS
        ]  # fmt: skip
        seen = {"when": "last", "collectives": collectives, "backward_ms": [25.0, 60.0], **last}
        write_log(
            events_file(folder, rank),
            steps=4,
            warmup=0,
            batch=8,
            ms=dict.fromkeys(PHASES, 10.0),
            rank=rank,
            size=size,
            about={"hostname": f"node{rank}"},
            evidence=seen if evidence else None,
        )
    return folder


def test_a_table_of_what_is_said(tmp_path):
    rows = figures.collectives(write(tmp_path / "r", 3, slow=1)).rows
    assert rows == [
        ("all_reduce", "float32", "gloo", "2", "26 MB", "30.0 to 40.0 ms"),
        ("broadcast", "float32", "gloo", "1", "4.1 kB", "0.5 to 5.5 ms"),
    ]


def test_the_figures_are_drawn(tmp_path):
    run = write(tmp_path / "r", 3, slow=1)
    when, much = figures.plot_collectives(run)
    assert len(when.patches) == 3 * (1 + len(BUCKETS))
    begins = {round(bar.get_x(), 6) for bar in when.patches}
    assert begins == {0, *(begin - 25 for *_, begin, _ in BUCKETS)}, "from the backward pass on"
    assert sum(p.get_width() for p in much.patches) == pytest.approx(3 * 26.004096)


@pytest.mark.parametrize(
    ("last", "title", "bars"),
    [
        (
            {"timed_on": "gpu", "communication_ms": 3.0, "exposed_ms": 1.0},
            "3.0 ms on the GPU, 1.0 of",
            3,
        ),
        ({"communication_ms": 3.0}, "3.0 ms on the GPU; marks", 0),
    ],
)
def test_on_a_gpu_the_figure_tells_what_is_hidden(last, title, bars, tmp_path):
    when, _ = figures.plot_collectives(write(tmp_path / "r", 2, **last))
    assert title in when.figure.get_suptitle()
    assert len(when.patches) == 2 * (1 + bars)


@pytest.mark.parametrize(
    ("size", "seen", "message"),
    [
        (1, {}, "one process has nothing to exchange"),
        (2, {"evidence": False}, "submit it with --test"),
        (2, {"collectives": []}, "no process sent anything .* wrapped in DistributedDataParallel"),
    ],
)
def test_a_run_without_communication_says_what_to_do(size, seen, message, tmp_path):
    with pytest.raises(UserError, match=message):
        figures.plot_collectives(write(tmp_path / "r", size, **seen))
    assert plt.get_fignums() == []
