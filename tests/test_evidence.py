"""The evidence says what the run did, not what its text says; and it disturbs nothing."""

import copy
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchvision
from made import torchrun

from dlojz import course
from dlojz.chapters.n02_amp import exercise
from dlojz.runs import log, records, stats
from dlojz.runs.folder import group_file
from dlojz.traces import kinds
from dlojz.training.data import normalize
from dlojz.watch import auditor, evidence, group, inventory, profile, readings

FLAGS = "--test --data synthetic --model resnet18 --image-size 32 -b 4 --test-nsteps 6".split()
BF16 = ("--precision", "bf16")


@pytest.fixture
def seen(tmp_path, train):
    """Run a solution with these flags; returns its log."""

    def call(step, *flags):
        train(course.solution(step), tmp_path, *FLAGS, *flags)
        return log.read(tmp_path)

    return call


def test_a_float32_run(seen):
    others = inventory.graphs_alive()  # of earlier tests in this process
    run = seen("01")
    probe, last, whole = run.probe, run.last, run.whole
    assert probe.parameters.dtypes == {"float32": 62}
    assert probe.parameters.layouts["NCHW"] == 17
    assert probe.loss_gradient == 1.0
    assert probe.gradients.missing == 0
    assert probe.optimizer_state == {"float32": 62}
    assert {op["dtype"] for op in last.matrix_ops} == {"float32"}
    assert last.collectives == [], "one process has nobody to talk to"
    assert last.calls == {}, "the Chronometer's own reading is not the trainer's"
    assert last.graphs_alive <= others
    assert whole.backward == whole.optimizer_steps == 6
    assert whole.weights_changed
    works = ("forward", "backward", "update", "validation")
    assert whole.phases == {work: [work] for work in works}
    assert len(whole.rates) == 6
    assert whole.threads == torch.get_num_threads()
    assert [(i["mode"], i["shape"], i["count"]) for i in whole.inputs] == [
        ("train", [4, 3, 32, 32], 6),
        ("val", [4, 3, 32, 32], 6),
    ]
    assert len(whole.drawn) == 6


def test_a_step_in_the_middle_is_profiled_too_and_not_measured(seen, monkeypatch):
    monkeypatch.setenv(auditor.VARIABLE, '{"keep": 1, "middle": true}')
    run = seen("01", "--test-nsteps", "8", "-b", "2")
    step = run.middle.step
    assert step in (5, 6)
    assert run.last.step == 7
    assert run.middle.work == run.last.work != []
    measured = [(w["first_step"], w["first_step"] + w["steps"]) for w in run.windows]
    assert measured == ([(3, 5), (6, 7)] if step == 5 else [(3, 6)])
    assert run.in_the_middle.ranks[0].last is run.middle


def test_an_error_keeps_no_worker_of_a_loader_alive(train, images, tmp_path):
    """Its frames hold the loader, and at exit torch would wait for each worker, on a GPU."""
    step = "    chrono.backward()\n"
    text = course.solution("05").read_text()
    assert text.count(step) == 1
    (tmp_path / "fails.py").write_text(text.replace(step, f"    raise ValueError('mine')\n{step}"))
    flags = [*FLAGS, "--data", images, "--num-workers", "1"]  # the last --data counts
    with pytest.raises(ValueError, match="mine") as caught:
        train(tmp_path / "fails.py", tmp_path, *flags)
    mine = {*multiprocessing.active_children()}
    assert mine
    sys.excepthook(caught.type, caught.value, caught.tb)  # the log's, as at the end of a process
    assert not mine & {*multiprocessing.active_children()}


def test_autocast_is_seen_where_it_acts(seen):
    run = seen("02", "--precision", "bf16", "-b", "2")
    probe = run.probe
    layers = {entry["layer"]: entry["out"] for entry in probe.layers}
    assert layers["Conv2d"] == layers["Linear"] == "bfloat16"
    assert probe.loss.dtype == "float32"
    assert probe.parameters.dtypes == {"float32": 62}
    assert {op["dtype"] for op in run.last.matrix_ops} == {"bfloat16"}
    assert probe.numerics.matmul_fp32 == "tf32"


def test_layouts_are_seen_by_strides(seen):
    probe = seen("03", "--precision", "fp32").probe
    assert probe.parameters.layouts["channels_last"] == 17
    assert {entry["out_layout"] for entry in probe.layers} == {"channels_last", "any"}


def test_layers_are_seen_in_every_step_of_an_audited_run_only(seen, monkeypatch):
    first = seen("03", "--precision", "fp32")
    assert first.whole.layers == []
    monkeypatch.setenv(auditor.VARIABLE, '{"keep": 0}')
    audited = seen("03", "--precision", "fp32")
    assert audited.probe.layers == first.probe.layers, "those of the first step"
    assert audited.share.again == first.share.again == 0

    def counts(layers, times=1):
        return {(e["layer"], e["out"], e["out_layout"]): times * e["count"] for e in layers}

    assert counts(audited.whole.layers) == counts(audited.probe.layers, 5)


def test_any_optimizer_and_a_loss_of_ones_own_are_seen_through_the_scaler(tmp_path, train):
    """A scaler calls a fused optimizer in skipped updates, too, with infinite gradients."""
    own = course.solution("02").read_text().replace(", fused=True)", ")")
    loss = "torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)"
    own = own.replace("training.criterion(logits, labels)", loss)
    trainer = tmp_path / "own.py"
    trainer.write_text(own)
    flags = (
        "--model shufflenet_v2_x0_5 -b 8 --precision fp16 --clip-norm 0.5 --test-nsteps 8".split()
    )
    for file, folder in ((trainer, "own"), (course.solution("02"), "usual")):
        (tmp_path / folder).mkdir()
        train(file, tmp_path / folder, *FLAGS, *flags)
    mine, usual = (log.read(tmp_path / folder) for folder in ("own", "usual"))
    for run, fused in ((mine, 0), (usual, 1)):
        assert run.probe.gradients.norm == pytest.approx(0.5, rel=1e-3)
        assert 0 < run.whole.optimizer_steps < 8
        skipped, due = stats.summary(run).skipped
        assert (due, run.whole.scale) == (8, 2.0 ** (16 - skipped)), "halved each time"
        assert run.last.fused_updates == fused
        assert run.probe.states_finite
    assert mine.probe.loss_gradient is None
    assert exercise._factor(mine, usual) == pytest.approx(2**16, rel=1e-3)


@pytest.fixture
def edited(tmp_path, train):
    """Run the solution of 02 with these edits; returns its log."""

    def call(edits, *flags):
        text = course.solution("02").read_text()
        for old, new in edits.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / "edited.py").write_text(text)
        train(tmp_path / "edited.py", tmp_path, *FLAGS, *flags)
        return log.read(tmp_path)

    return call


def test_the_formats_of_an_audited_runs_layers_are_seen_in_every_step(edited, monkeypatch):
    begin = "    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):\n"
    later = "    training.calls = getattr(training, 'calls', 0) + 1\n"
    later += begin.replace("dtype is not None", "training.calls < 2")
    flags = ("--precision", "bf16", "--test-nsteps", "6")
    assert exercise._outputs(edited({begin: later}, *flags)) == "bfloat16"
    monkeypatch.setenv(auditor.VARIABLE, '{"keep": 0}')
    assert exercise._outputs(edited({begin: later}, *flags)) == "bfloat16, float32"


EACH_STEP = "        loss = train_step(step"
ONE_EPOCH = "        train = train_one_epoch("


@pytest.mark.parametrize(
    ("call", "stale"), [(EACH_STEP, 0), (ONE_EPOCH, 5)], ids=["each step", "the whole epoch"]
)
def test_casts_of_the_weights_of_an_earlier_step_are_counted(edited, call, stale):
    around = "        with torch.autocast(device.type, torch.bfloat16):\n    "
    run = edited({call: around + call}, "--precision", "bf16")
    assert run.whole.stale_casts == stale


@pytest.mark.parametrize(("allowed", "expected"), [(False, "ieee ieee"), (True, "tf32 tf32")])
def test_the_older_switches_of_tf32_count_too(allowed, expected):
    """In a process of its own: torch does not let both kinds be mixed."""
    code = f"""
import torch
from dlojz.watch import inventory
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {allowed}
seen = inventory.numerics()
print(seen.matmul_fp32, seen.conv_fp32)"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == expected


def test_the_gradients_norm_is_that_after_clipping(seen):
    probe = seen("02", "--precision", "fp32", "--clip-norm", "0.5").probe
    assert probe.gradients.norm == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "last", "expected"),
    [((2, 3, 4, 4), False, "NCHW"), ((2, 3, 4, 4), True, "channels_last"),
     ((2, 3, 1, 1), False, "any"), ((2, 3), False, "any")],
)  # fmt: skip
def test_a_layout_is_told_by_strides(shape, last, expected):
    tensor = torch.zeros(shape)
    if last:
        tensor = tensor.to(memory_format=torch.channels_last)
    assert readings.layout(tensor) == expected


def test_a_sliced_tensor_has_another_layout():
    assert readings.layout(torch.zeros(2, 3, 8, 8)[:, :, ::2, ::2]) == "other"


def test_a_checksum_ignores_the_layout_and_sees_one_bit():
    model = torch.nn.Conv2d(4, 8, 3)
    before = inventory.digest(model)
    assert inventory.digest(model.to(memory_format=torch.channels_last)) == before
    with torch.no_grad():
        model.bias[0] += 1e-3
    assert inventory.digest(model) != before
    assert inventory.digest(torch.nn.Conv2d(4, 8, 3, device="meta")) is None


class Log:
    """Keeps what the witness writes."""

    def __init__(self):
        self.kept, self.calls = {}, []

    def evidence(self, seen):
        self.kept[type(seen)] = seen

    def before_end(self, call):
        self.calls.append(call)

    def note_memory(self):
        pass


def watched(model, compiled=None, run=None):
    """A training of a small model, watched by step.witness; returns (step, log)."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    criterion = torch.nn.CrossEntropyLoss()
    training = SimpleNamespace(
        model=model if compiled is None else compiled, criterion=criterion, optimizer=optimizer
    )
    loader = torch.utils.data.DataLoader([0] * 8, batch_size=2)
    args = SimpleNamespace(test=True, test_nsteps=4, epochs=1)
    kept = run or Log()
    witness = evidence.watch(kept, training, loader, args)

    def step():
        loss = criterion(training.model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step.witness = witness
    return step, kept


class Small(torch.nn.Module):
    """A model of our own: Dynamo leaves torch's own containers uncompiled in place."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 10)

    def forward(self, images):
        return self.linear(self.convolution(images).mean((2, 3)))


def test_the_weights_are_those_that_the_first_step_begins_with():
    """Not those that were there as the Chronometer was made: see the museum."""
    sums = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = Small()
        step, kept = watched(model)
        if changes:
            with torch.no_grad():
                model.linear.weight.mul_(0.5)
        step()
        sums.append(kept.kept[records.Probe].weights)
    assert sums[0] != sums[1]


@pytest.mark.parametrize("updates", [0, 1])
def test_without_an_update_no_weight_has_changed(updates):
    step, kept = watched(Small())
    for _ in range(updates):
        step()
    kept.calls[0]()
    assert kept.kept[records.WholeRun].weights_changed == bool(updates)
    assert kept.kept[records.Probe].weights


def test_a_copy_of_the_model_has_deaf_hooks():
    usual, copied = Small(), Small()
    inputs = []
    for model in (usual, copied):
        step, kept = watched(model)
        if model is copied:
            mean = copy.deepcopy(model)
            mean(torch.randn(2, 3, 8, 8))
            model.eval()
            mean.eval()(torch.randn(2, 3, 8, 8))
            model.train()
        step()
        kept.calls[0]()
        inputs.append([(i["mode"], i["count"]) for i in kept.kept[records.WholeRun].inputs])
        inputs.append([entry["count"] for entry in kept.kept[records.Probe].layers])
    assert inputs[:2] == inputs[2:] == [[("train", 1)], [1, 1]]


@pytest.mark.parametrize("how", ["function", "in place"])
def test_a_compiled_model_is_probed_before_it_is_compiled(how):
    graphs = []

    def backend(graph, inputs):  # what Inductor would be given
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = compiled = Small()
    if how == "in place":
        model.compile(backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    step, kept = watched(model, compiled)
    step()
    assert graphs == [], "the probe's step is eager"
    assert {entry["layer"] for entry in kept.kept[records.Probe].layers} >= {"Conv2d", "Linear"}
    for _ in range(3):
        step()
    assert len(graphs) == 1, "one graph, not broken by a hook, not compiled again"
    kept.calls[0]()
    assert kept.kept[records.WholeRun].backward == 4
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("compiles", "settled"), [(False, [True, True, True]), (True, [False, False, True])]
)
def test_no_window_opens_before_the_model_is_compiled(compiles, settled):
    """After the probe it is compiled in the next step, and may record a CUDA graph in another."""
    torch.compiler.reset()
    model = Small()
    if compiles:
        model.compile(backend="eager")
    step, kept = watched(model)
    seen = []
    for _ in range(3):
        step()
        seen.append(step.witness.settled)
    assert seen == settled
    assert kept.kept[records.Probe].compiles_in == settled.count(False), "a verdict reads it"
    torch.compiler.reset()


def test_what_a_compiler_or_an_optimizer_reads_of_the_host_is_no_wait():
    norm = torch.nn.BatchNorm1d(2)  # its guards compare numbers such as the momentum
    norm.compile(backend="aot_eager", dynamic=True)
    optimizer = torch.optim.SGD(norm.parameters(), torch.tensor(0.1), foreach=False)
    norm(torch.randn(4, 2)).sum().backward()

    def step(read):
        loss = norm(torch.randn(4, 2)).sum()
        optimizer.step()
        if read:
            loss.item()

    events = [profile.profiled(partial(step, read)) for read in (False, True)]
    assert profile.counts(events[0])["reads"] >= 2, "the guard's, the rate's"
    assert [profile.summary(found)["calls"].get("item", 0) for found in events] == [0, 1]


class Told(SimpleNamespace):
    """A record of the profiler: each of its fields is a function, as Kineto's are."""

    def __getattr__(self, name):
        return lambda: {"start_thread_id": 1, "device_type": profile.CPU}.get(name)


def told(name, start_ns, duration_ns=1):
    return Told(name=lambda: name, start_ns=lambda: start_ns, duration_ns=lambda: duration_ns)


@pytest.fixture
def counted(monkeypatch):
    """The calls that are counted of events: counted(events)."""
    for name in ("communication", "compilation.coverage"):
        monkeypatch.setattr(f"dlojz.watch.profile.{name}", lambda events: {})
    monkeypatch.setattr("dlojz.watch.profile.workload.counted", lambda events: {})
    monkeypatch.setattr("dlojz.watch.profile._asks_not_to_wait", lambda event: False)
    monkeypatch.setattr("dlojz.watch.profile._ran_on_gpu", lambda event: False)
    return lambda events: profile.summary(events)["calls"]


def test_waits_of_ddp_for_its_own_clock_are_not_the_trainees(counted):
    """It reads its events in its first ten steps and in each hundredth: eight waits."""
    event, whole = "cudaEventSynchronize", "cudaDeviceSynchronize"
    seen = [told("DistributedDataParallel.forward", 100, 50)]
    seen += [told(event, 101 + i) for i in range(8)]
    seen += [told(whole, 120), told(event, 99), told(event, 150), told(event, 200)]
    assert counted(seen) == {event: 3, whole: 1}
    assert counted(seen[1:]) == {event: 11, whole: 1}, "without DDP"


def test_what_the_auditor_waits_for_is_not_the_trainees(counted):
    """A large update is put away in the next one, which may be profiled."""
    seen = [told(kinds.ASIDE, 100, 50), told("cudaDeviceSynchronize", 101)]
    seen += [told("aten::_local_scalar_dense", 110), told("cudaStreamSynchronize", 149)]
    assert set(counted(seen).values()) <= {0}
    assert counted([*seen, told("cudaStreamSynchronize", 150)])["cudaStreamSynchronize"] == 1


def test_random_crops_of_a_loader_without_workers_read_nothing_of_the_device():
    images = torchvision.datasets.FakeData(
        8, (3, 9, 9), transform=torchvision.transforms.RandomResizedCrop(8)
    )
    batches = iter(torch.utils.data.DataLoader(images, 4, collate_fn=len))
    events = profile.profiled(lambda: next(batches))
    assert profile.counts(events)["reads"] > 0
    assert profile.summary(events)["calls"].get("item", 0) == 0


def test_the_probe_leaves_inductors_settings_alone():
    """`use_deterministic_algorithms` does not: Inductor then times fewer kernels."""
    step, _ = watched(Small())
    step()
    step()
    assert not torch._inductor.config.deterministic
    assert torch.get_deterministic_debug_mode() == 0


def test_hooks_of_the_probe_do_not_stay():
    model = Small()
    step, kept = watched(model)
    step()
    assert not model.convolution._forward_hooks
    kept.calls[0]()
    assert not model._forward_pre_hooks


class Lost:
    """A number on a device that has failed."""

    is_meta = False

    def __float__(self):
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_that_fails_before_the_probe_ends_leaves_the_log_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.excepthook", None)
    run = log.RunLog(tmp_path, SimpleNamespace())
    watched(Small(), run=run)
    run._last_words[0].__self__._loss_gradient = Lost()
    error = RuntimeError("CUDA error: device-side assert triggered")
    run._on_error(type(error), error, None)
    end = log.read(tmp_path).end
    assert (end["outcome"], end["error"]) == ("failed", f"RuntimeError: {error}")


def test_a_graph_that_is_kept_is_found():
    before = inventory.graphs_alive()
    kept = (torch.ones(3, requires_grad=True) * 2).sum()
    assert inventory.graphs_alive() == before + 2 or inventory.graphs_alive() == before + 1
    del kept
    assert inventory.graphs_alive() == before


def test_metrics_may_be_one_module_or_several_or_tensors():
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sums", torch.zeros(3))

    several = torch.nn.ModuleDict({"loss": Sums(), "accuracy": Sums()})
    for metrics, count in ((Sums(), 1), (several, 2), ({"loss": torch.zeros(1)}, 1)):
        assert inventory.devices(SimpleNamespace(metrics=metrics)) == {"cpu": count}
    assert inventory.devices(SimpleNamespace()) == {}


def test_batches_that_are_kept_are_counted():
    witness = object.__new__(evidence.Witness)
    witness._inputs = {("train", (2, 3, 5, 7)): 4, ("val", (1, 3, 5, 7)): 4}
    usual = witness._batches_alive()
    kept = [torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 5, 7), torch.zeros(1, 3, 5, 7)]
    assert witness._batches_alive() == usual + 2
    assert len(kept) == 3


@pytest.mark.parametrize("inside", [True, False])
def test_a_process_that_ends_inside_its_group_leaves_a_file(tmp_path, monkeypatch, inside):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: inside)
    monkeypatch.setattr(group, "_watched", [tmp_path / "gone", tmp_path])
    group._note()
    assert group_file(tmp_path, 0).exists() == inside


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The logs of solution 06 on two processes, by rank."""
    folder = tmp_path_factory.mktemp("two")
    flags = [*FLAGS, "--precision", "fp32"]
    command = torchrun(course.solution("06"), flags, 2)
    environment = {**os.environ, "DLOJZ_RUN": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return log.read_ranks(folder)


def test_the_collectives_of_a_step_are_all_gradients_once(two_processes):
    for run in two_processes:
        last = run.last
        reduced = [c for c in last.collectives if c["op"] == "all_reduce"]
        assert sum(c["bytes"] for c in reduced) == run.setup["parameter_bytes"]
        assert {c["dtype"] for c in reduced} == {"float32"}
        assert {c["backend"] for c in last.collectives} == {"gloo"}
        assert {c["op"] for c in last.collectives} == {"all_reduce"}
        begin, end = last.backward_ms
        assert begin < reduced[0]["begin_ms"] < end, "it begins within the backward pass"
        assert last.world_size == 2
        assert last.wrapper == "DistributedDataParallel"


def test_the_processes_end_with_the_same_weights_and_statistics(two_processes):
    first, second = (run.whole for run in two_processes)
    assert first.weights_after == second.weights_after is not None
    assert first.buffers_after == second.buffers_after is not None
    assert first.weights_changed


class Record:
    """One of the profiler's, with times in milliseconds."""

    def __init__(self, name, begin, end, gpu=False, annotation=False, id=0, launched_by=0):
        kinds = torch.autograd.DeviceType
        self._facts = {
            "name": name,
            "start_ns": round(1e6 * begin),
            "duration_ns": round(1e6 * (end - begin)),
            "device_type": kinds.CUDA if gpu else kinds.CPU,
            "is_user_annotation": annotation,
            "correlation_id": id,
            "linked_correlation_id": launched_by,
            "dtypes": ["float"],
            "shapes": [[1000]],
        }

    def __getattr__(self, name):
        return lambda: self._facts[name]


HOST = (
    Record("aten::conv2d", 100, 101, id=1),
    Record("autograd::engine::evaluate_function: B", 102, 104, id=2),
    Record("aten::convolution_backward", 102.5, 103.5, id=3),
    Record("nccl:all_reduce", 103.6, 103.7, id=4),
)


def test_on_a_gpu_communication_is_timed_there():
    found = profile.communication(
        [
            *HOST,
            Record("conv", 101, 105, gpu=True, launched_by=1),
            # A call of CUDA has a number of its own, here that of another operation.
            Record("cudaLaunchKernel", 102.6, 102.61, id=1, launched_by=3),
            Record("wgrad", 105, 109, gpu=True, launched_by=3),
            Record("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 108, 112, gpu=True, launched_by=4),
            # Around the kernel, and hiding nothing.
            Record("nccl:all_reduce", 108, 112, gpu=True, annotation=True),
        ]
    )
    (said,) = found["collectives"]
    assert (said["op"], said["bytes"], said["begin_ms"], said["ms"]) == ("all_reduce", 4000, 8, 4)
    assert found["backward_ms"] == [5, 9]
    assert found["communication_ms"] == 4
    assert found["exposed_ms"] == 3, "1 ms of it behind the backward pass"
    assert found["timed_on"] == "gpu"


def test_without_a_kernel_for_each_collective_the_host_tells_when():
    kernel = Record("ncclDevKernel_AllReduce", 108, 112, gpu=True)
    found = profile.communication([*HOST, kernel, kernel])
    assert found["timed_on"] == "host"
    assert found["collectives"][0]["begin_ms"] == pytest.approx(3.6)
    assert found["backward_ms"] == [2, 4]
    assert found["communication_ms"] == 4


def test_on_a_processor_communication_is_timed_on_the_host():
    found = profile.communication(HOST)
    assert found["collectives"][0]["begin_ms"] == pytest.approx(3.6)
    assert found["backward_ms"] == [2, 4]
    assert "exposed_ms" not in found
    assert profile.communication(HOST[:3]) == {}


def test_a_model_may_normalize_its_images_itself():
    raw = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    assert inventory.pixels(raw) == inventory.pixels(normalize(raw))


def test_labels_may_be_probabilities_and_metrics_have_any_buffers():
    labels = torch.tensor([3, 1])
    soft = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.025
    assert inventory.crc(readings.classes(soft)) == inventory.crc(labels)

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("sums", torch.zeros(3))
            self.register_buffer("count", torch.zeros(1))

    parts = SimpleNamespace(metrics=torch.nn.ModuleDict({"own": Own(), "none": torch.nn.Module()}))
    parts.metrics["another"] = Own()
    assert inventory.devices(parts) == {"cpu": 2}


def test_the_dtype_of_a_validation_is_not_that_of_the_training(edited):
    run = edited({"enabled=dtype is not None": "enabled=training.model.training"}, *BF16)
    assert exercise._autocast_in_validation(run) == "float32"


@pytest.mark.parametrize("around", ["model.forward", "unused"])
def test_what_a_validation_computes_is_seen_wherever_autocast_is(edited, around):
    """Around the model's own forward, it is not on as the model is entered."""
    build = "models.build(args.model, num_classes, args.image_size)"
    own = f"    {around} = torch.autocast('cpu', torch.bfloat16)(model.forward)"
    edits = {
        f"return {build}": f"model = {build}\n{own}\n    return model",
        "enabled=dtype is not None": "enabled=False",
    }
    run = edited(edits, *BF16)
    expected = "bfloat16" if around == "model.forward" else "float32"
    assert exercise._autocast_in_validation(run) == expected
