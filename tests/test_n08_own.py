"""The opening figure of notebook 08, and those of a trainee's own runs, say what they are given."""

import math

import matplotlib as mpl
import pytest
import trained
from logs import experiment, with_cases
from programs import load

mpl.use("Agg")

from dlojz.chapters import n08_large_batch as n08
from dlojz.chapters.n08_large_batch import history
from dlojz.course import UserError

LAMB = "solutions/optimizers.py"
PREPARED = "dlojz/chapters/n08_large_batch/experiments/optimizers.py"


def test_each_record_is_drawn_with_its_batch_and_has_a_source():
    ax = n08.plot_history()
    shown = [text.get_text() for text in ax.texts]
    for record, text in zip(history.RECORDS, shown, strict=True):
        assert text.startswith(f"{record.who} {record.year}: {record.processors:,} {record.of}")
        assert (f"batch {record.batch:,}" in text) if record.batch else "batch" not in text
        assert record.source.startswith(("arXiv ", "cloud.google.com"))
    areas = [collection.get_sizes()[0] for collection in ax.collections]
    batches = [record.batch for record in history.RECORDS]
    known = [(batch, area) for batch, area in zip(batches, areas, strict=True) if batch]
    assert [area for _, area in sorted(known)] == sorted(area for _, area in known)
    assert "from 14 days to 74.7 s" in ax.figure.get_suptitle()


def finder(path, losses):
    rates = [10.0 ** (n - 3) for n in range(len(losses))]
    return experiment(path, {"event": "rates", "rates": rates, "losses": losses})


def test_the_curve_of_a_finder_names_its_lowest_loss(tmp_path):
    ax = n08.plot_rates(finder(tmp_path / "a.jsonl", [2.3, 1.9, 2.1, math.nan]))
    assert [*ax.lines[0].get_ydata()] == [2.3, 1.9, 2.1]
    assert ax.texts[0].get_text() == " lowest loss: at 0.01"
    assert ax.figure.get_supxlabel().startswith("4 updates, one at each rate")


@pytest.mark.parametrize(
    ("losses", "said"),
    [(None, "no rate was tried in it; give the trainer --find-lr 40"), ([math.nan], "train_step")],
)
def test_a_finder_without_a_curve_is_explained(tmp_path, losses, said):
    path = tmp_path / "a.jsonl"
    run = finder(path, losses) if losses else experiment(path)
    with pytest.raises(UserError, match=said):
        n08.plot_rates(run)


@pytest.fixture
def ratios(one_thread):
    layers = load("layers")
    given = {"model": "shufflenet_v2_x0_5", "image_size": 32, "batch_size": 8, "updates": 2}

    def measured(name, file):
        args = layers.argparse.Namespace(**given, optimizers=file)
        return layers.trained(name, args, layers.torch.device("cpu"))

    return measured


@pytest.fixture
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_layer_changes_by_lambs_rate_and_not_by_sgds_nor_without_a_trust_ratio(ratios):
    lamb = [*ratios("LAMB", LAMB).values()]
    assert lamb == pytest.approx([0.02] * len(lamb), rel=1e-3)
    assert len(lamb) > 30
    for other in (ratios("SGD", LAMB), ratios("LAMB", PREPARED)):
        assert max(other.values()) > 2 * min(other.values())


def test_layers_are_drawn_in_their_order(tmp_path):
    cases = {
        name: {"rate": rate, "ratios": {"conv1.weight": 0.3, "fc.weight": 0.1}}
        for name, rate in (("SGD", 0.1), ("LAMB", 0.02))
    }
    ax = n08.plot_layers(with_cases(tmp_path / "a.jsonl", cases, updates=5))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["conv1.weight", "fc.weight"]
    assert [*ax.lines[0].get_ydata()] == [0.3, 0.1]
    assert ax.figure.get_supxlabel().startswith("update 5, weights of two and more dimensions")


def test_the_ratio_of_rates_is_that_of_the_large_batch_and_the_smallest(tmp_path):
    run = trained.batches(tmp_path / "batches.jsonl")
    assert n08.rate_ratio(run) == 1
