"""`dlojz pair` names what differs in the first steps of two programs, and times them."""

import json
import subprocess
import sys

import pytest
import torch

from dlojz import cli, launch
from dlojz.course import UserError
from dlojz.pairing import accounts, steps
from dlojz.pairing.logs import by_logs
from dlojz.pairing.steps import by_steps
from dlojz.watch import account

PROGRAM = """
import sys
import torch
from torch import nn
torch.seed() if "unseeded" in sys.argv else torch.manual_seed(0)
if "fails" in sys.argv:
    raise ValueError("on purpose")
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
if "channels_last" in sys.argv:
    net = net.to(memory_format=torch.channels_last)
decay = 0.01 if "decay" in sys.argv else 0.0
if "hand" in sys.argv:
    class ByHand:
        def __init__(self, weights, lr, weight_decay):
            self.weights, self.zero_grad = list(weights), net.zero_grad
        def step(self):
            for weight in self.weights:
                weight.data.sub_(weight.grad, alpha=0.1)
    torch.optim.SGD = ByHand
kind = torch.optim.Adam if "adam" in sys.argv else torch.optim.SGD
optimizer = kind(net.parameters(), 0.1, weight_decay=decay)
data = torch.utils.data.TensorDataset(torch.randn(160, 3, 8, 8), torch.randint(4, (160,)))
if "dark" in sys.argv:
    data.tensors[0].mul_(0.5)
for epoch in range(40):
    loader = torch.utils.data.DataLoader(data, 4 if "half" in sys.argv else 8, shuffle=True)
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in sys.argv):
            loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        for _ in range(2 if "twice" in sys.argv else 1):
            loss.backward(retain_graph="twice" in sys.argv)
        optimizer.step()
"""
# By name: its flag, and the environment of its process.
RUNS = {name: (name, {}) for name in ("before", "again", "channels_last", "half", "decay", "adam")}
RUNS |= {name: (name, {}) for name in ("autocast", "dark", "twice", "unseeded", "unseeded-again")}
RUNS |= {"hand": ("hand", {})}
RUNS |= {"nudged": ("before", {"DLOJZ_NUDGE": "1"})}
RUN = """
import json, os, sys
import torch
from dlojz.watch import program
for folder, flag, environment in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.environ |= environment | {"DLOJZ_RUN": folder}
        sys.argv = ["program", flag.removesuffix("-again")]
        try:
            program.run("train.py")
        except SystemExit:
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of each account, by name."""
    top = tmp_path_factory.mktemp("accounts")
    (top / "train.py").write_text(PROGRAM)
    folders = {name: top / name for name in RUNS}
    common = {"DLOJZ_ACCOUNT": "6", "DLOJZ_STEPS": "6"}
    words = [(str(folders[name]), flag, env | common) for name, (flag, env) in RUNS.items()]
    command = [sys.executable, "-c", RUN]
    subprocess.run(command, input=json.dumps(words), text=True, check=True, cwd=top, timeout=120)
    return folders


def compared(runs, name):
    return accounts.compared(runs["before"], runs[name], runs["nudged"], runs["again"])


def test_the_same_program_has_the_same_work_and_losses(runs):
    found = compared(runs, "again")
    assert (found.work, found.apart, found.off, found.steps) == ((), None, 0.0, 6)
    assert found.band > 0
    assert found.lines[0].startswith("work: the same images, passes, updates and settings")


@pytest.mark.parametrize(
    ("name", "difference", "apart"),
    [
        ("half", "the batch: float32 [8, 3, 8, 8], int64 [8], then float32 [4, 3, 8, 8]", 0),
        ("decay", "weight_decay of SGD: 0.0, then 0.01", 1),
        ("adam", "the optimizer: SGD, then Adam", 1),
        ("autocast", "autocast: off, then bfloat16", 0),
        (
            "channels_last",
            "layouts of the model's weights: 1 of NCHW, then 1 of channels_last",
            None,
        ),
        ("dark", "the images have other values, and their labels the same", 0),
        ("twice", "1 backwards, then 2", 1),
    ],
)
def test_a_change_is_named(runs, name, difference, apart):
    found = compared(runs, name)
    assert any(work.startswith(difference) for work in found.work), found.work
    assert found.apart == apart
    assert len(found.work) == 1


def test_a_loss_in_16_bits_is_told_from_a_mistake(runs):
    assert "and one in bfloat16" in compared(runs, "autocast").lines[-1]


def test_a_program_without_a_seed_is_compared_by_its_work_alone(runs):
    found = accounts.compared(runs["unseeded"], runs["decay"], None, runs["unseeded-again"])
    assert found.unseeded
    assert found.work == ("weight_decay of SGD: 0.0, then 0.01 (step 0)",)
    assert "seed Python's, NumPy's and torch's generators" in found.lines[-1]


def test_updates_by_hand_are_not_called_the_same(runs):
    found = accounts.compared(runs["hand"], runs["hand"])
    assert (found.work, found.steps) == ((), 6)
    assert "no optimizer of torch, whose settings would be seen" in found.lines[0]
    assert any("SGD, then none of torch" in work for work in compared(runs, "hand").work)


def test_a_sparse_tensor_is_told_by_its_shape():
    one = account.Account()
    one.batch([torch.eye(3).to_sparse()])
    assert one.closed(None, None)["batch"] == [[[3, 3], "float32 sparse_coo", None]]


def test_the_parts_of_a_step_add_up(course_folder, capsys):
    (course_folder / "train.py").write_text(PROGRAM)
    found = by_steps("train.py", "train.py decay", pairs=1, steps=30)
    assert found.account.apart == 1
    assert found.speed.pairs == 1
    rows = {row[0]: row[1:] for row in found.parts.rows}
    *added, whole = [float(row[2]) for row in rows.values() if row[2]]
    assert sum(added) == pytest.approx(whole, abs=0.006 * len(added))
    assert found.to_dict()["speed"]["ratio"] == found.speed.ratio
    assert steps.UNSEEN in repr(found)


def test_a_program_that_fails_is_named(course_folder):
    (course_folder / "train.py").write_text(PROGRAM)
    with pytest.raises(
        UserError, match=r"after: .*train.py ended with exit code 1(.|\n)*on purpose"
    ):
        by_steps("train.py", "train.py fails", pairs=1, steps=30)


def test_two_jobs_are_compared_by_their_logs(course_folder, capsys):
    (course_folder / "train.py").write_text(PROGRAM)
    jobs = launch.submit(["train.py", "train.py half"], watch=True)
    assert [job.wait() for job in jobs] == ["COMPLETED"] * 2
    found = by_logs(1, 2)
    assert found.work == ("batch size: 8, then 4", "images of a step: 8, then 4 (step 0)")
    assert (found.apart, found.steps) == (0, 800)
    assert found.half > 0
    assert by_logs("1", "0001").work == ()
    assert cli.main(["pair", "1", "2"]) == 0
    said = capsys.readouterr().out
    assert "losses: apart from step 0 on, by up to" in said
    spread, busy = "by the spread of the steps within each job", "not to be judged, for the reas"
    assert (busy if found.cautions else spread) in said
    assert cli.main(["pair", "1", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == found.ratio
    other = launch.submit("train.py")
    with pytest.raises(UserError, match=r"is (QUEUED|RUNNING), expected COMPLETED: wait for it"):
        by_logs(1, other.id)
    other.wait()
    with pytest.raises(UserError, match="no training steps in a log: expected a job of `dlojz w"):
        by_logs(1, other.id)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["7", "8"], "no job '7'"),
        (["7", "train.py"], "expected the numbers of two jobs"),
        (["7", "8", "--seeds", "3"], "expected the numbers of two jobs and no flag but --json"),
    ],
)
def test_a_wrong_pair_of_jobs_is_told(course_folder, capsys, words, error):
    assert cli.main(["pair", *words]) == 2
    assert error in capsys.readouterr().err


def test_flags_of_whole_trainings_ask_for_seeds(capsys):
    assert cli.main(["pair", "a.py", "b.py", "--read", "(x)"]) == 2
    assert "add --seeds 5" in capsys.readouterr().err


def test_a_frozen_layer_is_work_that_differs():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    before = account.Account().closed(model, None)
    model[0].requires_grad_(False)
    after = account.Account().closed(model, None)
    told = "trained parameters of the model's weights: 23, then 8"
    assert [*accounts._work([(before, after)], unseeded=False)] == [told]
