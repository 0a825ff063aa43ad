import pytest
from test_trace import CONV, LOADER, NCCL, PAGEABLE, PINNED, RELU, Made, busy, with_a_wait

from dlojz.runs import suspects, trace

TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>"
NORM = "void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>"
NORM_NHWC = "void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16>"


def accused(path, *made):
    files = [m.write(path / f"{i}.json") for i, m in enumerate(made)]
    return suspects.suspects([trace.read(file) for file in files])


def faults(path, *made):
    return [s.fault for s in accused(path, *made)]


def steps(*work, host=()):
    """Two steps of 10 ms, each with this work (name, begin, end) and these events of the host."""
    made = Made()
    for begin in (0, 10):
        made.step(begin, begin, begin + 10)
        for name, a, b in work:
            made.launch(begin + a, begin + a, begin + b, name, 20 if name == NCCL else 7)
        for name, a, b in host:
            made.host("user_annotation", name, begin + a, begin + b)
    return made


def reads(count):
    """In each step the host reads so many numbers, one after the other."""
    made = steps((CONV, 0, 6))
    for begin in (0, 10):
        for i in range(count):
            at = begin + 6 + 3 * i / count
            made.launch(at, at, at + 0.001, "Memcpy DtoH (Device -> Pageable)")
            made.host("cpu_op", "aten::item", at, at + 0.02)
            made.host("cuda_runtime", "cudaStreamSynchronize", at, at + 0.01)
    return made


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
        (reads(100), "item"),
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
        reads(1),  # the loss
        small(0.022),
    ],
)
def test_what_looks_like_it_is_not_accused(tmp_path, made):
    assert faults(tmp_path, made) == ["none"]


def test_a_printed_tensor_is_told_from_one_that_is_read(tmp_path):
    made = with_a_wait("aten::item")
    for begin in (0, 10):
        made.host("python_function", "torch/_tensor_str.py(702): _str", begin + 1.05, begin + 6.3)
    assert faults(tmp_path, made) == ["print"]


def test_the_dearest_fault_comes_first(tmp_path):
    made = steps((PAGEABLE, 5, 6), (CONV, 6, 10), host=[(LOADER, 0, 5)])
    found = accused(tmp_path, made)
    assert [s.fault for s in found] == ["one-worker", "unpinned"]
    assert found[0].share == pytest.approx(0.5)
    assert found[1].share == pytest.approx(0.1)


def test_who_waits_least_and_was_away_is_the_straggler(tmp_path):
    first = steps((CONV, 0, 4), (NCCL, 4, 10))
    late = steps((CONV, 5.8, 9.8), (NCCL, 9.8, 10))
    (only,) = accused(tmp_path, first, late)
    assert only.fault == "straggler"
    assert only.share == pytest.approx(0.58)
    assert "process 0 waited 5.8 ms longer" in only.evidence
    assert "than process 1" in only.evidence


def test_who_is_late_by_many_small_holes_was_not_away(tmp_path):
    first = steps((CONV, 0, 5), (NCCL, 5, 10))
    slow = steps(*[(CONV, i / 4, i / 4 + 0.13) for i in range(39)], (NCCL, 9.8, 10))
    assert "straggler" not in faults(tmp_path, first, slow)


def test_equal_processes_wait_for_the_link_and_not_for_each_other(tmp_path):
    both = steps((CONV, 0, 4), (NCCL, 4, 10))
    assert faults(tmp_path, both, both) == ["none"]


def test_on_a_processor_there_are_no_kernels_to_accuse(tmp_path):
    made = Made()
    made.step(0, 0, 10)
    made.host("cpu_op", "aten::conv2d", 0, 0.001)
    assert faults(tmp_path, made) == ["none"]
