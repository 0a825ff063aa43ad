"""Sites and the script of a job: compared whole; what is wrong with a site file is named."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dlojz.launch import Request, sites, slurm

REPOSITORY = Path(__file__).parent.parent
SITES = REPOSITORY / "slurm" / "sites"
TEMPLATE = (REPOSITORY / "slurm" / "job.sbatch").read_text()
EXPECTED = REPOSITORY / "tests" / "slurm" / "expected"
CASES = {
    "generic-1": ("generic", 1, 600, {}),
    "generic-8": ("generic", 8, 3600, {"name": "a'; echo foo"}),
    "jean-zay-v100-4": ("jean-zay", 4, 7200, {"account": "xyz"}),
    "jean-zay-a100-16": (
        "jean-zay", 16, 72_000, {"account": "xyz@a100", "module": "pytorch-gpu/py3.12/2.9.0"}
    ),
    "jean-zay-h100-8": ("jean-zay", 8, 200_000, {"account": "xyz@h100"}),
    "clariden-8": ("clariden", 8, 3600, {"account": "a-abc"}),
    "lumi-16": ("lumi", 16, 7200, {"account": "project_1@standard"}),
    "snellius-h100-4": ("snellius", 4, 7200, {"account": "xyz@h100"}),
}  # fmt: skip


def render(site="jean-zay", **options):
    return rendered(SITES / f"{site}.toml", **{"account": "xyz"} | options)


def rendered(file, **options):
    return slurm.render(TEMPLATE, sites.read(file), Request(**options))


@pytest.mark.parametrize("case", CASES)
def test_the_whole_script_for_each_site(case):
    site, n_gpu, time_max_s, more = CASES[case]
    found = rendered(SITES / f"{site}.toml", n_gpu=n_gpu, time_max_s=time_max_s, **more)
    assert found == (EXPECTED / f"{case}.sbatch").read_text()


def test_every_site_has_an_expected_script():
    assert {p.stem for p in SITES.glob("*.toml")} == {site for site, *_ in CASES.values()}


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
        ({"site": "clariden", "time_max_s": 43_201}, "that clariden allows is 12:00:00"),
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
        (GOOD + "memory_gb = '80'", "gpus.any.memory_gb = '80': .* like 80, of a GPU"),
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


# By what sites have in their documentation and bug reports: the key, and the line of the script.
REAL = {
    'gres = "gpu:a100_2g.20gb:{n}"': "--gres=gpu:a100_2g.20gb:4",
    'gres = "gpu:a100l.2g.20gb:{n}"': "--gres=gpu:a100l.2g.20gb:4",
    'gres = "gpu:nvidia_h100_80gb_hbm3_4g.40gb:{n}"': "--gres=gpu:nvidia_h100_80gb_hbm3_4g.40gb:4",
    'gres = "gpu:1g.10gb+me:{n}"': "--gres=gpu:1g.10gb+me:4",
    'gres = "gpu:rtx-a6000:{n}"': "--gres=gpu:rtx-a6000:4",
    'gres = "gpu:tesla:{n},localtmp:1024"': "--gres=gpu:tesla:4,localtmp:1024",
    'gres = "gpu:{n},lscratch:{n}"': "--gres=gpu:4,lscratch:4",
    'options = ["--gpus-per-node={n}"]': "--gpus-per-node=4",
    'options = ["--gpus-per-node=a100:{n}"]': "--gpus-per-node=a100:4",
    'options = ["--gpus={n}"]': "--gpus=8",  # Slurm counts those of the job
    'options = ["--gpus=h100:{n}"]': "--gpus=h100:8",
    'options = ["--gpu-bind=none", "--exclude=node[1-3,7]"]': "--exclude=node[1-3,7]",
    'constraint = "a100|h100"': "--constraint=a100|h100",
    'constraint = "a100&nvlink"': "--constraint=a100&nvlink",
    'constraint = "[i02&(scratch|work)]"': "--constraint=[i02&(scratch|work)]",
    'constraint = "[fat*4&thin*12]"': "--constraint=[fat*4&thin*12]",
    'qos = [["UNLIMITED", "long"], ["02:00:00", "dev"]]': "--qos=dev",
    'qos = [["infinite", "long"], ["00:05:00", "dev"]]': "--qos=long",
}


@pytest.mark.parametrize("line", REAL)
def test_what_real_sites_ask_for_is_in_the_script(line, tmp_path):
    file = tmp_path / "site.toml"
    of_gpus = line.startswith(("constraint", "qos"))
    file.write_text(f"{GOOD}{line}" if of_gpus else f"{line}\n{GOOD}")
    found = rendered(file, n_gpu=8)
    assert f"#SBATCH {REAL[line]}\n" in found


@pytest.mark.parametrize(
    "value",
    ["^lo,docker0", "^=docker0", "AWS Libfabric", "/tmp/%h.%p", "${X:-/tmp}/$USER", "a|b&c"],
)
def test_a_variable_reaches_the_job_as_it_is_written(value, tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(f'[environment]\nNCCL_SOCKET_IFNAME = "{value}"\n{GOOD}')
    script = rendered(file)
    (line,) = [x for x in script.splitlines() if x.startswith("export NCCL")]
    shell = ["bash", "-c", f'unset X; USER=me; {line}; printf %s "$NCCL_SOCKET_IFNAME"']
    found = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert found == value.replace("${X:-/tmp}/$USER", "/tmp/me")


TRIPS = "\n\r;`\"'\\\0\x1b"
HOSTILE = [*(f"a{character}b" for character in TRIPS), "$(b)", "a$(b)", "a$"]
PLACES = {
    "gres": "gres = {}\n" + GOOD,
    "options": "options = [{}]\n" + GOOD,
    "activate": "activate = {}\n" + GOOD,
    "environment": "[environment]\nA = {}\n" + GOOD,
    "constraint": GOOD + "constraint = {}",
    "partition": GOOD + "partition = {}",
    "qos": GOOD + 'qos = [["02:00:00", {}]]',
}


@pytest.mark.parametrize("key", PLACES)
def test_the_character_that_a_shell_could_trip_over_is_named(key, tmp_path):
    for value in HOSTILE:
        if key == "activate" and "$" in value and "(" not in value:
            continue  # a variable
        value = f"--x={value}" if key == "options" else value
        file = tmp_path / "site.toml"
        file.write_text(PLACES[key].format(json.dumps(value)))
        with pytest.raises(sites.SiteError, match=r"can't be in it: expected something like") as e:
            sites.read(file)
        assert any(f": {c!r} can't" in str(e.value) for c in f"{TRIPS}$("), value


def test_a_long_value_is_read_in_no_time(tmp_path):
    for key, form in PLACES.items():
        value = f"{'--' * (key == 'options')}{'a' * 10_000};"
        (tmp_path / "site.toml").write_text(form.format(json.dumps(value)))
        with pytest.raises(sites.SiteError, match="';' can't be in it"):
            sites.read(tmp_path / "site.toml")


def test_a_deep_site_file_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text("x = " + "[" * 50_000)
    with pytest.raises(sites.SiteError, match=r"site\.toml: can't be read as TOML: .*nested too"):
        sites.read(file)


def test_the_order_of_the_qos_does_not_matter():
    rows = [["20:00:00", "mid"], ["UNLIMITED", "long"], ["02:00:00", "dev"]]
    for order in itertools.permutations(rows):
        gpus = sites.Gpus(4, 8, qos=list(order))
        assert gpus.longest == "UNLIMITED"
        assert [gpus.qos_for(s) for s in (60, 7200, 7201, 10**6)] == ["dev", "dev", "mid", "long"]
    assert sites.Gpus(4, 8, qos=rows[::2]).longest == "20:00:00"


def test_a_site_is_found_by_name_by_path_or_by_cluster(course_folder, tmp_path, monkeypatch):
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
    known = {key for kind in (sites.Site, sites.Gpus, sites.Storage) for key in sites.keys(kind)}
    for key in known - {"description", "gpus"}:
        assert re.search(rf"^\|.*`\[?{key}", text, re.M), key


def test_the_longest_time_is_that_of_a_qos_or_of_the_partition():
    zay, snellius = (
        sites.read(SITES / f"{name}.toml").gpus["h100"] for name in ("jean-zay", "snellius")
    )
    assert (zay.longest, snellius.longest) == ("100:00:00", "120:00:00")
    assert sites.Gpus(4, 8).longest == ""
