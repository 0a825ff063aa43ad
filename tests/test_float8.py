"""The experiment and figures of matrix products in 8 bits, which are optional."""

import math
from importlib.util import find_spec

import matplotlib as mpl
import pytest
from claims import claims
from logs import with_cases
from programs import experiment_file, load

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters.n11b_hybrid import float8
from dlojz.course import UserError
from dlojz.figures import peaks
from dlojz.runs import log


def test_without_the_package_it_says_what_to_type(monkeypatch, tmp_path):
    module = load("float8")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["float8.py"])
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install -c constraints.txt -e \.\[float8\]"):
        module.main()


@pytest.mark.parametrize("sizes", ["64x64", "64x64x63", "64x64x0", "axbxc"])
def test_sizes_must_be_three_multiples_of_16(sizes, train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(experiment_file("float8.py"), tmp_path, "--sizes", sizes)
    assert f"'{sizes}': expected three multiples of 16, like 64x64x128" in capsys.readouterr().err


@pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao, which is optional")
def test_one_large_value_spoils_a_scale_that_all_share(train, tmp_path):
    flags = "--sizes 32x16x64 --rounds 1 --backend eager".split()
    train(experiment_file("float8.py"), tmp_path, *flags)
    cases = log.read(tmp_path).cases
    away = {name: case["away"] for name, case in cases.items() if "away" in case}
    assert away["bf16, 1"]["output"] < 2**-8 < away["tensorwise, 1"]["output"] < 2**-4
    assert away["tensorwise, 1e+06"]["output"] > 0.5, "the other rows are lost"
    for case in ("rowwise, 1e+06", "rowwise_with_gw_hp, 1e+06"):
        assert away[case]["output"] == pytest.approx(away["rowwise, 1"]["output"])
    exact = "weights' gradient"  # in bf16
    assert away["rowwise_with_gw_hp, 1"][exact] < 0.1 * away["rowwise, 1"][exact]
    (row,) = float8.break_even(tmp_path).rows
    assert row[0] == "32 x 16 x 64"
    assert set(cases["32x16x64"]["step_ms"]) == {"bf16", *load("float8").RECIPES}


def test_what_is_lost_is_a_table_and_a_line_for_each_recipe():
    run = runs.recorded("cpu/11-float8")
    rows = {row[0]: row[1:] for row in float8.lost(run).rows}
    assert rows["bf16"] == ("0.29%", "0.29%", "0.29%")
    assert rows["tensorwise"][0] == "3.68%"
    assert rows["rowwise"][0] == "3.82%"
    lines = {line.get_label(): line.get_ydata() for line in float8.plot_outliers(run).lines}
    assert [*lines] == [*rows] == [*float8.COLOURS]
    assert lines["tensorwise"][-1] > 20 * lines["rowwise"][-1]
    with pytest.raises(UserError, match=r"a run of float8\.py with --sizes, on a GPU"):
        float8.break_even(run)


@claims("11b_hybrid")
def test_what_notebook_11b_says_of_the_recorded_layers_is_so():
    run = runs.recorded("h200/11-float8")
    ms = {n: c["step_ms"] for n, c in log.read(run).cases.items() if "step_ms" in c}
    assert [row[0].replace(" ", "") for row in float8.break_even(run).rows] == [*ms]
    faster = [n for n, each in ms.items() if max(each, key=each.get) == "bf16"]
    slower = [n for n, each in ms.items() if min(each, key=each.get) == "bf16"]
    assert faster == ["4096x4096x16384", "16384x4096x16384"]
    assert slower == [n for n in ms if n not in faster]
    assert len(ms) == 6
    largest, (first, second, *_) = ms[faster[-1]], ms
    work = {n: 6 * math.prod(map(int, n.split("x"))) for n in ms}  # three products
    assert work[second] == 16 * work[first]
    assert ms[second]["bf16"] == pytest.approx(ms[first]["bf16"], rel=0.02)
    assert "1024x4096x16384" in slower, "a layer of 4,096 x 16,384 with 1,024 rows"
    product = peaks.measured(runs.recorded("h200/00-ceilings")).tflops["bf16"]
    gains = [largest["bf16"] / largest[recipe] for recipe in ("tensorwise", "rowwise")]
    yield "{:.2f} times as fast with one scale for each tensor, and {:.2f} times".format(*gains)
    ideal = f"{work[first] / product / 1e9:.2f} ms, and it took {ms[first]['bf16']:.2f}"
    yield f"At {product:.0f} TFLOP/s the first one's products take {ideal}"
    yield "TALK.md", f"two were, the largest {gains[0]:.2f} times as fast as in bf16"


def test_a_layer_that_is_too_small_is_slower_in_8_bits(tmp_path):
    small = {"step_ms": {"bf16": 0.1, "tensorwise": 0.2, "rowwise": 0.4}}
    large = {"step_ms": {"bf16": 3.0, "tensorwise": 2.0, "rowwise": 2.5}}
    run = with_cases(tmp_path / "f.jsonl", {"1x2x3": small, "4x5x6": large})
    assert float8.break_even(run).rows == [
        ("1 x 2 x 3", "0.100 ms", "x 0.50 slower", "x 0.25 slower"),
        ("4 x 5 x 6", "3.000 ms", "x 1.50", "x 1.20"),
    ]
    with pytest.raises(UserError, match=r"expected a run of float8\.py$"):
        float8.plot_outliers(run)
