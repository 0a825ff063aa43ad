"""Places in memory, kinds of kernels, and the figures of notebook 03."""

import made
import matplotlib as mpl
import pytest
import torch
from logs import experiment, measure, write_log

from dlojz.chapters.n03_channels_last import figures
from dlojz.course import UserError
from dlojz.runs import log


def case(name, step_ms, **times_ms):
    """A case of experiments/layouts.py: one convolution, one transpose, in a trace."""
    trace = [["nchwToNhwcKernel", 5.0, 1.0], ["sm90_xmma_fprop", 6.0, 2.0], ["relu", 8.0, 1.0]]
    seen = {"step_ms": step_ms, "times_ms": times_ms, "trace_ms": trace}
    return {"event": "case", "case": name, **seen}


# Strides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_addresses_are_those_of_the_memory(memory_format):
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).contiguous(memory_format=memory_format)
    memory = torch.as_strided(x, (x.numel(),), (1,))
    found = figures.addresses(x)
    assert list(found) == list(range(x.numel()))
    assert [x[index].item() for index in found.values()] == memory.tolist()


def test_the_memory_is_coloured_by_channel_in_its_order():
    x = torch.zeros(1, 3, 1, 2)
    y = x.to(memory_format=torch.channels_last)
    red, green, blue = (mpl.colors.to_rgba(c) for c in figures.CHANNELS)
    axes = figures.plot_memory([x, y]).ravel()
    colours = [[bar.get_facecolor() for bar in ax.patches] for ax in axes]
    assert colours == [[red, red, green, green, blue, blue], [red, green, blue] * 2]
    titles = [ax.get_title(loc="left") for ax in axes]
    assert "stride (6, 2, 2, 1)" in titles[0]
    assert "stride (6, 1, 6, 3)" in titles[1]
    assert all("shape (1, 3, 1, 2)" in title for title in titles)
    assert any(t.get_text() == "next channel: +1" for t in axes[1].texts)


# What a run saw ----------------------------------------------------------------------------------


def test_the_layers_of_a_run_are_told_by_layout(tmp_path):
    layer = {"layer": "Conv2d", "in_layout": "NCHW", "out_layout": "channels_last", "count": 2}
    linear = layer | {"layer": "Linear", "in_layout": "any", "out_layout": "any"}
    run = write_log(tmp_path / "run.jsonl", evidence={"when": "probe", "layers": [layer, linear]})
    table = figures.seen(run)
    assert table.rows == [("Conv2d", "2", "NCHW", "channels_last")]


def test_a_run_without_evidence_says_so(tmp_path):
    assert "no evidence" in repr(figures.seen(write_log(tmp_path / "run.jsonl")))
    assert "no evidence" in repr(figures.seen(tmp_path / "no-such-run"))


# Kernels -----------------------------------------------------------------------------------------


KINDS = {
    "change of layout": (
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half>",
        "void cudnn::ops::nhwcToNchwKernel<float, float>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "aten::copy_",
    ),
    "convolution": (
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_nhwckrsc_nhwc_tilesize128x64",
        "cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816wgrad_optimized>",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void fft2d_r2c_32x32<float, false, 0u>(float2*, cudnn::reduced_divisor)",
        "void cudnn::cnn::kern_precompute_indices<false>(int*, int, int)",
        "void nhwcAddPaddingKernel<float, (cudnnKernelDataType_t)0>(int)",
        *("aten::mkldnn_convolution", "aten::convolution_backward", "aten::addmm"),
    ),
    "batch normalization": (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half2, 512, true>",
        "void at::native::batch_norm_backward_reduce_channels_last_kernel<4>",
        "aten::native_batch_norm_backward",
    ),
    "the rest": (
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::float16_copy>",
        "void at::native::elementwise_kernel<128, 2, at::native::CUDAFunctor_add>",
        "void at::native::max_pool_forward_nhwc<__half, int>",
        "void at::native::multi_tensor_apply_kernel<...>",
        *("aten::add_", "aten::max_pool2d_with_indices"),
    ),
}


def test_a_kernel_is_told_by_its_name():
    assert {kind: tuple(n for n in names if figures.kind_of(n) == kind)
            for kind, names in KINDS.items()} == KINDS  # fmt: skip


def test_a_gain_compares_steps_made_after_each_other():
    """The machine became three times as slow in the middle: the pairs do not mind."""
    first = {"step_ms": [100, 100, 300, 300, 300]}
    second = {"step_ms": [50, 50, 50, 150, 150]}
    assert figures.gain(second, first) == 2


@pytest.fixture
def kinds(tmp_path):
    events = [
        measure("neither", 100.0),
        case("neither", [100.0, 100.0], nchwToNhwcKernel=4.0, sm90_xmma_fprop=6.0),
        measure("both", 50.0),
        case("both", [50.0, 50.0], sm90_xmma_fprop=6.0),
    ]
    return experiment(tmp_path / "layouts.jsonl", *events, **made.RESNET, precision="fp16")


def test_a_step_is_split_as_the_profiled_one(kinds):
    found = log.read(kinds).cases
    split = figures.step_by_kind(found["neither"], found["neither"])
    assert split["change of layout"] == pytest.approx(40)
    assert split["convolution"] == pytest.approx(60)
    both = figures.step_by_kind(found["both"], found["neither"])
    assert both["change of layout"] == 0
    assert sum(both.values()) == pytest.approx(50)


def test_the_kinds_are_stacked_to_the_step(kinds):
    (ax,) = figures.plot_kinds([kinds])
    ends = {round(p.get_x() + p.get_width(), 3) for p in ax.patches}
    assert {100.0, 50.0} <= ends
    assert [t.get_text().strip() for t in ax.texts] == ["100 ms, x 1.00", "50 ms, x 2.00"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["neither", "both"]
    assert "fp16" in ax.get_title(loc="left")


def test_a_trace_is_drawn_from_its_first_kernel(kinds):
    ax = figures.plot_trace(kinds)
    assert min(p.get_x() for p in ax.patches) == 0
    change = mpl.colors.to_rgba(figures.COLOURS["change of layout"])
    assert sum(p.get_facecolor() == change for p in ax.patches) == 2, "one in each case"
    assert "ms" in ax.get_xlabel()


def test_the_traces_end_with_the_same_layer():
    normal, other = ["aten::native_batch_norm", 0.0, 1.0], ["relu", 0.0, 1.0]
    first, second = figures._same_layers([[other, normal, other], [normal, other, normal]])
    assert first == [other, normal]
    assert second == [normal]


# The autotuner -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_ms", "scale"), [(5000.0, "log"), (110.0, "linear")])
def test_the_autotuners_steps_are_told_off_and_on(tmp_path, first_ms, scale):
    off, on = (
        experiment(
            tmp_path / f"{word}.jsonl",
            *(measure(sizes, ms) for sizes in ("one size", "6 sizes") for ms in times),
            autotuner=word == "on",
        )
        for word, times in (("off", [100.0] * 4), ("on", [first_ms, 80.0, 80.0, 80.0]))
    )
    axes = figures.plot_autotuner([off, on])
    assert [ax.get_xlabel() for ax in axes] == [
        "step, images of one size",
        "step, images of 6 sizes",
    ]
    labels = [t.get_text() for t in axes[0].get_legend().get_texts()]
    assert labels[0] == "off: 0.4 s in all, last 100 ms"
    assert labels[1].startswith("on: ")
    assert axes[0].get_yscale() == scale


# The matrix --------------------------------------------------------------------------------------


def recording(folder, precision, last, images_per_s, batch=256):
    """A training of resnet50 in one layout."""
    steps, wall = 20, 17 * batch / images_per_s
    given = {"model": "resnet50", "image_size": 224, "precision": precision, "channels_last": last}
    return write_log(
        folder / f"{precision}-{last}-{batch}.jsonl",
        steps=steps,
        device=True,
        batch=batch,
        arguments=given,
        about={"command": "x"},
        window={"first_step": 3, "steps": 17, "wall_s": wall},
    )


def test_the_matrix_shows_where_channels_last_loses(tmp_path):
    runs = [
        recording(tmp_path, "fp32", False, 900),
        recording(tmp_path, "fp32", True, 720),
        recording(tmp_path, "fp16", False, 1000),
        recording(tmp_path, "fp16", True, 1500),
        recording(tmp_path, "fp16", True, 9999, batch=512),
        recording(tmp_path, "bf16", True, 1400),  # its pair was not recorded
    ]
    axes = figures.plot_matrix(runs)
    texts = {t.get_text(): t.get_color() for t in axes[0].texts}
    assert texts == {"x 0.80": figures.WORSE, "no pair": "black", "x 1.50": "black"}
    assert max(p.get_height() for p in axes[0].patches) == pytest.approx(1500)
    assert axes[0].get_ylabel() == "throughput (images/s)"
    assert "recorded on X1" in axes[0].figure.get_supxlabel()


def test_an_experiment_that_failed_before_its_first_case_is_named(tmp_path):
    path = experiment(tmp_path / "layouts.jsonl", measure("steps", 6, "steps"))
    with pytest.raises(UserError, match=r"layouts.jsonl: no case was measured; see the job's"):
        figures.plot_kinds([path])
