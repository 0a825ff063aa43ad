import pytest
from simulated import BALANCED, LARGE, MIDDLE, TINY, Machine, simulated
from traces import CONV, LOADER, NCCL, PAGEABLE, PINNED, RELU, Made, busy, steps

from dlojz.chapters.n04_profiler import planted
from dlojz.traces import suspects, trace

TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>"
ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
NORM = "void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>"
NORM_NHWC = "void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16>"


def accused(path, *made):
    files = [m.write(path / f"{i}.json") for i, m in enumerate(made)]
    return suspects.suspects([trace.read(file) for file in files])


def faults(path, *made):
    return [s.fault for s in accused(path, *made)]


def small(kernel_ms):
    """A kernel every 25 microseconds."""
    made = steps()
    for i in range(800):
        made.launch(0.025 * i, 0.025 * i, 0.025 * i + kernel_ms, RELU)
    return made


def test_a_training_as_it_should_be_is_accused_of_nothing(tmp_path):
    (only,) = accused(tmp_path, busy())
    assert only.fault == "none"
    assert "100% of the step" in only.evidence


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (steps((CONV, 6, 10), host=[(LOADER, 0, 6)]), "one-worker"),
        (steps((CONV, 0, 1), (CONV, 9, 10), host=[("Python GC", 1, 9)]), "garbage"),
        (steps((PAGEABLE, 0, 4), (CONV, 4, 10)), "unpinned"),
        (steps((TO_NHWC, 0, 1), (NORM, 1, 4), (CONV, 4, 10)), "nchw"),
        (small(0.004), "small-batch"),
    ],
)
def test_a_fault_is_named_by_its_evidence(tmp_path, made, fault):
    assert faults(tmp_path, made) == [fault]


@pytest.mark.parametrize(
    "made",
    [
        steps((CONV, 0.5, 10), host=[(LOADER, 0, 0.5)]),  # all data loaders take a moment
        steps((PINNED, 0, 4), (CONV, 4, 10)),
        steps((NORM_NHWC, 0, 4), (CONV, 4, 10)),
        steps((NORM, 0, 4), ("sm80_sgemm_ffma", 4, 10)),  # without tensor cores NCHW does no harm
        small(0.022),
    ],
)
def test_what_looks_like_it_is_not_accused(tmp_path, made):
    assert faults(tmp_path, made) == ["none"]


@pytest.mark.parametrize("functions", [False, True], ids=["", "functions"])
@pytest.mark.parametrize(("plant", "fault"), BALANCED)
def test_a_cause_is_named_whether_weak_or_strong(tmp_path, plant, fault, functions):
    assert faults(tmp_path, simulated(MIDDLE, plant, functions)) == [fault]


@pytest.mark.parametrize("ms", [8, 40])
def test_garbage_is_named_with_pythons_functions_and_without_them_that_nothing_ran(tmp_path, ms):
    def collects(machine):
        machine.collect(ms)

    (told,) = accused(tmp_path, simulated(MIDDLE, collects, functions=True))
    assert (told.fault, told.sure) == ("garbage", "certain")
    (guessed,) = accused(tmp_path, simulated(MIDDLE, collects))
    assert (guessed.fault, guessed.sure) == ("elsewhere", "probable")
    assert f"for {ms}.0 ms at a stretch" in guessed.evidence
    assert "a garbage collection, another process?" in guessed.evidence
    assert "record again with Python's functions (with_stack=True)" in guessed.settle


def test_a_sleep_has_the_line_of_a_function_that_was_recorded(tmp_path):
    (told,) = accused(tmp_path, simulated(MIDDLE, lambda m: m.sleep(30), functions=True))
    assert "in trainer.py, augment (from line 7)" in told.evidence
    assert told.sure == "certain"


def test_a_printed_tensor_is_certain_only_with_pythons_functions(tmp_path):
    (told,) = accused(tmp_path, simulated(MIDDLE, lambda m: m.print(60), functions=True))
    assert told.sure == "certain"
    (guessed,) = accused(tmp_path, simulated(MIDDLE, lambda m: m.print(60)))
    assert guessed.sure == "probable"
    assert "numbers as print(tensor) reads them" in guessed.evidence


@pytest.mark.parametrize("count", [40, 160])
def test_what_the_host_reads_comes_before_the_small_work_that_remains(tmp_path, count):
    found = faults(tmp_path, simulated(TINY, lambda m: m.norms(count)))
    assert found == ["item", "small-batch"]


@pytest.mark.parametrize(("reads", "fault"), [(Machine.item, "item"), (Machine.nonzero, "waits")])
def test_many_reads_are_named_though_they_cost_little_while_the_host_is_behind(
    tmp_path, reads, fault
):
    """A profiler slows the host. Without it the same reads cost more."""

    def plant(machine):
        for _ in range(2):
            machine.train(TINY)
        for _ in range(20):
            reads(machine)

    found = accused(tmp_path, simulated(TINY, plant))
    assert [s.fault for s in found] == ["small-batch", fault]
    assert found[1].share < suspects.OTHER_SHARE
    assert found[1].sure == "probable"


@pytest.mark.parametrize("load_ms", [0.1, 0.5])
def test_small_work_is_not_the_loaders_fault(tmp_path, load_ms):
    """Though the host is never ahead after it waited for the batch."""
    (only,) = accused(tmp_path, simulated(TINY, lambda m: None, load_ms=load_ms))
    assert only.fault == "small-batch"
    assert 0.5 < only.share < 0.6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_without_workers_is_certain_and_one_with_workers_is_to_be_watched(
    tmp_path, workers
):
    made = steps((CONV, 6, 10), host=[(LOADER if workers else ALONE, 0, 6)])
    (only,) = accused(tmp_path, made)
    assert only.fault == "one-worker"
    assert only.sure == ("probable" if workers else "certain")
    assert ("the loader has no workers" in only.evidence) == (not workers)


@pytest.mark.parametrize(("kernel_ms", "named"), [(0.004, "small-batch"), (0.01, "none")])
def test_launches_that_are_slowed_by_the_recording_of_functions_must_lose_more(
    tmp_path, kernel_ms, named
):
    made = small(kernel_ms)
    assert faults(tmp_path, made) == ["small-batch"]
    made.host("python_function", "trainer.py(3): main", 0, 20)
    (only,) = accused(tmp_path, made)
    assert only.fault == named
    assert only.sure == ("probable" if named == "small-batch" else "certain")


def test_an_optimizer_that_sorts_its_parameters_is_not_busy_elsewhere(tmp_path):
    def sorts(machine):
        with machine.range("Optimizer.step#SGD.step"):
            machine.sleep(5)

    assert "elsewhere" not in faults(tmp_path, simulated(TINY, sorts))


def test_pinning_in_the_loop_is_a_copy_though_it_takes_memory(tmp_path):
    def pins(machine):
        with machine.op("aten::pin_memory", 4), machine.range("cudaHostAlloc", "cuda_runtime", 6):
            pass

    assert faults(tmp_path, simulated(MIDDLE, pins)) == ["copies"]


def test_what_costs_nothing_is_not_accused(tmp_path):
    """The device has enough to do while the host sleeps."""
    assert faults(tmp_path, simulated(LARGE, lambda m: m.sleep(8))) == ["none"]
    assert faults(tmp_path, simulated(TINY, Machine.synchronize)) == ["small-batch"]


def test_nothing_accused_in_a_slow_step_says_what_most_is_lost_to(tmp_path):
    (only,) = accused(tmp_path, small(0.015))
    assert only.fault == "none"
    assert "most of the rest is lost to: launches, 40%, which are fewer with" in only.evidence


def test_the_dearest_fault_comes_first(tmp_path):
    made = steps((PAGEABLE, 5, 6), (CONV, 6, 10), host=[(LOADER, 0, 5)])
    found = accused(tmp_path, made)
    assert [s.fault for s in found] == ["one-worker", "unpinned"]
    assert found[0].share == pytest.approx(0.5)
    assert found[1].share == pytest.approx(0.1)


def in_pieces(length):
    """Work of a device with many small holes in it."""
    return [(CONV, i / 4, i / 4 + length) for i in range(39)]


FIRST = steps((CONV, 0, 4), (NCCL, 4, 10))
PROCESSES = {  # the first process, the second, and what is said of them
    "was away": (
        FIRST, steps((CONV, 5.8, 9.8), (NCCL, 9.8, 10)), "straggler", 0.58,
        "process 0 waited 5.8 ms longer in the collectives of a step than process 1",
    ),
    "worked longer": (
        FIRST, steps((CONV, 0, 9.8), (NCCL, 9.8, 10)), "straggler", 0.58,
        "than process 1, the straggler, whose device worked 5.8 ms longer",
    ),
    "equal": (FIRST, FIRST, "communication", 0.6, "the process spends 6.0 ms, 60% of it"),
    "late by many small holes": (
        steps((CONV, 0, 7), (NCCL, 7, 10)), steps(*in_pieces(0.18), (NCCL, 9.8, 10)),
        "communication", 0.3, "process 0 spends 3.0 ms, 30% of it, in collectives",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "fault", "share", "told"), PROCESSES.values(), ids=PROCESSES
)
def test_who_waits_least_was_away_or_worked_longer_or_all_wait_for_the_link(
    tmp_path, first, second, fault, share, told
):
    (only,) = accused(tmp_path, first, second)
    assert (only.fault, only.share) == (fault, pytest.approx(share))
    assert told in only.evidence
    late = fault == "communication" and first is not second
    assert ("compare the processes" in only.settle) == late
    assert only.sure == ("probable" if late else "certain")


def test_who_is_late_by_many_small_holes_was_not_away(tmp_path):
    slow = steps(*in_pieces(0.13), (NCCL, 9.8, 10))
    assert "straggler" not in faults(tmp_path, steps((CONV, 0, 5), (NCCL, 5, 10)), slow)


def test_on_a_processor_there_are_no_kernels_to_accuse(tmp_path):
    made = Made()
    made.step(0, 0, 10)
    made.host("cpu_op", "aten::conv2d", 0, 9)
    made.host("user_annotation", LOADER, 9, 9.1)
    (only,) = accused(tmp_path, made)
    assert only.fault == "none"
    assert only.evidence == "the processor computes for 90% of the step"
    assert "a batch in memory" in only.settle, "workers that take the cores are in no trace"


def test_on_processors_too_the_last_to_reach_a_collective_is_the_straggler(tmp_path):
    made = []
    for sleeps_ms in (0, 5):
        one = Made()
        for begin in (0, 10):
            one.step(begin, begin, begin + 10)
            one.host("user_annotation", "forward", begin, begin + 9)
            one.host("cpu_op", "aten::conv2d", begin + sleeps_ms, begin + sleeps_ms + 4)
            one.host("user_annotation", "gloo:all_reduce", begin + sleeps_ms + 4, begin + 10)
            one.events[-1]["tid"] = 7
        made.append(one)
    (only,) = accused(tmp_path, *made)
    assert only.fault == "straggler"
    assert "5.0 ms at a stretch, while its host did something else in 'forward'" in only.evidence


def test_a_suspect_in_words_says_how_sure_it_is_and_what_settles_it():
    assert set(planted.FAULTS) < set(suspects.WORDS)
    probable = suspects.Suspect("elsewhere", 0.2, "seen", "record again")
    words = "the host does something else for a while (probable): seen. To settle it: record again"
    assert suspects.sentence(probable) == words
    healthy = suspects.Suspect("none", 0.0, "it computes")
    assert suspects.sentence(healthy) == "no known fault: it computes"
    small = suspects.Suspect("small-batch", 0.9, "seen")
    assert "two images" not in suspects.sentence(small), "which no trace can tell"


def test_a_core_that_another_process_has_for_a_moment_is_no_fault_of_each_step(tmp_path):
    made = Made()
    for begin in (0, 20):
        made.step(begin, begin, begin + 20)
        made.host("cpu_op", "aten::conv2d", begin, begin + (20 if begin else 10))
    assert faults(tmp_path, made) == ["none"]


@pytest.mark.parametrize("line", [False, True])
def test_on_a_processor_too_a_host_that_runs_no_operation_is_busy_elsewhere(tmp_path, line):
    made = Made()
    made.step(0, 0, 30)
    made.host("cpu_op", "aten::conv2d", 0, 20)
    made.host("user_annotation", "update", 20, 30)
    if line:
        made.host("python_function", "trainer.py(7): augment", 20.1, 29.9)
    (only,) = accused(tmp_path, made)
    assert only.fault == "elsewhere"
    assert only.share == pytest.approx(1 / 3)
    assert ("in trainer.py, augment" if line else "in the phase 'update'") in only.evidence
    assert only.sure == ("certain" if line else "probable")


@pytest.mark.parametrize(
    ("asker", "fault"), [("aten::mul_", "small-calls"), ("Optimizer.step#SGD.step", "updates")]
)
def test_who_asks_for_most_of_the_kernels_all_small_is_named(tmp_path, asker, fault):
    def asks(machine):
        with machine.range(asker, "cpu_op" if fault == "small-calls" else "user_annotation"):
            for _ in range(600):
                machine.task(RELU, 0.002, cost=0.01)

    (only,) = accused(tmp_path, simulated(MIDDLE, asks))
    assert only.fault == fault
    assert only.evidence.startswith(f"{asker} asks for 600 of the ")


def test_what_the_profiler_added_is_no_fault(tmp_path):
    traces = [trace.read(small(0.004).write(tmp_path / "0.json"))]
    assert [s.fault for s in suspects.suspects(traces)] == ["small-batch"]
    (only,) = suspects.suspects(traces, step_ms=400 * 0.004 / 0.9)  # of the same kernels
    assert "computes for 90% of the step" in suspects.sentence(only)


def test_a_stop_while_the_optimizer_launches_is_a_launch_whatever_range_is_inside(tmp_path):
    made = steps((CONV, 0, 1), (CONV, 9, 10), host=[("Optimizer.step#SGD.step", 0.5, 9.5)])
    made.host("user_annotation", "update", 0.6, 9.4)
    assert "elsewhere" not in faults(tmp_path, made)
