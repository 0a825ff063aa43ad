"""What notebook 07 and its answers say of recordings is in the recordings."""

import statistics
import tomllib

from claims import claims

from dlojz import course, runs
from dlojz.chapters.n07_augmentation import figures
from dlojz.runs import log
from dlojz.runs.stats import summary

RANDAUGMENT = "RandAugment(2, 9)"
CORES = 16


def demand():
    return summary(runs.recorded("h100/05-resnet50-bf16-synthetic-1")).images_per_s


def supplies(way):
    """Return the images/s of all cores by the kind of images: each road's rounds."""
    found = figures.seconds(runs.recorded("h100/07-costs"), "road", 224)
    return {kind: [CORES / s for s in spent] for (kind, of), spent in found.items() if of == way}


def case(way, images=256):
    cases = log.read(runs.recorded("h100/07-mixing")).cases.values()
    (found,) = [c for c in cases if (c["how"], c["way"], c["images"]) == ("cutmix", way, images)]
    return statistics.median(found["ms"]), found["launches"]


@claims("07_augmentation")
def test_pil_is_as_much_faster_as_the_notebook_says():
    middle, low, high = figures.ratio(runs.recorded("h100/07-costs"), RANDAUGMENT)
    yield f"{middle:.1f} times as fast ({low:.1f} to {high:.1f}, at 224 px)"


def test_the_ways_to_run_randaugment_overlap_and_only_augmix_starves_the_model():
    rounds = supplies(RANDAUGMENT).values()
    assert len(rounds) == 3
    assert max(map(min, rounds)) < min(map(max, rounds))
    assert min(min(speeds) for speeds in rounds) > demand()
    assert max(max(speeds) for speeds in supplies("AugMix").values()) < demand()


@claims("07_augmentation")
def test_a_batch_is_mixed_in_the_time_that_the_notebook_says():
    loop, masks, compiled = (case(way) for way in ("loop", "masks", "compiled"))
    assert case("masks", 16)[1] == masks[1]
    yield f"takes {masks[0]:.1f} ms at once and {loop[0]:.0f} ms image by image"
    yield f"launches {loop[1]:,} kernels in {loop[0]:.0f} ms"
    yield f"a whole step of ResNet-50 takes {256e3 / demand():.0f}."
    yield f"launches {masks[1]}, however large the batch is, in {masks[0]:.1f} ms"
    yield f"Compiled these are {compiled[1]}, in {compiled[0]:.1f} ms"
    yield f"in {masks[0]:.1f} ms instead of {loop[0]:.0f}"


@claims("07_augmentation")
def test_the_cores_supply_what_the_notebook_says():
    with_it = statistics.median(supplies(RANDAUGMENT)["tensor, augmented as PIL"])
    without = statistics.median(supplies("RandomResizedCrop")["tensor"])
    yield f"about {round(with_it, -3):,.0f} images/s instead of {round(without, -3):,.0f}"
    file = course.course_root() / "dlojz/chapters/n07_augmentation/answers.toml"
    answer = tomllib.loads(file.read_text())["07 from the figures"]
    halves = [f"{round(speed / 2, -2):,.0f}" for speed in (with_it, without)]
    assert "about {} images/s with RandAugment, and {}".format(*halves) in answer
    assert f"The model consumes {round(demand(), -1):,.0f}" in answer


@claims("07_augmentation")
def test_recipes_gain_what_the_notebook_says():
    *single, last = figures.RECIPES
    gains = [recipe.after - recipe.before for recipe in single]
    yield f"by {min(gains):.1f} to {max(gains):.1f} points for a single change"
    yield f"took {min(int(recipe.epochs) for recipe in figures.RECIPES)} epochs or more"
    assert int(last.epochs) > int(single[0].epochs)


def crossing():
    """Return the accuracies of the short and of the long task, and their differences by title."""
    paths = (runs.recorded(f"h100/07-accuracy-{task}-x4") for task in ("short", "long"))
    return [figures.Task.of(path) for path in paths]


@claims("07_augmentation")
def test_one_training_gains_what_the_other_loses():
    short, long = (task.others[RANDAUGMENT].difference.mean for task in crossing())
    yield f"{RANDAUGMENT} cost a short recorded training {-short:.1f} points of accuracy"
    yield f"and gained a long one {long:.1f} |"


def test_every_change_costs_the_short_training_and_only_cutmix_the_long_one():
    short, long = ({t: row.difference for t, row in task.others.items()} for task in crossing())
    assert len(short) == len(long) == 5
    assert all(found.mean + found.half < 0 for found in short.values())
    losers = [title for title, found in long.items() if found.mean + found.half < 0]
    assert losers == ["CutMix, alpha 1"]
    assert all(d.mean - d.half > 0 for title, d in long.items() if title not in losers)
