"""A small task can be learned, each variant differs in what it names, and the figure says so."""

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import recordings
import torch
from claims import claims
from logs import with_cases
from PIL import Image
from programs import experiment_file, load
from torchvision.io import decode_image

mpl.use("Agg")

from dlojz import course, runs
from dlojz.chapters import resident, session, small
from dlojz.chapters.n02_amp import accuracy as figures
from dlojz.course import UserError
from dlojz.figures import paired
from dlojz.images import draw
from dlojz.launch import Request, State, series
from dlojz.runs import log
from dlojz.training import data as training_data

FILE = experiment_file("accuracy.py")
pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CLASSES, SIZE = 4, 24
PER_CLASS = {"train": 24, "val": 12}


@pytest.fixture(scope="module")
def experiment():
    return load("accuracy")


@pytest.fixture(scope="module")
def data():
    """Noise in four colours, which a few steps suffice to tell apart."""
    found = {}
    colours = torch.tensor([[150, 0, 0], [0, 150, 0], [0, 0, 150], [100, 100, 0]])
    for split, count in PER_CLASS.items():
        rng = np.random.default_rng(len(split))
        labels = torch.arange(CLASSES).repeat_interleave(count)
        noise = torch.from_numpy(rng.integers(0, 100, (len(labels), 3, 30, 30)))
        images = (noise + colours[labels][:, :, None, None]).to(torch.uint8)
        found[split] = ({"usual": images}, labels)
    return found


def settings(**changes):
    sizes = {"model": "shufflenet_v2_x0_5", "image_size": SIZE, "batch_size": 16, "epochs": 2}
    sizes |= {"classes": CLASSES, "images_per_class": PER_CLASS["train"]}
    return SimpleNamespace(**sizes | {"lr": 0.1, "clip_norm": 0.5} | changes)


class Training:
    """A variant, built, whose steps can be taken one at a time."""

    def __init__(self, experiment, name, data, **changes):
        args = settings(**changes)
        self.variant = experiment.VARIANTS[name]
        self.trainer = experiment.copy_of_trainer(self.variant)
        self.args = experiment.arguments(self.trainer, self.variant, args, seed=0)
        self.trainer.set_numerics(self.args)
        self.parts = self.trainer.build_training(self.args, CPU, CLASSES, 50)
        self.parts.model.train()
        loader, _ = experiment.loaders(self.variant, self.args, data)
        self.batches = list(loader)

    def step(self, number=0):
        marks = SimpleNamespace(**dict.fromkeys(("forward", "backward", "update"), lambda: None))
        return self.trainer.train_step(number, self.parts, *self.batches[number], self.args, marks)

    def gradient_norm(self):
        grads = [p.grad.float().norm() for p in self.parts.model.parameters()]
        return torch.stack(grads).norm().item()


# The images --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawing():
    return draw.jpeg(0, "val", 1, 1)


def test_small_images_are_the_middles_of_the_drawings(drawing):
    made, labels = small.images("val", range(2), per_class=2, side=20, workers=1)
    images = made["usual"]
    assert images.shape == (4, 3, 20, 20)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0, 0, 1, 1]
    assert (images[3] == small.usual(drawing, 20)).all()
    other = small.usual(draw.jpeg(0, "train", 1, 1), 20)
    assert (images[3] != other).any(), "validation images stand apart"
    assert images.std() > 20, "something is drawn"


def test_a_drawing_is_drawn_once_for_all_ways(monkeypatch, drawing):
    drawn = []
    monkeypatch.setattr(draw, "jpeg", lambda *which: drawn.append(which) or drawing)
    made, _ = small.images("val", [0], 2, side=20, ways=list(small.WAYS), workers=1)
    assert drawn == [(0, "val", 0, 0), (0, "val", 0, 1)]
    shapes = {way: images.shape[1:] for way, images in made.items()}
    assert shapes == dict.fromkeys(small.WAYS, (3, 20, 20)) | {"large": (3, 80, 80)}


def test_processes_draw_a_part_of_the_classes_each(monkeypatch):
    whole, labels = small.images("val", range(3), 2, side=20, workers=1)
    parts = [small.images("val", range(3)[rank::2], 2, side=20, workers=1) for rank in (0, 1)]

    def gather(found, own):
        found[:] = parts

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(resident, "idr_torch", SimpleNamespace(size=2))
    images, found = resident.together(*parts[0])
    assert (found == labels).all()
    assert (images["usual"] == whole["usual"]).all()


def test_both_decoders_return_the_same_bytes(drawing):
    by_pil = np.asarray(Image.open(io.BytesIO(drawing)).convert("RGB")).transpose(2, 0, 1)
    file = torch.frombuffer(bytearray(drawing), dtype=torch.uint8)
    assert (by_pil == decode_image(file, mode="RGB").numpy()).all()


def test_ways_differ_in_how_an_image_is_made_smaller(drawing):
    made = {way: small.WAYS[way](drawing, 20).astype(int) for way in small.WAYS}
    means = made["large"].reshape(3, 20, 4, 20, 4).mean((2, 4))
    assert abs(means - made["usual"]).mean() < 1, "the same middle, four times as large"
    away = {way: abs(made[way] - made["usual"]).mean() for way in ("torchvision", "no-antialias")}
    assert 0 < 2 * away["torchvision"] < away["no-antialias"], "grain is not averaged away"


def test_crops_are_cut_where_they_should():
    images = torch.arange(2 * 3 * 5 * 5).reshape(2, 3, 5, 5)
    index, top, left = torch.tensor([[1, 0], [0, 2], [1, 0]])
    found = resident.crops(images, index, top, left, 3)
    assert (found[0] == images[1, :, 0:3, 1:4]).all()
    assert (found[1] == images[0, :, 2:5, 0:3]).all()


def seen(images, epoch=0, batch_size=8, seed=3, **crop):
    """Return what an epoch shows of these images, and in which order."""
    crop = resident.Crop(**crop)
    labels = torch.arange(len(images))
    loader = resident.Resident(images, labels, SIZE, batch_size, seed, crop)
    loader.epoch = epoch
    shown, order = zip(*loader, strict=True)
    return torch.cat(shown), torch.cat(order)


def test_without_flips_and_moves_the_rest_stays(data):
    images = data["train"][0]["usual"]
    usual, order = seen(images)
    straight, same = seen(images, flips=False)
    flipped = (usual != straight).flatten(1).any(1)
    assert 0.3 < flipped.float().mean() < 0.7
    assert (usual[flipped] == straight[flipped].flip(-1)).all()
    assert (order == same).all()
    middles, same = seen(images, flips=False, moves=False)
    assert (middles == images[order, :, 3:27, 3:27]).all()
    assert (order == same).all()


@pytest.mark.parametrize(("seed", "batch", "count"), [(3, 8, 96), (None, 7, 48)])
def test_processes_share_each_batch_and_see_every_image_once(data, seed, batch, count):
    images, labels = data["train"][0]["usual"][:count], torch.arange(count)
    whole, *shares = (
        [*resident.Resident(images, labels, SIZE, batch, seed, share=share)]
        for share in ((0, 1), (0, 2), (1, 2))
    )
    for (shown, told), *parts in zip(whole, *shares, strict=True):
        seen, said = (torch.cat(part) for part in zip(*parts, strict=True))
        assert sorted(said.tolist()) == sorted(told.tolist())
        assert (seen[said.argsort()] == shown[told.argsort()]).all()
        assert all(len(labels) == pytest.approx(len(told) / 2, abs=0.5) for _, labels in parts)


def test_in_a_job_of_two_processes_some_variants_share_each_batch():
    flags = f"--seeds 1 --model shufflenet_v2_x0_5 --image-size {SIZE} -b 8 -e 1 --classes 3"
    flags += " --images-per-class 8 --val-per-class 3 --variants processes not-wrapped"
    entry = series.Entry("shared", FILE, flags.split())
    job = series.submit([entry], Request(name="accuracy", n_gpu=2))
    assert job.wait() == State.COMPLETED, job.explain()
    (folder,) = series.folders(job).values()
    found = log.read(folder).cases
    assert [case["variant"] for case in found.values()] == ["fp32", "processes", "not-wrapped"]
    clean, shared, alone = found.values()
    assert clean["updates"] == shared["updates"] == alone["updates"] == 3
    assert shared["first_loss"] == alone["first_loss"] != clean["first_loss"], "of half a batch"
    assert shared["loss"] != alone["loss"], "the gradients of the other half count"
    assert shared["accuracy"] in [n / 9 for n in range(10)], "each image once"
    assert "2 processes together" in figures._caption(folder)


def test_synchronised_batch_norm_is_that_of_all_processes(experiment):
    trainer = experiment.copy_of_trainer(experiment.VARIANTS["sync-batch-norm"])
    args = SimpleNamespace(model="resnet18", image_size=SIZE)
    kinds = {type(layer) for layer in trainer.build_model(args, CLASSES).modules()}
    assert torch.nn.SyncBatchNorm in kinds
    assert torch.nn.BatchNorm2d not in kinds


@pytest.mark.parametrize("low", [0.08, 0.5])
def test_a_resized_crop_shows_a_part_as_large_as_it_should(low):
    """Red grows from left to right, green from top to bottom: the colours tell the box."""
    ramp = torch.arange(60, dtype=torch.uint8) * 4
    image = torch.stack([ramp.expand(60, 60), ramp[:, None].expand(60, 60), ramp.new_zeros(60, 60)])
    found, _ = seen(image.expand(96, -1, -1, -1), area=(low, 1))
    wide, high = ((c.amax((1, 2)) - c.amin((1, 2)) + 4) / 240 for c in found[:, :2].unbind(1))
    areas = wide * high  # the outermost pixels are means, so they look somewhat smaller
    assert 0.6 * low < areas.min() < 1.4 * low
    assert areas.max() > 0.8
    rising = found[:, 0, 0, -1] > found[:, 0, 0, 0]
    assert 0.3 < rising.float().mean() < 0.7, "flipped, too"


@pytest.mark.parametrize("area", [None, (0.08, 1)])
def test_seed_and_epoch_alone_determine_what_is_seen(data, area):
    images = data["train"][0]["usual"]
    first, order = seen(images, area=area)
    larger, _ = seen(images, area=area, batch_size=32)
    assert (first == larger).all(), "whatever the batch"
    assert (first != seen(images, area=area, epoch=1)[0]).any()
    assert (first != seen(images, area=area, seed=4)[0]).any()
    assert (seen(images)[1] == order).all(), "the order of all crops"


def test_validation_sees_every_image_once_uncut_by_chance(data):
    ways, labels = data["val"]
    images = ways["usual"]
    loader = resident.Resident(images, labels, SIZE, 7)
    batches = list(loader)
    assert len(batches) == len(loader) == math.ceil(len(images) / 7)
    assert (torch.cat([x for x, _ in batches]) == images[:, :, 3:27, 3:27]).all()
    assert (torch.cat([y for _, y in batches]) == labels).all()


def test_a_variant_trains_and_is_validated_on_the_images_that_it_names(experiment):
    shades = {way: torch.full((16, 3, 30, 30), k) for k, way in enumerate(small.WAYS)}
    data = dict.fromkeys(("train", "val"), (shades, torch.arange(16)))
    given, used = SimpleNamespace(image_size=SIZE, batch_size=16, seed=0), {}
    for name, variant in experiment.VARIANTS.items():
        shown = [x.images.unique() for x in experiment.loaders(variant, given, data)]
        used[name] = [list(small.WAYS)[int(shade)] for (shade,) in shown]
    assert {name: ways for name, ways in used.items() if ways != ["usual", "usual"]} == {
        "torchvision": ["torchvision", "torchvision"],
        "no-antialias": ["no-antialias", "no-antialias"],
        "no-antialias-train": ["no-antialias", "usual"],
        "resized-crop": ["large", "usual"],
        "large-crops": ["large", "usual"],
    }


def test_only_what_is_asked_for_is_made(experiment):
    sizes = {"image_size": 16, "classes": 1, "images_per_class": 1, "val_per_class": 1}
    names = ["fp32", "no-antialias-train", "no-flip"]
    found = experiment.draw(SimpleNamespace(variants=names, **sizes), CPU)
    made = {
        split: {way: i.shape[-1] for way, i in ways.items()} for split, (ways, _) in found.items()
    }
    assert made == {"train": {"usual": 20, "no-antialias": 20}, "val": {"usual": 20}}


# The trainings -----------------------------------------------------------------------------------


def test_the_loop_learns(experiment, data):
    args = settings(model="resnet18", epochs=4, lr=0.01)
    found = experiment.train(experiment.VARIANTS["fp32"], args, 0, data, CPU)
    assert found["accuracy"] > 2.4 / CLASSES
    assert found["loss"] < math.log(CLASSES), "that of equal guesses"
    assert found["updates"] == 4 * CLASSES * PER_CLASS["train"] // 16


def test_a_seed_repeats_to_the_last_bit(experiment, data):
    clean, found = experiment.VARIANTS["fp32"], []
    for _ in range(2):
        told = experiment.train(clean, settings(epochs=1, batch_size=32), 0, data, CPU)
        found.append(told | {"seconds": 0})
    assert found[0] == found[1]


def test_the_first_losses_of_the_formats_agree(experiment, data):
    """All variants begin with the same weights and images."""
    losses = {
        name: Training(experiment, name, data, model="resnet18").step().item()
        for name in ("fp32", "bf16", "pure-bf16")
    }
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["pure-bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert len(set(losses.values())) == 3


def test_pure_bf16_has_weights_momenta_and_statistics_in_bf16(experiment, data):
    pure, mixed = (Training(experiment, name, data) for name in ("pure-bf16", "bf16"))
    for training, dtype in ((pure, torch.bfloat16), (mixed, torch.float32)):
        training.step()
        model, state = training.parts.model, training.parts.optimizer.state
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert {p.grad.dtype for p in model.parameters()} == {dtype}
        assert {s["momentum_buffer"].dtype for s in state.values()} == {dtype}
        assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {dtype}


def test_without_a_scaler_the_rest_of_fp16_stays(experiment, data):
    clean, without = (Training(experiment, name, data) for name in ("fp16", "no-scaler"))
    assert clean.parts.scaler.is_enabled()
    assert not without.parts.scaler.is_enabled()
    assert without.args.precision == clean.args.precision == "fp16"


def test_forgotten_unscaling_clips_what_is_scaled(experiment, data):
    """The gradients come out of the step as short as the limit, divided by the scale."""
    clean, forgot = (Training(experiment, name, data) for name in ("clipped", "not-unscaled"))
    moved = []
    for training in (clean, forgot):
        training.parts.scaler = torch.amp.GradScaler("cpu", init_scale=1024)
        if training is forgot:
            experiment.not_unscaled(training.parts, CPU)
        before = [p.detach().clone() for p in training.parts.model.parameters()]
        # Weight decay would hide an update that is a thousand times too small.
        training.parts.optimizer.param_groups[0]["weight_decay"] = 0.0
        training.step()
        after = training.parts.model.parameters()
        moved.append(
            torch.stack([(a - b).norm() for a, b in zip(after, before, strict=True)]).norm()
        )
    assert (moved[0] / moved[1]).item() == pytest.approx(1024, rel=0.05)


def test_the_loss_is_computed_from_fp16_logits_outside_autocast(experiment, data):
    found = []
    for name in ("fp16", "loss-outside"):
        training = Training(experiment, name, data)
        logits, loss = training.trainer.forward(training.parts, *training.batches[0], training.args)
        found.append((logits.dtype, loss.dtype))
    assert found == [(torch.float16, torch.float32), (torch.float16, torch.float16)]


def test_only_the_training_is_under_autocast(experiment, data):
    dtypes = {}
    for name in ("fp16", "training-only"):
        training = Training(experiment, name, data)

        def look(model, _, out, name=name):
            dtypes[name, model.training] = out.dtype

        training.parts.model.register_forward_hook(look)
        training.step()
        loader = [training.batches[0]]
        training.trainer.evaluate(loader, training.parts, CPU, training.args)
    half = torch.float16
    assert dtypes == {
        ("fp16", True): half,
        ("fp16", False): half,
        ("training-only", True): half,
        ("training-only", False): torch.float32,
    }


def test_a_resume_at_half_time_begins_with_a_fresh_scale(experiment, data):
    for name, expected in (("fp16", 512), ("fresh-scaler", 2**16)):
        training = Training(experiment, name, data, epochs=4)
        training.parts.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        ways, labels = data["train"]
        empty = resident.Resident(ways["usual"][:0], labels[:0], SIZE, 16, seed=0)
        scales = []
        for epoch in range(4):
            chrono = experiment.FirstLoss()
            training.trainer.train_one_epoch(
                epoch, empty, training.parts, CPU, training.args, chrono
            )
            scales.append(training.parts.scaler.get_scale())
        assert scales == [512, 512, expected, expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", {"precision": "fp32", "batch_size": 16, "channels_last": False}),
        ("tf32", {"precision": "tf32"}),
        ("channels-last", {"precision": "fp32", "channels_last": True}),
        ("accumulation", {"batch_size": 4, "accumulate": 4, "lr": 0.1}),
        ("batch-x4", {"batch_size": 64, "accumulate": 1, "lr": 0.1}),
        ("batch-x4-lr", {"batch_size": 64, "lr": 0.4, "epochs": 2}),
        ("batch-x4-updates", {"batch_size": 64, "lr": 0.1, "epochs": 12}),
        ("batch-x4-lr-updates", {"batch_size": 64, "lr": 0.4, "epochs": 12}),
        ("clipped", {"precision": "fp16", "clip_norm": 0.5}),
    ],
)
def test_a_variant_differs_in_the_flags_that_it_names(experiment, name, expected):
    variant = experiment.VARIANTS[name]
    found = experiment.arguments(experiment.copy_of_trainer(variant), variant, settings(), 7)
    assert found.seed == 7
    assert {key: getattr(found, key) for key in expected} == expected


def test_quarters_are_normalized_as_in_four_processes(experiment, data):
    """The gradient of a whole batch whose quarters have statistics of their own."""
    grads = {}
    for name, quarters in (("accumulation", 1), ("fp32", 4), ("fp32", 1)):
        training = Training(experiment, name, data)
        # In float32 a rounding error can turn a ReLU on: 2e-3 of the gradient on some processors.
        model = training.parts.model.double()
        training.parts.optimizer.param_groups[0]["fused"] = False  # fused: float32 only
        training.batches = [
            (training_data.normalize(x).double(), labels) for x, labels in training.batches
        ]
        for layer in model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                own = layer.forward
                layer.forward = lambda x, own=own, n=quarters: torch.cat([*map(own, x.chunk(n))])
        for number in range(training.args.accumulate):
            training.step(number)
        grads[name, quarters] = [p.grad for p in model.parameters()]
    assert session.away(grads["accumulation", 1], grads["fp32", 4]) < 1e-9
    assert session.away(grads["fp32", 1], grads["fp32", 4]) > 0.1, "synchronised: another one"


def test_the_longer_warm_up_ends_at_half_time(experiment, data):
    rates = {}
    for name in ("batch-x4-lr", "batch-x4-warm-up"):
        parts = Training(experiment, name, data).parts
        rates[name] = []
        for _ in range(50):
            rates[name].append(parts.optimizer.param_groups[0]["lr"])
            parts.optimizer.step()
            parts.scheduler.step()
    usual, longer = rates.values()
    assert usual[0] == pytest.approx(0.4 / 25)
    assert longer[0] == pytest.approx(0.1), "that of the small batch"
    assert usual.index(max(usual)) == 14
    assert longer.index(max(longer)) == 24
    assert max(usual) == pytest.approx(0.4)
    assert max(longer) == pytest.approx(0.4)
    assert longer[12] - longer[11] == pytest.approx(longer[1] - longer[0]), "a line"


def test_what_changes_the_images_is_recorded_for_05_and_the_batch_for_06(experiment):
    clean, *others = experiment.VARIANTS.values()
    images = {v.title for v in others if (v.train, v.val, v.crop) != ("usual", "usual", clean.crop)}
    batches = {v.title for v in others if "-b " in v.flags and not v.shared}
    shared = {v.title for v in others if v.shared}
    for names, titles in (
        *((recordings.IMAGES_05, images), (recordings.BATCHES_06, batches)),
        (recordings.PROCESSES_06, shared),
    ):
        assert {experiment.VARIANTS[name].title for name in names.split()} == titles


def test_a_patch_stays_in_its_own_copy_of_the_trainer(experiment):
    clean = experiment.VARIANTS["fp32"]
    before = experiment.copy_of_trainer(clean)
    patched = experiment.copy_of_trainer(experiment.VARIANTS["training-only"])
    assert patched.evaluate.__module__ == experiment.__name__
    assert before.evaluate.__module__ != experiment.__name__
    after = experiment.copy_of_trainer(clean)
    assert after.evaluate.__module__ == before.evaluate.__module__
    assert Path(after.__file__) == course.solution("03")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--variants fp32 fp15", "--variants fp15: not known; expected some of fp32, tf32"),
        ("--classes 2 --images-per-class 9 -b 32", "18 images are less than a batch of 32"),
        (
            "--variants batch-x4 --classes 3 --images-per-class 9",
            "27 images are less than a batch of 64",
        ),
        ("-b 30 --variants accumulation", "-b 30: expected a multiple of 4"),
        ("--variants processes", "--variants processes: needs several processes: submit it with"),
    ],
)
def test_bad_flags_get_a_clear_error(experiment, monkeypatch, capsys, flags, message):
    few = "--variants bf16 " if "--variants" not in flags else ""
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *(few + flags).split()])
    with pytest.raises(SystemExit):
        experiment.parse_args(CPU)
    assert message in capsys.readouterr().err


def test_seeds_are_interleaved_and_each_training_is_logged(experiment, data, monkeypatch, tmp_path):
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(experiment, "draw", lambda args, device: data)
    words = f"--variants bf16 --seeds 2 --model shufflenet_v2_x0_5 --image-size {SIZE} -b 32 -e 1"
    words += f" --classes {CLASSES} --images-per-class 24 --val-per-class 12"
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *words.split()])
    experiment.main()
    found = log.read(tmp_path / "run")
    order = [(c["variant"], c["seed"]) for c in found.cases.values()]
    assert order == [("fp32", 0), ("bf16", 0), ("fp32", 1), ("bf16", 1)]
    losses = [c["first_loss"] for c in found.cases.values()]
    assert losses[0] != losses[2], "another seed"
    assert all(0 <= c["accuracy"] <= 1 and c["seconds"] > 0 for c in found.cases.values())
    assert [row.title for row in paired.rows(tmp_path / "run")] == ["fp32", "bf16"]


# The statistics ----------------------------------------------------------------------------------


def test_a_difference_is_paired_by_seed():
    """Pairs -2, -4, -6: mean -4, deviation 2, Student's t of 2 degrees 4.3027."""
    told = paired.difference({0: 80, 1: 70, 2: 90, 3: 10}, {0: 78, 1: 66, 2: 84})
    assert (told.mean, told.seeds) == (-4, 3)
    assert told.half == pytest.approx(4.302653 * 2 / math.sqrt(3))
    assert told.word == "no difference shown"
    assert paired.difference({0: 1.0}, {1: 1.0}) is None, "no seed is common"


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ([-4.0, -4.2, -3.8], "worse"),
        ([4.0, 4.2, 3.8], "better"),
        ([-1.0, 1.0, 0.5], "no difference shown"),
        ([0.0, 0.0, 0.0], "equal in every seed"),
        ([-4.0], "too few seeds"),
    ],
)
def test_a_difference_has_a_word(pairs, word):
    clean = dict.fromkeys(range(len(pairs)), 50.0)
    other = {seed: 50 + pair for seed, pair in enumerate(pairs)}
    assert paired.difference(clean, other).word == word


# The figure --------------------------------------------------------------------------------------

ACCURACIES = {  # by variant, one of each seed
    "fp32": (0.80, 0.82, 0.78),
    "bf16": (0.81, 0.80, 0.79),  # pairs 1, -2, 1: mean 0, deviation 1.73, half width 4.3
    "pure-bf16": (0.70, 0.72, 0.69),
}


@pytest.fixture
def trained(tmp_path):
    def write(accuracies):
        given = {"model": "resnet18", "image_size": 48, "batch_size": 128, "epochs": 12}
        given |= {"classes": 24, "images_per_class": 250, "val_per_class": 100}
        cases = {
            f"{name}, seed {seed}": {"variant": name, "title": f"in {name}", "seed": seed,
                                     "accuracy": value, "first_loss": 3.25, "loss": 1.0}
            for name, values in accuracies.items()
            for seed, value in enumerate(values)
        }  # fmt: skip
        return with_cases(tmp_path / "accuracy.jsonl", cases, **given)

    return write


def test_each_variant_has_a_row_with_its_words(trained):
    ax = figures.plot_accuracy(trained(ACCURACIES))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["in bf16", "in pure-bf16"]
    grey, red = ax.texts
    assert grey.get_text() == "no difference shown (would have seen 4.3 points)"
    assert grey.get_color() == figures.QUIET
    assert red.get_text() == "9.7 ± 1.4 points worse"
    assert red.get_color() == figures.COLOURS["worse"]
    assert ax.figure.get_suptitle() == '1 of 2 worse, most of all "in pure-bf16": 9.7 points'
    assert "80.0%" in ax.figure.get_supxlabel()
    caption = ax.figure.get_supxlabel()
    assert "24 x 250 images" in caption
    assert "A100-SXM4-80GB (cuda:0)" in caption
    assert ax.get_xscale() == "linear"


def test_a_collapse_does_not_hide_small_differences(trained):
    ax = figures.plot_accuracy(trained(ACCURACIES | {"not-unscaled": (0.04, 0.05, 0.04)}))
    assert ax.get_xscale() == "symlog"
    assert ax.get_xlim()[0] < -76


@pytest.mark.parametrize(("clean", "warned"), [(0.25, True), (0.75, False), (0.97, True)])
def test_a_task_that_is_too_hard_or_too_easy_is_named(trained, clean, warned):
    """Untrained models agree in every seed, which proves nothing."""
    ax = figures.plot_accuracy(trained({"fp32": (clean, clean), "bf16": (clean, clean)}))
    assert [t.get_text() for t in ax.texts] == ["equal in every seed"]
    assert ("outside 60% to 90%" in ax.figure.get_supxlabel()) is warned


def test_a_job_that_was_cut_off_is_compared_over_the_seeds_it_has(trained):
    cut = ACCURACIES | {"bf16": (0.81, 0.80), "pure-bf16": (0.7,)}
    ax = figures.plot_accuracy(trained(cut))
    assert [t.get_text() for t in ax.texts][1] == "too few seeds"
    assert "no difference shown" in ax.texts[0].get_text()


def test_only_some_variants_are_drawn_in_the_order_asked_for(trained):
    path = trained(ACCURACIES | {"fp16": (0.79, 0.80, 0.78)})
    asked = ["fp16", "bf16"]
    ax = figures.plot_accuracy(path, only=asked)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["in fp16", "in bf16"]
    assert "in fp32: 80.0%" in ax.figure.get_supxlabel(), "the clean training is the reference"
    whole = {row.title: row for row in paired.rows(path)}
    titles = ["in fp32", "in fp16", "in bf16"]
    assert paired.rows(path, asked) == [whole[title] for title in titles]
    assert paired.rows(path, ["fp32"]) == paired.rows(path, []) == [whole["in fp32"]]
    assert paired.rows(path, "bf16") == [whole["in fp32"], whole["in bf16"]]


@pytest.mark.parametrize("only", [["bf16", "in bf16"], "in bf16"])
def test_an_unknown_variant_is_named_with_what_is_there(trained, only):
    expected = r"accuracy.jsonl: no variant 'in bf16' in it; expected some of fp32, bf16, pure-bf16"
    with pytest.raises(UserError, match=expected):
        figures.plot_accuracy(trained(ACCURACIES), only=only)


@pytest.mark.parametrize(
    ("notebook", "recording", "variant", "quoted"),
    [
        ("02b_formats", "02", "pure-bf16", "2.2 points"),
        ("03_channels_last", "02", "channels-last", "1.3 points"),
        ("05b_storage", "05", "torchvision", "1.8 points"),
        ("05b_storage", "05", "no-antialias", "one of 1.2 without antialias"),
        ("05b_storage", "05", "no-antialias-train", "2.2 points"),
        ("07_augmentation", "05", "no-augmentation", "3.3 points"),
        ("07_augmentation", "05", "resized-crop", "15 points"),
        ("05b_storage", "05", "resized-crop", "63.9 %"),
        ("07_augmentation", "05", "large-crops", "and 2.8 if"),
        ("05b_storage", "05", "small-copies", "63.2 and"),
        ("06b_scaling", "06-x2", "not-wrapped", "costs 19 points"),
        ("06b_scaling", "06-few-x2", "processes", "costs 12.5 points"),
        ("06b_scaling", "06-few-x2", "sync-batch-norm", "Still 2.1 points"),
    ],
)
def test_what_a_notebook_quotes_was_recorded(notebook, recording, variant, quoted):
    step, *processes = recording.split("-")
    name = "-".join([step, "accuracy", *processes])
    where = "h100" if "few" in name else "h200"
    _, row = paired.rows(runs.recorded(f"{where}/{name}"), only=[variant])
    told, right = row.difference, 100 * np.mean(list(row.accuracies.values()))
    if told.word == "no difference shown":
        measured = [f"{told.half:.1f}"]
    else:
        measured = [f"{abs(told.mean):.1f}", f"{abs(told.mean):.0f}", f"{right:.1f}"]
    assert set(quoted.split()) & set(measured)
    assert quoted in (course.course_root() / "solutions" / f"{notebook}.ipynb").read_text()


@claims("06b_scaling")
def test_there_are_as_many_intervals_as_06b_says():
    names = runs.recordings("h200/0?-accuracy*") + runs.recordings("h100/0?-accuracy*")
    assert sum(len(paired.rows(run)) - 1 for run in names) > 30
    yield "figures of this kind have more than thirty"


def test_two_variants_that_a_notebook_compares_differ_as_it_says():
    _, large, small_before = paired.rows(
        runs.recorded("h200/05-accuracy"), only=["resized-crop", "small-copies"]
    )
    told = paired.difference(large.accuracies, small_before.accuracies)
    assert told.word == "no difference shown"
    quoted = f"a difference below {100 * told.half:.1f} points would not have shown"
    assert quoted in (course.course_root() / "solutions/05b_storage.ipynb").read_text()
