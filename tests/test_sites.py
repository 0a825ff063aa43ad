"""Sites and the script of a job: compared whole; what is wrong with a site file is named."""

import re
from pathlib import Path

import pytest

from dlojz import sites
from dlojz.launch import slurm

REPOSITORY = Path(__file__).parent.parent
SITES = REPOSITORY / "slurm" / "sites"
TEMPLATE = (REPOSITORY / "slurm" / "job.sbatch").read_text()
EXPECTED = REPOSITORY / "tests" / "slurm" / "expected"
CASES = {
    "generic-1": ("generic", {"n_gpu": 1, "time_max_s": 600}),
    "generic-8": ("generic", {"n_gpu": 8, "time_max_s": 3600, "name": "a'; echo foo"}),
    "jean-zay-v100-4": ("jean-zay", {"n_gpu": 4, "time_max_s": 7200, "account": "xyz"}),
    "jean-zay-a100-16": (
        "jean-zay",
        {
            "n_gpu": 16,
            "time_max_s": 72_000,
            "account": "xyz@a100",
            "module": "pytorch-gpu/py3.12/2.9.0",
        },
    ),
    "jean-zay-h100-8": ("jean-zay", {"n_gpu": 8, "time_max_s": 200_000, "account": "xyz@h100"}),
    "clariden-8": ("clariden", {"n_gpu": 8, "time_max_s": 3600, "account": "a-abc"}),
    "lumi-16": ("lumi", {"n_gpu": 16, "time_max_s": 7200, "account": "project_1@standard"}),
    "snellius-h100-4": ("snellius", {"n_gpu": 4, "time_max_s": 7200, "account": "xyz@h100"}),
}


def render(site="jean-zay", **options):
    wanted = {"n_gpu": 1, "time_max_s": 600, "account": "xyz"} | options
    return slurm.render(TEMPLATE, sites.read(SITES / f"{site}.toml"), **wanted)


@pytest.mark.parametrize("case", CASES)
def test_the_whole_script_for_each_site(case):
    site, options = CASES[case]
    found = slurm.render(TEMPLATE, sites.read(SITES / f"{site}.toml"), **options)
    assert found == (EXPECTED / f"{case}.sbatch").read_text()


def test_every_site_has_an_expected_script():
    assert {p.stem for p in SITES.glob("*.toml")} == {site for site, _ in CASES.values()}


def test_the_script_by_hand_is_the_template():
    assert TEMPLATE.startswith("#!/bin/bash\n")
    assert "#SBATCH --time=00:10:00" in TEMPLATE


@pytest.mark.parametrize(
    ("n_gpu", "expected"), [(1, (1, 1)), (3, (1, 3)), (4, (1, 4)), (8, (2, 4)), (16, (4, 4))]
)
def test_gpus_become_nodes(n_gpu, expected):
    assert slurm.shape(n_gpu, sites.Gpus(4, 10)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpu": 6}, "4 GPUs each, and a job takes whole nodes: ask for 4 or 8"),
        ({"account": "xyz@b200"}, "no nodes 'b200': expected one of xyz@v100, xyz@a100, xyz@h100"),
        ({"account": None}, r'no account: .* submit\(..., account="xyz@v100"\)'),
        ({"account": "a'; echo foo"}, "expected a project's name"),
        ({"time_max_s": 360_001}, "the longest that jean-zay allows is 100:00:00"),
        (
            {"site": "clariden", "time_max_s": 43_201},
            "the longest that clariden allows is 12:00:00",
        ),
    ],
)
def test_what_a_site_does_not_have_is_told(options, message):
    with pytest.raises(slurm.SlurmError, match=message):
        render(**options)


PLACE = "[storage.work]\npath = '/w'\nholds = 'code'\n"
GOOD = "[gpus.any]\ngpus_per_node = 4\ncpus_per_gpu = 8\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpus", "can't be read as TOML"),
        ("", r"no gpus: expected something like a table \[gpus.a100\]"),
        ("gpus = 3", "gpus: expected a table"),
        ("[gpus.any]\ngpus_per_node = 4", "no gpus.any.cpus_per_gpu: expected something like 8"),
        (GOOD + 'partitoin = "x"', "unknown key gpus.any.partitoin: did you mean partition?"),
        ("acount = 'x'\n" + GOOD, "unknown key acount: did you mean account?"),
        (GOOD.replace("4", '"four"'), "gpus.any.gpus_per_node = 'four': .* like 4"),
        (GOOD.replace("4", "0"), "gpus.any.gpus_per_node = 0: expected"),
        (GOOD + 'qos = ["dev"]', r'qos = \[\'dev\'\]: .* \[\["02:00:00", "qos_gpu-dev"\]\]'),
        (GOOD + 'partition = "a\\n#SBATCH --x"', "gpus.any.partition = .*: expected something"),
        ("modules = ['x; rm -rf /']\n" + GOOD, "modules = .*: expected something like"),
        ("[environment]\nA = '$(rm -rf /)'\n" + GOOD, "environment = .*: expected something"),
        ("default = 'b'\n" + GOOD, "default = 'b': expected one of any"),
        (
            GOOD + "memory_gb = '80'",
            "gpus.any.memory_gb = '80': expected something like 80, of a GPU",
        ),
        (GOOD + "hour_costs = 0", "gpus.any.hour_costs = 0: expected something like 1.5"),
        (GOOD + "time_max = '5 days'", "gpus.any.time_max = '5 days': .* like \"120:00:00\""),
        ("storage = 3\n" + GOOD, r"storage: expected a table \[storage.work\]"),
        (GOOD + "[storage.work]\npath = '/w'", "no storage.work.holds: expected something like"),
        (GOOD + PLACE + "purged = 3", "unknown key storage.work.purged: did you mean purged_days"),
        (GOOD + PLACE + "files = '1 M'", "storage.work.files = '1 M': .* like 500_000"),
    ],
)
def test_a_bad_site_file_names_the_key_and_shows_how_it_should_look(text, message, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(text)
    with pytest.raises(sites.SiteError, match=message) as error:
        sites.read(file)
    assert str(file) in str(error.value)


def test_a_site_is_found_by_name_by_path_or_by_cluster(course_folder, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(REPOSITORY / "slurm", course_folder / "slurm")
    monkeypatch.delenv("DLOJZ_SITE", raising=False)
    assert sites.find().stem == "generic"
    assert sites.find(cluster="jean-zay").stem == "jean-zay"
    assert sites.find("jean-zay", cluster="other").stem == "jean-zay"
    own = tmp_path / "own.toml"
    own.write_text(GOOD)
    monkeypatch.setenv("DLOJZ_SITE", str(own))
    assert sites.find() == own
    monkeypatch.setenv("DLOJZ_SITE", "a'; echo foo")
    with pytest.raises(sites.SiteError, match="or one of clariden, generic, jean-zay"):
        sites.find()


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("00:10:00", 600), ("05:00:00", 18000), ("2:30", 150), ("90", 5400), ("1-2", 93600)],
)
def test_time_limits_are_read_as_slurm_reads_them(limit, seconds):
    assert sites.seconds(limit) == seconds


def test_each_site_says_where_its_figures_are_from_and_when_they_were_read():
    for file in SITES.glob("*.toml"):
        if file.stem != "generic":
            head = [line for line in file.read_text().splitlines() if line.startswith("#")]
            assert "http" in " ".join(head), file
            assert re.search(r"read in \w+ 20\d\d", " ".join(head).replace("# ", "")), file


def test_every_key_of_a_site_is_explained():
    text = (REPOSITORY / "slurm" / "README.md").read_text()
    for key in {*sites.KEYS, *sites.GPU_KEYS, *sites.STORAGE_KEYS} - {"description", "gpus"}:
        assert re.search(rf"^\|.*`\[?{key}", text, re.M), key


def test_the_longest_time_is_that_of_a_qos_or_of_the_partition():
    zay, snellius = (
        sites.read(SITES / f"{name}.toml").gpus["h100"] for name in ("jean-zay", "snellius")
    )
    assert (zay.longest, snellius.longest) == ("100:00:00", "120:00:00")
    assert sites.Gpus(4, 8).longest == ""
