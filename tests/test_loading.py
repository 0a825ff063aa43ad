"""The tables and figures of notebook 05 say what the logs say."""

import json

import matplotlib as mpl
import pytest

mpl.use("Agg")
from test_stats import write_log

from dlojz import loading

SPEEDS = {
    "decoder: PIL": [500, 520, 540],
    "decoder: torchvision": [700, 720, 740],
    "road: PIL, v1, float32": [200, 210, 220],
    "road: torchvision, v2, uint8": [400, 420, 440],
}


def experiment(path, cases, **changes):
    """The log of an experiment with these cases of evidence: {when: fields}."""
    nothing = {"window": None, "validation": None, "epoch": None, "memory": None}
    write_log(path, steps=0, **nothing | changes)
    lines = path.read_text().splitlines()
    lines[2:2] = [
        json.dumps({"event": "evidence", "when": w} | c) for w, c in cases.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def decoders(tmp_path):
    cases = {name: {"images_per_cpu_s": speeds} for name, speeds in SPEEDS.items()}
    cases |= {f"nvJPEG: {b}": {"images_per_s": [b * 100, b * 101]} for b in (1, 16)}
    return experiment(tmp_path / "decoders.jsonl", cases)


def test_decoders_are_compared_with_the_first_of_their_kind(decoders):
    rows = {row[1]: row for row in loading.decoders(decoders).rows}
    assert rows["torchvision"][2:] == ("720", "700 to 740", "1.38")
    assert rows["torchvision, v2, uint8"][2:] == ("420", "400 to 440", "2.00")
    assert rows["nvJPEG, 16 in a batch"][4] == "16.00"
    assert rows["simplejpeg"][3] == "not installed there"


def test_the_ratio_of_two_ways_is_taken_round_by_round(decoders):
    mean, low, high = loading.ratio(decoders, "torchvision, v2, uint8", "PIL, v1, float32")
    assert (mean, low, high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="expected one of PIL, torchvision"):
        loading.ratio(decoders, "torchvision", "DALI")


def test_each_way_on_the_processor_has_a_bar_and_the_gpu_a_line(decoders):
    ax = loading.plot_decoders(decoders)
    assert [bar.get_width() for bar in ax.patches] == [520, 720, 210, 420]
    assert list(loading.plot_nvjpeg(decoders).lines[0].get_ydata()) == [100.5, 1608]
