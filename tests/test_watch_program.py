"""`dlojz.watch.program` runs programs of any make unchanged, and logs what they do."""

import json
import re
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dlojz.figures import report
from dlojz.figures.diagnosis import CURES, diagnosis
from dlojz.runs import log, stats
from dlojz.traces import breakdown, suspects, trace
from dlojz.watch import observer

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(4, (160,)))
loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
entropy, sgd = nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1)
"""
PROGRAMS = {
    "usual": """
        import beside
        for epoch in range(2):
            net.train()
            for x, y in loader:
                loss = entropy(net(x), y)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
            net.eval()
            with torch.no_grad():
                for x, y in torch.utils.data.DataLoader(data, 40):
                    net(x)
        print("last", loss.item(), beside.WORD)
        sys.exit()
        """,
    "accumulation": """
        for step, (x, y) in enumerate(loader):
            (entropy(net(x), y) / 4).backward()
            if step % 4 == 3:
                sgd.step()
                sgd.zero_grad()
        """,
    "no loader": """
        import time
        net = nn.Sequential(nn.Embedding(16, 8), net)
        two = [torch.optim.AdamW(net[0].parameters(), 0.01), sgd]
        for step in range(20):
            time.sleep(0.1 * (step % 8 == 7))
            for _ in range(3):
                x = torch.randint(16, (2, 5))
                entropy(net(x).flatten(0, 1), x.flatten() % 4).backward()
            for optimizer in two:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "closure": """
        def closure():
            sgd.zero_grad()
            loss = entropy(net(x), y)
            loss.backward()
            return loss
        for x, y in loader:
            sgd.step(closure)
        """,
    "closures": """
        x, y = data[:8]
        lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=3)
        def closure():
            lbfgs.zero_grad()
            loss = entropy(net(x), y)
            loss.backward()
            return loss
        for _ in range(20):
            lbfgs.step(closure)
        """,
    "scaler": """
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
            assert loss < 10
        """,
    "adversary": """
        other, adam = nn.Linear(4, 8), None
        adam = torch.optim.Adam(other.parameters())
        for x, y in loader:
            fake = other(torch.randn(8, 4))
            for images in (x, fake.detach()):
                net(images).mean().backward()
            sgd.step()
            net(fake).mean().backward()
            adam.step()
        """,
    "a copy": """
        import copy
        for x, y in loader:
            entropy(net(x), y).backward()
            sgd.step()
            average = copy.deepcopy(net).eval()
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(data, 40):
                average(x)
        torch.save(net, "whole.pt")
        """,
    "detection": """
        class Detector(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = nn.Conv2d(1, 4, 3)
            def forward(self, images, targets):
                pairs = zip(images, targets)
                return sum(entropy(self.inside(x).mean((1, 2)), t["label"]) for x, t in pairs)
        pictures = [(torch.randn(1, 8, 8 + n % 3), {"label": data[n][1]}) for n in range(80)]
        del net
        net = Detector()
        sgd.add_param_group({"params": net.parameters()})
        pile = lambda batch: tuple(zip(*batch))
        for x, targets in torch.utils.data.DataLoader(pictures, 4, collate_fn=pile):
            net(x, targets).backward()
            sgd.step()
        """,
    "samples": """
        picture = lambda batch: torch.stack([sample["image"].mean((1, 2)) for sample in batch])
        pictures = [{"image": torch.randn(8, 6, 6 + n % 3), "label": n % 4} for n in range(80)]
        for batch in torch.utils.data.DataLoader(pictures, 4, collate_fn=list):
            labels = torch.tensor([sample["label"] for sample in batch])
            entropy(net(picture(batch)), labels).backward()
            sgd.step()
        """,
    "named lists": """
        pictures = [(torch.randn(8, 6, 6 + n % 3), n % 4) for n in range(80)]
        pile = lambda batch: dict(zip(("images", "labels"), map(list, zip(*batch))))
        for batch in torch.utils.data.DataLoader(pictures, 4, collate_fn=pile):
            x = torch.stack([image.mean((1, 2)) for image in batch["images"]])
            entropy(net(x), torch.tensor(batch["labels"])).backward()
            sgd.step()
        """,
    "a stream": """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.randn(8), 0
        batches = iter(torch.utils.data.DataLoader(Stream(), 8))
        for _ in range(20):
            x, y = next(batches)
            entropy(net(x), y).backward()
            sgd.step()
        """,
    "evaluation mode": """
        net.eval()
        for x, y in loader:
            entropy(net(x), y).backward()
            sgd.step()
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(data, 40):
                net(x)
        """,
    "turns": """
        other = nn.Linear(4, 8)
        adam = torch.optim.Adam(other.parameters())
        for _ in range(20):
            net(torch.randn(8, 8)).mean().backward()
            sgd.step()
            net(other(torch.randn(8, 4))).mean().backward()
            adam.step()
        for _ in range(20):
            net(torch.randn(8, 8)).mean().backward()
            sgd.step()
        """,
    "parts": """
        for _ in range(20):
            sum(net[2](net[0](torch.randn(8, 8))).mean() for _ in range(3)).backward()
            sgd.step()
        """,
    "graphs": """
        class Graph:
            def __init__(self, batch):
                edges = torch.eye(8).to_sparse()
                self._store = {"x": torch.stack([x for x, _ in batch]), "edges": edges}
                self.y = torch.stack([y for _, y in batch])
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = nn.Linear(8, 4)
            def forward(self, graph):
                return self.inside(graph._store["edges"] @ graph._store["x"])
        net = Net()
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        for graph in torch.utils.data.DataLoader(data, 8, collate_fn=Graph):
            entropy(net(graph), graph.y).backward()
            sgd.step()
        """,
    "own updates": """
        del sgd
        net[0] = nn.Embedding(16, 16)
        for _ in range(20):
            entropy(net(torch.randint(16, (8, 5))).flatten(0, 1), torch.zeros(40).long()).backward()
            for weight in net.parameters():
                weight.data.add_(weight.grad, alpha=-0.1)
                weight.grad = None
        """,
    "an error": """
        for step, (x, y) in enumerate(loader):
            if step == 5:
                raise KeyError("in the sixth step")
            entropy(net(x), y).backward()
            sgd.step()
        """,
    "no training": "print(net(torch.ones(1, 8)).shape)",
}
# One process imports torch; each program has a fork of it.
RUN = """
import json, os, sys
import torch
from dlojz.watch import program
for name, folder in json.load(sys.stdin).items():
    if (child := os.fork()) == 0:
        os.dup2(os.open(f"{folder}/out.txt", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        os.environ["DLOJZ_RUN"] = folder
        os.chdir(folder)
        sys.argv, sys.path[0] = ["program", "--flag", "1"], folder
        code = 0
        try:
            program.run(f"{folder}/train.py")
        except SystemExit as ending:
            code = ending.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep="=")
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The folder of each program, and its exit code."""
    folders = {}
    for name, source in PROGRAMS.items():
        folder = folders[name] = tmp_path_factory.mktemp("watched")
        source = f"import sys\n{BEGIN}\nassert sys.argv[1:] == ['--flag', '1']\n" + textwrap.dedent(
            source
        )
        (folder / "train.py").write_text(source)
        (folder / "beside.py").write_text("WORD = 'beside'")
    words = json.dumps({name: str(folder) for name, folder in folders.items()})
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=words, capture_output=True, text=True, timeout=120
    )
    codes = dict(line.split("=") for line in done.stdout.splitlines())
    return {name: (folder, int(codes[name])) for name, folder in folders.items()}


def read(watched, name):
    folder, code = watched[name]
    assert code == 0, (folder / "out.txt").read_text()
    return log.read(folder)


def sums(run):
    """Return the ms in each phase of all steps."""
    return {phase: sum(ms) for phase, ms in run.steps.host_ms.items()}


def test_a_usual_program_is_logged_as_the_courses_trainer(watched):
    run, (folder, _) = read(watched, "usual"), watched["usual"]
    assert len(run.steps) == 40
    assert {*run.steps.images} == {8}
    assert {*run.steps.lr} == {0.1}
    assert [*run.steps.epoch] == [0] * 20 + [1] * 20
    assert len(run.validations) == 2
    assert all(ms > 0 for ms in sums(run).values())
    assert run.end["outcome"] == "completed"
    last = float(re.search(r"^last (\S+)", (folder / "out.txt").read_text(), re.M)[1])
    assert run.steps.loss[-1] == pytest.approx(last, rel=1e-6)
    assert "beside" in (folder / "out.txt").read_text()
    summary = stats.summary(folder)
    assert (summary.model, summary.batch_size, summary.optimizer) == ("Sequential", 8, "SGD")
    assert summary.images_per_s > 0


def test_a_few_steps_are_in_a_trace(watched):
    found = breakdown.analyse(trace.open_trace(watched["usual"][0]))
    assert found.steps == 2


def test_a_diagnosis_has_the_time_a_suspect_and_a_cure(watched):
    time, suspect, cure = diagnosis(watched["usual"][0])
    takes = r"time: a step takes [\d.]+ ms on average( and [\d.]+ ms in the median)?"
    parts = r"(\w+ \d+%(, )?){5}"
    assert re.fullmatch(rf"{takes} \(host clock\): {parts}", time)
    assert suspect.startswith("suspect: ")
    assert cure in ("cure: notebook 05_dataloader", "cure: notebook 09_compile"), suspect


def test_a_diagnosis_of_uneven_steps_has_their_mean_and_their_median(watched, monkeypatch):
    summary = stats.summary(watched["usual"][0])
    mean = sum(summary.phase_ms.values())
    monkeypatch.setattr(stats, "summary", lambda run: replace(summary, step_ms=mean / 2))
    time = diagnosis(watched["usual"][0])[0]
    assert f"takes {mean:.3g} ms on average and {mean / 2:.3g} ms in the median" in time


def test_a_run_without_a_trace_is_told_how_to_get_one(watched):
    time, suspect = diagnosis(watched["an error"][0])
    assert time.startswith("time: ")
    assert "no trace" in suspect


def test_each_fault_has_a_notebook_that_is_there():
    assert CURES.keys() == suspects.WORDS.keys() - {"none"}
    solved = Path(__file__).parent.parent / "solutions"
    assert all((solved / f"{name}.ipynb").exists() for name in CURES.values())


def test_a_step_is_a_batch_of_the_loader(watched):
    run = read(watched, "accumulation")
    assert len(run.steps) == 20
    assert [*run.steps.lr][4:] == [0.1] * 16


def test_without_a_loader_a_step_is_an_update(watched):
    run = read(watched, "no loader")
    assert len(run.steps) == 20
    assert {*run.steps.images} == {6}
    assert run.setup["optimizer"] == "AdamW and SGD"
    assert max(sums(run), key=sums(run).get) == "data", "what is between an update and a forward"
    summary = stats.summary(watched["no loader"][0])
    assert summary.tokens_per_s == pytest.approx(5 * summary.images_per_s)
    assert "tokens/s" in repr(report.inspect_run(summary))
    _, suspect, cure = diagnosis(watched["no loader"][0])
    if "does something else" not in suspect:  # a busy machine took the core in the traced steps
        assert "of the time is before the forward pass, in other steps" in suspect
        assert cure == "cure: notebook 05_dataloader"


def test_several_closures_of_an_update_are_one_step(watched):
    run = read(watched, "closures")
    assert len(run.steps) == 20
    assert run.setup["optimizer"] == "LBFGS"


def test_without_an_optimizer_of_torch_an_update_follows_a_backward_pass(watched):
    run = read(watched, "own updates")
    assert len(run.steps) == 20
    assert {*run.steps.images} == {8}
    assert sums(run)["update"] > 0


def test_a_saved_model_can_be_read_without_the_course(watched):
    read(watched, "a copy")
    with zipfile.ZipFile(watched["a copy"][0] / "whole.pt") as saved:
        (pickled,) = (name for name in saved.namelist() if name.endswith("data.pkl"))
        assert b"dlojz" not in saved.read(pickled)


def test_optimizers_that_take_turns_without_a_loader_share_a_step(watched):
    images = [*read(watched, "turns").steps.images]
    assert images[:2] == [8, 8], "the second optimizer is known from its first step on"
    assert images[2:21] == [16] * 19
    assert images[21:] == [8 * observer.TURN] + [8] * (20 - observer.TURN), "it steps no longer"


def test_images_without_a_loader_are_counted_once_for_a_backward_pass(watched):
    assert [*read(watched, "parts").steps.images] == [8] * 20


OTHERS = ["closure", "scaler", "adversary", "a copy", "detection", "samples", "named lists"]
OTHERS += ["a stream", "evaluation mode", "graphs"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_makes_have_steps_with_all_phases(watched, name):
    run = read(watched, name)
    assert len(run.steps) == 20
    assert {*run.steps.images} == {4 if name in ("detection", "samples", "named lists") else 8}
    phases = sums(run)
    assert all(phases[phase] > 0 for phase in ("data", "forward", "backward", "update"))
    if name in ("a copy", "evaluation mode"):
        assert len(run.validations) == 1
    if name == "scaler":
        assert max(run.steps.loss) < 10, "not the scaled one"


def test_an_error_ends_the_log(watched):
    folder, code = watched["an error"]
    run = log.read(folder)
    assert code == 1
    assert len(run.steps) == 5
    assert run.end["outcome"] == "failed"
    assert "in the sixth step" in run.end["error"]
    assert "Traceback" in (folder / "out.txt").read_text()


def test_a_program_that_does_not_train_has_no_log(watched):
    folder, code = watched["no training"]
    assert code == 0
    assert not (folder / "events.jsonl").exists()
