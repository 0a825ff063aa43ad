"""The tables and figures of notebook 05 say what the logs say."""

import json
from types import SimpleNamespace

import pytest
from logs import trial, with_cases, write_log

from dlojz.chapters.n05_dataloader import figures, search

SPEEDS = {
    "PIL": ("decoder", [500, 520, 540]),
    "torchvision": ("decoder", [700, 720, 740]),
    "PIL, v1, float32": ("road", [200, 210, 220]),
    "torchvision, v2, uint8": ("road", [400, 420, 440]),
}


@pytest.fixture
def decoders(tmp_path):
    cases = {n: {"kind": kind, "images_per_cpu_s": speeds} for n, (kind, speeds) in SPEEDS.items()}
    for batch, name in ((1, "nvJPEG, one by one"), (16, "nvJPEG, 16 in a batch")):
        speeds = [batch * 100, batch * 101]
        cases[name] = {"kind": "nvJPEG", "batch": batch, "images_per_s": speeds}
    return with_cases(tmp_path / "decoders.jsonl", cases)


def test_decoders_are_compared_with_the_first_of_their_kind(decoders):
    rows = {row[1]: row for row in figures.decoders(decoders).rows}
    assert rows["torchvision"][2:] == ("720", "700 to 740", "1.38")
    assert rows["torchvision, v2, uint8"][2:] == ("420", "400 to 440", "2.00")
    assert rows["nvJPEG, 16 in a batch"][4] == "16.00"
    assert rows["simplejpeg"][3] == "not installed: pip install simplejpeg"


def test_the_ratio_of_two_ways_is_taken_round_by_round(decoders):
    mean, low, high = figures.ratio(decoders, "torchvision, v2, uint8", "PIL, v1, float32")
    assert (mean, low, high) == pytest.approx((2, 2, 2))
    with pytest.raises(ValueError, match="expected one of PIL, torchvision"):
        figures.ratio(decoders, "torchvision", "DALI")


def test_each_way_on_the_processor_has_a_bar_and_the_gpu_a_line(decoders):
    ax = figures.plot_decoders(decoders)
    assert [bar.get_width() for bar in ax.patches] == [520, 720, 210, 420]
    assert list(figures.plot_nvjpeg(decoders).lines[0].get_ydata()) == [100.5, 1608]


# Trials ------------------------------------------------------------------------------


def test_a_trial_shows_its_knobs_and_what_came_of_them(tmp_path):
    row = search.trial_table(trial(tmp_path / "1.jsonl", workers=2)).rows[0]
    assert row[:7] == ("1", "2", "yes", "3", "yes", "yes", "no")
    assert row[7:] == ("320", "10%", "0.5 s", "912 MB", "★ fastest")


SHORT = {"steps": 10, "window": {"first_step": 3, "steps": 7, "wall_s": 0.7}}
BUSY = {"window": {"first_step": 3, "steps": 40, "wall_s": 4.0, "others_cpu": 0.8}}


@pytest.mark.parametrize(
    ("changes", "column", "told"),
    [
        ({"workers": 9}, 1, "2"),  # those that there were
        ({"workers": 2} | SHORT, -1, "★ fastest; short: 6 batches were ready"),
        ({"workers": 1} | BUSY, -1, "others kept 0.8 of 2 CPUs busy: repeat it"),  # and no star
    ],
)
def test_what_a_trial_owes_its_speed_to_is_told(changes, column, told, tmp_path):
    (row,) = search.trial_table(trial(tmp_path / "1.jsonl", **changes)).rows
    assert row[column] == told


def test_a_star_needs_a_lead_that_equal_runs_do_not_have(tmp_path):
    """Three runs of one trial on a processor: 288, 282, 279 images/s."""
    speeds = {0: 111, 1: 113.5, 2: 114.7, 3: 118}  # ms; the last is 6 % slower than the first
    runs = [trial(tmp_path / f"{w}.jsonl", w, ms=ms, cores=4) for w, ms in speeds.items()]
    few = "among the fastest"
    assert [row[-1] for row in search.trial_table(runs).rows] == [few, few, few, ""]
    colours = {bar.get_facecolor() for bar in search.plot_trials(runs).patches[:6:2]}
    assert len(colours) == 1


def test_the_steps_for_which_nobody_decoded_any_more_do_not_count(tmp_path):
    """The last six of an epoch of 31: two workers had three batches each in the queue."""
    window = {"first_step": 3, "steps": 28, "wall_s": (22 * 115 + 6 * 45) / 1000}
    run = trial(tmp_path / "1.jsonl", 2, ms=115, steps=31, window=window)
    lines = [json.loads(line) for line in run.read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    for step in steps[-6:]:
        step["host_ms"] = {"data": 0, "transfer": 0, "forward": 9, "backward": 27, "update": 9}
    next(line for line in lines if line["event"] == "setup")["steps_per_epoch"] = 31
    run.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = search.trial_table(run).rows[0]
    assert row[7:9] == ("278", "10%"), "32 images in 115 ms"
    assert row[-1] == "★ fastest; without its last 6 steps: nothing was left to decode"
    longer = run.read_text().replace('"steps_per_epoch": 31', '"steps_per_epoch": 100')
    (tmp_path / "2.jsonl").write_text(longer)
    assert search.trial_table(tmp_path / "2.jsonl").rows[-1][7] == "320"


def test_a_trial_that_failed_is_shown_with_its_state(tmp_path):
    end = {"outcome": "out_of_memory", "time": "2026-01-02T03:05:05", "error": "out of memory"}
    lost = {"steps": 0, "window": None, "validation": None, "epoch": None, "end": end}
    runs = [trial(tmp_path / "1.jsonl", 0), trial(tmp_path / "2.jsonl", 1, **lost)]
    assert search.trial_table(runs).rows[1][7:] == ("-", "-", "-", "-", "OUT_OF_MEMORY")


def test_a_trial_of_another_trainer_is_told(tmp_path):
    runs = [
        trial(tmp_path / f"{number}.jsonl", number, ms=100 + 10 * number, code=code)
        for number, code in enumerate(("aa", "bb", "bb"))
    ]
    assert [row[-1] for row in search.trial_table(runs).rows] == [
        "another trainer",
        "★ fastest",
        "",
    ]


def test_the_figure_of_trials_names_what_differs(tmp_path):
    runs = [trial(tmp_path / "1.jsonl", 0, ms=200), trial(tmp_path / "2.jsonl", 1)]
    ax = search.plot_trials(runs)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1: 0 workers", "2: 1 worker"]
    with pytest.raises(ValueError, match="no trial with a speed"):
        search.plot_trials([])


def test_oversubscription_is_told_in_words(tmp_path):
    text = search.oversubscription(trial(tmp_path / "1.jsonl", workers=2))
    assert "2 workers decoding and 2 threads training share 2 cores" in text
    assert search.oversubscription(trial(tmp_path / "2.jsonl", 1, threads=1)) == ""


def test_the_same_oversubscription_is_told_once(tmp_path, monkeypatch):
    told = {"1": "oversubscribed: " + "word " * 30, "2": "", "3": "oversubscribed: " + "word " * 30}
    monkeypatch.setattr(search, "oversubscription", lambda job: told[job.id])
    text = search.oversubscribed([SimpleNamespace(id=number) for number in told])
    assert text.startswith("1, 3: oversubscribed: word")
    assert text.endswith("\n2: enough cores for all")
    assert max(map(len, text.splitlines())) <= 100


def test_on_a_gpu_one_thread_trains(tmp_path):
    run = trial(tmp_path / "1.jsonl", workers=3, threads=4, cores=4, device=True)
    assert search.oversubscription(run) == ""


@pytest.mark.parametrize(
    ("workers", "threads", "crowded"), [(0, 8, False), (1, 1, False), (1, 2, True), (2, 1, True)]
)
def test_it_is_crowded_with_more_workers_and_threads_than_cores(
    workers, threads, crowded, tmp_path
):
    run = trial(tmp_path / "1.jsonl", workers, threads=threads, cores=2)
    assert bool(search.oversubscription(run)) == crowded


# Supply and demand -------------------------------------------------------------------


def loader(path, speeds):
    cases = {
        f"{w} workers": {"num_workers": w, "images_per_s": [0.9 * s, s, 1.1 * s]}
        for w, s in speeds.items()
    }
    return with_cases(path, cases)


@pytest.mark.parametrize(
    ("speeds", "found", "told"),
    [
        (
            {0: 40, 1: 50, 2: 95},
            (True, 2, 7),
            "most 95 in parallel, with 2 workers; 7 workers on 7 cores would be enough",
        ),
        (  # The second worker gave less than the first: two were not enough, so two can't be.
            {0: 150, 1: 200, 2: 230},
            (True, 2, 3),
            "most 230 in parallel, with 2 workers; 3 workers on 3 cores would be enough",
        ),
        (
            {0: 900, 1: 200, 2: 390, 4: 700},
            (False, 4, 2),
            "gives up to 700 in parallel, with 4 workers; 2 workers are enough",
        ),
    ],
)
def test_a_model_that_takes_more_than_the_loader_gives_is_data_bound(speeds, found, told, tmp_path):
    model = write_log(tmp_path / "m.jsonl", device=True)  # 320 images/s
    supply = figures.supply(loader(tmp_path / "l.jsonl", speeds), model)
    assert (supply.bound, supply.best, supply.enough) == found
    taken = ("not " * (not supply.bound)) + "data bound: the model takes 320 images/s, the loader"
    assert str(supply).startswith(taken)
    assert str(supply).endswith(told)


def test_a_processor_that_does_both_is_told(tmp_path):
    found = figures.supply(loader(tmp_path / "l.jsonl", {1: 320}), write_log(tmp_path / "m.jsonl"))
    assert str(found).endswith("here both share the cores: together at most about 160 images/s")


def test_the_figure_says_whether_one_is_data_bound(tmp_path):
    model = write_log(tmp_path / "m.jsonl", device=True)
    runs = {"before": {1: 50, 2: 95}, "after": {1: 200, 2: 390}}
    runs = {name: loader(tmp_path / f"{name}.jsonl", found) for name, found in runs.items()}
    text = runs["before"].read_text().replace('"num_workers"', '"others_cpu": 0.8, "num_workers"')
    runs["before"].write_text(text.replace('"start"', '"start", "cpu_count": 2'))
    ax = figures.plot_supply(runs, model)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    busy = "before\n(others kept up to 0.8 of 2 CPUs busy)"
    assert labels == [busy, "after", "all rounds", "the model consumes"]
    assert "before: data bound" in ax.figure.get_suptitle().replace("\n", " ")
    assert "after: not data bound" in ax.figure.get_suptitle().replace("\n", " ")


def test_the_figure_says_that_a_job_of_the_loader_failed(tmp_path):
    model = write_log(tmp_path / "m.jsonl", device=True)
    whole, cut = (loader(tmp_path / f"{name}.jsonl", {1: 200}) for name in ("whole", "cut"))
    lines = [line for line in cut.read_text().splitlines() if json.loads(line)["event"] != "end"]
    cut.write_text("\n".join(lines))
    title = figures.plot_supply({"a": whole, "b": cut}, model).figure.get_suptitle()
    assert "b: its job failed or goes on" in title
    assert "a: its job failed" not in title


# Storage -----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    speeds = {"cold": [100, 120], "warm": [1000, 1200], "decoded": [90, 110]}
    case = {"images": 400, "bytes": 40_000_000, "images_per_s": speeds, "still_cached": [0.0, 0.01]}
    files = case | {"kind": "files", "files": 400, "operations": {"open": 400, "list": 8}}
    shards = case | {"kind": "shards", "files": 4, "operations": {"open": 4}}
    cases = {"files, full size": files, "shards, full size": shards}
    return with_cases(tmp_path / "storage.jsonl", cases)


def test_storage_in_figures(stored):
    rows = figures.storage(stored).rows
    assert rows[0] == ("files, full size", "400", "100 kB", "110", "1,100", "100", "400 + 8")
    assert rows[1][-1] == "4 + 0"
    title = figures.plot_storage(stored).figure.get_supxlabel()
    assert "at most 1.0% of the files were in memory" in title


def test_the_load_of_a_metadata_server_grows_with_all_who_ask(stored):
    per = figures.operations_per_image(stored)
    assert per == {"files, full size": 1.02, "shards, full size": 0.01}
    assert figures.metadata_load(8, 4, 1000, per["files, full size"]) == pytest.approx(32_640)
    lines = figures.plot_metadata(stored, images_per_s=1000).lines
    assert [line.get_ydata()[3] for line in lines] == pytest.approx([32_640, 320])
