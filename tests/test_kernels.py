import gzip

import pytest

from dlojz import runs
from dlojz.chapters import n02b_formats as n02b
from dlojz.chapters import n04b_roofline as n04b
from dlojz.chapters.n04b_roofline import kernels
from dlojz.traces import kinds
from dlojz.widgets.answer import ANSWERS

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc"
NORM = "void at::batch_norm_backward_reduce_channels_last_kernel<4, float>(const T2 *)"


def log(*measured):
    """What ncu writes: (name, duration, unit, memory, sm, tensor) of each kernel."""
    text = "==PROF== Connected to process 7\n" + HEAD
    for i, (name, duration, unit, *shares) in enumerate(measured):
        values = zip(kernels.METRICS, (unit, "%", "%", "%"), (duration, *shares), strict=True)
        text += "".join(f'"{i}","{name}","{m}","{u}","{v}"\n' for m, u, v in values)
    return text + "==ERROR== An error occurred while trying to profile.\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ncu.csv"
    path.write_text(log((CONV, "3,000", "ns", 20, 60, 70), (NORM, "1.0", "us", 90, 30, 0)))
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_a_log_of_ncu_is_read_zipped_or_not(file, zipped):
    if zipped:
        packed = file.with_suffix(".csv.gz")
        packed.write_bytes(gzip.compress(b"# on an H100\n# ncu ...\n" + file.read_bytes()))
        file = packed
    found = kernels.read(file)
    assert [k.us for k in found.all] == [3.0, 1.0]
    assert [k.tensor for k in found.all] == [70, 0]
    assert found.all[0].kind == kinds.MATRIX
    assert found.about == ("on an H100" if zipped else "")


def test_the_table_tells_the_mean_by_time(tmp_path):
    file = tmp_path / "ncu.csv"
    file.write_text(log((CONV, "3000", "ns", 20, 60, 70), (CONV, "1000", "ns", 60, 20, 30)))
    (row,) = kernels.by_kind(file).rows
    assert row == (kinds.MATRIX, "2", "0.00", "100%", "30 %", "50 %", "60 %")


def test_the_answer_of_notebook_04b_is_that_of_its_table():
    rows = {row[0]: row for row in n04b.by_kind().rows}
    _, _, _, share, *_, busy = rows[kinds.MATRIX]
    share, busy = (float(text.rstrip(" %")) for text in (share, busy))
    said = ANSWERS["04b from the figures"].replace("\n", " ")
    assert f"Half of {share:.0f} % at most" in said
    assert f"{share / 2:.0f} %. More likely {share * busy / 200:.0f} %" in said
    assert f"only {busy:.0f} % of their time. The other {100 - share:.0f} %" in said


def test_each_kernel_is_a_point(file):
    ax = kernels.plot_kernels(file)
    points = [c.get_offsets().tolist() for c in ax.collections]
    assert points == [[[70, 20]], [[0, 90]]], "what takes most time is first"
    assert ax.get_legend_handles_labels()[1][0].endswith(": 75.0%")
    assert len(ax.texts) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "no kernel in it; expected what ncu --csv"),
        (HEAD, "no kernel in it"),
        (HEAD + f'"0","{CONV}","gpu__time_duration.sum","ns","5"\n', "a metric is missing"),
        (HEAD + f'"0","{CONV}","gpu__time_duration.sum","ns","n/a"\n', "'n/a', not a number"),
    ],
)
def test_what_ncu_did_not_write_says_so(tmp_path, text, said):
    file = tmp_path / "ncu.csv"
    file.write_text(text)
    with pytest.raises(kernels.NsightError, match=said):
        kernels.read(file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NORM, "batch_norm_backward_reduce_channels_last_kernel"),
        ("void at::<unnamed>::max_pool_backward_nhwc<float>(const T1 *)", "max pooling, backward"),
        (CONV, "convolution, forward"),
        ("nvjet_sm90_tst_64x64_64x13_2x1_v_bz_splitK_NTT",) * 2,
    ],
)
def test_a_kernel_is_named_in_words_or_without_its_types(name, expected):
    assert kernels.short(name) == expected


def test_the_recorded_reading_is_of_a_gpu_and_names_no_machine():
    found = kernels.read(kernels.recorded())
    assert len(found.all) == 175
    assert "NVIDIA H100 80GB HBM3, torch 2.11.0" in found.about
    head = gzip.decompress(kernels.recorded().read_bytes()).decode().splitlines()[3]
    assert "Host" not in head
    assert "Process" not in head


def test_the_names_of_recorded_kernels_say_whether_they_use_tensor_cores():
    named = {p: runs.recorded(f"h200/03-resnet50-{p}-nchw-b0256") for p in ("fp32", "tf32", "bf16")}
    named |= {"cpu": runs.recorded("h100/00-resnet50-cpu-b0032")}
    found = n02b.by_name(named)
    assert [row[0] for row in found.rows] == ["fp32"] * 2 + ["tf32"] * 2 + ["bf16"] * 2
    for precision, name, says, cores in found.rows:
        assert says in name
        assert cores == ("no" if precision == "fp32" else "yes")
        assert len(name) <= n02b.figures.WIDTH + 1


def test_most_names_agree_with_what_was_measured():
    """Notebook 02b says so."""
    matrix = [k for k in kernels.read(kernels.recorded()).all if k.kind == kinds.MATRIX]
    agree = [kinds.on_tensor_cores(k.name) == (k.tensor > 1) for k in matrix]
    assert (sum(agree), len(agree)) == (42, 46)
