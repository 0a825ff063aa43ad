"""The monitor, the quizzes, the questions and the predictions, without a browser."""

import math
import re
import sys
import threading
from pathlib import Path

import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from logs import write_log
from matplotlib.colors import to_rgb
from programs import load_file
from waiting import until

from dlojz import launch, table, widgets
from dlojz.chapters.n04_profiler import mysteries
from dlojz.course import progress
from dlojz.launch import submit
from dlojz.training import flags
from dlojz.widgets.answer import ANSWERS
from dlojz.widgets.monitor import _news
from dlojz.widgets.queue import COLUMNS
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent
INKS = {"good": table.GOOD_INK, "bad": table.BAD_INK, "quiet": table.QUIET_INK}
LAB_THEMES = Path(sys.prefix) / "share" / "jupyter" / "lab" / "themes" / "@jupyterlab"
THEMES = {p.name.split("-")[1]: p / "index.css" for p in LAB_THEMES.glob("theme-*")}


@pytest.fixture
def shown(course_folder, monkeypatch):
    """What was displayed."""
    found = []
    for name in ("answer", "form", "monitor", "queue", "quiz"):  # the room's face hides these
        monkeypatch.setattr(sys.modules[f"dlojz.widgets.{name}"], "display", found.append)
    monkeypatch.setattr(mysteries, "display", found.append)
    return found


def test_a_quiz_has_one_right_answer_and_an_explanation_of_each(subtests):
    for key, quiz in QUIZZES.items():
        with subtests.test(key):
            assert [answer.right for answer in quiz.answers].count(True) == 1
            assert len({answer.text for answer in quiz.answers}) == len(quiz.answers) >= 3
            whys = [answer.why for answer in quiz.answers]
            assert all(30 < len(why.strip()) == len(why) for why in whys), whys
            assert len(set(whys)) == len(whys)


def test_the_right_answer_is_not_longer_than_the_longest_wrong_one():
    longer = [key for key, quiz in QUIZZES.items() if chance(quiz, max) == 1]
    assert longer == [], "shorten it, with its reason in `why`, or say a wrong one as precisely"


@pytest.mark.parametrize("pick", [max, min])
def test_picking_by_length_passes_few_quizzes(pick):
    assert sum(chance(quiz, pick) for quiz in QUIZZES.values()) <= 0.4 * len(QUIZZES)


def chance(quiz, pick):
    """Return the chance of the right answer among those of the picked length."""
    sizes = [len(answer.text) for answer in quiz.answers]
    return (sizes[quiz.right] == pick(sizes)) / sizes.count(pick(sizes))


def test_the_explanation_of_a_wrong_answer_does_not_quote_the_right_one():
    quoting = [
        (key, answer.why)
        for key, quiz in QUIZZES.items()
        for answer in quiz.answers
        if not answer.right and quoted(quiz.answers[quiz.right].text).search(answer.why)
    ]
    assert quoting == []


def quoted(text):
    """Return a pattern that finds a text as words of their own: "16" is not in "bf16"."""
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.I)


def test_a_quoted_answer_would_be_found():
    assert quoted("16").search("It takes 16 bytes.")
    assert not quoted("16").search("It is in bf16.")


def test_code_is_set_as_code_and_nothing_else_is_marked():
    texts = [*ANSWERS.values(), *(quiz.question for quiz in QUIZZES.values())]
    texts += [answer.why for quiz in QUIZZES.values() for answer in quiz.answers]
    plain = [re.sub(r"`[^`]+`", "", text) for text in texts]
    assert [text for text in plain if re.search(r"\w\(|\btorch\.\w|\*", text)] == []


def test_an_answer_is_explained_kept_and_shown_again(shown):
    """As when the notebook is opened again, and the cell is run."""
    answers, right = QUIZZES["gpu-timer"].answers, QUIZZES["gpu-timer"].right
    widgets.quiz("gpu-timer")
    assert "- " in repr(shown[0]), "text where there are no widgets"
    for given, word in ((0, "Not quite."), (right, "Yes.")):
        first = shown[0].children[1]
        first.value = text = answers[given].text.replace("`", "")
        widgets.quiz("gpu-timer")
        for box in (shown[0], shown[-1]):
            _, choice, verdict = box.children
            assert choice.value == text
            assert word in verdict.value
            assert answers[given].why in verdict.value
            assert (answers[right].why in verdict.value) == (given == right), "nor given away"
        assert f"x {answers[given].text}" in repr(shown[-1])
        assert answers[given].why in repr(shown[-1])
    kept = [entry["value"] for entry in progress.load()["quizzes"]["gpu-timer"]]
    assert kept == [0, right], "to show is not to answer"


def test_each_trainee_sees_the_answers_in_an_order_of_their_own(shown, monkeypatch):
    orders = set()
    for trainee in "abcdefgh":
        monkeypatch.setenv("JUPYTERHUB_USER", trainee)
        widgets.quiz("gpu-timer")
        widgets.quiz("gpu-timer")
        again, options = (box.children[1].options for box in shown[-2:])
        assert again == options
        assert {*options} == {a.text.replace("`", "") for a in QUIZZES["gpu-timer"].answers}
        listed = [line[4:] for line in repr(shown[-1]).splitlines()[1:]]
        assert [text.replace("`", "") for text in listed] == [*options]
        orders.add(options)
    assert len(orders) > 2


def test_an_answer_that_the_quiz_no_longer_has_is_not_shown(shown):
    progress.keep("quizzes", "gpu-timer", 99)
    widgets.quiz("gpu-timer")
    assert shown[0].children[1].value is None


def test_an_answer_appears_once_the_trainee_has_typed_one_and_is_shown_again(shown):
    key = "00 what if"
    widgets.answer(key)
    label, typed, button, other = shown[0].children
    assert (label.value, other.value) == ("<b>What if</b>", "")
    typed.value = "  "
    button.click()
    assert "Type yours first" in other.value
    assert progress.last("answers", key) is None
    typed.value = "about 1 %"
    assert ANSWERS[key] not in other.value, "to type is not to be done"
    button.click()
    assert ANSWERS[key] in other.value
    widgets.answer(key)  # as when the notebook is opened again, and the cell is run
    _, typed, _, other = shown[1].children
    assert (typed.value, ANSWERS[key] in other.value) == ("about 1 %", True)
    assert repr(shown[1]) == f"What if\nYour answer: about 1 %\nAn answer: {ANSWERS[key]}"
    assert len(progress.load()["answers"][key]) == 1, "to show is not to answer"


@pytest.mark.parametrize(
    ("ask", "first"), [(widgets.quiz, "start-epoch"), (widgets.answer, "00 from the figures")]
)
def test_an_unknown_question_names_the_others(ask, first):
    with pytest.raises(KeyError, match=f"expected one of {first}"):
        ask("nothing")


def test_a_mystery_is_judged_with_hints_that_say_more_and_shown_again(shown, course_folder):
    (course_folder / "reference").symlink_to(REPOSITORY / "reference")
    mysteries.accuse("H")
    first, _ = shown[0].children
    assert [key for _, key in first.options] == [None, *mysteries.ANSWERS]
    assert first.label == "what is wrong?"
    assert repr(shown[0]).startswith("H: what is wrong? "), "text where there are no widgets"
    for given, word, hint in (
        ("print", "Not quite.", mysteries.LOOK["one-worker"]),
        ("item", "Not quite.", "The evidence: "),
        ("one-worker", "Yes:", "next batch"),
    ):
        first.value = given
        mysteries.accuse("H")
        for box in (shown[0], shown[-1]):
            choice, verdict = box.children
            assert choice.value == given
            assert word in verdict.value
        assert hint in shown[0].children[1].value
        assert f"H: {mysteries.ANSWERS[given]}. {word}" in repr(shown[-1])
    assert mysteries.answers("H") == ["print", "item", "one-worker"], "to show is not to answer"


def test_a_prediction_is_scored(course_folder, tmp_path, capsys):
    run = write_log(tmp_path / "r.jsonl")
    widgets.predict("b", images_per_s=300, step_ms=50, peak_memory_gb=None)
    assert capsys.readouterr().out == "noted: 300 images/s, 50 ms\n"
    text = repr(widgets.score("b", run))
    assert "images_per_s: predicted 300, measured 320 images/s: ★★★" in text
    assert "step_ms: predicted 50, measured 100 ms: ★ a factor of 2.0" in text


def test_a_prediction_of_a_ratio_is_scored(course_folder, capsys):
    widgets.predict("decoding", ratio=1.5)
    text = repr(widgets.score_value("decoding", ratio=1.6))
    assert text == "ratio: predicted 1.5, measured 1.6 times: ★★★ within 10 %"
    found = widgets.score_value("decoding", how="estimated", ratio=1.6)
    assert repr(found) == "ratio: predicted 1.5, estimated 1.6 times: ★★★ within 10 %"
    assert ">estimated</th>" in found._repr_html_()
    unknown = widgets.score_value("decoding", how="estimated")
    assert repr(unknown) == "ratio: predicted 1.5, estimated -: not estimated"


def disturbed(path, wall_s):
    window = {"first_step": 3, "steps": 7, "wall_s": wall_s, "others_cpu": 0.92}
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "cpu_count": 2, "arguments": {}}
    return write_log(path, window=window, start=start)


def test_a_prediction_of_a_gain_is_scored_with_two_runs(course_folder, tmp_path):
    slow = disturbed(tmp_path / "slow.jsonl", 1.4)
    fast = write_log(tmp_path / "fast.jsonl")
    widgets.predict("c", ratio=2)
    text = repr(widgets.score_gain("c", slow, fast))
    assert "ratio: predicted 2, measured 2 times: ★★★" in text
    assert "disturbed: others kept 0.9 of 2 CPUs busy" in text
    nothing = write_log(tmp_path / "nothing.jsonl", steps=0, window=None)
    assert repr(widgets.score_gain("c", fast, nothing)).endswith("measured -: not measured")
    failed = write_log(tmp_path / "failed.jsonl", steps=0, window=None, end={"outcome": "failed"})
    said = repr(widgets.score_gain("c", slow, failed))
    assert "job failed is FAILED: job.explain() says why" in said


def test_no_prediction_is_no_error(course_folder, tmp_path, capsys):
    widgets.predict("b", images_per_s=None)
    assert "no guess yet: write a number for images_per_s" in capsys.readouterr().out
    assert "no prediction" in widgets.score("b", write_log(tmp_path / "r.jsonl"))._repr_html_()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("images_per_s", value, "expected a number above 0") for value in (0, -3, "fast", True)),
        *(("images_per_s", float(value), "expected a number above 0") for value in ("inf", "nan")),
        ("speed", 1, "speed can't be predicted"),
        ("backward_share", 50, "at most 1"),
    ],
)
def test_a_prediction_is_a_number_that_can_be_measured(name, value, said, course_folder):
    with pytest.raises(ValueError, match=said):
        widgets.predict("b", **{name: value})


def test_all_that_is_wrong_with_a_prediction_is_told_in_one_line(course_folder, capsys):
    shell = InteractiveShell()
    shell.run_cell("from dlojz.widgets import predict")
    shell.run_cell("predict('b', images_per_s='many', backward_share=66)")
    assert capsys.readouterr().out == (
        "UserError: images_per_s='many': expected a number above 0, or None for no guess; "
        "backward_share=66: expected a number above 0, at most 1 (0.66 for 66 %), or None for no "
        "guess\n"
    )


def test_the_score_names_what_disturbed_the_run(course_folder, tmp_path):
    widgets.predict("b", images_per_s=300)
    found = widgets.score("b", disturbed(tmp_path / "r.jsonl", 0.7))
    for text in (repr(found), found._repr_html_()):
        assert "disturbed: others kept 0.9 of 2 CPUs busy: repeat it" in text


def test_the_score_of_a_run_that_diverged_says_so(course_folder, tmp_path):
    ran = [write_log(tmp_path / "a.jsonl"), write_log(tmp_path / "b.jsonl", losses=[math.nan] * 10)]
    widgets.predict("b", images_per_s=300, ratio=2)
    told = "the loss of run b is nan from step 1 of 10 on"
    assert repr(widgets.score("b", ran[1])).endswith(told)
    assert repr(widgets.score_gain("b", *ran)).endswith(told)


def test_a_share_of_nothing_has_no_factor(course_folder):
    widgets.predict("b", data_share=0.2)
    assert repr(widgets.score_value("b", data_share=0)).endswith("there was none")
    assert repr(widgets.score_value("b", data_share=-1)).endswith("the other way round")


def settle():
    """Wait until all monitors and queues have shown the end of their jobs."""
    [t.join(30) for t in threading.enumerate() if t.name.endswith(("(_move)", "(follow)"))]


def test_a_long_label_is_cut_and_its_whole_is_a_tooltip(shown, course_folder):
    (course_folder / "t.py").write_text("")
    flags = "--no-persistent-workers --prefetch-factor"
    jobs = submit([f"t.py {flags} {n}" for n in (2, 4)])
    widgets.monitor(jobs)
    [job.wait(30) for job in jobs]
    bar = shown[0].children[0]
    assert bar.tooltip == f"job {jobs[0].id} --prefetch-factor 2"
    long = submit("t.py", name="a name that is longer than there is room for")
    widgets.monitor([long, jobs[0]])
    long.wait(30)
    bar = shown[2].children[0]
    assert bar.description == f"job {long.id} a name that is lon…"
    assert bar.tooltip.endswith("longer than there is room for")
    settle()


def test_the_monitor_says_why_a_job_ended(shown, course_folder):
    (course_folder / "t.py").write_text("raise SystemExit(3)")
    job = submit("t.py")
    widgets.monitor(job)
    job.wait(30)
    settle()
    assert shown[0].children[2].value == "FAILED: exit code 3"


def test_the_monitor_returns_at_once_and_follows_to_the_end(shown, course_folder):
    (course_folder / "t.py").write_text("import time; time.sleep(1)")
    job = submit("t.py")
    widgets.monitor(job)
    bar, cancel, text = shown[0].children
    assert isinstance(bar, ipywidgets.IntProgress)
    assert not cancel.disabled
    job.wait(30)
    settle()
    assert bar.bar_style == "success"
    assert repr(shown[0]).startswith(f"job {job.id}: COMPLETED"), "text where there are no widgets"
    assert text.value.startswith("COMPLETED")
    assert cancel.disabled


def test_a_job_that_knows_no_steps_yet_is_starting(course_folder):
    (course_folder / "t.py").write_text("from dlojz.runs import log")
    job = submit("t.py")
    assert _news(launch.Now("QUEUED"), job) == "QUEUED"
    assert _news(launch.Now("RUNNING"), job) == "RUNNING: starting"
    assert _news(launch.Now("RUNNING", 2, 9), job) == "RUNNING 2/9 steps"
    slow = launch.Now("RUNNING", 2, 9, images_per_s=1.14, loss=7)
    assert _news(slow, job) == "RUNNING 2/9 steps, 1.1 images/s, loss 7.000"
    job.wait(30)
    text = _news(launch.Now("RUNNING", 0, 0), job)
    assert text.startswith("RUNNING for "), "a small experiment has no steps of training"


def test_a_program_without_a_log_runs_for_some_time(course_folder):
    (course_folder / "t.py").write_text("")
    assert re.fullmatch(r"RUNNING for \d s", _news(launch.Now("RUNNING"), submit("t.py")))


def test_the_monitor_says_what_a_job_waits_for_and_can_cancel_it(shown, course_folder):
    (course_folder / "t.py").write_text("import time; time.sleep(99)")
    jobs = submit(["t.py", "t.py"])
    widgets.monitor(jobs)
    text = shown[1].children[2]
    until(lambda: "QUEUED: waits for cpu, held by run 0001" in text.value)
    for bar in shown:
        bar.children[1].click()
    assert [job.wait(30) for job in jobs] == ["CANCELLED"] * 2


def test_the_queue_is_live_and_its_buttons_cancel(shown, course_folder):
    (course_folder / "t.py").write_text("import time; time.sleep(99)")
    first, second = submit(["t.py 1", "t.py 2"], name="a'; <b>echo foo")
    widgets.queue(every=0.05)
    (box,) = shown
    assert "t.py 2" in repr(box), "text where there are no widgets"
    head, *lines = box.children
    assert [cell.value for cell in head.children] == [f"<b>{c}</b>" for c in COLUMNS]
    assert "&lt;b&gt;echo" in lines[0].children[1].value
    lines[1].children[-1].click()
    assert second.wait(30) == "CANCELLED"
    lines[0].children[-1].click()
    assert first.wait(30) == "CANCELLED"
    settle()
    assert all("CANCELLED" in line.children[2].value for line in lines)
    assert all(line.children[-1].disabled for line in lines)


def test_an_empty_queue_says_so(shown):
    widgets.queue()
    assert shown[0].children[0].value == "no jobs"


# The form of a job -------------------------------------------------------------------------------


@pytest.fixture
def form(shown):
    """Display a form: form(command) -> its controls by name, its preview, its button, its words."""

    def make(command="dlojz/dlojz.py", **about):
        widgets.submit_form(command, **about)
        *grids, preview, last = shown[-1].children
        grids = [grid.children[0] if "Acc" in type(grid).__name__ else grid for grid in grids]
        controls = {c.description: c for grid in grids for c in grid.children}
        return controls, preview, *last.children

    return make


@pytest.mark.parametrize("file", ["dlojz/dlojz.py", "solutions/dlojz_11_fsdp.py"])
def test_the_flags_of_a_form_are_those_that_the_trainer_has_when_it_runs(file, monkeypatch):

    trainer = load_file(REPOSITORY / file)
    monkeypatch.setattr(sys, "argv", [file])
    arguments = vars(trainer.parse_args())
    found = {f.label[2:].replace("-", "_"): f for f in launch.flags_of(REPOSITORY / file)}
    assert [*found] == [*arguments]
    usual = [name for name, value in arguments.items() if value == found[name].default]
    assert {*found} - {*usual} <= {"precision", "compile"}, "only what depends on the device"


def test_a_form_has_a_control_of_the_right_type_for_each_flag(form):
    controls, preview, *_ = form("solutions/dlojz_11_fsdp.py --test -b 8 --no-channels-last")
    kinds = {
        **{"--batch-size": ipywidgets.BoundedIntText, "--lr": ipywidgets.FloatText},
        **{"--precision": ipywidgets.Dropdown, "--profile": ipywidgets.Checkbox},
        **{"--test": ipywidgets.Checkbox, "--data": ipywidgets.Text},
    }
    assert {name: type(controls[name]) for name in kinds} == kinds
    assert controls["--batch-size"].value == 8
    assert (controls["--batch-size"].min, controls["--num-workers"].min) == (1, 0)
    assert controls["--precision"].options[1] == ("fp32", "fp32")
    assert controls["--channels-last"].value is False
    assert "solutions/dlojz_11_fsdp.py -b 8 --no-channels-last --test" in preview.value


def test_a_form_shows_the_command_and_submits_it(form, shown, course_folder):
    flags = "--test --test-nsteps 4 --model resnet18 --image-size 32"
    controls, preview, button, said = form(f"dlojz/dlojz.py {flags}", name="mine")
    controls["--batch-size"].value = 2
    controls["--data"].value = "synthetic"
    controls["--persistent-workers"].value = False
    command = (
        "dlojz/dlojz.py --model resnet18 --image-size 32 -b 2 --data synthetic "
        "--no-persistent-workers --test --test-nsteps 4"
    )
    assert repr(shown[-1]) == f"submit({command!r}, name='mine')", "text without widgets"
    assert command in preview.value
    button.click()
    assert "Job 0001" in said.value
    job = launch.latest()
    assert (job.command, job.name, job.info["n_gpu"]) == (command, "mine", 1)
    assert job.wait(60) == "COMPLETED"
    controls["--batch-size"].value = 32
    assert "-b" not in preview.value, "a default is not repeated"
    assert said.value == "", "which was of another command"


def test_a_default_that_is_none_of_the_choices_can_be_kept_and_left(form):
    file = "solutions/dlojz_02_amp.py"
    controls, preview, *_ = form(file)
    assert controls["--precision"].label == "fp16 on a GPU, else fp32"
    assert f"{file}&#x27;)" in preview.value
    controls["--precision"].value = "bf16"
    assert f"{file} --precision bf16" in preview.value
    with pytest.raises(ValueError, match="--precision: invalid choice: 'x'"):
        form(f"{file} --precision x")


def test_a_form_shows_the_help_of_each_flag(form):
    controls, *_ = form("solutions/dlojz_11_fsdp.py")
    assert "fsdp: one copy, in shards" in controls["--sharding"].tooltip
    assert all(controls[flag.label].tooltip == flag.help for flag in flags.STEPS)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("dlojz/dlojz.py --precison fp16", "unrecognized arguments: --precison fp16; `python"),
        ("dlojz/dlojz.py -b many", "--batch-size: invalid whole number value: 'many'"),
        ("dlojz/dlojz.py -b 0", "--batch-size: 0: expected a whole number of at least 1"),
        ("dlojz/dlojz.py -b", "--batch-size: expected one argument"),
        ("solutions/dlojz_11_fsdp.py --sharding x", "--sharding: invalid choice: 'x' (choose from"),
        ("t.py", "t.py has no flag"),
        ("broken.py", "broken.py, line 1"),
        ("none.py", "no trainer 'none.py'"),
        ("", "expected"),
    ],
)
def test_a_form_says_what_is_wrong_with_a_command(command, told, form, script):
    script("print(1)\n")
    script("def (\n", "broken.py")
    with pytest.raises((ValueError, launch.SubmitError), match=re.escape(told)):
        form(command)


def test_what_cannot_be_submitted_is_said_beside_the_button(form, course_folder):
    _, _, button, said = form("dlojz/dlojz.py --test")
    course_folder.joinpath("dlojz/dlojz.py").write_text("<b>")
    button.click()
    assert "&lt;b&gt;" in said.value
    assert "nothing was submitted" in said.value
    assert not button.disabled


# Light and dark themes ---------------------------------------------------------------------------


def channels(colour, ground=(1, 1, 1)):
    """Return a CSS colour's red, green and blue from 0 to 1, on a ground if it is transparent."""
    if colour.startswith("rgba"):
        *rgb, alpha = map(float, re.findall(r"[\d.]+", colour))
        return tuple(alpha * c / 255 + (1 - alpha) * g for c, g in zip(rgb, ground, strict=True))
    return to_rgb(colour)


def contrast(colour, ground):
    """Return the ratio of their luminances, from 1 to 21, as WCAG 2 defines it."""

    def luminance(rgb):
        parts = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    below = channels(ground)
    high, low = sorted([luminance(channels(colour, below)), luminance(below)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def in_theme(css, name):
    """Return the value of a variable in the text of a theme."""
    value = re.findall(rf"{name}: *([^;}}]+)", css)[-1]
    return value.removesuffix(")").rpartition(",")[2] if value.startswith("var(") else value


def test_contrast_is_that_of_the_standard():
    assert contrast("#000", "white") == pytest.approx(21)
    assert contrast("#777", "#fff") == pytest.approx(4.48, abs=0.01)
    assert contrast("rgba(0,0,0,.54)", "white") == pytest.approx(4.6, abs=0.1)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("ink", INKS)
def test_coloured_text_is_legible_in_each_theme_of_jupyterlab(ink, theme):
    css = THEMES[theme].read_text()
    name = re.match(r"var\((--jp-[\w-]+),", INKS[ink])[1]
    assert contrast(in_theme(css, name), in_theme(css, "--jp-layout-color0")) >= 4.5


@pytest.mark.parametrize("ink", INKS)
@pytest.mark.parametrize("ground", ["white", "#1e1e1e"])
def test_where_there_is_no_theme_text_is_legible_on_light_and_dark(ink, ground):
    fallback = re.search(r"(#\w+)\)$", INKS[ink])[1]
    assert contrast(fallback, ground) >= 3.5


def test_both_kinds_of_themes_are_looked_at():
    grounds = [in_theme(css.read_text(), "--jp-layout-color0") for css in THEMES.values()]
    assert {sum(channels(ground)) > 1.5 for ground in grounds} == {True, False}


def test_no_text_in_html_has_a_colour_of_one_theme_only():
    for path in (REPOSITORY / "dlojz").rglob("*.py"):
        found = re.findall(r"(?<![\w-])color: ?(?:#|white|black|rgb)\S*", path.read_text())
        assert not found, path
