"""Traces of other people's programs, devices and profilers: no GPU of NVIDIA's, no marked step."""

import json
import time

import pytest
from simulated import BALANCED, MIDDLE, simulated
from traces import CONV, NCCL, Made, busy, steps, with_a_wait

from dlojz import cli
from dlojz.figures import timeline
from dlojz.traces import breakdown, kinds, suspects, trace

# Names of NVIDIA's in the traces of the tests, and how the other makers' traces have them.
AMD = {
    CONV: "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1_SN_LDSB1",
    NCCL: "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "cudaLaunchKernel": "hipExtModuleLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyWithStream",
    "cudaStreamSynchronize": "hipStreamSynchronize",
    "cudaDeviceSynchronize": "hipDeviceSynchronize",
    "cudaMalloc": "hipMalloc",
    "cudaFree": "hipFree",
    "Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD (Host -> Device)",
    "Memcpy DtoH (Device -> Pageable)": "Memcpy DtoH (Device -> Host)",
}
INTEL = {
    "cuda_runtime": "xpu_runtime",
    CONV: "gemm_kernel_dpas",
    NCCL: "oneccl_allreduce_large",
    "cudaLaunchKernel": "urEnqueueKernelLaunchWithArgsExp",
    "cudaMemcpyAsync": "urEnqueueUSMMemcpy",
    "cudaStreamSynchronize": "urQueueFinish",
    "cudaDeviceSynchronize": "urEventWait",
    "cudaMalloc": "urUSMDeviceAlloc",
    "cudaFree": "urUSMFree",
    "Memcpy HtoD (Pinned -> Device)": "Memcpy H2D",
    "Memcpy DtoH (Device -> Pageable)": "Memcpy D2M",
    "Memcpy HtoD (Pageable -> Device)": "Memcpy M2D",
}


def renamed(made, names):
    for event in made.events:
        event |= {key: names.get(event[key], event[key]) for key in ("name", "cat")}
    return made


def read(made, folder):
    return trace.read(made.write(folder / "trace.json"))


def facts(made, folder):
    """Return what does not depend on how the calls and kernels are called."""
    found = breakdown.analyse(opened := read(made, folder))
    waits = [w._replace(call="") for w in found.waits]
    accused = [(s.fault, s.share, s.sure) for s in suspects.suspects([opened])]
    return found.verdict, found.kinds, found.tensor_cores, found.lost, waits, accused


@pytest.mark.parametrize("names", [AMD, INTEL], ids=["AMD", "Intel"])
@pytest.mark.parametrize(
    "plant",
    [
        lambda m: m.norms(20),
        lambda m: m.cpu(),
        lambda m: (m.synchronize(), m.kernels("aten::add", MIDDLE, 0.5)),
        lambda m: m.empty_cache(8),
        lambda m: m.sleep(30),
        lambda m: m.task(NCCL, 20),
    ],
    ids=["item", "cpu", "synchronize", "allocate", "sleep", "exchange"],
)
def test_the_same_trace_with_another_makers_names_has_the_same_reading(tmp_path, plant, names):
    nvidia = facts(simulated(MIDDLE, plant), tmp_path)
    assert facts(renamed(simulated(MIDDLE, plant), names), tmp_path) == nvidia
    assert nvidia[1][kinds.MATRIX] > 0


def test_the_pageable_memory_of_an_intel_gpu_is_named(tmp_path):
    plant, fault = next(each for each in BALANCED if each[1] == "unpinned")
    opened = read(renamed(simulated(MIDDLE, plant), INTEL), tmp_path)
    assert [s.fault for s in suspects.suspects([opened])] == [fault]


def test_a_copy_for_which_hip_makes_the_host_wait_is_a_wait_however_short(tmp_path):
    """On AMD's GPUs torch reads a number with one call, which copies and waits."""
    made = Made()
    for begin in (0, 10):
        made.step(begin, begin, begin + 10)
        for at in range(begin, begin + 8):
            made.launch(at, at, at + 0.4)
            made.host("cpu_op", "aten::_local_scalar_dense", at + 0.4, at + 0.8)
            made.host("cuda_runtime", "hipMemcpyWithStream", at + 0.41, at + 0.45)
    (wait,) = breakdown.analyse(read(made, tmp_path)).waits
    assert (wait.why, wait.count) == (".item()", 16)


def test_a_driver_s_wait_within_a_runtime_s_is_one_wait(tmp_path):
    made = renamed(with_a_wait("aten::item"), INTEL)
    for begin in (0, 8):
        made.host("xpu_driver", "zeEventHostSynchronize", begin + 1.2, begin + 6)
    (wait,) = breakdown.analyse(read(made, tmp_path)).waits
    assert (wait.call, wait.count) == ("urQueueFinish", 2)


WAIT = """hipDeviceSynchronize hipStreamSynchronize hipEventSynchronize hipMemcpyWithStream
hipMemcpy urQueueFinish urEventWait piQueueFinish piEventsWait zeCommandQueueSynchronize
zeFenceHostSynchronize cudaEventSynchronize cuStreamSynchronize cudaMemcpy""".split()
GO_ON = """hipLaunchKernel hipStreamWaitEvent hipMemcpyAsync hipPointerGetAttribute cudaEventRecord
urEnqueueEventsWaitWithBarrier zeCommandQueueExecuteCommandLists cudaMemcpyAsync""".split()


def test_calls_that_wait_are_told_from_those_that_do_not():
    names = WAIT + GO_ON
    assert [n for n in names if kinds.WAITS.match(n) or kinds.BLOCKING.match(n)] == WAIT


def test_matrix_cores_of_other_makers():
    on_them = [
        AMD[CONV],
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x256x32",
        "_ZN2ck16tensor_operation6device12kernel_grouped_conv_fwd_xdl_cshuffle_v3",
        INTEL[CONV],
    ]
    names = [*on_them, "Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1"]
    assert {kinds.kind(name) for name in names} == {kinds.MATRIX}
    assert [kinds.on_tensor_cores(name) for name in names] == [True] * 4 + [False]


def test_no_share_of_tensor_cores_is_told_if_no_name_tells(tmp_path):
    made = renamed(busy(), {CONV: "attn_fwd"})
    found = breakdown.analyse(read(made, tmp_path))
    assert found.kinds[kinds.MATRIX] == pytest.approx(10)
    assert found.tensor_cores is None


# Devices that are not known -----------------------------------------------------------------


def on_a_device(work="mtia_ccp_events", calls="mtia_runtime"):
    made = busy()
    return renamed(made, {"kernel": work, "cuda_runtime": calls})


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op", "npu_kernel", "anything else"])
def test_the_work_of_a_device_that_is_not_known_is_no_processors(tmp_path, category, capsys):
    made = on_a_device(category, category)
    made.host("cpu_op", "aten::conv2d", 0, 20)
    path = made.write(tmp_path / "trace.json")
    assert cli.main(["trace", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a device that this reader does not know")
    assert f"that this reader does not know (category {category!r})" in out
    assert "20 events" in out
    assert "processor" not in out
    assert "something else" not in out
    assert (
        timeline.plot_step(path).figure.get_supxlabel() == "a device that this reader does not know"
    )


def test_kernels_whose_calls_are_not_known_do_not_say_that_the_host_waits_nowhere(tmp_path):
    path = on_a_device("kernel", "npu_runtime").write(tmp_path / "trace.json")
    assert trace.read(path).on_gpu
    assert str(timeline.waits(path)) == timeline.NO_CALLS


def test_a_processor_waits_nowhere(tmp_path):
    made = Made()
    made.step(1, 0, 10)
    made.host("cpu_op", "aten::conv2d", 0, 10)
    assert str(timeline.waits(made.write(tmp_path / "trace.json"))) == "the host waits nowhere"


def test_categories_of_old_versions_are_known(tmp_path):
    old = {"kernel": "Kernel", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    found = read(renamed(with_a_wait("aten::item"), old), tmp_path)
    assert found.notes == []
    assert [w.why for w in breakdown.analyse(found).waits] == [".item()"]


@pytest.mark.parametrize(
    ("category", "name"),
    [("cuda_runtime", "hipLaunchKernel"), ("user_annotation", "nccl:all_reduce")],
)
def test_a_gpu_whose_work_was_not_recorded_is_no_processor(tmp_path, category, name):
    made = Made()
    made.step(1, 0, 10)
    made.host("cpu_op", "aten::conv2d", 0, 10)
    made.host(category, name, 1, 2)
    assert breakdown.analyse(read(made, tmp_path)).verdict == trace.NOT_RECORDED


# Steps that nobody marked -------------------------------------------------------------------


def unmarked(*ranges):
    made = busy()
    made.events = [e for e in made.events if "ProfilerStep" not in e["name"]]
    for name, begin, end in ranges:
        made.host("user_annotation", name, begin, end)
    return made


def test_the_outermost_range_that_is_repeated_is_a_step(tmp_path):
    ranges = [("train_step", 4 * i, 4 * i + 3.9) for i in range(5)]
    ranges += [("forward", 4 * i, 4 * i + 1.9) for i in range(5)]
    ranges += [(f"layer {i}", i / 5, i / 5 + 0.2) for i in range(100)]
    found = read(unmarked(*ranges, ("all", 0, 20)), tmp_path)
    assert [s.name for s in found.steps] == ["train_step"] * 5
    assert breakdown.analyse(found).steps == 5
    assert found.notes == [
        "no step is marked in it by prof.step(), so each of the 5 ranges like 'train_step' is "
        "taken as one"
    ]


def test_ranges_that_are_numbered_are_the_same(tmp_path):
    found = read(unmarked(*((f"step {i}", 4 * i, 4 * i + 4) for i in range(5))), tmp_path)
    assert len(found.steps) == 5


@pytest.mark.parametrize(
    "ranges",
    [(), [("inference", 0, 20)], [("forward", 0, 1), ("forward", 10, 11)]],
    ids=["none", "one", "short"],
)
def test_without_a_repeated_range_the_whole_is_a_step(tmp_path, ranges):
    found = read(unmarked(*ranges), tmp_path)
    assert len(found.steps) == 1
    assert found.notes == ["no step is marked in it by prof.step(), so all of it is taken as one"]
    assert breakdown.analyse(found).verdict == "GPU bound"


def test_the_profilers_own_wait_at_its_end_is_not_of_the_whole(tmp_path):
    made = unmarked()
    made.host("cuda_runtime", "cudaDeviceSynchronize", 12.5, 20)
    assert breakdown.analyse(read(made, tmp_path)).waits == []


def test_kernels_alone_are_a_trace_whose_gaps_are_not_the_hosts_fault(tmp_path):
    made = unmarked()
    made.events = [e for e in made.events if e["cat"] == "kernel"]
    assert breakdown.analyse(read(made, tmp_path)).verdict == "GPU bound"
    made.events = made.events[::2]
    assert breakdown.analyse(read(made, tmp_path)).lost == {breakdown.PAUSES: pytest.approx(4 / 9)}


def test_where_steps_have_to_be_marked_nothing_is_taken_for_them(tmp_path):
    path = unmarked().write(tmp_path / "trace.json")
    with pytest.raises(trace.TraceError, match="no step in it; call"):
        trace.read(path, marked=True)


# What is not JSON ---------------------------------------------------------------------------

QUOTE = '{"ph": "X", "cat": "cpu_op", "name": "foo({"device": "cuda"})", "ts": 1, "dur": 2}'


def written(folder, *texts, end='], "traceName": "x"}'):
    path = folder / "trace.json"
    path.write_text('{"traceEvents": [\n' + ",\n".join(texts) + end)
    return path


@pytest.mark.parametrize("at", [0, 3, 12], ids=["first", "within", "last"])
@pytest.mark.parametrize("chunk", [50, 1 << 20])
def test_an_event_with_a_quote_in_its_name_is_left_out_with_its_line(
    tmp_path, monkeypatch, at, chunk
):
    monkeypatch.setattr(trace, "CHUNK", chunk)
    texts = [json.dumps(e) for e in busy().events]
    texts.insert(at * 2, QUOTE)
    found = trace.read(written(tmp_path, *texts))
    assert len(found.work) == 10
    line, column = 2 + min(at * 2, 22), 1 + QUOTE.index("device")
    place = f"1 place, first in line {line}, column {column}"
    assert found.notes == [f"events that are not JSON, left out in {place}"]


def test_broken_events_in_a_row_are_one_place(tmp_path):
    texts = [json.dumps(e) for e in busy().events]
    found = trace.read(written(tmp_path, *texts[:3], QUOTE, QUOTE, *texts[3:6], QUOTE, *texts[6:]))
    assert found.notes[0].startswith("events that are not JSON, left out in 2 places, first in li")


@pytest.mark.parametrize("cut", [30, 60, -5])
def test_a_file_that_is_cut_in_its_last_event_is_cut_short_all_the_same(tmp_path, cut):
    texts = [json.dumps(e) for e in busy().events]
    path = written(tmp_path, QUOTE, *texts[:-1], texts[-1][:cut], end="")
    with pytest.raises(trace.TraceError, match="cut short"):
        trace.read(path)


def test_a_control_character_in_a_name_does_no_harm(tmp_path):
    texts = [
        json.dumps(e).replace("aten::item", "aten::\x01\x1bitem")
        for e in with_a_wait("aten::item").events
    ]
    (wait,) = breakdown.analyse(trace.read(written(tmp_path, *texts))).waits
    assert wait.why == "aten::??item"


def test_what_is_no_utf_8_does_no_harm(tmp_path):
    path = written(tmp_path, *(json.dumps(e) for e in busy().events))
    path.write_bytes(path.read_bytes().replace(b"ProfilerStep#5", b"ProfilerStep#5\xff"))
    assert len(trace.read(path).steps) == 2


def test_a_large_file_with_a_fault_in_its_first_event_is_read_in_linear_time(tmp_path, monkeypatch):
    """In chunks as small as this a reader that copies the rest for each takes minutes."""
    monkeypatch.setattr(trace, "CHUNK", 100)
    texts = [json.dumps(e) for e in busy().events]
    path = written(tmp_path, QUOTE, *texts * 400)
    begin = time.process_time()
    assert len(trace.read(path).notes) == 1
    assert time.process_time() - begin < 1


def test_a_large_file_of_faults_only_is_read_in_linear_time(tmp_path):
    path = written(tmp_path, *[QUOTE] * 20_000)
    begin = time.process_time()
    with pytest.raises(trace.TraceError, match="no operation, call or kernel in it"):
        trace.read(path)
    assert time.process_time() - begin < 2


# Events that are no events ------------------------------------------------------------------


NO_NAME_OR_TIME = [{"name": None}, {"name": 7}, {"ts": "soon"}, {"ts": None}, {"ts": 10**400}]
NO_NAME_OR_TIME += [{"dur": -1}, {"dur": float("nan")}]


@pytest.mark.parametrize("change", NO_NAME_OR_TIME, ids=str)
def test_an_event_without_a_name_or_a_time_is_left_out(tmp_path, change):
    made = busy()
    made.events.insert(5, made.events[5] | change)
    del made.events[6]["args"]
    found = read(made, tmp_path)
    assert found.notes == ["left out: 1 event without a name or a time"]
    assert breakdown.analyse(found).verdict == "GPU bound"


@pytest.mark.parametrize(
    "change",
    [{"args": None}, {"args": []}, {"cat": None}, {"cat": []}, {"tid": {}}, {"ph": []}]
    + [{"args": {"correlation": number}} for number in (None, [], "7", 1e400)],
    ids=str,
)
def test_fields_of_a_wrong_shape_do_no_harm(tmp_path, change):
    made = busy()
    made.events.append(made.events[4] | change)
    assert breakdown.analyse(read(made, tmp_path)).verdict == "GPU bound"


def test_times_that_are_texts_are_times_and_numbers_of_calls_may_repeat(tmp_path):
    made = busy()
    for event in made.events:
        event |= {"ts": str(event["ts"]), "dur": str(event["dur"])}
        event["args"]["correlation"] = 7
    assert breakdown.analyse(read(made, tmp_path)).step_ms == pytest.approx(10)


@pytest.mark.parametrize("properties", [None, {}, [None], [{"name": 3}], "GPU"])
def test_a_head_of_a_wrong_shape_does_no_harm(tmp_path, properties):
    head = json.dumps({"deviceProperties": properties})[:-1]
    texts = ",".join(json.dumps(e) for e in busy().events)
    path = tmp_path / "trace.json"
    path.write_text(f'{head}, "traceEvents": [{texts}, null, 3, []]}}')
    assert trace.read(path).device is None


# Processes that do little -------------------------------------------------------------------


def empty(end=10):
    made = Made()
    made.step(1, 0, end)
    return made


def only_collectives():
    made = Made()
    for begin in (0, 10):
        made.step(begin, begin, begin + 10)
        made.host("user_annotation", "gloo:all_reduce", begin + 1, begin + 9)
        made.events[-1]["tid"] = 7
    return made


DO_LITTLE = [
    (only_collectives(), "communication bound", "communication"),
    (empty(), "held up by a host that is busy elsewhere", "elsewhere"),
]


@pytest.mark.parametrize(("made", "verdict", "fault"), DO_LITTLE, ids=["collectives", "empty"])
def test_a_process_that_runs_no_operation_has_a_verdict(tmp_path, made, verdict, fault, capsys):
    path = made.write(tmp_path / "trace.json")
    assert cli.main(["trace", str(path), "--png", str(tmp_path / "t.png")]) == 0
    assert capsys.readouterr().out.startswith(verdict)
    assert [s.fault for s in suspects.suspects([trace.read(path)])] == [fault]
    timeline.plot_shares({"it": path})


def test_steps_that_take_no_time_say_so(tmp_path):
    with pytest.raises(trace.TraceError, match="its steps take no time: ProfilerStep#1"):
        read(empty(end=0), tmp_path)


# Verdict and suspects agree -----------------------------------------------------------------


def paused():
    """The host has asked for all in time, and the device computes for 18 % of the step."""
    made = Made()
    for step in (0, 1):
        made.step(step, 10 * step, 10 * step + 5)
        for i in range(20):
            begin = 10 * step + 0.5 * i
            made.launch(10 * step + 0.01 * i, begin, begin + 0.09)
    return made


def test_a_device_that_computes_for_18_percent_is_not_what_bounds_the_step(tmp_path):
    found = breakdown.analyse(opened := read(paused(), tmp_path))
    assert found.verdict == "held up by pauses between kernels"
    (only,) = suspects.suspects([opened])
    assert (only.fault, only.sure) == ("pauses", "probable")
    assert only.share == pytest.approx(0.8, abs=0.05)


def test_an_exchange_that_nothing_overlaps_is_a_suspect(tmp_path):
    opened = read(steps((CONV, 0, 6.5), (NCCL, 6.5, 10)), tmp_path)
    assert breakdown.analyse(opened).verdict == "communication bound"
    (only,) = suspects.suspects([opened])
    assert (only.fault, only.sure) == ("communication", "probable")
    assert only.share == pytest.approx(0.35)
    assert "Larger batches" in only.evidence
    assert "record all processes" in only.settle


def test_an_exchange_comes_before_what_costs_less(tmp_path):
    made = steps(
        ("void at::native::batch_norm_backward_kernel<float>", 0, 1), (CONV, 1, 5), (NCCL, 5, 10)
    )
    found = suspects.suspects([read(made, tmp_path)])
    assert [s.fault for s in found] == ["communication", "nchw"]


def test_two_kernels_are_not_enough_for_an_average(tmp_path):
    made = Made()
    made.step(1, 0, 34)
    made.launch(1, 1.1, 1.105)
    made.launch(30, 30.1, 30.105)
    for at in range(2, 34):
        made.host("cuda_runtime", "cudaEventRecord", at, at + 0.01)
    opened = read(made, tmp_path)
    assert breakdown.analyse(opened).verdict == breakdown.TOO_FEW
    assert [s.fault for s in suspects.suspects([opened])] == ["none"]


def test_nobody_is_certain_of_what_costs_little(tmp_path):
    """Seven reads in a step of 100 ms, each with a moment in which the device is idle."""
    made = Made()
    for begin in (0, 100):
        made.step(begin, begin, begin + 100)
        for i in range(7):
            at = begin + 14 * i
            made.launch(at, at + 0.1, at + 14)
            made.host("cpu_op", "aten::item", at + 0.2, at + 14)
            made.host("cuda_runtime", "cudaStreamSynchronize", at + 0.3, at + 14)
    (only,) = suspects.suspects([read(made, tmp_path)])
    assert only.fault == "item"
    assert only.share < suspects.OTHER_SHARE
    assert only.sure == "probable"
    assert "time the step without it" in only.settle
