"""What notebook 10c says of recordings is in the recordings."""

import statistics
from itertools import pairwise

from claims import claims

from dlojz import runs
from dlojz.runs import log
from dlojz.runs.stats import summary

NOTEBOOK = "10c_attention"


def cases(what):
    return [*log.read(runs.recorded(f"h100/10c-{what}")).cases.values()]


def times(found, field="ms"):
    """Return the median milliseconds of the cases that were timed, by name."""
    return {name: statistics.median(case[field]) for name, case in found.items() if field in case}


@claims(NOTEBOOK)
def test_memory_grows_with_the_square_or_with_the_length():
    found = {(c["way"], c["length"]): c for c in cases("attention") if "way" in c}
    for way, least, most in (("naive", 3.8, 4.1), ("math", 3.8, 4.1), ("cudnn", 1.9, 2.1)):
        peaks = [c["peak_bytes"] for (w, _), c in found.items() if w == way and "ms" in c]
        assert all(least < b / a < most for a, b in pairwise(peaks))
    failed = {key for key, case in found.items() if case.get("error") == "out of memory"}
    assert failed == {("math", 8192), ("naive", 16384), ("math", 16384)}
    yield "ends at 16,384 tokens for naive, in a single layer of four sequences"
    ms = times(found, "both_ms")
    assert ms["math", 4096] > 1.5 * ms["naive", 4096]
    assert min(ms["naive", 4096] / ms[way, 4096] for way in ("efficient", "flash", "cudnn")) > 1.5


@claims(NOTEBOOK)
def test_the_compiler_calls_sdpa_and_fused_kernels_are_more_accurate():
    found = {(c["way"], c["length"]): c for c in cases("attention") if "way" in c}
    for length in (512, 1024, 2048, 4096, 8192):
        compiled, cudnn, naive = (found[way, length] for way in ("compiled", "cudnn", "naive"))
        assert compiled["replaced"]
        assert compiled["peak_bytes"] == cudnn["peak_bytes"]
        for way in ("efficient", "flash", "cudnn"):
            assert 0.45 < found[way, length]["off"] / naive["off"] < 0.57
    yield "is half of naive's with a fused kernel"
    yield "SDPA chose cuDNN's kernel: the memory is the same to the byte"


@claims(NOTEBOOK)
def test_what_answers_and_what_it_costs():
    found = {(c["backend"], c["mask"], c["size"], c["format"]): c for c in cases("attention")[36:]}
    ms = times(found, "both_ms")
    usual = "none", 64, "bf16"
    cudnn = ms["cudnn", *usual]
    assert found["default", *usual]["answers"] == "cudnn"
    yield f"answers** on this card, {ms['flash', *usual] / cudnn:.1f} times as fast as flash"
    masked = [ms["cudnn", mask, 64, "bf16"] / cudnn for mask in ("boolean", "additive")]
    yield f"costs {masked[0]:.1f} times the time"
    yield "dlojz/chapters/n10c_attention/answers.toml", f"costs {masked[0]:.1f} times the time"
    assert f"{masked[1]:.1f}" == f"{masked[0]:.1f}"
    assert ms["cudnn", "causal", 64, "bf16"] < 0.8 * cudnn
    assert {
        b for b in ("math", "efficient", "flash", "cudnn") if (b, "none", 60, "bf16") in ms
    } == {*("math", "flash")}
    odd, fp32 = ms["flash", "none", 60, "bf16"], ms["default", "none", 64, "fp32"]
    assert 1.9 < odd / cudnn < 2.1
    yield "numbers takes twice as long as one of 64"
    yield f"**Float32** takes {fp32 / cudnn:.0f} times as long"
    for backend in ("flash", "cudnn"):
        assert "Got Query dtype: float" in found[backend, "none", 64, "fp32"]["why"][0]


@claims(NOTEBOOK)
def test_what_odd_sizes_and_separate_products_cost():
    found = {(c["comparison"], c["way"]): c for c in cases("products")}
    ms = times(found)
    odd, eight, padded = (ms["vocabulary", w] for w in ("50,257", "50,264", "50,304"))
    assert 6 < odd / padded < 7
    yield "of 50,257 takes 6 to 7 times as long as one of 50,304"
    assert eight < 1.05 * padded
    (best,) = log.read(runs.recorded("h100/10c-products")).measures
    share = found["vocabulary", "50,257"]["flops"] / odd / 1e9 / best.value
    yield f"reaches {share:.0%} of the speed of a large product".replace("%", " %")
    naive = ms["tokens, naive", "1,021"] / ms["tokens, naive", "1,024"]
    yield f"1,021 tokens makes naive {naive:.1f} times as slow"
    assert ms["tokens, SDPA", "1,021"] < 1.1 * ms["tokens, SDPA", "1,024"]
    apart, one, fused = (ms["LSTM", w] for w in ("separate gates", "one product", "fused"))
    assert 1.9 < apart / one < 2.4
    yield f"twice as fast as with separate ones, and the fused kernel {apart / fused:.0f} times"
    loop, kernel = (
        [ms[f"hidden numbers, {way}", size] for size in ("1,021", "1,024")]
        for way in ("one product", "fused")
    )
    assert loop[0] < 1.06 * loop[1]
    for words in ("512", "8,192"):
        three, joined = (
            ms[f"q, k, v of {words} tokens", w] for w in ("three products", "one product")
        )
        assert joined < three / 2
        assert 0.7 < three < 0.8
        assert 0.3 < joined < 0.4
    yield f"In the fused kernel it took {kernel[0]:.1f} ms; a width of 1,024 took {kernel[1]:.1f}"
    yield f"and {fused:.1f} when it was measured again"


@claims(NOTEBOOK)
def test_words_per_second_follow_the_share_until_something_else_is_the_limit():
    found = {c["layout"]: c for c in cases("sequences") if "layout" in c}
    share = {name: c["words"] / c["places"] for name, c in found.items()}
    speed = {name: c["words"] / statistics.median(c["ms"]) for name, c in found.items()}
    step = {name: statistics.median(c["ms"]) / len(c["columns"]) for name, c in found.items()}
    whole, packed = "longest of all", "packed"
    assert round(share[packed] / share[whole]) == 10
    yield f"the words per second {speed[packed] / speed[whole]:.1f} times"
    yield f"A padded step took {step[whole]:.0f} ms."
    yield f"has a tenth of the places, and still took {step[packed]:.0f} ms"
    assert speed["longest of its batch"] < 1.2 * speed[whole]
    given = summary(runs.recorded("h100/10c-sequences")).arguments
    attends, products = 4 * given["longest"], 24 * given["width"]  # operations, over the width
    assert attends / (attends + products) < 0.1
    slower = [100 - 100 * speed[f"packed, {way}"] / speed[packed] for way in ("flex", "varlen")]
    yield f"The last two are {slower[0]:.0f} % and {slower[1]:.0f} % slower here"
    yield f"{speed[packed] / speed[whole]:.0f} times as many words per second from texts"


@claims(NOTEBOOK)
def test_packed_gradients_are_exact_and_faults_are_not_seen_in_the_loss():
    found = {c["gradients"]: c for c in cases("sequences") if "gradients" in c}
    assert found["packed"]["away"] < 1e-14
    faults = [found[n] for n in found if "without" in n or "go on" in n]
    assert len(faults) == 3
    assert min(c["away"] for c in faults) > 0.3
    assert max(abs(c["loss"] / found["padded"]["loss"] - 1) for c in faults) < 0.01
    rounded = [c["away"] for name, c in found.items() if "bf16" in name]
    assert len(rounded) == 4
    assert max(rounded) < 1.05 * min(rounded)
    yield "All of them are as far from float64 as padded texts in bf16"


@claims(NOTEBOOK)
def test_the_gains_on_the_card_are_those_of_the_figures():
    found = {c["way"]: c for c in cases("attention") if c.get("length") == 8192}
    naive, cudnn = found["naive"], found["cudnn"]
    ms = times({"naive": naive, "cudnn": cudnn}, "both_ms")
    times_as_fast, less = ms["naive"] / ms["cudnn"], naive["peak_bytes"] / cudnn["peak_bytes"]
    yield f"attention {times_as_fast:.0f} times as fast, in 1/{less:.0f} of the memory"


def trained(place, epochs):
    """The longest trainings of a recording, by family."""
    found = {}
    for case in log.read(runs.recorded(place)).cases.values():
        if case["phase"] == "fresh" and case["epochs"] == epochs:
            found.setdefault(case["family"], []).append(case)
    return found


def mean(found, field):
    return {family: statistics.fmean(c[field] for c in cases) for family, cases in found.items()}


@claims(NOTEBOOK)
def test_fewer_operations_need_not_cost_less():
    short, middle, long = (trained("h100/10c-families", n) for n in (3, 6, 12))
    flops = mean(long, "flops")
    assert sorted(flops, key=flops.get) == ["deep", "depthwise", "dense", "wide"]
    cost, reached = mean(long, "joules"), mean(long, "accuracy")
    assert min(cost, key=cost.get) == "dense"
    yield f"its epochs cost {cost['depthwise'] / cost['dense']:.1f} times as much"
    assert abs(reached["deep"] - reached["dense"]) < 0.002
    yield f"and costs {cost['deep'] / cost['dense']:.1f} times as much"
    assert min(reached, key=reached.get) == "wide"
    first = mean(short, "accuracy")
    assert max(first, key=first.get) == "depthwise"
    for found, family in ((middle, "dense"), (short, "depthwise"), (long, "wide")):
        joules, share = (mean(found, field)[family] for field in ("joules", "accuracy"))
        yield f"{100 * share:.0f} % cost {joules:,.0f} J"


@claims(NOTEBOOK)
def test_the_order_of_networks_is_the_machine_s():
    found = trained("cpu/10c-cpu-families", 8)
    cost = mean(found, "core_s")
    assert min(cost, key=cost.get) == "wide"
    reached = {f: statistics.median(c["accuracy"] for c in cases) for f, cases in found.items()}
    assert reached["wide"] >= reached["dense"]
    sizes = [cases[0]["parameters"] for cases in found.values()]
    least, most = (round(f(sizes) / 1000) for f in (min, max))
    yield f"with networks of {least},000 to {most},000 parameters"
