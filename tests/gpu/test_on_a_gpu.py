"""What only a GPU can show; not part of `make test`. With a GPU: pytest tests/gpu."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import wrong

from dlojz import course, launch
from dlojz.chapters.n10_kernels import exercise as kernels
from dlojz.check import audit as judged
from dlojz.images import generate
from dlojz.runs import log, records
from dlojz.runs.stats import summary
from dlojz.training import imports
from dlojz.watch import auditor, normalizing, replay

SOLUTION = course.solution("01")


def run(folder, *flags):
    """The solution as a process of its own; returns its exit status."""
    command = [sys.executable, str(SOLUTION), *map(str, flags)]
    return subprocess.run(command, env={**os.environ, "DLOJZ_RUN": str(folder)}).returncode


def test_fifty_steps_never_wait_for_the_gpu(tmp_path, monkeypatch, train):
    from dlojz.training import data, metrics

    flags = "--test --test-nsteps 50 --epochs 2 --data synthetic --model resnet18 -b 32"
    set_epoch = data.Batches.set_epoch
    epochs = []

    def strict_from_the_second_epoch(self, epoch, first_step=0):
        set_epoch(self, epoch, first_step)
        epochs.append(epoch)
        torch.cuda.set_sync_debug_mode("error" if epoch == 1 else "default")

    compute = metrics.compute_and_reset

    def relaxed(found):  # reading the metrics at the end of an epoch does wait
        torch.cuda.set_sync_debug_mode("default")
        return compute(found)

    monkeypatch.setattr(data.Batches, "set_epoch", strict_from_the_second_epoch)
    monkeypatch.setattr(metrics, "compute_and_reset", relaxed)
    train(SOLUTION, tmp_path, *flags.split(), "--clip-norm", 1)
    assert epochs == [0, 1]
    assert len(log.read(tmp_path).steps) == 100


def test_the_two_clocks_agree_within_one_percent(tmp_path):
    assert run(tmp_path, *"--test --data synthetic --model resnet50 -b 64".split()) == 0
    found = summary(tmp_path)
    assert found.clock == "device"
    assert found.device_images_per_s == pytest.approx(found.images_per_s, rel=0.01)
    assert found.energy_per_image_j > 0
    assert found.ahead_ms > 0


def test_a_resumed_run_is_identical_when_deterministic(tmp_path, train, stop_at_first_save):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    data = generate(tmp_path / "data", 4, 32, 8, progress=False)
    flags = f"--data {data} --model resnet18 --image-size 64 -b 16 -e 2 --deterministic".split()
    file = tmp_path / "half.pt"
    with pytest.raises(KeyboardInterrupt):
        train(SOLUTION, tmp_path / "first", *flags, "--checkpoint", file, "--checkpoint-every", 3)
    train(SOLUTION, tmp_path / "resumed", *flags, "--checkpoint", file, "--resume", file)
    train(SOLUTION, tmp_path / "whole", *flags)
    torch.use_deterministic_algorithms(False)
    whole, resumed = log.read(tmp_path / "whole"), log.read(tmp_path / "resumed")
    assert list(resumed.steps.loss) == list(whole.steps.loss)[3:]
    assert resumed.epochs == whole.epochs


def test_out_of_memory_is_a_result(tmp_path):
    flags = "--test --test-nsteps 2 --data synthetic --model resnet152 -b 4096".split()
    assert run(tmp_path, *flags) == 1
    assert summary(tmp_path).state == "OUT_OF_MEMORY"


def test_the_memory_is_what_the_tensors_held(tmp_path):
    flags = "--test --test-nsteps 4 --data synthetic --model resnet50 -b 32".split()
    assert run(tmp_path, *flags) == 0
    found = summary(tmp_path)
    assert found.memory_of == "device"
    assert 3 * found.parameter_bytes < found.peak_memory_bytes < found.memory_limit_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_collectives_are_timed_on_the_gpus(course_folder, monkeypatch):
    monkeypatch.setenv("DLOJZ_PYTHON", sys.executable)  # a fork could not use CUDA once more
    flags = "--test --data synthetic --model resnet50 -b 64 --precision bf16 --test-nsteps 12"
    job = launch.submit(f"solutions/dlojz_06_ddp.py {flags}", n_gpu=2)
    assert job.wait(180) == launch.State.COMPLETED, job.explain()
    for run in log.read_ranks(job.directory):
        last = run.last
        assert last.timed_on == "gpu"
        assert {c["backend"] for c in last.collectives} == {"nccl"}
        assert 0 <= last.exposed_ms <= last.communication_ms
        begin, end = last.backward_ms
        buckets = [c for c in last.collectives if c["op"] == "all_reduce"]
        assert begin < buckets[0]["begin_ms"] < end, "the first leaves during the backward pass"
    errors = (job.directory / "stderr.txt").read_text()
    assert "destroy_process_group" not in errors


def test_a_step_is_profiled_and_a_block_compiled_before_the_whole_model(tmp_path):
    from dlojz.chapters.n09b_modes import worth

    # A batch whose step the GPU decides; where its host does, that must be quiet.
    into, flags = tmp_path / "worth.json", "--model resnet18 -b 512 --precision bf16"
    program = (sys.executable, "-m", "dlojz.chapters.n09b_modes.measuring", "--measure", "--into")
    trainer = course.solution("09")
    assert subprocess.run([*program, str(into), str(trainer), *flags.split()]).returncode == 0
    row = json.loads(into.read_text())
    found = worth.Profile.of(row["profile"])
    assert found.on_gpu
    assert not found.nchw
    assert min(found.host_ms, found.update_host_ms, found.update_ms) > 0
    assert found.launches["matrix"] >= 50  # 20 convolutions, forward and twice backward
    # No step is shorter than its kernels, and the parts explain most of it.
    explained = worth.modelled_ms(found, worth.NOTHING_DONE)
    assert 0.7 < explained / found.step_ms < 1.3
    assert found.block.name == "layer1.0 (BasicBlock)"
    assert row["measured"]["compile_s"] > found.block.compile_s > 0


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_is_done_again_as_this_gpu_does_it(fused):
    """On a processor a fused AdamW computes with other numbers: 30 to 80 roundings apart."""
    weight = torch.nn.Parameter(torch.linspace(-1e-3, 1e-3, 64, device="cuda"))
    mine = torch.optim.AdamW([weight], 0.01, fused=fused)
    other = weight.detach().clone().requires_grad_()
    solved = replay.Replay.__new__(replay.Replay)
    solved.training = SimpleNamespace(optimizer=torch.optim.AdamW([other], 0.01, fused=True))
    solved.weights, solved._buffers = {"w": other}, {}
    solved.rates, solved.device = [[0.01]] * 6, weight.device
    begun = {"buffers": {}, "cpu_rng": torch.get_rng_state(), "cuda_rng": None}

    def state():
        kept = {f"w {key}": value.to("cpu", copy=True) for key, value in mine.state[weight].items()}
        return {"weights": {"w": weight.detach().to("cpu", copy=True)}, "optimizer": kept}

    for number in range(6):
        weight.grad = torch.sin(torch.arange(64.0, device="cuda") * (number + 1))
        update = state() | {"gradients": {"w": weight.grad.cpu()}, "begun": begun}
        update["facts"] = auditor.Facts(number)
        mine.step()
        update["after"] = state()
        found = solved._optimizer(update)["optimizer_roundings"]
        assert found < judged.ROUNDINGS


def probed(trainer, monkeypatch):
    """The findings on the kernel beside a trainer that fail, by their hints, and the record."""
    flags = {"normalize": "triton", "precision": "bf16", "mix": "off", "channels_last": True}
    monkeypatch.setenv(auditor.VARIABLE, '{"keep": 0}')
    monkeypatch.setitem(sys.modules, "__main__", imports.from_file(trainer, "probed"))
    training = SimpleNamespace(model=torch.nn.Linear(2, 2, device="cuda"))
    seen = records.Normalized(**normalizing.look(training, SimpleNamespace(**flags)))
    found = [*kernels._error(seen), *kernels._outputs(seen.cases), *kernels._calls(seen)]
    found += [*kernels._memory(seen.cases), *kernels._trainer(seen.forward)]
    found += kernels._timed(seen.timed) if seen.timed else []
    return sorted({f.hint for f in found if f.fails}, key=[*kernels.EXERCISE.hints].index), seen


def test_the_kernel_of_10_moves_its_bytes_faster_than_torch(monkeypatch):
    failing, seen = probed(course.solution("10"), monkeypatch)
    assert failing == []
    assert len(seen.timed["kernels"]) == seen.timed["calls"]
    assert max(seen.timed["kernel"]) < 0.5 * min(seen.timed["torch"])
    assert seen.stream is False


IN_A_RUN = {"flag-without-effect", "in-the-loop-too"}  # mistakes beside the kernel
OF_KERNELS = [each for each in wrong.every("10_kernels") if each.name not in IN_A_RUN]


@pytest.mark.parametrize("answer", OF_KERNELS, ids=lambda answer: answer.name)
def test_a_mistake_in_the_kernel_is_seen_on_a_gpu(answer, tmp_path, monkeypatch):
    failing, _ = probed(wrong.put(answer, tmp_path), monkeypatch)
    assert failing[0] == (answer.on_gpu or answer.expect)
