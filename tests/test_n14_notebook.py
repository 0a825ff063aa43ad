"""What notebook 14 and its quiz say of recordings is what they hold."""

import statistics

import pytest
from claims import claims

from dlojz import race, runs
from dlojz.chapters import n14_race as n14
from dlojz.figures import paired

NOTEBOOK = "14_race"


def rungs():
    return {rung.title: rung for rung in n14.rungs(runs.recorded("cpu/14-cpu-bought"))}


def places():
    return {p.name: p for p in race.standings(race.open_race(runs.recorded("cpu/14-cpu-race")))}


@claims(NOTEBOOK)
def test_no_notebook_bought_an_epoch_and_an_edit_did():
    found = rungs()
    first, once, kept = (found[t] for t in ("00 starter", "05, validated once", "05, images kept"))
    assert found["03 channels_last"].epochs == first.epochs - 1
    assert found["05 loader"].epochs == first.epochs == once.epochs - 1
    yield f"had not ended after {found['09 compile'].pilot['seconds']:.0f} s"
    told = paired.difference(first.by_seed, kept.by_seed)
    assert told.word == paired.BETTER
    yield f"{kept.epochs:.0f} instead of {first.epochs:.0f}, and with them"
    yield f"{told.mean:.1f} ± {told.half:.1f} points"
    alone = paired.difference(first.by_seed, once.by_seed)
    assert alone.word == paired.NO_DIFFERENCE
    yield f"only a difference of more than {alone.half:.1f} points would show"


@claims(NOTEBOOK)
def test_points_come_from_epochs_and_vary_by_seed():
    found = [rung for rung in rungs().values() if rung.trainings]
    begins = [(rung.fixed_s + rung.pilot["epoch_s"]) / 0.95 for rung in found]
    yield f"after {min(begins):.0f} to {max(begins):.0f} s here"
    budget = 15  # the curves are what was run
    assert all(rung.fitting(budget) == rung.epochs for rung in found)
    kept = found[-1]
    yield "dlojz/chapters/n14_race/answers.toml", f"is {kept.fitting(60):.0f} epochs for the last"
    mean = sum(kept.by_seed.values()) / len(kept.by_seed)
    yield "dlojz/chapters/n14_race/answers.toml", f"{kept.epochs:.0f} epochs, with {mean:.0f} %"
    five = [a for rung in found for a in rung.by_seed.values() if rung.epochs == 5]
    yield f"from {min(five):.0f} to {max(five):.0f} %"


@claims(NOTEBOOK)
def test_the_starter_trains_in_half_of_its_seconds():
    found = rungs()
    parts = n14.parts(found["00 starter"])
    yield f"trains in {100 * parts['training'] / sum(parts.values()):.0f} % of its seconds"
    yield f"It starts for {parts['imports']:.1f} s and ends for {parts['ending']:.1f} s"
    both = parts["validation"] + parts["saving"]
    assert both > found["00 starter"].pilot["epoch_s"]
    yield f"after each epoch takes {both:.1f} s"
    beside, alone = (
        n14.parts(found[t])["training"] / found[t].epochs for t in ("00 starter", "05, images kept")
    )
    yield f"takes {beside:.1f} s beside them, and {alone:.1f} s once"


@claims(NOTEBOOK)
def test_the_recorded_race_has_a_winner_a_tie_and_a_cheat():
    found = places()
    kept, tie = found["images-kept"], found["loader"].margin
    assert kept.word == race.ranking.BEST
    yield f"It is {kept.margin.mean:.1f} points ahead, and the gate was {kept.margin.gate:.1f}"
    assert tie.word == race.ranking.TIE
    yield f"`loader` is {-tie.mean:.1f} points behind `first`"
    first = 100 * sum(found["loader"].accuracies) / 4 - tie.mean
    yield f"in which `first` had {first:.1f} %"
    for margin in (kept.margin, tie):
        assert n14.gates(margin, 0.05)[4] == pytest.approx(margin.gate)  # as on the board
    gates = n14.gates(tie, 0.05)
    assert gates[12] > -tie.mean > gates[16]
    images, _, floor = found["cheat"].why.partition(" images in its log need at least ")
    yield f"{images.rpartition(' ')[2]} images need at least {float(floor.split()[0]):.0f} s"


@claims(NOTEBOOK)
def test_in_a_short_race_on_a_gpu_what_starts_slowly_loses():
    of = race.open_race(runs.recorded("h200/14-race"))
    found = {place.name: place for place in race.standings(of)}
    gpu, amp, cheat = (found[name] for name in ("gpu", "amp", "too-good"))
    assert (gpu.word, amp.word) == (race.ranking.BEST, race.ranking.TIE)
    yield f"on an H200, with {of.rules['seconds']:.0f} s and three runs each"
    assert len(gpu.accuracies) == 3
    fewer = 1 - statistics.mean(amp.joules) / statistics.mean(gpu.joules)
    first, second = race.results.read(of)
    saw = {name: ran["images"] for (name, _), ran in first.runs.items()}
    assert saw["amp"] / 5 == saw["gpu"] / 6, "as many images in an epoch"
    yield f"is a tie, with five epochs instead of six, for {100 * fewer:.0f} % fewer joules"
    assert saw["gpu"] == 2 * saw["loader"], "half as many images"
    late = [ran for (name, _), ran in second.runs.items() if name == "late"]
    assert late[0]["cut"]
    every = [*first.runs.values(), *second.runs.values()]
    watts = [ran["joules"] / ran["seconds"] for ran in every]
    idle = statistics.median(ran["idle_w"] for ran in every)
    yield f"drew {idle:.0f} W idle, and {min(watts):.0f} to {max(watts):.0f} W in its entries"
    assert found["late"].why.startswith("no weights")
    yield f"claims {saw['too-good'] / 1e6:.1f} million images"
    yield f"could compute them in {cheat.floor_s:.1f} s"
    assert cheat.word == race.ranking.BEHIND


@claims(NOTEBOOK)
def test_an_idle_watt_and_the_node_cost_their_seconds():
    budget, node, gpus, each = 15, 10_200, 8, 700  # s, W, and W of each GPU
    yield f"and {budget} s from the start of the process to its end"
    yield f"each idle watt costs {budget} J in an entry of {budget} s"
    yield f"up to {node / 1000} kW, of which its eight GPUs of {each} W are {gpus * each / 1000}"
    rest = (node - gpus * each) / gpus
    yield f"The rest is {rest:.0f} W for each GPU: up to {rest * budget / 1000:.1f} kJ"
    yield f"its GPU takes up to {each * budget / 1000:.1f} kJ"
