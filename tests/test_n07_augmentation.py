"""Chapter 07 measures what it names, and its figures say what was measured."""

import io
from functools import partial
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from logs import with_cases, write_log
from PIL import Image
from programs import experiment_file, load, run_main
from torchvision.models import ResNet50_Weights

mpl.use("Agg")

from dlojz import course
from dlojz.chapters.n07_augmentation import figures
from dlojz.chapters.resident import Resident
from dlojz.course import UserError
from dlojz.figures import paired
from dlojz.launch import Request, State, series
from dlojz.runs import log
from dlojz.training import mixing

CPU = torch.device("cpu")
ACCURACY = experiment_file("accuracy.py")


# Mixing ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    return load("mixing")


def batch(images=6, height=20, width=30):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, height, width), generator=generator).to(torch.uint8)
    return pixels, torch.arange(images) % 4, mixing.draws_of(0, 0, 0, images, (height, width))


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_the_loop_and_the_masks_give_the_same(program, how):
    images, labels, draws = batch()
    by_masks = program.ways(how)["masks"].func
    found = program.looped(images, labels, draws, how, 4)
    program.same(found, by_masks(images, labels, draws, how, 4), how)
    assert (found[0] != images).any()
    assert found[1].sum(1) == pytest.approx(torch.ones(6))
    assert len(found[1].amax(1).unique()) > 1, "a share for each image"


def test_other_images_or_targets_are_an_error(program):
    images, labels, draws = batch()
    found = program.looped(images, labels, draws, "cutmix", 4)
    with pytest.raises(AssertionError, match="here: an image differs"):
        program.same((images, found[1]), found, "here")
    with pytest.raises(AssertionError):
        program.same((found[0], found[1].flip(0)), found, "here")


def test_v2_draws_one_share_for_all_images(program):
    images, labels, draws = batch()
    for how in program.HOW:
        _, targets = program.ways(how)["v2"](images, labels, draws)
        assert len({round(share, 4) for share in targets.amax(1).tolist()}) <= 1 + (how == "cutmix")


def test_only_the_loop_takes_more_operations_for_more_images(program):
    counted = {}
    for size in (8, 16):
        images, labels, draws = batch(size)
        for name, way in program.ways("cutmix").items():
            if name != "compiled":
                call = partial(way, images, labels, draws)
                counted[name, size] = program.launched(call, name, CPU)["launches"]
    assert counted["masks", 8] == counted["masks", 16]
    assert counted["v2", 8] == counted["v2", 16]
    assert counted["loop", 16] > 1.8 * counted["loop", 8]


# Accuracy ----------------------------------------------------------------------------------------

TINY = "--model shufflenet_v2_x0_5 --image-size 24 -b 8 -e 1 --classes 3"
TINY += " --images-per-class 8 --val-per-class 3"


def test_trainings_are_dealt_out_and_come_together_in_order():
    flags = f"--seeds 2 {TINY} --variants mixup cutmix"
    job = series.submit(
        [series.Entry("dealt", ACCURACY, flags.split())], Request(name="accuracy", n_gpu=2)
    )
    assert job.wait() == State.COMPLETED, job.explain()
    (folder,) = series.folders(job).values()
    assert [len(rank.cases) for rank in log.read_ranks(folder)] == [3, 3]
    found = [(c["variant"], c["seed"]) for c in paired.trainings(folder)]
    names = ("fp32", "mixup", "cutmix")
    assert found == [(name, seed) for seed in (0, 1) for name in names]
    clean, *others = paired.rows(folder)
    assert [row.title for row in others] == ["mixup, alpha 1", "CutMix, alpha 1"]
    assert [*clean.accuracies] == [0, 1]


@pytest.fixture(scope="module")
def accuracy():
    return load("accuracy")


def shown(randaugment=None, epoch=0):
    images = torch.full((16, 3, 30, 30), 90, dtype=torch.uint8)
    images[:, :, 10:20] = torch.arange(16, dtype=torch.uint8)[:, None, None, None] * 15
    loader = Resident(images, torch.arange(16), 24, 8, seed=1, randaugment=randaugment)
    loader.epoch = epoch
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def test_randaugment_changes_each_image_by_seed_epoch_and_index():
    plain, order = shown()
    found, same = shown((2, 9))
    assert (same == order).all()
    assert found.dtype == torch.uint8
    assert found.shape == plain.shape
    changed = (found != plain).flatten(1).any(1)
    assert changed.float().mean() > 0.5
    assert (found == shown((2, 9))[0]).all()
    assert (found != shown((2, 9), epoch=1)[0]).any()


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_only_a_training_is_mixed_and_each_update_draws_again(accuracy, how):
    seen = []
    trainer = SimpleNamespace(forward=lambda training, images, labels, args: seen.append(labels))
    accuracy.mixes(how, 1.0)(trainer)
    images, labels, _ = batch(8, 24, 24)
    scheduler = SimpleNamespace(last_epoch=0)
    training = SimpleNamespace(model=SimpleNamespace(training=True), scheduler=scheduler, classes=4)
    args = SimpleNamespace(seed=3)
    trainer.forward(training, images, labels, args)
    scheduler.last_epoch = 1
    trainer.forward(training, images, labels, args)
    training.model.training = False
    trainer.forward(training, images, labels, args)
    assert seen[0].shape == seen[1].shape == (8, 4)
    assert (seen[0] != seen[1]).any()
    assert seen[2] is labels


# The costs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs_program():
    return load("costs")


def jpeg():
    """A picture of 60 x 48 pixels, red growing to the right."""
    ramp = np.broadcast_to(np.arange(60, dtype=np.uint8) * 4, (48, 60))
    file = io.BytesIO()
    Image.fromarray(np.stack([ramp, ramp[:, ::-1], ramp // 2], -1)).save(file, "JPEG", quality=95)
    return bytearray(file.getvalue())


def test_every_road_ends_at_a_tensor_of_uint8(costs_program):
    file = jpeg()
    for kind in (*costs_program.OF, costs_program.BOTH):
        for name, road in costs_program.roads(32, kind).items():
            found = road(file)
            assert found.shape == (3, 32, 32), (kind, name)
            assert found.dtype == torch.uint8, (kind, name)


def test_a_third_road_augments_pil_images_only(costs_program):
    assert [*costs_program.roads(32, costs_program.BOTH)] == [
        "RandAugment(2, 9)",
        "TrivialAugmentWide",
        "AugMix",
    ]
    assert [*costs_program.roads(32, "PIL")] == [*costs_program.augmentations(32)]


def test_what_is_alone_is_timed_on_small_images_of_its_kind(costs_program):
    found = costs_program.cases([jpeg()], 16, "PIL")
    _, (image,) = found["alone", "flip"]
    assert isinstance(image, Image.Image)
    assert image.size == (16, 16)
    _, (image,) = costs_program.cases([jpeg()], 16, "tensor")["alone", "flip"]
    assert tuple(image.shape) == (3, 16, 16)
    _, inputs = found["road", "flip"]
    assert inputs == [jpeg()]
    assert len(costs_program.cases([jpeg()], 16, costs_program.BOTH)) == 3


def test_all_take_turns_after_a_warm_up_and_draw_the_same(costs_program):
    seen, times = [], iter(range(100))
    calls = {
        name: (lambda image, name=name: seen.append((name, image, torch.rand(()).item())), [1, 2])
        for name in "ab"
    }
    spent = costs_program.seconds(calls, rounds=2, clock=lambda: next(times))
    assert [(name, image) for name, image, _ in seen] == [(n, i) for n in "ab" for i in (1, 2)] * 3
    draws = [draw for *_, draw in seen]
    assert draws[:2] == draws[2:4] != draws[4:6] == draws[6:8]
    assert spent == {"a": [0.5, 0.5], "b": [0.5, 0.5]}, "of one image, without the warm-up"


def test_the_program_logs_each_way_and_size(tmp_path):
    (tmp_path / "train/n01").mkdir(parents=True)
    (tmp_path / "train/n01/a.JPEG").write_bytes(jpeg())
    threads = torch.get_num_threads()
    flags = ("--data", tmp_path, "--sizes", 16, 24, "--rounds", 2)
    found = run_main(experiment_file("costs.py"), tmp_path / "run", *flags)
    torch.set_num_threads(threads)
    cases = log.read(found).cases.values()
    assert {case["size"] for case in cases} == {16, 24}
    assert {case["kind"] for case in cases} == {*figures.ROADS}
    assert all(len(case["seconds"]) == 2 for case in cases)
    ratio = figures.ratio(found, "RandAugment(2, 9)", size=24)
    assert ratio[1] <= ratio[0] <= ratio[2]


# The figures -------------------------------------------------------------------------------------

KINDS = ("PIL", "tensor", "tensor, augmented as PIL")


@pytest.fixture
def costs_run(tmp_path):
    def case(size, kind, measured, way, *ms):
        fields = {"size": size, "kind": kind, "measured": measured, "way": way}
        return f"{measured}, {way}, {kind}", fields | {"seconds": [x / 1000 for x in ms]}

    cases = [case(224, "PIL", "alone", "RandAugment", 1.0, 1.1)]
    cases += [case(224, "tensor", "alone", "RandAugment", 3.0, 3.3)]
    cases += [case(224, kind, "road", "RandAugment", 4.0, 4.0 + k) for k, kind in enumerate(KINDS)]
    cases += [case(224, "PIL", "road", "flip", 2.0, 2.0)]
    return with_cases(tmp_path / "costs.jsonl", dict(cases))


def test_pil_is_as_many_times_as_fast_as_measured(costs_run):
    assert figures.ratio(costs_run, "RandAugment") == pytest.approx((3, 3, 3))
    text = repr(figures.costs(costs_run))
    assert "1,050 (1,000 to 1,100)" in text
    assert "3.00 (3.00 to 3.00)" in text


def test_the_supply_of_all_cores_is_drawn_with_the_demand(costs_run, tmp_path):
    model = write_log(tmp_path / "model.jsonl", batch=100, device=True)
    ax = figures.plot_costs(costs_run, model, cores=8)
    widths = [round(bar.get_width()) for bar in ax.patches]
    assert widths == [2000, round(8000 * np.median([1 / 4, 1 / 5])), 1667, 4000]
    labels = [text.get_text() for text in ax.get_legend().texts]
    assert "resnet18 consumes 1,000" in labels
    assert "8 cores" in ax.get_xlabel()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda run: figures.ratio(run, "crop"), "'crop' was not timed: expected one of RandAug"),
        (lambda run: figures.costs(run, 64), r"nothing of 64 pixels; expected one of \[224\]"),
        (figures.mixing, "expected a run of experiments/mixing.py"),
    ],
)
def test_an_error_names_what_is_there(costs_run, call, expected):
    with pytest.raises(UserError, match=expected):
        call(costs_run)


@pytest.fixture
def mixing_run(tmp_path):
    cases = {
        f"{how}, {way}, {images}": {
            **{"how": how, "way": way, "images": images, "reads": 0},
            "ms": [images * factor, images * factor * 3],
            "launches": 10 * images if way == "loop" else 12,
            "shares": 1 if way == "v2" else images,
        }
        for how in ("mixup", "cutmix")
        for way, factor in zip(figures.WAYS, (1.0, 0.1, 0.01, 0.1), strict=True)
        for images in (16, 256)
    }
    return with_cases(tmp_path / "mixing.jsonl", cases, image_size=224)


def test_the_table_of_mixing_is_of_the_largest_batch(mixing_run):
    rows = figures.mixing(mixing_run).rows
    assert rows[0] == ("mixup", "image by image", "512 (256 to 768)", "2,560", "256")
    assert rows[3][-1] == "1"
    assert len(rows) == 8


def test_each_line_of_mixing_names_its_launches(mixing_run):
    axes = figures.plot_mixing(mixing_run)
    labels = [text.get_text() for text in axes[0].get_legend().texts]
    assert labels[0] == "image by image: 160 to 2,560 kernels"
    assert labels[1] == "the batch at once: 12 kernels"
    assert [ax.get_title(loc="left") for ax in axes] == ["mixup", "cutmix"]


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_a_mixed_batch_is_the_trainers_own(how):
    file = course.solution("07")
    plain, pixels, targets = figures.mixed_batch(how, file, 4, 32)
    assert plain.shape == pixels.shape == (4, 32, 32, 3)
    assert targets.sum(1) == pytest.approx(np.ones(4))
    axes = figures.plot_batch(how, file, images=4, side=32)
    texts = [figures.shares_text(target, label) for label, target in enumerate(targets)]
    assert [ax.get_title(loc="left") for ax in axes[1]] == texts
    assert [ax.get_title(loc="left") for ax in axes[0]] == [f"class {n}" for n in range(4)]


def test_a_trainer_that_does_not_mix_yet_is_told_apart(tmp_path):
    for source, expected in (
        ("", "no function `mixed` in it"),
        ("def mixed(images, labels, *_):\n    return images, labels", r"returned targets \[4\]"),
    ):
        file = tmp_path / "trainer.py"
        file.write_text(source)
        with pytest.raises(UserError, match=expected):
            figures.mixed_batch("mixup", file, 4, 32)


def test_shares_are_named_with_the_images_own_first():
    target = np.array([0.25, 0.0, 0.75])
    assert figures.shares_text(target, 0) == "0.25 of 0 + 0.75 of 2"
    assert figures.shares_text(target, 1) == "0.00 of 1 + 0.25 of 0 + 0.75 of 2"


def trained(path, variants, **sizes):
    given = {"model": "resnet18", "image_size": 48, "batch_size": 64, "epochs": 10}
    given |= {"classes": 24, "images_per_class": 60, "val_per_class": 100} | sizes
    cases = {
        f"{name}, seed {seed}": {"variant": name, "title": name, "seed": seed, "accuracy": value}
        for name, values in variants.items()
        for seed, value in enumerate(values)
    }
    return with_cases(path, cases, **given)


@pytest.fixture
def tasks(tmp_path):
    clean = {"clean": (0.8, 0.82, 0.78)}
    short = clean | {"mixup": (0.7, 0.72, 0.69), "CutMix": (0.6, 0.62, 0.57)}
    long = clean | {"mixup": (0.83, 0.86, 0.82)}
    return (
        trained(tmp_path / "short.jsonl", short),
        trained(tmp_path / "long.jsonl", long, images_per_class=15, epochs=150),
    )


def test_the_crossing_has_a_mean_and_an_interval_for_each_task(tasks):
    ax = figures.plot_crossing(*tasks)
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts == ["−9.7 ± 1.4", "−20.3 ± 1.4", "+3.7 ± 1.4"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["mixup", "CutMix"]
    labels = [text.get_text() for text in ax.get_legend().texts]
    assert labels == [
        "short: 60 images a class, 10 epochs; clean 80.0%",
        "long: 15 images a class, 150 epochs; clean 80.0%",
    ]


def test_the_table_of_the_crossing_says_what_was_not_trained(tasks):
    rows = figures.crossing(*tasks).rows
    assert rows[0] == ("clean", "80.0%", "", "80.0%", "")
    better = "3.7 ± 1.4 points better"
    assert rows[1] == ("mixup", "70.3%", "9.7 ± 1.4 points worse", "83.7%", better)
    assert rows[2][-2:] == ("-", "not trained")


def test_each_reported_recipe_has_a_gain_and_a_source():
    rows = figures.recipes().rows
    assert len(rows) == len(figures.RECIPES)
    assert all(row[4].startswith("+") and row[5] for row in rows)
    last = {w.name: w.meta["_metrics"]["ImageNet-1K"]["acc@1"] for w in ResNet50_Weights}
    recipe = figures.RECIPES[-1]
    assert recipe.before == pytest.approx(last["IMAGENET1K_V1"], abs=0.005)
    assert recipe.after == pytest.approx(last["IMAGENET1K_V2"], abs=0.005)
