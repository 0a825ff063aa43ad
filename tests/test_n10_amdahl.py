"""A kernel of one's own can gain its share of a step, which the trace of a training tells."""

import pytest
from traces import CONV, RELU, steps

from dlojz import runs
from dlojz.chapters import n10_kernels as n10
from dlojz.chapters.n10_kernels import amdahl
from dlojz.traces import breakdown
from dlojz.traces.trace import open_trace


def test_a_kernel_can_gain_its_share_and_not_more(tmp_path):
    made = steps((CONV, 0, 5), (RELU, 5, 6), (RELU, 6, 10)).write(tmp_path / "trace.json")
    table = n10.gains(made)
    (relu, whole) = table.rows
    assert relu[1:] == ("elementwise and the rest", "2", "5.00", "50.0%", "x 2.00")
    assert whole == ("all of these kinds", "", "2", "5.00", "50.0%", "x 2.00")


def test_matrix_products_and_copies_are_left_to_others():
    trace = runs.recorded("h100/04-trace-fault-none")
    found = breakdown.analyse(open_trace(trace))
    *_, whole = n10.gains(trace).rows
    mine = sum(ms for kind, ms in found.kinds.items() if kind not in amdahl.ELSEWHERE)
    assert float(whole[3]) == pytest.approx(mine, abs=0.01)
    assert len(n10.gains(trace, rows=3)) == 4


def test_a_trace_without_such_kernels_has_no_rows(tmp_path):
    table = n10.gains(steps((CONV, 0, 5)).write(tmp_path / "trace.json"))
    assert len(table) == 0
    assert "nothing to show" in repr(table)


NATIVE = "void at::native::"
NAMES = {
    f"{NATIVE}vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>": (
        "CUDAFunctor_add"
    ),
    f"{NATIVE}(anonymous namespace)::max_pool_forward_nhwc<c10::BFloat16, int>(": (
        "max_pool_forward_nhwc"
    ),
    f"{NATIVE}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps": "MaxOps",
    "void nhwcAddPaddingKernel<__nv_bfloat16>(int)": "nhwcAddPaddingKernel",
    "triton_poi_fused_relu_0": "triton_poi_fused_relu_0",
    "aten::threshold_backward": "threshold_backward",
    "autograd::engine::evaluate_function: NativeBatchNormBackward0": (
        "autograd::engine::evaluate_function: NativeBatchNo"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_named_by_what_it_computes(name):
    assert amdahl.short(name) == NAMES[name]
