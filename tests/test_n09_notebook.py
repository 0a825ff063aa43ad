"""What notebooks 09 and 09b, their quizzes, and the talk say of recordings is in the recordings."""

from claims import claims
from programs import REPOSITORY

from dlojz import course, runs
from dlojz.chapters.n09b_modes import figures, worth
from dlojz.chapters.n09b_modes import worth_figures as tables
from dlojz.figures import report
from dlojz.runs.stats import summary

CHAPTERS = "dlojz/chapters"
MODELS = ("resnet50", "resnet152", "convnext_tiny", "vit_b_16")


def recorded(name):
    return summary(runs.recorded(f"h200/{name}"))


def faster(after, before):
    return recorded(after).images_per_s / recorded(before).images_per_s


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
    yield f"Fusion gained {min(gains):.1f} to {max(gains):.1f} times"
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
    yield answers, f"with 512 images it gains {gains[-1]:.2f} times"


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
