"""The talks: one for each title of the syllabi, whose slides have a message and a figure."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from claims import claims

from dlojz import course, runs
from dlojz.chapters import n06_ddp as n06
from dlojz.chapters import n10_kernels as n10
from dlojz.chapters import n11_fsdp as n11
from dlojz.chapters import n11b_hybrid as n11b
from dlojz.classroom import syllabus
from dlojz.figures import ladder
from dlojz.runs.stats import summary

ROOT = course.course_root()
FOLDER = ROOT / "solutions" / "talks"
TALKS = {path.stem: path.read_text() for path in syllabus.talks().values()}
BLOCK = re.compile(r"```\{([\w-]+)\}\n(.*?)```", re.S)
WORDS = 35
NUMBERED = "One GPU trains", "One line makes", "Six times as fast", "The price is messages"


def slides(text):
    """Return the slides after the first: the title, the words below it, and its blocks by name."""
    found = []
    for slide in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = slide.partition("\n")
        blocks = [(name, content) for name, content in BLOCK.findall(body)]
        found.append((title, BLOCK.sub("", body).strip(), blocks))
    return found


def long(blocks):
    return any(content.startswith(":long:") for _, content in blocks)


def minutes(path):
    """Return the shortest and the longest time that the syllabi give a talk."""
    titles = {p.stem: title for title, p in syllabus.talks().items()}
    given = [part.minutes for part in syllabus.parts(titles[path])]
    return min(given), max(given)


# The files ----------------------------------------------------------------------------------------


def test_each_talk_of_a_syllabus_has_its_slides_and_no_slides_are_left_over():
    days = [day for syllabi in syllabus.read().values() for day in syllabi]
    titles = {part.name for day in days for part in day.parts if part.kind == "talk"}
    assert set(syllabus.talks()) == titles
    assert {*TALKS, "index"} == {path.stem for path in FOLDER.glob("*.md")}


@pytest.mark.parametrize("name", TALKS)
def test_a_slide_has_one_message_one_figure_and_notes(name):
    found = slides(TALKS[name])
    assert 5 <= len(found) <= 12
    for title, words, blocks in found:
        assert [kind for kind, _ in blocks] == ["draw", "revealjs-notes"], title
        assert len(f"{title} {words}".split()) <= WORDS, title
        said = blocks[1][1].partition("Room:")[0]
        assert 3 <= len(re.findall(r"[.?!]\)?\s", said)) <= 6, title


@pytest.mark.parametrize("name", TALKS)
def test_a_slide_takes_one_to_five_minutes_in_the_short_form_and_in_the_long_one(name):
    found = slides(TALKS[name])
    short = [title for title, _, blocks in found if not long(blocks)]
    least, most = minutes(name)
    assert 1 <= least / len(short) <= 5
    assert 1 <= most / len(found) <= 5


def test_each_question_of_the_room_is_in_the_talk_track():
    track = (ROOT / "solutions" / "TALK.md").read_text()
    for name, text in TALKS.items():
        asked = re.findall(r"Room: \*(.+?)\*\n", text)
        assert asked, name
        assert [question for question in asked if f"### {question}\n" not in track] == []


# Numbers ------------------------------------------------------------------------------------------


def speed(name):
    return summary(runs.recorded(name)).images_per_s


def finding(axes):
    """Return the finding that a figure says itself."""
    return np.ravel(axes)[0].figure.get_suptitle()


def test_words_for_numbers_are_those_of_the_recordings():
    found = ladder.recorded("11_fsdp").found
    assert found["09_compile"].images_per_s > 200 * found["00_start"].images_per_s
    fp32, bf16 = (speed(f"h200/09-ladder-resnet50-{n}") for n in ("1-fp32", "3-bf16"))
    assert bf16 > 2 * fp32, "half the bits more than double the speed"
    nchw, nhwc = (speed(f"h200/03-resnet50-fp16-{n}-b0256") for n in ("nchw", "nhwc"))
    assert 1.85 < nhwc / nchw < 2, "almost twice as fast"
    one, four = (
        np.mean([summary(r).images_per_s for r in runs.recordings(f"h200/06-resnet50-bf16-x{n}-*")])
        for n in (1, 4)
    )
    assert 3.9 < four / one < 4, "nearly four times"
    eager, compiled = (speed(f"h200/09-batch-resnet50-{n}-b0032") for n in ("03", "09"))
    assert compiled < eager, "with a small batch the compiler may even lose"
    cases = dict(n06.figures._cases(runs.recorded("h200/06-ddp-x2")))
    sent = {
        name: sum(c["bytes"] for c in case.get("collectives", [])) for name, case in cases.items()
    }
    for name in ("loss read in each step", "metrics summed in each step", "SyncBatchNorm"):
        assert 0 <= sent[name] - sent["DDP"] < 1e6, name


@claims("talks/second-computer.md")
def test_a_gpu_beside_cores():
    ratio = speed("h100/01-resnet50-fp32-b0032") / speed("h100/00-resnet50-cpu-b0032")
    yield f"One GPU trains {ratio:.0f} times as fast as 16 CPU cores"


@claims("talks/compiler.md")
def test_the_gain_of_a_line():
    eager, compiled = (
        speed(f"h200/09-ladder-resnet152-{n}") for n in ("4-channels-last", "5-default")
    )
    yield f"One line makes ResNet-152 {compiled / eager:.1f} times as fast"


@claims("talks/kernel.md")
def test_what_kernels_move_and_gain():
    assert "need 4.0 times fewer bytes" in finding(n10.plot_path(runs.recorded("h100/10-softmax")))
    yield "Fused, the same operations need a quarter of the bytes"
    counted = finding(n10.plot_counters(runs.recorded("h100/10-counters")))
    assert "moves 4.9 times the bytes" in counted
    yield "a kernel that spills moves them five times"
    normalize = runs.recorded("h100/10-normalize")
    step = n10.step_gain(normalize, runs.recorded("h100/03-resnet50-bf16-nhwc-b0256"))
    assert round(n10.kernel_gain(normalize)) == 6
    yield f"Six times as fast for the kernel, {100 * (step - 1):.1f} % for the step"
    plt.close("all")


@claims("talks/do-not-fit.md")
def test_the_price_of_sharding_and_the_peak():
    sent = {way: sum(parts) for way, parts in n11.sent(runs.recorded("cpu/11-nodes-x4")).items()}
    yield f"The price is messages: {sent['FSDP2'] / sent['DDP']:.1f} times the bytes of DDP"
    shares = [used.mfu for _, used in n11b.used(runs.recorded("cpu/11-predicted"))]
    assert 0.48 < max(shares) < 0.56
    yield "Compiled and full, a GPU reaches half of its sold peak"


def test_a_title_with_another_number_would_need_a_claim():
    titles = [title for text in TALKS.values() for title, *_ in slides(text)]
    names = re.compile(r"fp\d+|16 bits|1F1B|ResNet-\d+")
    counted = [title for title in titles if re.search(r"\d", names.sub("", title))]
    assert [title for title in counted if not title.startswith(NUMBERED)] == []


# The slides as they are shown ---------------------------------------------------------------------

MEASURE = """() => Array.from({length: Reveal.getTotalSlides()}, (_, number) => {
  Reveal.slide(number);
  const slide = Reveal.getCurrentSlide(), image = slide.querySelector("img");
  const texts = slide.querySelectorAll("h1, h2, p, table");
  const parts = [...texts].map((text) => text.getBoundingClientRect());
  const box = image ? image.getBoundingClientRect() : {top: 720, bottom: 720, right: 0};
  return {title: slide.querySelector("h1, h2").textContent, top: box.top, end: box.bottom,
          bottom: Math.max(...parts.map((p) => p.bottom)), inside: slide.scrollHeight,
          right: Math.max(box.right, ...parts.map((p) => p.right)), wide: slide.scrollWidth,
          loaded: !image || image.naturalWidth > 0};
})"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All talks, built in a folder of their own with small figures."""
    if importlib.util.find_spec("sphinx_revealjs") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs sphinx-revealjs: make setup")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import talks

    return talks.build(tmp_path_factory.mktemp("talks") / "built", scale=0.4).parent


def test_the_slides_build_without_a_warning_and_nothing_overflows(built, page):
    page.set_viewport_size({"width": 1280, "height": 720})
    for name in [*TALKS, "index"]:
        page.goto((built / f"{name}.html").as_uri())
        page.wait_for_function("window.Reveal && Reveal.isReady()")
        shown = page.evaluate(MEASURE)
        assert len(shown) == 1 + len(slides(TALKS.get(name, "")))
        for slide in shown:
            assert slide["loaded"], slide
            assert slide["bottom"] <= slide["top"] + 1, slide
            assert slide["end"] <= 720, slide
            assert slide["inside"] <= 720, slide
            assert max(slide["right"], slide["wide"]) <= 1280, slide


def test_the_short_form_leaves_out_the_slides_that_are_marked(built, page):
    page.goto((built / "fewer-bits.html").as_uri() + "?short")
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    short = [blocks for _, _, blocks in slides(TALKS["fewer-bits"]) if not long(blocks)]
    assert page.evaluate("Reveal.getTotalSlides()") == 1 + len(short) == 5


def test_a_printed_slide_fills_its_page(built, page):
    page.goto((built / "fewer-bits.html").as_uri() + "?print-pdf")
    page.wait_for_selector(".pdf-page img")
    page.emulate_media(media="print")
    places = """(all) => all.map((e) => { const box = e.getBoundingClientRect(),
      paper = e.closest(".pdf-page").getBoundingClientRect();
      return [box.left - paper.left, box.top - paper.top, box.bottom - paper.top]; })"""
    titles, images = (page.eval_on_selector_all(f".pdf-page {e}", places) for e in ("h2", "img"))
    assert len(titles) == len(images) == len(slides(TALKS["fewer-bits"]))
    for (left, _, under), (_, top, bottom) in zip(titles, images, strict=True):
        assert left == 50
        assert under <= top
        assert 700 < bottom <= 720
