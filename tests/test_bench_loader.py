"""The benchmark of decoders judges what it measured."""

from types import SimpleNamespace

import bench_loader

FOUND = {bench_loader.PIL: [100, 110, 90], bench_loader.OURS: [200, 220, 180]}


def test_what_is_not_installed_is_told_and_not_judged(monkeypatch, capsys):
    monkeypatch.setattr(bench_loader, "find_spec", lambda name: None)
    decoders = SimpleNamespace(
        roads=lambda size: dict.fromkeys(FOUND), images_per_s=lambda *_: FOUND
    )
    assert bench_loader.on_processor(decoders, [], 3) == [True]
    text = capsys.readouterr().out
    assert f"{bench_loader.DALI:36} not installed here" in text
    assert "ours / PIL: 2.00 (2.00 to 2.00, 3 rounds); goal 1.6: reached" in text
