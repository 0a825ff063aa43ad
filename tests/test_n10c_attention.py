"""Chapter 10c: layouts of texts, exact gradients, refusals that are logged, and its figures."""

from itertools import chain, pairwise
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from logs import with_cases
from programs import experiment_file, load, run_main

mpl.use("Agg")

from dlojz.chapters import n10c_attention as n10c
from dlojz.chapters import session
from dlojz.chapters.n10c_attention import figures, packing
from dlojz.course import UserError
from dlojz.runs import log

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small ceilings, in one thread."""
    monkeypatch.setattr(session, "MATRIX", {"cpu": 64})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_of(name, folder, flags):
    """Run an experiment with these flags; return its folder and its cases."""
    run = run_main(experiment_file(f"{name}.py"), folder, *flags.split())
    return run, log.read(run).cases


def title(ax):
    return np.ravel(ax)[0].figure.get_suptitle()


# Texts --------------------------------------------------------------------------------------------

LENGTHS = [3, 40, 7, 9, 30, 2, 11, 5, 64, 1, 20, 33, 8, 8, 17, 4]


def test_texts_are_real_and_of_unequal_lengths():
    texts = packing.texts(200, 64, 1000)
    lengths = sorted(map(len, texts))
    assert len(texts) == 200
    assert lengths[-1] == 64
    assert lengths[100] < sum(lengths) / 200, "a few long ones, and many short ones"
    assert {packing.PADDING, packing.HIDDEN}.isdisjoint(chain(*texts))
    assert packing.UNKNOWN < max(chain(*texts)) < 1000
    assert texts == packing.texts(200, 64, 1000)


@pytest.mark.parametrize("name", packing.LAYOUTS)
def test_a_layout_has_each_text_once_and_room_for_it(name):
    batches = packing.LAYOUTS[name](LENGTHS, 4, 64)
    numbers = [n for batch in batches for n in chain(*batch.rows)]
    assert len(numbers) == len(set(numbers))
    assert name == "packed" or sorted(numbers) == [*range(16)]
    for batch in batches:
        assert batch.columns % packing.EIGHTS == 0
        assert all(sum(LENGTHS[n] for n in row) <= batch.columns for row in batch.rows)


def share(name):
    batches = packing.LAYOUTS[name](LENGTHS, 4, 64)
    words = sum(LENGTHS[n] for batch in batches for n in chain(*batch.rows))
    return words / sum(len(batch.rows) * batch.columns for batch in batches)


def test_less_is_padded_from_layout_to_layout():
    shares = [share(name) for name in ("longest of all", "longest of its batch", "sorted")]
    assert shares == sorted(shares)
    assert share("packed") > share("sorted") > 2 * share("longest of all")


def test_buckets_are_sorted_within_a_window_only(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 2)
    batches = packing.buckets(LENGTHS, 4, 64)
    windows = [{n for batch in batches[i : i + 2] for n in chain(*batch.rows)} for i in (0, 2)]
    assert windows == [{*range(8)}, {*range(8, 16)}]
    by_length = packing.by_length(LENGTHS, 4, 64)
    assert all(a.columns <= b.columns for a, b in pairwise(by_length))


def test_a_text_goes_into_the_first_row_with_room():
    assert packing.first_fit([5, 6, 3, 4, 2], 10) == [[0, 2, 4], [1, 3]]


# Gradients ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    flags = "--texts 48 --longest 64 -b 4 --width 32 --layers 1 --rounds 2"
    return run_of("sequences", tmp_path_factory.mktemp("sequences"), flags)


def test_packed_gradients_are_those_of_padded_texts(sequences):
    found = {c["gradients"]: c for c in sequences[1].values() if "gradients" in c}
    assert found["packed"]["rows"] < found["padded"]["rows"] == 16
    assert found["packed"]["away"] < 1e-13
    assert found["packed"]["loss"] == pytest.approx(found["padded"]["loss"], rel=1e-13)
    for fault in ("packed, without the mask", "packed, positions go on"):
        assert found[fault]["away"] > 0.01
    assert found["padded, without the mask"]["away"] > 0.01


def made(program, rows, columns):
    texts = packing.texts(16, columns, program.VOCABULARY)[: sum(map(len, rows))]
    return program.Rows(packing.Batch(rows, columns), texts, CPU)


@pytest.mark.parametrize("way", ["flex", "by_ends"])
def test_the_ways_of_a_gpu_attend_as_the_boolean_mask_does(way, monkeypatch):
    """Flex_attention without its compiler, and varlen's kernel replaced by a loop."""
    program = load("sequences")

    def one_by_one(q, k, v, ends, *_):
        parts = pairwise(ends.tolist())
        each = ((x[None, a:b].transpose(1, 2) for x in (q, k, v)) for a, b in parts)
        return torch.cat([program.any_word(None)(*one)[0].transpose(0, 1) for one in each])

    flex = program.flex_attention
    monkeypatch.setattr(program, "compiled", lambda: (flex.flex_attention, flex.create_block_mask))
    monkeypatch.setattr(program.varlen, "varlen_attn", one_by_one)
    rows = made(program, [[0, 1], [2], [3, 4, 5]], 256)
    given = torch.randn(3, 3, 2, 256, 16)
    expected = program.boolean(rows)(*given)
    assert torch.allclose(getattr(program, way)(rows)(*given), expected, atol=1e-5)


def test_hidden_words_are_the_same_in_each_layout():
    program = load("sequences")
    apart, together = (made(program, rows, 512) for rows in ([[0], [1], [2]], [[0, 1, 2]]))
    assert apart.answers.tolist() == together.answers.tolist()
    for rows in (apart, together):
        assert set(rows.words.flatten()[rows.at].tolist()) == {packing.HIDDEN}


def test_words_are_counted_and_drawn(sequences):
    run, cases = sequences
    whole, packed = cases["longest of all"], cases["packed"]
    assert whole["places"] == 48 * 64
    assert packed["words"] / packed["places"] > 2 * whole["words"] / whole["places"]
    assert len(n10c.plot_layouts(run)) == 5
    assert "times the words per second of longest of all" in title(n10c.plot_sequences(run))
    assert n10c.gradients(run).rows[0][2] == "0.0e+00"


# Attention ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    flags = "--lengths 32 64 --heads 2 --at 32 --rounds 2"
    return run_of("attention", tmp_path_factory.mktemp("attention"), flags)


def test_what_is_kept_grows_with_the_square_or_with_the_length(attention):
    kept = {name: case.get("kept_bytes") for name, case in attention[1].items()}
    matrix, heads = 4 * 64 * 64, 2
    assert kept["naive, 64 tokens"] >= heads * matrix
    assert kept["flash, 64 tokens"] == 2 * kept["flash, 32 tokens"]
    assert kept["naive, 64 tokens"] > 2 * kept["naive, 32 tokens"]


def test_each_way_is_exact_to_rounding(attention):
    assert all(case["off"] < 2e-6 for case in attention[1].values() if "off" in case)


def test_what_refuses_is_logged_and_the_rest_goes_on(attention):
    run, cases = attention
    assert "No viable backend" in cases["cudnn none 64 fp32"]["error"]
    table = n10c.backends(run)
    assert len(table) == 10
    assert {row[-1] for row in table.rows} == {"refuses"}
    assert {row[3] for row in table.rows} == {"flash"}
    assert {row[0] for row in n10c.refusals(run).rows} == {"efficient", "cudnn"}


def test_a_way_without_memory_is_logged_with_its_reasons():
    program = load("attention")

    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 137 GiB")

    assert program.attempt(fails) == {"error": "out of memory", "why": []}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Flash attention kernel not used because: (Triggered internally at a.cpp:9.)", []),
        ("Flash attention has been runtime disabled. (Triggered internally at a.h:9.)", []),
        (
            "Flash Attention does not support non-null attn_mask. (Triggered internally at a.h:9.)",
            ["Flash Attention does not support non-null attn_mask."],
        ),
    ],
)
def test_reasons_are_those_of_the_kernel_that_was_asked(text, left):
    assert load("attention").why([SimpleNamespace(message=text)]) == left


def test_attention_is_drawn_by_length_with_what_was_too_much(tmp_path):
    case = {"flops": 1e12, "ms": [1.0, 1.0], "off": 1e-3, "replaced": 0}
    cases = {}
    for length in (1024, 2048):
        for way, ms, size in (("naive", 30.0, length**2), ("flash", 10.0, 16 * length)):
            about = {"way": way, "length": length, "both_ms": [ms, 1.1 * ms], "kept_bytes": 1}
            cases[f"{way} {length}"] = case | about | {"peak_bytes": size}
    cases["naive 4096"] = {"way": "naive", "length": 4096, "flops": 1, "error": "out of memory"}
    run = with_cases(tmp_path / "a.jsonl", cases)
    said = "2,048 tokens: flash is 3 times as fast as naive, with 1/128 of its memory; 4,096 tokens"
    assert title(n10c.plot_attention(run)).replace("\n    ", " ").startswith(said)
    assert [row[0] for row in n10c.attentions(run).rows] == ["naive, 2,048", "flash, 2,048"]
    assert n10c.attentions(run, 4096).rows[0][-1] == "out of memory"


# Products and networks ----------------------------------------------------------------------------


def test_the_ways_of_an_lstm_are_the_layer_of_torch():
    program = load("products")
    layer = torch.nn.LSTM(6, 6, bias=False).double()
    x = torch.randn(5, 3, 6, dtype=torch.double)
    expected = layer(x)[0]
    for call in (
        program.fused,
        *(lambda *g, s=s: program.loop(s, *g) for s in (program.separate, program.together)),
    ):
        found = call(x, layer.weight_ih_l0, layer.weight_hh_l0)
        assert torch.allclose(found, expected, atol=1e-12)


def test_products_are_timed_beside_those_of_their_comparison(tmp_path, monkeypatch):
    program = load("products")
    monkeypatch.setattr(program, "VOCABULARIES", (101, 104))
    monkeypatch.setattr(program, "LENGTHS", (13, 16))
    args = SimpleNamespace(tokens=16, width=64, steps=3, batch_size=2, rounds=2)
    found = list(program.measured(args, CPU, torch.float32))
    assert len({case["comparison"] for case in found}) == 8
    assert all(len(case["ms"]) == 2 for case in found)
    cases = {f"{case['comparison']} {case['way']}": case for case in found}
    axes = n10c.plot_products(with_cases(tmp_path / "a.jsonl", cases))
    assert " times as fast as " in title(axes)


def test_networks_have_about_as_many_parameters():
    program, most = load("families"), 2_000_000
    for family in program.LAYERS:
        width = program.width_of(family, most, 24)
        assert width % 8 == 0
        assert 0.75 * most < program.parameters(program.Network(family, width, 24)) <= most


def test_networks_train_and_are_drawn(tmp_path):
    flags = "--image-size 16 --classes 2 --images-per-class 8 --val-per-class 4 -b 8"
    run, cases = run_of("families", tmp_path, f"{flags} --lengths 1 2 --parameters 20000 --seeds 1")
    assert [case["phase"] for case in cases.values()] == 4 * ["tuning", "tuning", "fresh", "fresh"]
    for family in figures.FAMILIES:
        tuned, fresh = (
            [c for c in cases.values() if (c["family"], c["phase"]) == (family, phase)]
            for phase in ("tuning", "fresh")
        )
        assert fresh[0]["rate"] == max(tuned, key=lambda c: c["accuracy"])["rate"]
    assert all(0 <= case["accuracy"] <= 1 for case in cases.values())
    assert "epochs of" in title(n10c.plot_families(run))
    assert [row[0] for row in n10c.families(run).rows] == [*figures.FAMILIES]


def test_a_run_of_something_else_is_refused(tmp_path):
    run = with_cases(tmp_path / "a.jsonl", {"a": {"way": "naive"}})
    with pytest.raises(UserError, match=r"expected a run of experiments/products\.py"):
        n10c.plot_products(run)
