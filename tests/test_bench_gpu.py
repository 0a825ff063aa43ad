"""The benchmark beside timm claims only what its interval shows."""

import bench_gpu
import pytest


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.001, 1.02, "reached"),
        (1.0, 1.02, "reached"),
        (0.999, 1.02, "cannot tell"),
        (0.98, 1.0, "cannot tell"),
        (0.98, 0.999, "MISSED"),
    ],
)
def test_the_goal_is_reached_only_by_the_whole_interval(low, high, word):
    assert bench_gpu.outcome(low, high) == word


@pytest.mark.parametrize(
    ("seconds", "reached"),  # ours and timm's in two pairs, interleaved A B B A
    [([1, 1.2, 1.2, 1], True), ([1, 1.2, 0.9, 1], False), ([1, 0.8, 0.8, 1], False)],
)
def test_an_interval_that_includes_the_goal_does_not_count_as_reached(
    seconds, reached, monkeypatch, capsys
):
    clock = iter(seconds)
    monkeypatch.setattr(bench_gpu, "ours", lambda *_: lambda steps: None)
    monkeypatch.setattr(bench_gpu, "timm_loop", lambda *_: lambda steps: None)
    monkeypatch.setattr(bench_gpu, "_seconds", lambda loop, steps: next(clock))
    args = bench_gpu.argparse.Namespace(pairs=2, batch=2)
    assert bench_gpu.compare("02 fp16", args) == reached
    assert ("goal 1.00: reached" in capsys.readouterr().out) == reached


@pytest.mark.parametrize("name", bench_gpu.SETTINGS)
def test_the_solution_has_the_flags_of_each_setting(name, monkeypatch):
    monkeypatch.setattr("sys.argv", [])  # and as it was before, afterwards
    setting = bench_gpu.SETTINGS[name]
    _, args = bench_gpu._parsed(setting, 8)
    assert args.precision == setting.precision
    assert getattr(args, "channels_last", False) == setting.channels_last
    assert getattr(args, "compile", "off") == (setting.mode or "off")
