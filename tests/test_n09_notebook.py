"""What notebooks 09 and 09b, their quizzes, and the talk say of recordings is in the recordings."""

import statistics

from claims import claims
from programs import REPOSITORY

from dlojz import course, runs
from dlojz.chapters.n09_compile import figures as n09
from dlojz.chapters.n09b_modes import figures, worth
from dlojz.chapters.n09b_modes import worth_figures as tables
from dlojz.figures import report
from dlojz.runs.log import read
from dlojz.runs.stats import summary

CHAPTERS = "dlojz/chapters"
MODELS = ("resnet50", "resnet152", "convnext_tiny", "vit_b_16")


def recorded(name):
    return summary(runs.recorded(f"h200/{name}"))


def faster(after, before):
    return recorded(after).images_per_s / recorded(before).images_per_s


# 09: the sines, the gain, its price --------------------------------------------------------------


@claims("09_compile")
def test_sines_gain_by_their_bytes_and_lose_by_their_calls():
    found = read(runs.recorded("cpu/09-pointwise")).cases
    ms = {
        (name, way): statistics.median(case[f"{way}_ms"])
        for name, case in found.items()
        for way in ("eager", "compiled")
    }
    gains = {name: n09.ratio(case["eager_ms"], case["compiled_ms"]) for name, case in found.items()}
    long, short = "sin, 4194304 elements", "sin, 1024 elements"
    yield f"eight sines run only {gains[f'8 {long}']:.1f} times as fast"
    yield f"and runs {gains['GELU, 4194304 elements']:.1f} times as fast"
    calls = 1000 * (ms[f"8 {short}", "eager"] - ms[f"1 {short}", "eager"]) / 7
    yield f"each operation took {calls:.1f} microseconds"
    checks = [1000 * ms[f"{sines} {short}", "compiled"] for sines in (1, 8)]
    yield "It took {:.0f} to {:.0f} microseconds".format(*checks)
    assert [n for n in (1, 2, 4, 8) if gains[f"{n} {short}"] < 1] == [1, 2, 4]
    yield "chains of up to four sines *lost*"


@claims("09_compile")
def test_compiling_pays_after_its_price_with_the_start_of_the_compiler():
    run = runs.recorded("cpu/09-compile-time")
    starts = {m.what: m.value for m in read(run).measures}
    eager, whole = n09.ways(run)
    started = starts["the compiler starts, cold"]
    yield f"the compiler takes {whole.cold_s:.0f} s there, {started:.0f} of them to start"
    yield f"saves {eager.step_ms - whole.step_ms:.1f} ms in each step"
    cold, warm = (whole.break_even(paid).steps for paid in (whole.cold_s, whole.warm_s))
    yield f"after {round(cold, -3):,.0f} steps, and a warm cache saves less than a fifth"
    assert 0.8 < warm / cold < 0.85


@claims("09_compile")
def test_a_resnet_gains_on_an_h200():
    names = [f"09-ladder-resnet152-{rung}" for rung in ("4-channels-last", "5-default")]
    eager, default = map(recorded, names)
    yield f"Compiled it is {faster(*names[::-1]):.2f} times as fast"
    yield f"takes {100 - 100 * default.energy_per_image_j / eager.energy_per_image_j:.0f} % less"
    assert not default.compile_cached
    [rungs] = figures.ladders([runs.recorded(f"h200/{name}") for name in names]).values()
    steps = rungs[-1].price.rpartition("after ")[2]
    yield f"compiled for {default.compile_s:.0f} s, on {default.cpus} cores"
    yield f"compiled for {default.compile_s:.0f} s, and paid for itself after {steps}"
    minutes = int(steps.removesuffix(" steps").replace(",", "")) * eager.step_ms / 60_000
    assert round(minutes, 1) == 7.5, "until both are at the same step"
    ladder = "09-ladder-resnet50-"
    gain = faster(f"{ladder}5-default", f"{ladder}4-channels-last")
    yield f"a ResNet-50 trains {gain:.2f} times as fast"


@claims("09_compile")
def test_the_cuts_of_ddp_cost_one_percent_of_a_step():
    cases = read(runs.recorded("h200/09-ddp-x2")).cases
    alone, both, whole = (
        statistics.median(cases[name]["step_ms"])
        for name in ("no communication", "both", "both, graph not cut")
    )
    yield f"these cuts cost {100 * (both - whole) / alone:.0f} % of a step"


# 09b: how large, who waits, whose gain, what was computed -----------------------------------------


@claims(f"{CHAPTERS}/n09b_modes/quiz.toml")
def test_the_quiz_on_what_a_compiler_can_gain_is_on_the_table_above_it():
    row = tables.measured(course.course_root() / "reference/cpu/09-worth.json")[0]
    profile = worth.Profile.of(row["profile"])
    assert row["model"] == "resnet18"
    kept = profile.device_ms["matrix"] + profile.update_ms
    yield f"{profile.device_ms['matrix']:.0f} ms are matrix products"
    yield f"{worth.modelled_ms(profile, worth.NOTHING_DONE):.0f} ms / {kept:.0f} ms"
    yield f"{row['measured']['gain']:.2f} times were measured"


@claims("09b_modes")
def test_cuda_graphs_add_little_with_256_images():
    rungs = [[f"09-ladder-{m}-{r}" for m in MODELS] for r in ("5-reduce-overhead", "5-default")]
    assert {recorded(name).batch_size for some in rungs for name in some} == {256}
    added = [100 * faster(*pair) - 100 for pair in zip(*rungs, strict=True)]
    said = f"{min(added):.1f} to {max(added):.0f} %"
    yield f"CUDA graphs added {said}, because"
    yield f"with 256 images on an H200 they added {said}"
    yield "TALK.md", f"with 256 images an H200 gained {said} from it"
    eager = [f"09-ladder-{m}-4-channels-last" for m in MODELS]
    gains = [faster(*pair) for pair in zip(rungs[1], eager, strict=True)]
    yield f"Fusion made the four models {min(gains):.1f} to {max(gains):.1f} times as fast"
    ahead = [recorded(name).ahead_ms for name in rungs[1]]
    yield f"was {ahead[0]:.0f} ms ahead of it with ResNet-50, and {ahead[1]:.0f} ms with ResNet-152"


@claims("TALK.md")
def test_tuned_kernels_are_faster_and_compile_longer():
    tuned = runs.recorded("h200/09-tuned-resnet50-fp16")
    [rungs] = figures.ladders([*runs.recordings("h200/09-ladder-resnet50-*"), tuned]).values()
    *_, usual, rung = rungs
    assert (usual.words, rung.words) == (
        "09  reduce-overhead, fp16",
        "09  reduce-overhead, fp16, tuned",
    )
    yield f"is {100 * (rung.gain / usual.gain - 1):.0f} % faster with it, and compiled for"
    yield f"{rung.run.compile_s:.0f} s\ninstead of {usual.run.compile_s:.0f}"
    said = f"{rung.run.images_per_s:,.0f} images/s, {rung.gain:.2f} times fp32"
    assert said in (REPOSITORY / "docs/benchmark.md").read_text()


@claims("09b_modes")
def test_a_small_batch_gains_what_its_host_gains():
    batch, other = "09-batch-resnet50-", "03-resnet50-bf16-nhwc-b"
    gains = [faster(f"{batch}09-b{n:04d}", f"{batch}03-b{n:04d}") for n in (32, 64, 128, 512)]
    assert gains == sorted(gains), "less with a small batch"
    assert gains[0] < 1, "with 32 images it lost"
    yield f"the compiler gains {100 * (gains[1] - 1):.0f} %"
    assert abs(faster(f"{batch}03-b0512", f"{other}0512") - 1) < 0.005, "equally fast"
    assert faster(f"{other}0064", f"{batch}09-b0064") > 1, "eager, and ahead of the compiled one"
    assert recorded(f"{batch}09-b0064").ahead_ms < recorded(f"{batch}03-b0064").ahead_ms < 1
    twice = [recorded(f"09-compiled-resnet50-b0032-{n}").images_per_s for n in (1, 2)]
    yield "reached {:,.0f} images/s, and {:,.0f} when it was run again".format(*twice)
    answers = f"{CHAPTERS}/n09b_modes/answers.toml"
    yield answers, f"{recorded(f'{other}0064').images_per_s:,.0f} images/s"
    yield answers, f"with 512 images it is {gains[-1]:.2f} times as fast"


@claims("09b_modes")
def test_a_cache_gave_bf16_to_a_program_in_fp16():
    cases = [*report.measured(runs.recorded("cpu/09-stale")).cases.values()]
    bf16, fp16, tagged = cases
    assert [case["asked"] for case in cases] == ["bf16", "fp16", "fp16"]
    assert [case["from_cache"] for case in cases] == [False, True, False]
    assert [case["computed"] for case in cases] == ["bfloat16", "bfloat16", "float16"]
    assert fp16["error"] == bf16["error"] == bf16["eager_error"], "to the last digit"
    assert tagged["error"] == tagged["eager_error"]
    yield "eight times the error"
    assert round(fp16["error"] / tagged["error"]) == 8
    ladder = "09-ladder-resnet50-"
    eager = faster(f"{ladder}4-channels-last-fp16", f"{ladder}4-channels-last")
    graphs = faster(f"{ladder}5-reduce-overhead-fp16", f"{ladder}5-reduce-overhead")
    yield f"although eager it is {eager:.2f} times as fast"
    yield f"with clean caches fp16 gains {100 * (graphs - 1):.0f} %"
