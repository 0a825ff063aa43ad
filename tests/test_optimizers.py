"""Notebook 08's optimizers equal timm's; the finder of rates leaves no trace."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import steps
import torch
from made import in_one_job

from dlojz import course
from dlojz.runs import log
from dlojz.training import checkpoint, finder, imports
from dlojz.watch import solved

LIMIT = torch._dynamo.config.recompile_limit
with torch._dynamo.config.patch(recompile_limit=LIMIT):  # timm changes it as it is imported
    import timm.optim.muon

SOLUTION = course.solution("08")
OPTIMIZERS = ("sgd", "adamw", "lamb", "lars", "lion", "muon")
SMALL = "--model shufflenet_v2_x0_5 --image-size 32 -b 8 --num-workers 0".split()
SOLVED, PREPARED = SOLUTION.with_name("optimizers.py"), course.prepared("08_large_batch")
ours, prepared = imports.from_file(SOLVED, "ours"), imports.from_file(PREPARED, "prepared")


def test_only_the_paragraphs_of_the_trainee_are_prepared():
    handed_out, solved_one = PREPARED.read_text(), SOLVED.read_text()
    assert steps.problems(handed_out, solved_one, "08") == []
    assert handed_out.count("# TODO 08") == 2


# The updates -------------------------------------------------------------------------------------


def model():
    """A model with a convolution, norms and matrices, wide and tall, in float64."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 40),
        torch.nn.LayerNorm(40),
        torch.nn.Linear(40, 12),
        torch.nn.Linear(12, 4),
    ).double()


def updates(optimizer, of, times=6):
    """The weights of a model after each of a few updates."""
    found, generator = [], torch.Generator().manual_seed(1)
    for _ in range(times):
        images = torch.randn(5, 3, 4, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        of(images).square().mean().backward()
        optimizer.step()
        found.append([w.detach().clone() for w in of.parameters()])
    return found


def built(name, of, lr=0.01, wd=0.1):
    args = SimpleNamespace(optimizer=name, lr=lr, mom=0.9, wd=wd)
    return ours.build(args, of)


def timms(name, of, lr=0.01, wd=0.1):
    """The same optimizer of timm."""
    groups = ours.groups(of, wd)
    if name == "muon":
        adam = {"use_fallback": True, "nesterov": False, "eps": 1e-8, "betas": (0.9, 0.999)}
        last = {"params": [groups[0]["params"].pop()], "weight_decay": wd}
        groups = [groups[0], last | adam, groups[1] | adam]
        more = {"momentum": 0.95, "nesterov": True, "ns_coefficients": "original"}
        return timm.optim.Muon(groups, lr, **more)
    more = {"lamb": {"max_grad_norm": None}, "lars": {"momentum": 0.9}, "lion": {}}[name]
    return getattr(timm.optim, name.capitalize())(groups, lr, **more)


@pytest.mark.parametrize("name", ["lamb", "lars", "lion", "muon"])
def test_updates_are_those_of_timm(name, monkeypatch):
    exact = partial(timm.optim.muon.zeropower_via_newtonschulz, dtype=torch.float64)
    monkeypatch.setattr(timm.optim.muon, "zeropower_via_newtonschulz", exact)  # else in bf16
    one, other = model(), model()
    first = [w.detach().clone() for w in one.parameters()]
    pairs = zip(updates(built(name, one), one), updates(timms(name, other), other), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        for begin, a, b in zip(first, mine, theirs, strict=True):
            moved = (b - begin).norm()
            assert moved > 0
            assert (a - b).norm() <= 1e-6 * moved, f"update {number} of {list(begin.shape)}"


@pytest.mark.parametrize(
    ("name", "kept"), [("adamw", 2), ("lamb", 2), ("lars", 1), ("lion", 1), ("muon", 1)]
)
def test_a_state_has_as_many_values_for_each_weight(name, kept):
    one = model()
    optimizer = built(name, one)
    updates(optimizer, one, times=1)
    for number, weight in enumerate(one.parameters()):
        values = sum(v.numel() for v in optimizer.state[weight].values() if v.numel() > 1)
        adams = name == "muon" and (weight.ndim == 1 or number == 9)  # the classifier
        assert values == (2 if adams else kept) * weight.numel()


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "lion", "muon"])
def test_norms_and_biases_do_not_decay(name):
    one = model()
    for weight in one.parameters():
        weight.grad = torch.zeros_like(weight)
    before = [w.detach().clone() for w in one.parameters()]
    built(name, one, lr=0.1, wd=0.5).step()
    for weight, old in zip(one.parameters(), before, strict=True):
        assert torch.equal(weight, old) == (weight.ndim == 1)


@pytest.mark.parametrize("name", ["lamb", "lars", "lion", "muon"])
def test_a_layer_of_zeros_learns_all_the_same(name):
    one = model()
    with torch.no_grad():
        one[5].weight.zero_()
        one[3].weight.zero_()
    one[3].weight.requires_grad_(False)  # no gradient at all
    optimizer = built(name, one)
    for weight in one.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    one[0].weight.grad.zero_()
    optimizer.step()
    assert all(w.isfinite().all() for w in one.parameters())
    assert one[5].weight.norm() > 0
    assert one[3].weight.norm() == 0


def test_the_ratio_of_a_layer_is_known_without_its_values():
    """A device that has no values can't be waited for."""
    weight = torch.empty(4, 3, device="meta")
    ratio = ours.trust_ratio(weight, weight)
    assert (ratio.shape, ratio.device.type) == ((), "meta")
    assert ours.trust_ratio(weight[0], weight[0]).device.type == "meta"


@pytest.mark.parametrize(
    ("weight", "update", "expected"),
    [
        ([[3.0, 4.0]], [[0.0, 2.0]], 2.5),
        ([[0.0, 0.0]], [[0.0, 2.0]], 1),
        ([[3.0, 4.0]], [[0.0, 0.0]], 1),
        ([3.0, 4.0], [0.0, 2.0], 1),
    ],
)
def test_a_trust_ratio_is_that_of_the_lengths(weight, update, expected):
    weight, update = torch.tensor(weight), torch.tensor(update)
    assert ours.trust_ratio(weight, update) == pytest.approx(expected)
    assert prepared.trust_ratio(weight, update) == 1


@pytest.mark.parametrize("shape", [(8, 8), (4, 90), (90, 4), (1, 7)])
def test_singular_values_of_muons_matrix_are_near_one(shape):
    for seed in range(10):
        torch.manual_seed(seed)
        matrix = torch.randn(shape, dtype=torch.float64)
        values = torch.linalg.svdvals(ours.orthogonal(matrix))
        usual = torch.linalg.svdvals(matrix)
        if usual.min() > 0.01 * usual.max():  # a smaller one would need a further iteration
            assert 0.67 < values.min() <= values.max() < 1.14


# In the trainer ----------------------------------------------------------------------------------


def made_training(*flags, updates=10):
    """A trainer of 08, its arguments and its training."""
    trainer, argv = solved.imported(SOLUTION), [str(SOLUTION), *SMALL, "--precision", "fp32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*argv, *map(str, flags)])
        args = trainer.parse_args()
    torch.manual_seed(args.seed)
    training = trainer.build_training(args, torch.device("cpu"), 10, updates)
    training.model.train()
    return trainer, args, training


def trained(trainer, args, training, steps):
    nothing = SimpleNamespace(forward=int, backward=int, update=int)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
        trainer.train_step(0, training, images, torch.arange(4), args, nothing)


def rates(training, steps):
    """The rates of each group of weights in each update."""
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in training.optimizer.param_groups])
        training.optimizer.step()
        training.scheduler.step()
    return [*zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("schedule", "last"), [("onecycle", 0), ("cosine", math.pi**2 / 4 / 90**2), ("constant", 1)]
)
def test_a_schedule_reaches_its_peak_once_and_ends_as_it_says(schedule, last):
    how = ("--schedule", schedule, "--warm-up", 0.1, "--lr", 0.5, "--optimizer", "muon")
    _, _, training = made_training(*how, updates=100)
    found = rates(training, 100)
    assert len(found) == 3, "muon has three groups of weights"
    assert found[0] == found[1] == found[2]
    own = found[0]
    assert max(own) == pytest.approx(0.5)
    assert own.index(max(own)) == 9, "the tenth of 100 updates"
    assert own[:10] == tuple(sorted(own[:10]))
    assert own[9:] == tuple(sorted(own[9:], reverse=True))
    assert own[-1] / 0.5 == pytest.approx(last, abs=2e-4)
    if schedule != "onecycle":
        assert own[:10] == pytest.approx([0.05 * n for n in range(1, 11)])


def test_by_default_a_rate_is_the_one_of_the_steps_before():
    _, _, training = made_training("--lr", 0.5)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.5)
    usual = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 10, cycle_momentum=False)
    mine = SimpleNamespace(optimizer=optimizer, scheduler=usual)
    assert rates(training, 10) == rates(mine, 10)


def test_groups_keep_their_own_rates(monkeypatch):
    build = partial(ours.build)

    def two_rates(args, model):
        optimizer = build(args, model)
        optimizer.param_groups[1]["lr"] /= 10
        return optimizer

    trainer = solved.imported(SOLUTION)
    own = trainer.imports.beside(trainer.__file__, "optimizers")
    monkeypatch.setattr(own, "build", two_rates)
    for schedule in ("onecycle", "cosine", "constant"):
        _, _, training = made_training("--optimizer", "lamb", "--schedule", schedule)
        matrices, others = rates(training, 10)
        assert others == pytest.approx([rate / 10 for rate in matrices])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resume_gives_the_same_weights(name, tmp_path, monkeypatch):
    how = ("--optimizer", name, "--schedule", "onecycle" if name == "sgd" else "cosine")
    trainer, args, whole = made_training(*how, "--lr", 0.01)
    trained(trainer, args, whole, range(2))
    args.checkpoint = args.resume = tmp_path / "saved.pt"
    checkpoint.save(whole, [checkpoint.own_state(whole)], args, 0, 2)
    trained(trainer, args, whole, range(2, 4))
    _, _, rest = made_training(*how, "--lr", 0.01, "--seed", 7)
    assert checkpoint.load(rest, args) == (0, 2)
    trained(trainer, args, rest, range(2, 4))
    assert state(rest) == state(whole)


def test_a_resume_with_another_optimizer_or_schedule_is_refused(tmp_path):
    trainer, args, training = made_training("--optimizer", "lion")
    trained(trainer, args, training, range(1))
    args.checkpoint = args.resume = tmp_path / "saved.pt"
    checkpoint.save(training, [checkpoint.own_state(training)], args, 0, 1)
    for name, value in {"optimizer": "lars", "schedule": "constant", "warm_up": 0.1}.items():
        other = copy.copy(args)
        setattr(other, name, value)
        with pytest.raises(checkpoint.CheckpointError, match=f"{name} .*this run has {value!r}"):
            checkpoint.load(training, other)


# The finder --------------------------------------------------------------------------------------


def state(training):
    """All that a training holds, in values that can be compared."""

    def plain(value):
        if torch.is_tensor(value):
            return value.dtype, value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [*map(plain, value)] if isinstance(value, list | tuple) else value

    own = {name: part.state_dict() for name, part in checkpoint.parts(training).items()}
    own["buffers"] = dict(training.model.named_buffers())
    return plain(own)


def fake(losses):
    """A training whose losses are given; it notes the rates that it had."""
    weight = torch.nn.Linear(1, 1)
    training = SimpleNamespace(model=weight, optimizer=torch.optim.SGD(weight.parameters(), 7.0))
    seen, left = [], iter(losses)

    def train(images, labels):
        seen.append([group["lr"] for group in training.optimizer.param_groups])
        return next(left)

    return training, train, seen


def test_rates_grow_by_a_factor_from_the_lowest_to_the_highest():
    training, train, seen = fake([1.0] * 7)
    table = ours.find_rate(training, train, [(0, 0)] * 7, lowest=1e-5, highest=10.0)
    assert [rate for rate, _ in table] == pytest.approx([10.0**n for n in range(-5, 2)])
    assert seen == [[rate] for rate, _ in table]
    assert training.optimizer.param_groups[0]["lr"] == 7.0


@pytest.mark.parametrize("last", [2.0, 9.0, float("inf"), float("nan")])
def test_a_loss_four_times_the_lowest_ends_the_search(last):
    training, train, _ = fake([3.0, 0.5, 1.99, last, 0.1])
    table = ours.find_rate(training, train, [(0, 0)] * 5)
    assert [loss for _, loss in table][:-1] == [3.0, 0.5, 1.99]
    assert len(table) == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_finder_leaves_all_as_it_was(name):
    trainer, args, training = made_training("--optimizer", name, "--mix", "cutmix")
    trained(trainer, unmixed(args), training, range(1))
    before, generator = state(training), torch.get_rng_state()
    train = finder.updating(trainer.train_step, training, args)
    batches = [(torch.full((4, 3, 32, 32), n, dtype=torch.uint8), torch.arange(4)) for n in (9, 99)]
    table = ours.find_rate(training, train, batches, lowest=0.1)
    assert len(table) == 2
    assert state(training) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(w.grad is None for w in training.model.parameters())


def unmixed(args):
    found = copy.copy(args)
    found.mix = "off"
    return found


def test_without_putting_back_the_weights_would_differ(monkeypatch):
    trainer, args, training = made_training("--optimizer", "lamb")
    before = state(training)
    monkeypatch.setattr(finder, "put_back", lambda *_: None)
    train = finder.updating(trainer.train_step, training, args)
    batch = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4)
    ours.find_rate(training, train, [batch], lowest=0.1)
    found = state(training)
    changed = {name for name in before if found[name] != before[name]}
    assert {"model", "optimizer", "metrics", "buffers"} <= changed


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Trainings of two processes, with and without a finder before; and with the prepared file."""
    folder = tmp_path_factory.mktemp("unedited")
    unedited = folder / "dlojz.py"
    unedited.write_text(SOLUTION.read_text())
    unedited.with_name("optimizers.py").write_bytes(PREPARED.read_bytes())
    flags = [*SMALL, "--data", images, "--precision", "fp32", "-e", 2, "--optimizer", "lamb"]
    flags += ["--num-workers", 1, "--warm-up", 0.1, "--schedule", "cosine", "--lr", 0.01]
    wanted = {"usual": (SOLUTION, flags), "found": (SOLUTION, [*flags, "--find-lr", 6])}
    wanted["unedited"] = unedited, flags
    wanted["todo"] = unedited, [*flags, "--find-lr", 6]
    return in_one_job(wanted, 2, all_complete=False)


def test_a_training_begins_as_if_no_rate_had_been_tried(runs):
    found, usual = (log.read_ranks(runs[name]) for name in ("found", "usual"))
    for mine, other in zip(found, usual, strict=True):
        assert len(mine.steps) == 8
        assert list(mine.steps.loss) == list(other.steps.loss)
        assert mine.whole.drawn == other.whole.drawn
        assert mine.whole.weights_after == other.whole.weights_after
        assert mine.epochs == other.epochs


def test_several_processes_find_one_table(runs):
    """64 images make 4 batches for each process in an epoch: six need a second one."""
    one, other = (run.rates for run in log.read_ranks(runs["found"]))
    assert len(one.rates) == len(one.losses) == 6
    assert one == other
    assert one.rates[0], one.rates[-1] == pytest.approx((1e-5, 10))
    assert log.read(runs["usual"]).rates.rates == []
    first = [run.steps.loss[0] for run in log.read_ranks(runs["usual"])]
    assert one.losses[0] == pytest.approx(sum(first) / 2)
    assert first[0] != first[1], "each process has images of its own"


def test_the_prepared_file_trains_unedited(runs):
    run = log.read(runs["unedited"])
    assert run.end["outcome"] == "completed"
    assert run.setup["optimizer"] == "Lamb"
    assert list(run.steps.loss) != list(log.read(runs["usual"]).steps.loss)


def test_its_finder_says_what_is_left_to_do(runs):
    end = log.read(runs["todo"]).end
    assert end["outcome"] == "failed"
    assert end["error"].startswith("NotImplementedError: TODO 08b: try one rate after the other")
