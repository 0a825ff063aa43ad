"""The benchmark of decoders judges what it measured."""

import bench_loader
import pytest

FOUND = {bench_loader.PIL: [100, 110, 90], bench_loader.OURS: [200, 220, 180]}


class Decoders:
    """In place of the experiment: speeds that are known."""

    def __init__(self, found):
        self.found = found

    def roads(self, size):
        return dict.fromkeys(self.found)

    def images_per_s(self, roads, jpegs, rounds):
        return self.found


@pytest.mark.parametrize(
    ("goal", "word"), [(1.9, "reached"), (2.0, "cannot tell"), (2.1, "MISSED")]
)
def test_a_ratio_is_judged_by_its_goal(goal, word, capsys):
    reached = bench_loader.judge("a / b", [2.0, 2.02, 1.98], goal)
    assert reached == (word == "reached")
    assert capsys.readouterr().out.startswith("a / b: 2.00 (1.95 to 2.05, 3 rounds); goal")


def test_what_is_not_installed_is_told_and_not_judged(monkeypatch, capsys):
    monkeypatch.setattr(bench_loader, "find_spec", lambda name: None)
    assert bench_loader.on_processor(Decoders(FOUND), [], 3) == [True]
    text = capsys.readouterr().out
    assert f"{bench_loader.DALI:36} not installed here" in text
    assert "ours / PIL: 2.00 (2.00 to 2.00, 3 rounds); goal 1.6: reached" in text
