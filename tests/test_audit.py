"""The auditor, the replay's comparisons, and what the check makes of their numbers."""

import copy
import dataclasses
import errno
import functools
import json
import math
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import made
import numpy as np
import pytest
import torch
import torchvision
from logs import write_log

from dlojz.check import audit as judged
from dlojz.check import reported, speed
from dlojz.check.exercise import State
from dlojz.runs import log, records
from dlojz.training import clocks, distributed
from dlojz.training.data import normalize
from dlojz.watch import auditor as audit
from dlojz.watch import calls, distances, readings, replay, solved, store

CLASSES = 5


class Run:
    """A log that keeps the evidence."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def evidence(self, record):
        self.seen.append(record)


def training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(5),
    )
    model(torch.zeros(2, 3, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=criterion)


def audited(folder, steps=6, step=None, args=None, **wish):
    """An audited run of a small model: its record, and the files that it left."""
    parts, run = training(), Run(folder)
    witness = SimpleNamespace(last=steps - 1, middle=None, settled=True)
    wish = {"keep": 3} | wish
    auditor = audit.Auditor(run, parts, args or SimpleNamespace(), witness, steps, wish)
    parts.auditor = auditor
    generator = torch.Generator().manual_seed(1)
    for number in range(steps):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        labels = torch.randint(CLASSES, (4,), generator=generator)
        (step or honest)(number, parts, images, labels)
    auditor.finish()
    ledger = torch.load(audit.watched_file(folder, 0))
    return run.seen[-1], ledger, [Path(file) for file in ledger.files]


def honest(number, parts, images, labels):
    parts.optimizer.zero_grad()
    parts.criterion(parts.model(images), labels).backward()
    parts.optimizer.step()


def test_a_model_left_in_evaluation_mode_is_seen_and_ends_no_run(tmp_path):
    def forgotten(number, parts, images, labels):
        parts.model.train(number < 3)
        honest(number, parts, images, labels)

    _, ledger, _ = audited(tmp_path, step=forgotten, keep=6)
    assert [bool(update.evaluating) for update in ledger.updates] == [False] * 3 + [True] * 3


def test_what_the_metrics_should_say_is_kept_of_each_batch(tmp_path):
    def by_name(number, parts, images, labels):
        parts.optimizer.zero_grad()
        logits = parts.model(input=images)
        loss = parts.criterion(logits, target=labels)
        parts.seen = (*getattr(parts, "seen", ()), (loss, logits.argmax(1).eq(labels).sum()))
        loss.backward()
        parts.optimizer.step()

    kept = []
    found, _, _ = audited(tmp_path, step=lambda *a: (by_name(*a), kept.append(a[1].seen[-1])))
    assert found.met["val"] == []
    assert found.met["train"] == [[loss.item(), 4.0, right.item()] for loss, right in kept]


@pytest.mark.parametrize(
    "name",
    ["layer.weight", "module.layer.weight", "_orig_mod.layer._checkpoint_wrapped_module.weight"],
)
def test_a_weight_has_the_same_name_however_its_model_is_wrapped(name):
    assert readings.plain(name) == "layer.weight"


def test_images_are_counted_where_their_gradient_comes_back(tmp_path):
    def half(number, parts, images, labels):
        parts.optimizer.zero_grad()
        logits = parts.model(images)
        count = 2 if number == 4 else 4
        parts.criterion(logits[:count], labels[:count]).backward()
        parts.optimizer.step()

    found, _, _ = audited(tmp_path, step=half)
    assert found.images == [4, 4, 4, 4, 2, 4]


def test_a_forward_pass_without_a_backward_pass_counts_no_image(tmp_path):
    def twice(number, parts, images, labels):
        parts.model(images)
        honest(number, parts, images, labels)

    found, _, _ = audited(tmp_path, step=twice)
    assert found.images == [0, 4] * 6


def test_the_first_updates_are_kept_as_many_as_asked_for(tmp_path):
    found, _, files = audited(tmp_path)
    assert found.kept == [0, 1, 2]
    assert len(files) == 3


@pytest.mark.parametrize("keep", [3, 8])
def test_a_kept_update_holds_the_state_before_it_its_gradients_and_what_followed(tmp_path, keep):
    before, gradients = [], []

    def watched(number, parts, images, labels):
        before.append(copy.deepcopy(parts.model.state_dict()))
        honest(number, parts, images, labels)
        gradients.append({n: p.grad.clone() for n, p in parts.model.named_parameters()})
        if number == 7:
            before.append(copy.deepcopy(parts.model.state_dict()))

    found, _, files = audited(tmp_path, steps=8, step=watched, keep=keep)
    assert len(files) == keep
    for number, file in zip(found.kept, files, strict=True):
        kept = store.load(file)
        for name, weight in kept["weights"].items():
            assert torch.equal(weight, before[number][name])
            assert torch.equal(kept["gradients"][name], gradients[number][name])
        for name, buffer in kept["begun"]["buffers"].items():
            assert torch.equal(buffer, before[number][name])
        for name, tensor in (kept["after"]["weights"] | kept["after"]["buffers"]).items():
            assert torch.equal(tensor, before[number + 1][name])


def test_an_update_that_was_skipped_does_not_pass_for_what_followed(tmp_path):
    """As in fp16 with a loss that overflowed: the optimizer is not called."""
    buffers = []

    def skips(number, parts, images, labels):
        buffers.append(copy.deepcopy(dict(parts.model.named_buffers())))
        loss = parts.criterion(parts.model(images), labels)
        if number != 3:
            parts.optimizer.zero_grad()
            loss.backward()
            parts.optimizer.step()

    found, _, files = audited(tmp_path, steps=5, step=skips, keep=5)
    assert found.kept == [0, 1, 2, 4]
    for update, file in zip(found.kept[:3], files, strict=False):
        for name, buffer in store.load(file)["after"]["buffers"].items():
            assert torch.equal(buffer, buffers[update + 1][name])


def test_an_update_that_a_fused_optimizer_skips_is_no_update(tmp_path):
    """An optimizer that is not fused is not even called. What had to be skipped is not replayed."""

    def skips_the_third(number, parts, images, labels):
        parts.optimizer.param_groups[0]["fused"] = True
        parts.optimizer.found_inf = torch.tensor(float(number == 2))
        honest(number, parts, images, labels)

    record, ledger, files = audited(tmp_path, step=skips_the_third, keep=6)
    assert [update.update for update in ledger.updates] == [0, 1, 3, 4, 5]
    assert record.kept == [0, 1, 3, 4, 5]
    assert len(files) == 5


@pytest.mark.parametrize(
    ("told", "gradient", "expected"),
    [(None, 1.0, False), (0.0, 1.0, False), (1.0, torch.inf, True), (1.0, torch.nan, True),
     (1.0, 1.0, False)],  # the last one only says so
)  # fmt: skip
def test_only_gradients_that_are_not_finite_let_an_update_be_skipped(told, gradient, expected):
    told = None if told is None else torch.tensor(told)
    state = {
        "facts": audit.Facts(0, found_inf=told),
        "gradients": {"w": torch.tensor([0.0, gradient])},
    }
    assert replay._had_to_skip(state) == expected


def test_gradients_are_compared_without_the_scale_that_a_fused_optimizer_takes_away():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([16.0, 32.0])
    own = SimpleNamespace(weights={"w": weight}, _gradients=None)
    fused = SimpleNamespace(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(1.0))
    replay.Replay._on_update(own, fused, (), {})
    assert own._gradients is None, "it skips the update"
    fused.found_inf = torch.tensor(0.0)
    replay.Replay._on_update(own, fused, (), {})
    assert own._gradients["w"].tolist() == [2, 4]
    replay.Replay._on_update(own, SimpleNamespace(), (), {})
    assert own._gradients["w"].tolist() == [16, 32]


def fused_as_on_a_gpu(weights, grads, exp_avgs, exp_avg_sqs, _, steps, **options):
    """AdamW in place with betas of float32, as CUDA's fused kernel has them.

    A processor's has betas of float64: seen on an H200, whose weights were 30 to 80 roundings from
    those that a processor made of the same gradients.
    """
    (first, second), one = map(np.float32, (options["beta1"], options["beta2"])), np.float32(1)
    for w, g, m, v, step in zip(weights, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        w.mul_(1 - options["lr"] * options["weight_decay"])
        m.lerp_(g, float(one - first))
        v.mul_(float(second)).addcmul_(g, g, value=float(one - second))
        corrections = [one - beta ** np.float32(step) for beta in (first, second)]
        deviation = v.sqrt() / float(np.sqrt(corrections[1])) + options["eps"]
        w.sub_(options["lr"] / float(corrections[0]) * m / deviation)


class Solved(replay.Replay):
    """A replay of one weight's updates."""

    def __init__(self, optimizer, rate):
        self.training, self.rates = SimpleNamespace(optimizer=optimizer), [[rate]] * 9
        self.weights, self._buffers = {"w": optimizer.param_groups[0]["params"][0]}, {}
        self.device = torch.device("cpu")


def state_of(optimizer):
    (weight,) = optimizer.param_groups[0]["params"]
    kept = {f"w {key}": value.clone() for key, value in optimizer.state[weight].items()}
    return {"weights": {"w": weight.detach().clone()}, "optimizer": kept}


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_adam_of_other_numbers_is_the_same_optimizer(fused, monkeypatch):
    """A trainee's, fused or not, while the solution's is fused and computes as a GPU's does."""
    monkeypatch.setattr(torch, "_fused_adamw_", fused_as_on_a_gpu)
    weight = torch.nn.Parameter(torch.linspace(-1e-3, 1e-3, 64))
    mine = torch.optim.AdamW([weight], 0.01, fused=fused)
    other = torch.nn.Parameter(weight.detach().clone())
    solved = Solved(torch.optim.AdamW([other], 0.01, fused=True), 0.01)
    begun = {"buffers": {}, "cpu_rng": torch.get_rng_state(), "cuda_rng": None}
    for number in range(6):
        weight.grad = torch.sin(torch.arange(64.0) * (number + 1))
        gradients = {"gradients": {"w": weight.grad.clone()}}
        state = state_of(mine) | gradients | {"facts": audit.Facts(number), "begun": begun}
        mine.step()
        state["after"] = state_of(mine)
        assert solved._optimizer(state)["optimizer_roundings"] < judged.ROUNDINGS
    kept = state["after"]["optimizer"]
    state["after"]["optimizer"] = {}  # dropped before the next update
    assert solved._optimizer(state)["optimizer_roundings"] > judged.ROUNDINGS
    state["after"]["optimizer"] = kept
    state["after"]["weights"]["w"] *= 1.0001
    assert solved._optimizer(state)["optimizer_roundings"] > judged.ROUNDINGS


@pytest.mark.parametrize("mine", [torch.inf, torch.nan, 0.0])
def test_gradients_of_any_kind_have_a_distance(mine):
    found = distances.gradients({"w": torch.tensor([mine])}, {"w": torch.tensor([1.0])})
    assert found["gradients_tensor"] == distances.GONE
    found = distances.gradients({"w": torch.tensor([1.0])}, {"w": torch.tensor([torch.inf])})
    assert found["gradients_tensor"] == distances.GONE


def test_updates_are_kept_in_memory_where_it_has_room_or_else_in_the_folder(tmp_path, monkeypatch):
    held = [os.memfd_create("update") for _ in range(3)]
    places = [f"/proc/{os.getpid()}/fd/{file}" for file in held]
    _, _, files = audited(tmp_path, memory=places)
    assert [str(file) for file in files] == places
    assert not list(audit.folder_of(tmp_path).glob("update-*"))
    assert store.load(files[0])["weights"]
    store.drop(files[0])
    assert os.fstat(held[0]).st_size == 0
    monkeypatch.setattr(audit.machine, "memory", lambda: {"available_bytes": 1000})
    _, _, files = audited(tmp_path, memory=places)
    assert [file.parent for file in files] == 3 * [audit.folder_of(tmp_path)]
    store.drop(files[0])
    assert not files[0].exists()


def test_saved_without_checksums_while_the_trainer_keeps_its_own(tmp_path, monkeypatch):
    held, options, save = os.memfd_create("update"), [], torch.save

    def watched(*args):
        options.append(torch.serialization.get_crc32_options())
        save(*args)

    monkeypatch.setattr(torch, "save", watched)
    audited(tmp_path, keep=1, memory=[f"/proc/{os.getpid()}/fd/{held}"])
    assert options == [False, True], "the update in memory, and the ledger on the disk"
    assert torch.serialization.get_crc32_options()


def test_updates_of_other_weights_are_counted_apart(tmp_path):
    other = torch.nn.Linear(2, 2)
    aside = torch.optim.SGD(other.parameters(), 0.1)

    def both(number, parts, images, labels):
        other(torch.ones(2)).sum().backward()
        aside.step()
        honest(number, parts, images, labels)

    found, _, _ = audited(tmp_path, step=both)
    assert (found.updates, found.foreign) == (6, 6)


def test_images_of_another_size_have_no_pixels_to_compare(tmp_path):
    parts, run = training(), Run(tmp_path)
    witness = SimpleNamespace(last=5, middle=None, settled=True)
    auditor = audit.Auditor(run, parts, SimpleNamespace(), witness, 6, {"keep": 0})
    assert auditor._sample(torch.zeros(2, 3, 8, 8)).shape == (2, audit.PIXELS)
    assert auditor._sample(torch.zeros(2, 3, 16, 16)) is None
    auditor.finish()


def test_pauses_within_pauses_count_once(monkeypatch):
    times = iter([10.0, 11.0, 15.0])
    monkeypatch.setattr(clocks, "perf_counter", lambda: next(times))
    monkeypatch.setattr(clocks, "_paused", 0.0)
    with clocks.pause(), clocks.pause():
        pass
    assert clocks.paused() == 5.0


def test_packed_tensors_come_back(tmp_path):
    tensors = {"a": torch.randn(2, 3), "b": torch.arange(4), "c": torch.randn(2, 3, 4, 4).mT, "d":
               torch.tensor(7)}  # fmt: skip
    found = store.unpack(store.pack(tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert store.unpack(store.pack({})) == {}


def test_one_update_is_packed_over_the_one_before():
    memory = {}
    first, second = ({"a": torch.randn(3, 4), "b": torch.randn(5)} for _ in range(2))
    place = store.pack(first, memory=memory)["torch.float32"]["flat"].data_ptr()
    packed = store.pack(second, memory=memory)
    assert packed["torch.float32"]["flat"].data_ptr() == place
    assert all(torch.equal(t, second[name]) for name, t in store.unpack(packed).items())
    larger = {"a": torch.randn(30), "n": torch.arange(3)}
    found = store.unpack(store.pack(larger, memory=memory))
    assert all(torch.equal(found[name], tensor) for name, tensor in larger.items())


# What the replay compares ------------------------------------------------------------------------


def test_a_single_bias_without_a_gradient_is_seen_however_small():
    there = {"weight": torch.ones(1000), "bias": torch.full((1,), 1e-6)}
    found = distances.gradients(there | {"bias": torch.zeros(1)}, there)
    assert found["gradients"] < 1e-6
    assert found["gradients_tensor"] == distances.GONE
    assert distances.gradients(there, there)["gradients_tensor"] == 0
    dead = {"w": torch.zeros(2)}  # of a model whose activations are all 0
    assert distances.gradients(dead, dead)["gradients"] == 0
    assert distances.gradients({"w": torch.ones(2)}, dead)["gradients"] == math.inf


class AtAKink(replay.Replay):
    """A replay of a model whose first unit is 0 before its ReLU, so that roundings decide.

    share: that of this unit in the loss; away: by how much it is off zero.
    """

    def __init__(self, share=1.0, away=0.0):
        self.away = away
        self.share, self._noises, self.moved = torch.tensor([share, 1.0]), [], []

    def _step(self, state, batches, moved=None):
        self.moved.append(moved)
        model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        if moved:
            solved.perturb(model, *moved)
        units = torch.relu(model(torch.tensor([1.0, -1.0])) + torch.tensor([self.away, 1.0]))
        (self.share * units).sum().backward()
        return {"gradients": {"weight": model.weight.grad}}

    def nearest(self, mine):
        """How far these gradients are from the solution's, which are asked again."""
        facts = audit.Facts(3)
        state = {"facts": facts, "gradients": {"weight": torch.tensor(mine)}}
        return self._nearest(state, [], self._step(state, []))["gradients"]


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([[0.0, 0.0], [1.0, -1.0]], 0.0),  # off, as 0 is in torch
        ([[1.0, -1.0], [1.0, -1.0]], 0.0),  # on
        ([[1.1, -1.1], [1.0, -1.0]], 0.1 / 2**0.5),  # neither of the two
    ],
)
def test_gradients_may_be_those_of_either_side_of_a_kink(mine, expected):
    again = AtAKink()
    assert again.nearest(mine) == pytest.approx(expected, abs=1e-6)
    seeds = [moved and moved[1] for moved in again.moved]
    assert len(set(seeds)) == len(seeds) <= 1 + replay.AGAIN, "other errors each time"


def test_a_small_jump_is_looked_at_again_too():
    """The middle one of a few updates has narrower bounds than a single one."""
    found = AtAKink(0.01).nearest([[0.01, -0.01], [1.0, -1.0]])
    assert found == pytest.approx(0.0, abs=1e-6)


def test_a_kink_in_the_first_noise_is_no_measure():
    """It would allow for the jump of the update itself, and the middle one would be off."""
    again = AtAKink(0.01)
    again._noises = [{"gradients_noise": 0.01, "gradients_tensor_noise": 0.0}]
    assert again.nearest([[0.01, -0.01], [1.0, -1.0]]) == pytest.approx(0.0, abs=1e-6)
    again._noises *= 2
    assert again.nearest([[0.01, -0.01], [1.0, -1.0]]) == pytest.approx(0.01, abs=1e-3)


@pytest.mark.parametrize(("roundings", "found"), [(3, True), (100, False)])
def test_a_kink_that_is_a_few_roundings_away_is_reached(roundings, found):
    """Images that are normalized in other steps are off by more than one."""
    mine = [[0.0, 0.0], [1.0, -1.0]]  # off, where the solution's unit is on
    reached = AtAKink(away=roundings * 2.0**-24).nearest(mine) < 1e-6
    assert reached == found


def test_gradients_that_are_missing_or_unexpected_are_named():
    one, two = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    found = distances.gradients(one, two)
    assert (found["missing"], found["unexpected"]) == (["b"], ["a"])


def test_not_a_number_is_the_worst_distance():
    worst = {"roundings": 0.0}
    distances.keep_worst(worst, "a", torch.tensor([torch.nan]), torch.ones(1))
    assert worst["roundings"] != 0.0


# What the check makes of it ----------------------------------------------------------------------


def findings(change=None, precision="fp32", updates=8):
    """The findings on a run that did all right, but for what `change(updates, every)` changes."""
    found, every = made.updates(updates), made.every(32, 10)
    found, every = json.loads(json.dumps([found, every]))
    if change:
        change(found, every)
    mine, again = log.Run(Path("mine")), log.Run("again")
    again.replay = made.replayed(found, every)
    return judged.findings([judged.Audited(mine, again, precision)])


def test_an_update_of_two_processes_is_one():
    found, every = made.updates(4), made.every(32, 10)
    runs = []
    for rank in range(2):
        mine, again = log.Run(Path("run", f"{rank}.jsonl")), log.Run("again")
        again.replay = made.replayed(found, every)
        runs.append(judged.Audited(mine, again, "fp32"))
    (number,) = [f for f in judged.findings(runs) if f.what == "audit"]
    assert number.yours == "4 updates done again with the solution"
    assert number.state == State.PASSED


@pytest.mark.parametrize(
    ("scale", "precision", "fails"),
    [
        (0.25, "bf16", False),
        (1.0, "fp32", False),  # divided by the accumulated steps elsewhere
        (0.5, "bf16", False),  # and summed over two processes
        (0.2505, "bf16", False),  # rounded
        (0.278, "bf16", True),  # without label smoothing, as the logits are small
        (1e-9, "bf16", True),
        (0.25 * 65536 * 1.001, "bf16", False),  # by a scaler that is always there
        (0.278 * 65536, "bf16", True),
        (0.75, "tf32", True),
        (0.25 * 128, "fp16", False),
        (0.278 * 128, "fp16", True),
        (-0.25, "fp16", True),
        (0.2501, "fp32", True),
        (math.inf, "fp16", False),  # another finding
    ],
)
def test_a_gradient_of_the_loss_may_be_divided_elsewhere_and_no_more(scale, precision, fails):
    every = made.every(32, 10)
    every["scales"] = [0.25] * 7 + [scale]
    start = {"arguments": {"accumulate": 4}, "size": 2}
    mine, again = log.Run(Path("mine"), start=start), log.Run("again")
    again.replay = made.replayed(made.updates(8), every)
    found = judged.findings([judged.Audited(mine, again, precision)])
    assert [f.what for f in found if f.fails] == ["gradient of the loss"] * fails


def failing(change, **more):
    return [(f.what, f.hint) for f in findings(change, **more) if f.fails]


def test_a_run_that_did_all_right_passes():
    assert not failing(None)


FIRST = {  # of 8 steps and updates, and of two batches of validation
    **{name: 4 for name in ("images", "pixels", "criterion", "scales", "updates", "usual")},
    **{f"val-{name}": 1 for name in ("pixels", "labels")},
}


def cut_to_its_first_epoch(updates=None, epochs=2, **every):
    """An audited run of 8 steps, cut to its first epoch; every: what its replay found."""
    found = made.every(32, 8) | every
    mine, again = log.Run(Path("mine"), start={"arguments": {"epochs": epochs}}), log.Run("again")
    again.replay = made.replayed(updates or made.updates(8), found)
    return judged.Audited(mine, again, "fp32").first_epoch


def test_the_first_epoch_has_half_of_the_steps_the_updates_and_the_validation():
    found = cut_to_its_first_epoch()
    sizes = {name: len(getattr(found.every, name)) for name in FIRST if "val" not in name}
    validation = found.every.validation
    sizes |= {f"val-{n}": len(getattr(validation, n)) for n in ("pixels", "labels")}
    assert sizes == FIRST
    assert (found.every.steps, len(found.updates)) == ([4, 4], 4)


def test_a_single_epoch_is_the_first_one():
    assert len(cut_to_its_first_epoch(epochs=1).updates) == 8
    nothing = judged.Audited(log.Run("mine"), log.Run("again"), "fp32")
    assert nothing.first_epoch is nothing


@pytest.mark.parametrize(("update", "hints"), [(3, {"update"}), (4, set())])
def test_an_update_of_the_second_epoch_is_no_mistake_of_the_first(update, hints):
    updates = made.updates(8)
    updates[update] |= {"optimizer_roundings": 2e6, "optimizer_worst": "conv1.weight"}
    first = cut_to_its_first_epoch(updates)
    assert {f.hint for f in judged.findings([first]) if f.fails} == hints


def test_steps_that_are_missing_in_the_second_epoch_are_no_mistake_of_the_first():
    first = cut_to_its_first_epoch(steps=[6, 8])
    assert not [f for f in judged.findings([first]) if f.fails]


def test_what_changed_between_updates_is_named():
    again = log.Run("again", replay=made.replayed(made.updates(8), made.every(32, 8)))
    run = judged.Audited(log.Run(Path("mine")), again, "fp32")
    (found,) = [f for f in judged.findings([run]) if f.key == "touched"]
    assert (found.state, found.yours) == (State.PASSED, "left alone")
    run.every.touched[:] = ["fc.weight in update 6", "fc.bias in update 6"]
    run.mine.audit = records.Audit(kept_buffers=False)
    (found,) = [f for f in judged.findings([run]) if f.fails]
    assert (found.yours, found.hint) == ("3 changed, such as fc.weight in update 6", "touched")
    run.every.touched.clear()
    assert [f.key for f in judged.findings([run]) if f.fails] == ["touched"]
    run.mine.start["rank"] = 1  # DDP gives it the first process's statistics
    assert not [f for f in judged.findings([run]) if f.fails]


def test_groups_of_equal_settings_are_as_good_as_one():
    def twice(updates, every):
        every["updates"][3]["settings"] *= 2

    assert not failing(twice)


def test_a_group_of_weights_may_have_a_name():
    weights = [torch.nn.Parameter(torch.zeros(1))]
    plain, named = (
        torch.optim.SGD([{"params": weights} | more], 0.1, momentum=0.9, weight_decay=1e-4)
        for more in ({}, {"name": "all"})
    )
    seen = [readings.settings(optimizer.param_groups[0], optimizer) for optimizer in (plain, named)]
    assert seen[0] == seen[1]
    assert seen[0]["momentum"] == 0.9
    assert seen[0].keys() >= {"dampening", "nesterov", "weight_decay", "maximize"}
    assert "lr" not in seen[0]


def test_a_scaler_is_found_inside_another_part():
    class Native:
        def __init__(self, scaler):
            self._scaler = scaler

        def state_dict(self):
            return self._scaler.state_dict()

    scaler, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    found = [SimpleNamespace(scaler=part) for part in (scaler, Native(scaler))]
    assert all(readings.scaler(training) is scaler for training in found)
    none = [SimpleNamespace(scaler=part) for part in (None, off, Native(off))]
    assert not any(map(readings.scaler, none))


def test_groups_may_name_their_settings_in_any_order():
    weights, kept = [torch.nn.Parameter(torch.zeros(1))], {"weight_decay": 1e-4, "momentum": 0.9}
    seen = []
    for more in ({}, dict(kept), dict(reversed(kept.items()))):
        optimizer = torch.optim.SGD([{"params": weights} | more], 0.1, **kept)
        seen.append(str(readings.settings(optimizer.param_groups[0], optimizer)))
    assert len(set(seen)) == 1


def set_in(place, number, **values):
    def change(updates, every):
        target = updates if place == "updates" else every[place]
        target[number] = target[number] | values if isinstance(target[number], dict) else values

    return change


def put(place, number, value):
    def change(updates, every):
        every[place][number] = value

    return change


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        (put("images", 7, [31, 32]), "images with a gradient", "images"),
        (put("images", 7, [0, 32]), "images with a gradient", "backward"),
        (put("steps", 0, 9), "images with a gradient", "images"),
        (put("pixels", 7, 0.03), "pixels of the images", "pixels"),
        (put("pixels", 7, None), "pixels of the images", "pixels"),
        (put("criterion", 7, 2e-4), "gradient of the loss", "criterion"),
        (put("criterion", 7, None), "gradient of the loss", "criterion"),
        (put("scales", 7, 1.1), "gradient of the loss", "criterion"),
        (put("scales", 7, -1.0), "gradient of the loss", "criterion"),
        (set_in("updates", 7, optimizer_roundings=9.0), "update of all weights", "update"),
        (set_in("updates", 7, gradients=0.06), "gradients", "gradients"),
        (set_in("updates", 7, gradients=float("nan")), "gradients", "gradients"),
        (set_in("updates", 7, outputs=0.06), "outputs of the model", "outputs"),
        (set_in("updates", 7, gradients_tensor=0.2), "gradient of each weight", "gradients"),
        (set_in("updates", 7, missing=["fc.bias"]), "gradients there or not", "frozen"),
        (set_in("updates", 7, buffers=1e-3), "batch statistics", "batch-norm"),
    ],
)
def test_one_wrong_step_is_seen(change, what, hint):
    assert (what, hint) in failing(change)


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ({"lr_off": 1e-9}, "learning rate", "rate"),
        ({"settings": [{"momentum": 0.5}]}, "optimizer's settings", "settings"),
        ({"optimizer": "Adam"}, "optimizer's settings", "settings"),
        ({"missing": ["fc.bias"]}, "weights without a gradient, layers not in training", "frozen"),
        ({"random": [3]}, "random numbers", "random"),
        ({"evaluating": 3}, "weights without a gradient, layers not in training", "frozen"),
    ],
)
def test_one_wrong_update_is_seen(change, what, hint):
    def late(updates, every):
        every["updates"][7] = every["updates"][7] | change

    assert failing(late) == [(what, hint)]


@pytest.mark.parametrize(
    ("train", "val", "hint"),
    [
        ([[2.0, 4, 1]], [[2.0, 4, 1]], None),
        ([], [], None),  # a function computes the losses
        ([[2.0, 4, 1]], [], "unseen"),
    ],
)
def test_the_validation_has_the_criterion_of_the_training(train, val, hint):
    usual = log.Run("r", audit=records.Audit(met={"train": [[2.0, 4, 1]], "val": [[2.0, 4, 1]]}))
    mine = log.Run("r", audit=records.Audit(met={"train": train, "val": val}))
    assert judged.validation([usual, mine], [usual, usual]).hint == hint


def test_a_validation_needs_the_batch_statistics_of_the_training(tmp_path):
    """On process 0 of several, too: a mean over all of them is another model than the saved one."""

    def validates(number, parts, images, labels, factor):
        honest(number, parts, images, labels)
        if number in (2, 5):
            parts.model.eval()
            if factor is None:
                parts.model.register_buffer("another", torch.zeros(1))
            elif number == 2:
                parts.model[1].running_mean *= factor
            with torch.no_grad():
                parts.model(images)
                parts.model(images)
            parts.model.train()

    for factor, same in ((1, True), (1.001, False), (None, False)):
        (tmp_path / str(factor)).mkdir()
        step = functools.partial(validates, factor=factor)
        found, _, _ = audited(tmp_path / str(factor), step=step)
        assert found.same_buffers is same
        run = log.Run("run", audit=records.Audit(same_buffers=same))
        assert judged.validation([run], [log.Run("usual")]).fails is not same


@pytest.mark.parametrize(
    ("moved_in", "batch", "same"), [((), 0, True), ((2,), 0, False), ((5,), 1, False)]
)
def test_a_validation_needs_the_weights_that_the_last_update_left(tmp_path, moved_in, batch, same):
    """In each epoch, and in each batch; afterwards they may be as before."""

    def validates(number, parts, images, labels):
        honest(number, parts, images, labels)
        if number not in (2, 5):
            return
        parts.model.eval()
        kept = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
        with torch.no_grad():
            for i in range(2):
                if number in moved_in and i == batch:
                    parts.model[0].weight *= 1.001
                parts.model(images)
        parts.model.load_state_dict(kept)
        parts.model.train()

    found, _, _ = audited(tmp_path, step=validates, args=SimpleNamespace(epochs=2))
    assert found.same_weights is same
    usual, run = log.Run("usual"), log.Run("run", audit=records.Audit(same_weights=same))
    assert judged.validation([usual, run], [usual, usual]).fails is not same


def test_an_optimizer_of_another_model_ends_no_update(tmp_path):
    """Weights that moved before it steps are not what the model's own optimizer left."""
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())

    def moves(number, parts, images, labels):
        honest(number, parts, images, labels)
        with torch.no_grad():
            if number == 5:
                parts.model[0].weight *= 1.001
                other.step()
                parts.model.eval()(images)

    found, _, _ = audited(tmp_path, step=moves)
    assert (found.same_weights, found.foreign) == (False, 1)


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_an_update_that_is_skipped_leaves_the_weights_as_they_were(tmp_path, factor):
    def skips(number, parts, images, labels):
        parts.criterion(factor * parts.model(images), labels).backward()
        if number != 5:
            parts.optimizer.step()
        else:
            parts.model.eval()
            with torch.no_grad():
                parts.model(images)

    found, _, _ = audited(tmp_path, step=skips)
    assert found.same_weights is True


def test_updates_of_weights_that_are_not_the_models_are_refused():
    found, every = made.updates(8), made.every(32, 10)
    mine, again = log.Run(Path("mine")), log.Run("again")
    mine.audit, again.replay = records.Audit(foreign=3), made.replayed(found, every)
    failing = [f for f in judged.findings([judged.Audited(mine, again, "fp32")]) if f.fails]
    assert [(f.what, f.yours, f.hint) for f in failing] == [
        ("optimizer's settings", "3 updates of weights that are not the model's", "settings")
    ]


def test_where_nothing_was_replayed_nothing_passes():
    assert judged.findings([judged.Audited(log.Run("a"), log.Run("b"), "fp32")])[0].fails
    assert failing(None, updates=0)


@pytest.mark.parametrize(
    ("losses", "state"),
    [
        ([2.0, 1.9, 1.8], State.NOT_ASKED),
        ([2.0, 1.9, 9.9], State.NOT_ASKED),  # a mistake shows in the updates
        ([2.0, 1.9, math.nan], State.FAILED),
        ([2.0, 1.9, math.inf], State.FAILED),
        ([], State.UNMEASURED),
    ],
)
def test_losses_are_shown_and_only_those_that_are_no_number_fail(losses, state):
    mine, usual = (log.Run("r", audit=records.Audit(losses=x)) for x in (losses, [2.0, 1.9, 1.8]))
    assert reported.losses(mine, usual).state == state


def speed_of(folder, change=None):
    """The finding on the speed of ten steps of 100 ms; `change(event)` changes the log."""
    log_file = write_log(folder / "events.jsonl")
    made.stopwatch(folder, images=32, steps=10, step_s=0.1)
    events = [json.loads(line) for line in log_file.read_text().splitlines()]
    for event in events:
        if change:
            change(event)
    log_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    (found,) = speed.finding([log.read(folder)])
    return found


def told(**values):
    def change(event):
        event |= values.get(event["event"], {})

    return change


def test_a_slow_step_that_only_one_of_the_clocks_times_is_no_trick(tmp_path):
    """The stopwatch's window is the steps 3 to 7, the Chronometer's goes on to the step 9."""

    def quick_in_the_end(event):
        if event["event"] == "step" and event["step"] > 8:
            event["host_ms"] = dict.fromkeys(event["host_ms"], 0.0)
        if event["event"] == "window":
            event["wall_s"] = 0.6

    found = speed_of(tmp_path, quick_in_the_end)
    assert not found.fails, found


@pytest.mark.parametrize("ms", [4.0, 60.0])
def test_steps_that_the_chronometer_says_are_shorter_or_longer_fail(tmp_path, ms):
    def other(event):
        if event["event"] == "step" and event["step"] == 5:
            event["host_ms"] = dict.fromkeys(event["host_ms"], ms)

    found = speed_of(tmp_path, other)
    assert (found.fails, found.hint) == (True, "marks")


@pytest.mark.parametrize(("shorter_ms", "fails"), [(17, False), (30, True)])
def test_a_delay_between_two_marks_is_no_trick_in_a_short_window(tmp_path, shorter_ms, fails):
    def short(event):
        if event["event"] == "step":
            event["host_ms"] = {phase: ms / 5 for phase, ms in event["host_ms"].items()}
            event["host_ms"]["forward"] -= shorter_ms if event["step"] == 5 else 0
        for window in event.get("windows", ()):
            window["wall_s"] /= 5

    assert speed_of(tmp_path, short).fails is fails


@pytest.mark.parametrize("step", [7, 8])
def test_a_delay_between_the_chronometers_mark_and_the_stopwatchs_counts(tmp_path, step):
    """The window closes at step 8. What one before took longer is no excuse for another delay."""

    def held_up(event):
        if event["event"] == "step" and event["step"] == step:
            event["host_ms"]["forward"] += 200
        if event["event"] == "window":
            event["wall_s"] += 0.2
        for window in event.get("windows", ()):
            window["wall_s"] += 0.2 if step == 8 else 0.4

    assert speed_of(tmp_path, held_up).fails is (step == 7)


@pytest.mark.parametrize(
    "change", [told(window={"wall_s": 0.5}), told(step={"images": 40}), told(window={"steps": 99})]
)
def test_more_images_per_second_than_the_steps_took_fail(tmp_path, change):
    assert speed_of(tmp_path, change).fails


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        (torchvision.models.squeezenet1_1(), ""),
        (torch.nn.Sequential(torch.nn.Identity(), torchvision.models.squeezenet1_1()), "1."),
        (torch.nn.Linear(2, 3), ""),
        (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)), ""),
    ],
)
def test_what_is_around_a_model_is_not_in_its_weights_names(model, prefix):
    assert readings.around(model) == prefix


def test_the_layout_of_each_steps_images_is_kept(tmp_path):
    def turned(number, parts, images, labels):
        honest(number, parts, images.to(memory_format=torch.channels_last), labels)

    for step, expected in ((honest, "NCHW"), (turned, "channels_last")):
        (tmp_path / expected).mkdir()
        _, ledger, _ = audited(tmp_path / expected, step=step)
        assert {seen.layout for seen in ledger.steps} == {expected}


@pytest.mark.parametrize("wanted", ["NCHW", "channels_last"])
@pytest.mark.parametrize("before", ["NCHW", "channels_last"])
def test_a_replay_computes_in_the_layout_of_the_trainees_run(before, wanted):
    """Other kernels would round otherwise."""
    again = object.__new__(replay.Replay)
    again.training, again.device, again.rates = training(), torch.device("cpu"), [[0.1]]
    again._model = again.training.model.to(memory_format=solved.FORMATS[before])
    again.weights = dict(again._model.named_parameters())
    again._buffers = dict(again._model.named_buffers())
    kept = {name: torch.randn_like(weight) for name, weight in again.weights.items()}
    kept["0.weight"] = kept["0.weight"].contiguous(memory_format=solved.FORMATS[wanted])
    begun = {"buffers": again._buffers, "cpu_rng": torch.get_rng_state(), "cuda_rng": None}
    state = {"weights": kept, "optimizer": {}, "begun": begun}
    again._load(state | {"facts": audit.Facts(0)})
    weight, images = again.weights["0.weight"], torch.randn(2, 3, 8, 8)
    ((_, laid_out, _),) = again._laid_out([(0, images, None)], [audit.Batch(layout=wanted)])
    assert readings.layout(weight) == readings.layout(laid_out) == wanted
    assert torch.equal(weight, kept["0.weight"])
    assert torch.equal(laid_out, images)


def test_a_vector_has_no_layout_and_a_slice_keeps_the_weights_own():
    again = object.__new__(replay.Replay)
    for weight, kept in (
        (torch.ones(4), torch.ones(4)),
        (torch.ones(2, 3, 8, 8), torch.ones(2, 3, 16, 8)[:, :, ::2]),
    ):
        again._lay_out(weight, kept)
        assert weight.is_contiguous()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_criterion_may_return_the_mean_the_sum_or_each_loss(reduction):
    logits, labels = torch.randn(6, CLASSES), torch.randint(CLASSES, (6,))
    criterion = torch.nn.CrossEntropyLoss(reduction=reduction)
    found = readings.per_image(criterion, criterion(logits, labels), len(logits))
    assert found == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())


def test_a_learning_rate_may_be_kept_in_float32():
    rate, again = 0.004 / 3, SimpleNamespace(rates=[[0.004 / 3]])
    update = audit.Facts(0, lr=[torch.tensor(rate)])
    assert distances.settings(update, again).lr_off == 0
    update.lr = [rate * (1 + 1e-9)]
    assert distances.settings(update, again).lr_off == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("rates", "usual", "off"),
    [
        ([0.1, 0.2, 0.1], [0.2, 0.1], 0),
        ([0.1], [0.1, 0.2], 0.5),  # one rate for both groups
        ([0.1, 0.2], [0.1], 1),
    ],
)
def test_groups_may_be_others_but_each_rate_needs_its_like(rates, usual, off):
    found = distances.settings(audit.Facts(0, lr=rates), SimpleNamespace(rates=[usual]))
    assert found.lr_off == pytest.approx(off)


def test_a_speed_that_was_measured_passes(tmp_path):
    assert not speed_of(tmp_path).fails


# A step in the middle -----------------------------------------------------------------------------


def middle(folder, steps=12, batches=100, wish=True, **args):
    """The step that is profiled, too."""
    names, wish = SimpleNamespace(**args), {"keep": 0, "middle": wish}
    witness = SimpleNamespace(last=steps - 1, middle=None, settled=True)
    loader = range(batches)
    make = audit.Auditor(Run(folder), training(), names, witness, steps, wish, loader)
    return make.middle(steps - 1)


def test_it_is_in_the_second_half_and_not_the_last(tmp_path):
    assert middle(tmp_path) == 8
    assert middle(tmp_path, steps=8) == 5


def test_it_is_not_the_first_of_an_epoch_whose_profile_would_hold_the_validation(tmp_path):
    assert middle(tmp_path, steps=4 * 3, epochs=4) not in (6, 9)


def test_it_ends_an_update_as_the_last_one_does(tmp_path):
    assert middle(tmp_path, accumulate=2) in (7, 9)


@pytest.mark.parametrize(
    "how", [{"wish": False}, {"steps": 5}, {"batches": 12}, {"precision": "fp16"}], ids=str
)
def test_there_is_none_where_no_step_is_like_the_last(tmp_path, how):
    assert middle(tmp_path, **how) is None


# The validations ----------------------------------------------------------------------


def validates(number, parts, images, labels, last=5, batches=2, change=None):
    """An honest step, and a validation of the last one's images and their negatives."""
    honest(number, parts, images, labels)
    if number == last:
        parts.model.eval()
        with torch.no_grad():
            for i in range(batches):
                logits = parts.model(images * (-1) ** i)
                parts.criterion(logits, labels) if change is None else change(parts, logits, labels)
        parts.model.train()


def test_the_last_validation_is_kept_with_the_buffers_that_it_saw(tmp_path):
    at_end = {}

    def step(number, parts, images, labels):
        validates(number, parts, images, labels)
        at_end.update(labels=labels, buffers=dict(parts.model.named_buffers()))

    _, ledger, _ = audited(tmp_path, step=step)
    first, second = ledger.validation
    assert torch.equal(first.pixels, -second.pixels)
    assert torch.equal(first.labels, at_end["labels"])
    assert first.loss != second.loss
    for name, tensor in ledger.validated.items():
        assert torch.equal(tensor, at_end["buffers"][name])
    assert "1.running_var" in ledger.validated


class Again(replay.Replay):
    """A replay of the training above."""

    def __init__(self):
        self.training = training()
        self.device, self._model = torch.device("cpu"), self.training.model
        self.weights = dict(self._model.named_parameters())
        self._buffers = dict(self._model.named_buffers())
        self.trainer, self.args = SimpleNamespace(forward=self.forward), None

    def forward(self, parts, images, labels, args):
        logits = parts.model(images)
        return logits, parts.criterion(logits, labels)


def test_all_validations_are_kept_and_the_buffers_of_the_last(tmp_path):
    at_end = {}

    def twice(number, parts, images, labels):
        validates(number, parts, images, labels, last=2 if number < 5 else 5)
        at_end[number] = labels, {n: b.clone() for n, b in parts.model.named_buffers()}

    _, ledger, _ = audited(tmp_path, step=twice, args=SimpleNamespace(epochs=2))
    assert [batch.labels.tolist() for batch in ledger.validation] == [
        at_end[number][0].tolist() for number in (2, 2, 5, 5)
    ]
    assert all(torch.equal(t, at_end[5][1][name]) for name, t in ledger.validated.items())


def test_the_solutions_run_keeps_what_it_saw_and_no_buffers(tmp_path):
    _, ledger, _ = audited(tmp_path, step=validates, keep=0)
    assert ledger.validated is None
    seen = [(b.pixels is not None, b.loss is not None) for b in ledger.validation]
    assert seen == [(True, True)] * 2


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_validation_leaves_the_batch_statistics_as_they_were(tmp_path, factor):
    """They are looked at as the next epoch begins: what is changed after the last one is lost."""

    def step(number, parts, images, labels):
        validates(number, parts, images, labels, last=2)
        if number == 2:
            parts.model[1].running_var *= factor

    found, _, _ = audited(tmp_path, step=step, args=SimpleNamespace(epochs=2))
    assert found.same_buffers
    assert found.kept_buffers is (factor == 1)


def test_batch_statistics_that_change_before_a_validation_are_not_changed_by_it(tmp_path):
    def step(number, parts, images, labels):
        honest(number, parts, images, labels)
        if number == 2:
            parts.model.eval()[1].running_var *= 1.001
            with torch.no_grad():
                parts.model(images)
            parts.model.train()

    found, _, _ = audited(tmp_path, step=step, args=SimpleNamespace(epochs=2))
    assert (found.same_buffers, found.kept_buffers) == (False, True)


def moves(parts, number):
    parts.model[0].weight.data *= 1.001


def forgets(parts, number):
    parts.optimizer.state.clear()


def begins_again(parts, number):
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda parts, number: None, ()),
        (lambda parts, number: parts.model.zero_grad(), ()),
        (moves, ("0.weight in update 2",)),
        (forgets, ("0.weight momentum_buffer in update 2", "3.bias momentum_buffer in update 2")),
        (begins_again, ("0.weight momentum_buffer in update 2",)),
    ],
)
def test_only_the_optimizer_changes_weights_and_momenta_between_two_updates(
    tmp_path, change, names
):
    """Such as an optimizer that is made again for each epoch."""

    def step(number, parts, images, labels):
        if number == 2:
            change(parts, number)
        honest(number, parts, images, labels)

    _, _, files = audited(tmp_path, step=step)
    states = [store.load(file) for file in files]
    found = [store.touched(*pair) for pair in pairwise(states)]
    assert found[0] == []
    assert bool(found[1]) == bool(names)
    assert {*names} <= {*found[1]}


def test_what_is_no_number_or_of_another_shape_is_compared_too():
    def state(tensor, number=1):
        kept = {"weights": {"w": tensor}, "optimizer": {}}
        return kept | {"after": kept, "facts": audit.Facts(number)}

    nan = torch.tensor([math.nan])
    assert store.touched(state(nan), state(nan.clone())) == []
    assert store.touched(state(nan), state(torch.ones(1)))
    assert store.touched(state(torch.ones(1)), state(torch.ones(2), 7)) == ["w in update 7"]


def validation_of(folder, change=None):
    """What a replay finds of a validation: `change(parts, logits, labels)` in the trainee's run."""
    (folder / "solution").mkdir(parents=True)
    _, mine, _ = audited(folder, step=functools.partial(validates, change=change))
    _, solution, _ = audited(folder / "solution", step=validates, keep=0)
    return Again().validation(mine, solution)


def test_a_right_validation_is_the_same(tmp_path):
    found = validation_of(tmp_path / "mine")
    assert (found.pixels, found.labels, found.buffers) == ([0.0, 0.0], [True, True], 0.0)


def test_outputs_of_zeros_are_the_same_and_what_is_no_number_is_nowhere():
    """The classifier of torchvision's vision transformers begins with zeros."""
    zeros, ones, none = torch.zeros(2), torch.ones(2), torch.full((2,), torch.nan)
    assert distances.outputs([zeros], [zeros]) == 0
    assert distances.outputs([ones], [zeros]) == math.inf
    for order in ([none, ones], [ones, none]):
        assert distances.outputs(order, [ones, ones]) == math.inf


@pytest.mark.parametrize(("factor", "far"), [(1, False), (1.01, True)])
def test_buffers_of_a_validation_are_compared_with_those_of_process_0(monkeypatch, factor, far):
    again = Again()
    first = {name: factor * buffer.double() for name, buffer in again._buffers.items()}
    mine = again._buffers | {"mean": torch.zeros(3)}
    assert again._off_process_0(mine) == 0
    monkeypatch.setattr(replay, "in_each_process", lambda here: [first, here])
    assert (again._off_process_0(mine) > 1e-3) is far
    assert again._off_process_0(None) is None
    monkeypatch.setattr(replay, "in_each_process", lambda here: [None, here])
    assert again._off_process_0(mine) is None


def test_what_has_another_dtype_is_not_equal():
    one = torch.ones(2)
    assert [distances.equal(one, other) for other in (one, one.half(), 2 * one)] == [1, 0, 0]


def test_a_right_model_may_have_more_buffers_than_the_solutions(tmp_path):
    again = Again()
    kept = {name: tensor.clone() + 1 for name, tensor in again._buffers.items()}
    again._put({}, kept | {"mean": torch.zeros(3)}, None)
    assert torch.equal(again._buffers["1.running_var"], kept["1.running_var"])


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(value, file):
        if str(file).endswith(".pt") and "update-" in str(file) and not tried:
            tried.append(file)
            raise RuntimeError("unexpected pos 0 vs 512")
        torch_save(value, file)

    tried, torch_save = [], torch.save
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=rf"\[Errno {errno.ENOSPC}\] {store.NO_ROOM} \(unexpected"):
        audited(tmp_path, keep=6)


def other_labels(parts, logits, labels):
    parts.criterion(logits, logits.argmax(1))


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (None, []),
        (other_labels, ["val-labels"]),
        (lambda parts, logits, labels: None, []),  # a function computes the losses
    ],
)
def test_other_labels_in_a_validation_are_refused(tmp_path, change, fails):
    every = made.every(32, 10) | {"validation": validation_of(tmp_path / "mine", change).written()}
    again = log.Run("again")
    again.replay = made.replayed(made.updates(8), every)
    found = judged.validated([judged.Audited(log.Run(Path("mine")), again, "fp32")])
    assert [(f.key, f.hint) for f in found if f.fails] == [(key, "evaluation") for key in fails]


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        ({"pixels": [0, 0.03]}, "pixels of the validation", "evaluation"),
        ({"pixels": [None]}, "pixels of the validation", "evaluation"),
        ({"buffers": 1e-4}, "batch statistics of the validation", "evaluation"),
        ({"buffers": math.nan}, "batch statistics of the validation", "evaluation"),
    ],
)
def test_other_images_or_batch_statistics_are_refused(change, what, hint):
    again, every = log.Run("again"), made.every(32, 10)
    every["validation"] |= change
    again.replay = made.replayed(made.updates(8), every)
    first = log.Run("again", replay=made.replayed([], made.every(32, 10)))
    runs = [judged.Audited(log.Run(Path("mine")), r, "fp32") for r in (first, again)]
    (found,) = judged.validated(runs)
    assert (found.what, found.hint, found.fails) == (what, hint, True)


# Right trainers of another make ------------------------------------------------------------------


def test_a_criterion_may_name_its_arguments_as_it_likes():
    logits, labels = torch.zeros(2, 3), torch.zeros(2)
    for args, kwargs in (
        ((), {"logits": logits, "truth": labels}),
        ((), {"target": labels, "input": logits}),
        ((logits,), {"target": labels}),
        ((logits, labels), {}),
    ):
        found = readings.given(args, kwargs)
        assert found[0] is logits
        assert found[1] is labels


def test_a_criterion_that_is_no_module_has_no_hook():
    for criterion in (functools.partial(torch.nn.functional.cross_entropy), None):
        assert calls.hook_loss(SimpleNamespace(criterion=criterion), print) == []
    assert calls.hook_loss(SimpleNamespace(), print) == []
    assert len(calls.hook_loss(training(), print)) == 1


def test_an_optimizer_derived_from_torchs_counts_as_that():
    class Counting(torch.optim.AdamW):
        pass

    weights = [torch.nn.Parameter(torch.zeros(1))]
    assert readings.kind(Counting(weights)) == "AdamW"
    assert readings.kind(torch.optim.SGD(weights)) == "SGD"
    assert readings.kind(torch.optim.Adam(weights)) == "Adam"
    assert readings.kind(torch.optim.Adam(weights, decoupled_weight_decay=True)) == "AdamW"
    assert readings.kind(SimpleNamespace()) == "SimpleNamespace"


def test_a_training_may_be_a_class_with_slots():
    @dataclasses.dataclass(slots=True)
    class Parts:
        model: object
        scaler: object

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    assert readings.scale(Parts(None, scaler)).item() == 65536
    assert readings.scale(SimpleNamespace(model=None)) is None


def test_a_model_may_normalize_its_images_itself():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    seen = []
    for given in (images, normalize(images)):
        auditor = SimpleNamespace(_places=None)
        seen.append(audit.Auditor._sample(auditor, given))
    assert torch.equal(*seen)


def test_a_process_group_that_was_left_is_kept_to_the_end(tmp_path, monkeypatch):
    """DDP must not free it: see `distributed.keep_group`."""
    kept = []
    monkeypatch.setattr(distributed, "_kept", kept)
    distributed.keep_group()
    assert kept == [], "one process has none"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    everyone = torch.distributed.group.WORLD
    distributed.keep_group()
    distributed.leave_group()
    assert not distributed.are_joined()
    assert kept == [everyone]
    distributed.leave_group()
