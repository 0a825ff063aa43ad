"""The talk track: for each notebook three questions of the room, each with an answer."""

import re
from functools import cache

import nbformat
import pytest
from claims import claims

from dlojz import course

ROOT = course.course_root()
TALK = ROOT / "solutions" / "TALK.md"
SOLVED = sorted((ROOT / "solutions").glob("[0-9]*.ipynb"))
WORDS = 90  # of an answer, without its links
LINK = re.compile(r"\[([^]]*)\]\(([^)]+)\)")
FIGURE = re.compile(r"\d[\d,.]*\d|\d")


def sections(text):
    """Return by notebook its questions and their answers, in order."""
    parts = re.split(r"^## (.+)$", text, flags=re.M)[1:]
    return {
        name.strip(): [
            tuple(map(str.strip, asked.split("\n", 1)))
            for asked in re.split(r"^### ", body, flags=re.M)[1:]
        ]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def questions():
    found = sections(TALK.read_text())
    return [(name, question, answer) for name in found for question, answer in found[name]]


@cache
def taught(number):
    """The figures up to a notebook and its second parts: notebooks, quizzes and answers."""
    books = [path for path in SOLVED if path.stem[:2] <= number]
    texts = [cell.source for path in books for cell in nbformat.read(path, as_version=4).cells]
    for name in ("quiz.toml", "answers.toml"):
        files = (ROOT / "dlojz" / "chapters").glob(f"*/{name}")
        texts += [file.read_text() for file in files if file.parent.name[1:3] <= number]
    return {*FIGURE.findall("\n".join(texts))}


def without_source(notebook, answer):
    """Return the figures of an answer which are neither taught by then nor have a source."""
    if LINK.search(answer) or "reference/" in answer:
        return []
    prose = re.sub(r"`[^`]*`", "", answer)
    prose = re.sub(r"\b0\d\b|\b0\db\b|\b11b?\b|torch 2\.\d+", "", prose)  # of notebooks, versions
    return [figure for figure in FIGURE.findall(prose) if figure not in taught(notebook[:2])]


def test_each_notebook_has_three_questions():
    found = sections(TALK.read_text())
    assert list(found) == [path.stem for path in SOLVED]
    assert {name: len(asked) for name, asked in found.items()} == dict.fromkeys(found, 3)


def test_an_answer_is_short_and_its_figures_have_a_source(subtests):
    for notebook, question, answer in questions():
        with subtests.test(question):
            assert "?" in question
            assert 30 <= len(LINK.sub(r"\1", answer).split()) <= WORDS
            assert without_source(notebook, answer) == []


def test_what_an_answer_points_to_is_there():
    text = TALK.read_text()
    named = re.findall(r"`((?:notebooks|solutions|tools)/[\w/.]+)`", text)
    named += [target for _, target in LINK.findall(text) if not target.startswith("http")]
    folders = [ROOT, TALK.parent]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
    logs = re.findall(r"`(\d\d-[\w-]+)`", text)
    kept = [ROOT / "reference" / gpu / f"{log}.jsonl" for log in logs for gpu in ("h100", "h200")]
    assert logs
    assert all(path.is_file() for path in kept)


def test_the_speeds_of_two_gpus_are_those_of_the_recordings():
    """The only figures that no notebook shows: of 04b, and their logs are named there."""
    from dlojz import runs
    from dlojz.runs import stats

    (answer,) = [text for _, question, text in questions() if "newer GPU" in question]
    for name in ("01-resnet50-fp32-b0256", "03-resnet50-tf32-nhwc-b0256"):
        speeds = [stats.summary(runs.recorded(f"{gpu}/{name}")) for gpu in ("h100", "h200")]
        h100, h200 = (speed.images_per_s for speed in speeds)
        assert f"{h100:,.0f} and {h200:,.0f}" in answer
        assert f"{h200 / h100 - 1:.0%}".replace("%", " %") in answer


def test_what_the_answers_say_of_tensors_is_so():
    import torch

    text = TALK.read_text()
    (line,) = re.findall(r"`(torch\.ones\(10_000.*?\))` is `tensor\(9984\.\)`", text)
    assert eval(line) == 9984
    assert torch.finfo(torch.float16).max == 65_504
    x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"Use \.reshape"):
        x.view(2, -1)
    with pytest.raises(RuntimeError, match="required rank 4"):
        torch.zeros(2, 3, 4).to(memory_format=torch.channels_last)
    nhwc = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    nchw = torch.nn.Conv2d(3, 4, 3)
    nchw.load_state_dict(nhwc.state_dict())
    assert torch.equal(nchw.weight, nhwc.weight)
    assert nchw.weight.is_contiguous()
    assert not nhwc.weight.is_contiguous()


def test_a_figure_without_a_source_would_be_found():
    assert without_source("01_gpu", "It is 4,711 times as fast.") == ["4,711"]
    assert without_source("01_gpu", "It is 4,711 times as fast ([x](https://x.org)).") == []
    assert without_source("01_gpu", "The host is 23 ms ahead.") == []
    assert without_source("00_start", "98.4 % of linear, says 06.") == ["98.4"], "not taught yet"


def test_a_claim_that_is_not_in_its_text_would_be_found():
    claims("TALK.md")(lambda: ["## 01_gpu", ("01_gpu", "# 01 ·")])()
    with pytest.raises(AssertionError, match="4,711 times"):
        claims("TALK.md")(lambda: ["It is 4,711 times as fast."])()
