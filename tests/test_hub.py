"""The course on a real JupyterHub: its guide, block by block, and two trainees with real accounts.

The guide's blocks are run with a folder, names and a port of the test's own. What they install is
kept from one session to the next.
"""

import contextlib
import fcntl
import grp
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import hub_load
import psutil
import pytest
import requests
import websocket
from hubs import (
    CACHE,
    HUB,
    REPOSITORY,
    Hub,
    Site,
    Trainee,
    as_user,
    assert_denied,
    attacker,
    attempts,
    block,
    blocks,
    bring_bytecode,
    call,
    commit,
    copy_course,
    link,
    ports_of,
    secrets_of,
    server_of,
    variables,
    visible,
)
from journey import LONG, Lab, jobs, show_all_cells
from waiting import until

# Where nothing is kept yet, PyTorch is installed first.
pytestmark = pytest.mark.timeout(900)

if os.geteuid() or not all(map(shutil.which, ("npm", "useradd", "chpasswd", "git"))):
    if os.environ.get("CI"):
        pytest.fail("needs root, npm and python3-venv: tools/system.sh", pytrace=False)
    pytest.skip("needs root, npm and python3-venv: tools/system.sh", allow_module_level=True)


@pytest.fixture(scope="module")
def site():
    """The guide's steps up to the start of the hub; accounts go with the session."""
    CACHE.mkdir(exist_ok=True)
    with (
        Path("/var/cache/dlojz-hub.lock").open("w") as lock,  # for the groups: also other clones
        tempfile.TemporaryDirectory(
            prefix="dlojz-hub-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        groups = [group.gr_name for group in grp.getgrall()]
        for name in ("class", "course", "course.git", "state"):
            shutil.rmtree(CACHE / name, ignore_errors=True)
        site = Site(Path(folder))
        site.folder.chmod(0o755)
        shutil.copytree(os.environ["DLOJZ_DATA"], site.folder / "data")
        copy_course(site.folder / "upstream")
        if not (CACHE / "env").exists():
            bring_bytecode(CACHE / "env")
        try:
            steps = iter(blocks())
            for _ in range(4):
                site.run(next(steps))
            install, *others = next(steps).splitlines()
            site.run(install)
            assert all(line.startswith("systemctl ") for line in others), "no systemd here"
            yield site
        finally:
            for name in site.names:
                subprocess.run(["userdel", "--force", "--remove", name], capture_output=True)
                shutil.rmtree(f"/run/dlojz/{name}", ignore_errors=True)
            for group in {"dlojz", "dlojz-teachers"} - set(groups):
                subprocess.run(["groupdel", group], capture_output=True)


@pytest.fixture(scope="module")
def hub(site):
    # Beside other tests a second thread of a job costs many times what it gains.
    python = site.folder / "python"
    python.write_text(f'#!/bin/sh\nOMP_NUM_THREADS=1 exec {CACHE}/env/bin/python "$@"\n')
    python.chmod(0o755)
    with Hub(site, "one_machine", DLOJZ_PYTHON=str(python)) as hub:
        yield hub


@pytest.fixture(scope="module")
def ann(hub, site):
    """A trainee with the course and a notebook that runs."""
    return Trainee(hub, site.names[0]).begin()


@pytest.fixture(scope="module")
def bob(site):
    """The account of another trainee."""
    return site.names[1]


JOB = (
    "dlojz/dlojz.py --test --test-nsteps 3 --model shufflenet_v2_x0_5 --image-size 32 -b 4 "
    "--num-workers 0"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("install.sh", "expected a folder, found '': jupyterhub/install.sh /opt/dlojz"),
        ("install.sh /root/x", "is closed to other users: choose another folder"),
        ("install.sh '/tmp/a b'", "expected a folder of letters, digits and / . _ + -, such as /o"),
        (
            'install.sh "/tmp/a\'b"',
            "expected a folder of letters, digits and / . _ + -, such as /o",
        ),
        ("start.sh /opt", "expected a folder and a configuration"),
        ("start.sh /usr one_machine", "no JupyterHub in /usr: run"),
        (f"start.sh {CACHE} laptop", "laptop: expected one_machine or slurm_cluster"),
        ("link.py http://here", "expected a hub and a repository"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(site, words, message):
    name, *rest = shlex.split(words)
    python = [sys.executable] * name.endswith(".py")
    made = Path("/root/x").exists()
    done = subprocess.run([*python, HUB / name, *rest], capture_output=True, text=True)
    if not made and Path("/root/x").exists():
        Path("/root/x").rmdir()
    assert done.returncode != 0
    assert message in done.stderr
    asked = subprocess.run([*python, HUB / name, "--help"], capture_output=True, text=True)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert name in asked.stdout


def test_a_plain_user_tries_a_hub_with_a_password(site, bob):
    settings = {"HUB_LOGIN": "trial", "HUB_STATE": f"/home/{bob}/trial", "HOME": f"/home/{bob}"}
    with Hub(site, "one_machine", user=bob, **settings) as hub:
        said = hub.log.read_text()
        password = re.search(r"and the password (\S+)", said)[1]
        assert "/hub/user-redirect/git-pull?repo=file%3A%2F%2F" in said
        refused = (("eve", "x"), ("root", password), ("eve;id", password), ("-eve", password))
        for name, given in refused:
            answer = hub_load.log_in(requests.Session(), hub.url, name, given)
            assert answer.status_code == 403, name
        Trainee(hub, "eve", password).start()
        server = next(
            p for p in psutil.process_iter() if variables(p).get("JUPYTERHUB_USER") == "eve"
        )
        assert server.username() == bob
        assert ports_of(server) == []


def test_the_guides_link_is_the_course(site):
    text = site.run(block("python3 /opt/dlojz/course/jupyterhub/link.py"))
    assert text.startswith("http://127.0.0.1:8000/hub/user-redirect/git-pull?repo=file%3A%2F%2F%2F")
    assert f"{quote(str(CACHE / 'course.git'), safe='')}&branch=main&targetpath=dlojz" in text


def test_every_block_of_the_guide_is_run(site):
    """Four by the fixture `site`, and two lines of the fifth; the rest in tests of their own."""
    begins = ("apt-get", "mkdir", "/opt/dlojz/course/", "groupadd", "install -m", "python3")
    begins += ("install -d", "git")
    assert len(blocks()) == len(begins)
    assert all(text.startswith(begin) for text, begin in zip(blocks(), begins, strict=True))
    unit = site.folder / "dlojz-hub.service"  # the guide has installed it
    unit.write_text(unit.read_text().replace("/opt/dlojz", str(CACHE)))
    if shutil.which("systemd-analyze"):
        call("systemd-analyze", "verify", unit)


def test_a_notebook_has_the_shared_package_and_its_job_ends(ann):
    assert ann.run("import dlojz; print(dlojz.__path__[0])").startswith(str(CACHE / "env"))
    assert ann.run("import os, pwd; print(pwd.getpwuid(os.getuid()).pw_name)").strip() == ann.name
    said = ann.run(
        f"from dlojz.launch import submit\njob = submit('{JOB}')\njob.wait()\n"
        "print(job.state, job.directory, sep='\\n')"
    )
    assert not ann.home(".npm").exists(), "a server starts no Node.js"
    assert said.split()[-2:] == ["COMPLETED", str(ann.home("dlojz/runs/0001"))], said


def test_a_terminal_begins_in_the_course_and_knows_its_command(ann):
    """Not so by default: a terminal is a login shell, and Debian's /etc/profile sets PATH."""
    path = f"/user/{ann.name}/api/terminals"
    name = ann.ask("POST", path).json()["name"]
    address = f"{ann.url}/user/{ann.name}/terminals/websocket/{name}".replace("http", "ws", 1)
    channel = websocket.create_connection(address, header=ann.token, timeout=60)
    channel.send(json.dumps(["stdin", "pwd; dlojz queue; command -v python; exit\r"]))
    said, kind = "", ""
    while kind != "disconnect":
        kind, *text = json.loads(channel.recv())
        said += text[0] if kind == "stdout" else ""
    words = said.split()
    assert str(ann.home("dlojz")) in words, said
    assert f"{CACHE}/env/bin/python" in words, said
    assert "not found" not in said, said


def test_the_environment_and_the_data_are_read_only(ann, site):
    said = ann.run(
        "import dlojz, os, sys\n"
        f"data, course = '{site.folder}/data', '{CACHE}/course.git'\n"
        "for place in (dlojz.__path__[0], sys.prefix, data, course):\n"
        "    print(os.access(place, os.R_OK), os.access(place, os.W_OK))"
    )
    assert said == "True False\n" * 4
    # By default a folder in /tmp that another could have made before, with code of their own.
    code = ann.run("print(os.environ['TORCHINDUCTOR_CACHE_DIR'])").strip()
    assert code == str(ann.home(".cache/torchinductor"))
    assert stat.S_IMODE((site.folder / "passwords").stat().st_mode) == 0o600
    writable = call("find", CACHE, "!", "-type", "l", "-perm", "/022", "!", "-name", "queue")
    assert writable == ""


# from /etc/skel, and by IPython, with the modes that they have there
COPIED = (".bashrc", ".bash_logout", ".profile", "README")


def test_files_of_a_trainee_are_private_even_in_an_open_home(ann, bob):
    ann.run("from dlojz.course import progress; progress.keep('quizzes', 'x', 1)")
    ann.home().chmod(0o755)
    try:
        theirs = [p for p in ann.home().rglob("*") if not p.is_symlink() and p.stat().st_uid]
        made = [p for p in theirs if p.name not in COPIED]
        assert ann.home("dlojz/dlojz/dlojz.py") in made
        assert ann.home("dlojz/progress.json") in made
        assert ann.home("dlojz/runs/0001/events.jsonl") in made
        assert [p for p in made if p.stat().st_mode & 0o077] == []
        assert_denied(bob, ["cat", ann.home("dlojz/progress.json")])
    finally:
        ann.home().chmod(0o700)


def test_a_trainee_neither_enters_anothers_server_nor_the_hubs_administration(hub, ann, bob):
    other = Trainee(hub, bob)
    for path in (f"/user/{ann.name}/api/contents", "/hub/api/users", f"/hub/api/users/{ann.name}"):
        answer = requests.get(f"{hub.url}{path}", headers=other.token, timeout=30)
        assert answer.status_code in (403, 404), path
    assert hub_load.log_in(requests.Session(), hub.url, bob, "x").status_code == 403


def test_no_secret_is_in_a_log_a_command_line_or_an_open_file(hub, ann, bob, site):
    ann.ask("GET", f"/user/{ann.name}/api/contents?token={ann.token['Authorization'].split()[1]}")
    secrets = secrets_of(hub, ann)
    assert {"cookie secret", "proxy", "password", "own token", "server", "kernel"} <= set(secrets)
    places = [str(site.folder), str(CACHE / "state"), str(CACHE / "queue"), str(ann.home())]
    places.append("/run/dlojz")  # what a server keeps outside the home
    seen = visible(secrets, places)
    assert {"cookie secret", "proxy", "password", "server", "kernel"} <= seen, "the search works"
    assert visible(secrets, places, bob) == set()
    log = hub.log.read_text()
    assert [what for what, secret in secrets.items() if secret in log] == []
    about = variables(psutil.Process(hub.process.pid))
    assert "A_SECRET" not in about
    assert not set(about.values()) & set(secrets.values())


def test_the_board_is_read_by_teachers_only(ann, bob, site):
    site.run(block("install -d"))
    folder, dlojz = CACHE / "class", f"{CACHE}/env/bin/dlojz"
    words = [dlojz, "share", str(folder), "--as", "fox", "--yes"]
    run = f"subprocess.run({words}, capture_output=True, text=True)"
    said = ann.run(f"import subprocess; done = {run}; print(done.returncode, done.stderr)")
    assert said == "0 \n", said
    (file,) = folder.iterdir()
    look = ["env", f"DLOJZ_ROOT={CACHE}/course", dlojz, "class", folder]
    assert_denied(bob, ["ls", folder], ["cat", file], ["rm", "-f", file], look)
    call("usermod", "--append", "--groups", "dlojz-teachers", site.names[2])
    code, said = as_user(site.names[2], *look)
    assert (code, "fox" in said) == (0, True), said


def test_a_trainee_cannot_cancel_or_displace_anothers_job(ann, bob, site):
    ann.home("dlojz/wait.py").write_text("import time; time.sleep(60)")
    ann.run("job = submit('wait.py')")
    run = Path(ann.run("print(job.directory)").strip())
    until(lambda: ann.run("print(job.state)") == "RUNNING\n")
    (ticket,) = (CACHE / "queue").glob("running-*")
    keeper = json.loads((run / "keeper.json").read_text())["pid"]
    assert_denied(
        bob,
        ["rm", "-f", ticket],
        ["mv", ticket, f"{ticket}.away"],
        ["truncate", "-s", "0", ticket],
        ["chmod", "000", CACHE / "queue"],
        ["touch", run / "cancel"],
        ["kill", "-KILL", keeper],
    )
    # The queue says whose job it is, and bob's own waits for it.
    folder = f"/home/{bob}/other"
    call("runuser", "-u", bob, "--", "mkdir", "-p", folder, cwd="/")
    call("runuser", "-u", bob, "--", "touch", f"{folder}/.course-root", f"{folder}/t.py", cwd="/")
    code = """if True:
        import time
        from dlojz.launch import submit
        job = submit("t.py")
        while "held by" not in (reason := job.status.get("reason", "")):
            time.sleep(0.1)
        job.cancel()
        print(reason)"""
    variables = (f"DLOJZ_QUEUE={CACHE}/queue", "DLOJZ_LAUNCHER=local", f"DLOJZ_ROOT={folder}")
    _, said = as_user(bob, "env", *variables, CACHE / "env/bin/python", "-c", code)
    assert f"held by run 0002 of {ann.name}" in said
    assert ann.run("print(job.state)") == "RUNNING\n"
    ann.run("job.cancel(); job.wait()")


def enter(hub, page, name, kept):
    """Log in by the hub's form at the course's link, to the first notebook; return the screen."""
    home = Path(f"~{name}").expanduser()
    show_all_cells(home)
    call("chown", "-R", name, home / ".jupyter")
    lab = Lab(page, hub.log, kept / name)
    lab.log_in(link(hub.url, f"file://{CACHE}/course.git"), name, hub.site.passwords()[name])
    return lab


def test_two_trainees_work_at_once_in_browsers(hub, ann, site, new_page, tmp_path):
    names = (ann.name, site.names[2])
    roots = [Path(f"~{name}/dlojz").expanduser() for name in names]
    known = jobs(roots[0]).keys()
    labs = [enter(hub, new_page(), name, tmp_path / "kept") for name in names]
    with labs[0], labs[1]:
        for lab in labs:
            lab.shown("00_start.ipynb")
            lab.run("presets.choose()")
        for lab in labs:
            lab.run("monitor(job)")
        for lab in labs:
            lab.watch("monitor(job)", 1)
    mine, theirs = (jobs(root) for root in roots)
    (first,) = (job for number, job in mine.items() if number not in known)
    (second,) = theirs.values()
    assert first["name"] == second["name"] == "baseline"
    assert first["ended"] <= second["started"], "the queue serves one at a time, in order"


def test_nobody_takes_the_place_of_a_teachers_server(hub, bob, site):
    """Neither while it runs, nor when it has ended and the proxy still knows it, nor as it starts.

    As long as it was found at a port, the first who listened there had its pages, and who let
    nobody in stopped the hub.
    """
    teacher = Trainee(hub, site.names[2])
    if not teacher.ask("GET", f"/hub/api/users/{teacher.name}").json()["servers"]:
        teacher.start()
    api = f"/user/{teacher.name}/api"
    server = server_of(teacher)
    assert ports_of(server) == []
    state, room = CACHE / "state", Path("/run/dlojz")
    sockets = [state / "proxy", state / f"server-{teacher.name}"]
    assert attempts("root", "enter", *sockets).count("connected") == 2, "the attack works"
    places = [state, *sockets, room, room / teacher.name, CACHE / "env/share/dlojz"]
    assert attempts(bob, "enter", *places) == ""
    first, second = range(30_000, 30_100), range(30_100, 30_200)
    with attacker(bob, "answer", *first) as answers, attacker(bob, "stall", *second) as stalls:
        assert answers.stdout.readline() == stalls.stdout.readline() == b"ready\n"
        server.kill()
        until(lambda: server.status() == psutil.STATUS_ZOMBIE)  # until the hub looks at it
        gone = requests.get(f"{hub.url}{api}", headers=teacher.token, timeout=10)
        assert (gone.status_code, "the-attacker" in gone.text) == (503, False)
        teacher.ask("DELETE", f"/hub/api/users/{teacher.name}/server", within_s=10)
        teacher.start(within_s=30)
        assert "version" in teacher.ask("GET", api, within_s=10).json()


def test_it_is_the_proxy_that_closes_a_connection(hub, ann):
    """Otherwise one of a thousand requests fails: the proxy writes where nobody reads."""
    places = {f"/user/{ann.name}/api": CACHE / f"state/server-{ann.name}", "/hub/api": hub.socket}
    for page, path in places.items():
        with socket.socket(socket.AF_UNIX) as proxy:
            proxy.connect(str(path))
            proxy.sendall(f"GET {page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = http.client.HTTPResponse(proxy)
            answer.begin()
            assert (answer.status, "version" in json.load(answer)) == (200, True)
            proxy.settimeout(0.2)
            with pytest.raises(TimeoutError):
                proxy.recv(1)


def test_an_update_comes_with_the_link_and_the_next_notebook_shows_it(ann, site):
    """What becomes of which file is in tests/test_updates.py; this is the way through a hub."""
    trainer, upstream = ann.home("dlojz/dlojz/dlojz.py"), site.folder / "upstream"
    trainer.write_text("# mine\n" + trainer.read_text())
    for file in ("dlojz/dlojz.py", "GLOSSARY.md"):
        text = (upstream / file).read_text()
        (upstream / file).write_text(f"# theirs\n{text}# theirs\n")  # one meets mine, one does not
    commit(upstream)
    for line in block("git -C /opt/dlojz/course.git fetch").splitlines()[:2]:  # not the package
        site.run(f"umask 077\n{line}")  # as an administrator's may be
    ann.pull()
    assert trainer.read_text().startswith("# mine\n")
    assert "# theirs" not in trainer.read_text()
    shown = ann.kernel()("import dlojz.widgets")
    assert "updated:\n    GLOSSARY.md\n" in shown
    assert "yours, kept as it was, though the course has another version:\n    dlojz/" in shown


def proxy_of(hub):
    """Return the process of a hub's proxy, if it has one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(hub.process.pid).children():
            if "configurable-http-proxy" in " ".join(process.cmdline()):
                return process


def assert_no_proxy_stays(hub):
    """End a hub as soon as it has started its proxy."""
    hub.begin()
    until(lambda: proxy_of(hub))
    proxy = proxy_of(hub)
    hub.process.terminate()
    hub.process.wait(10)
    proxy.wait(5)


def test_a_restart_of_the_hub_leaves_servers_and_kernels_alone(hub, ann, bob):
    ann.run.connect()  # the server may have closed a channel that idled
    ann.run("import dlojz")
    hub.left = hub.stop()
    assert_no_proxy_stays(hub)
    assert hub.socket.is_socket(), "where servers look for the hub"
    assert attempts(bob, "take", hub.socket) == ""
    hub.__enter__()
    ann.run.connect()
    assert ann.run("print(dlojz.__path__[0])").startswith(str(CACHE)), "it knows what it imported"


# Settings -------------------------------------------------------------------------------------


DOORS = {
    "expected http://127.0.0.1:800": {"HUB_LOGIN": "trial", "HUB_URL": "http://0.0.0.0:8000"},
    "expected http://127.0.0.1:8": {"HUB_LOGIN": "trial", "HUB_URL": "http://hub.example:80"},
    "expected https://... with HUB_CERTIFICATE": {"HUB_URL": "http://0.0.0.0:8000"},
    "expected an address such as http://127.0.0.1:8000": {"HUB_URL": "here"},
    "HUB_LOGIN=dummy: expected pam, or trial": {"HUB_LOGIN": "dummy"},
}
PROFILES = {
    'cpu = "x"': "'cpu' stands outside of a profile",
    '["c\\npu"]': "profile 'c\\npu': expected a name of one line",
    "[cpu]\noptions = '''a\n#SBATCH --uid=0'''": "'options' in [cpu]: expected a text of one line",
    '[cpu]\nlabel = "\\u001b[31m"': "'label' in [cpu]: expected a text of one line, or a whole",
    '[cpu]\npartition = "a\\rb"': "'partition' in [cpu]: expected a text of one line",
    '[cpu]\ngres = ["gpu:1"]': "'gres' in [cpu]: expected a text of one line, or a whole number",
    "[cpu]\nnprocs = 1.5": "'nprocs' in [cpu]: expected",
    "[cpu]\nnprocs = true": "'nprocs' in [cpu]: expected",
    "[cpu.nprocs]": "'nprocs' in [cpu]: expected",
    "[cpu]\ncmd = 'id'": "'cmd' in [cpu]: unknown, expected one of label, partition",
    "": "has no profile: expected at least one, such as [cpu]",
    '[""]': "profile '': expected a name of one line",
    "[cpu": "can't be read as TOML",
    f"[cpu]\nnprocs = {'[' * 5000}": "can't be read as TOML",
}
OPTIONS = [["cpu"], {}, [], 0, False, 5, "nix", "cpu\n", "x" * 10**6, "cpu, gpu"]
LOGS = {
    "mkfifo {}": "exit status 124",
    "ln -s /dev/zero {}": "exit status 124",
    "truncate -s 1G {}": "its log says nothing",
    "touch {}": "its log says nothing",
    "mkdir {}": "Is a directory",
    "ln -s /etc/shadow {}": "Permission denied",
    "ln -s {} {}": "Too many levels of symbolic links",
    "true {}": "No such file",
    r"printf 'a\nb\nc\033[31m\nthe end\n' >{}": "b\nc[31m\nthe end",
}


@pytest.fixture(scope="module")
def tried(site, tmp_path_factory):
    """What came of settings, of forms, and of what a job may leave."""
    if not shutil.which("sbatch"):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Slurm: tools/system.sh")
    tests, folder = REPOSITORY / "tests", tmp_path_factory.mktemp("tried")
    homes = [site.folder / f"home{i}" for i in range(len(LOGS))]
    for home, command in zip(homes, LOGS, strict=True):
        home.mkdir()
        call("bash", "-c", command.replace("{}", str(home / ".jupyter-server.log")))
    given = {
        "doors": list(DOORS.values()),
        "profiles": list(PROFILES),
        "options": [{"profile": name} for name in OPTIONS],
        "forms": [{}, {"profile": []}, {"profile": [""]}, {"profile": ["cpu", "gpu"]}],
        "homes": list(map(str, homes)),
        "commands": ["yes", "kill -STOP $$", "echo out; echo error >&2; exit 3", "cat; echo out"],
    }
    done = subprocess.run(
        [CACHE / "env/bin/python", tests / "hub_settings.py", HUB, site.names[1]],
        input=json.dumps(given),
        env=os.environ
        | {"HUB_URL": "http://127.0.0.1:8000", "HUB_LOGIN": "pam", "HUB_STATE": str(folder)}
        | {"HUB_PROFILES": str(folder / "profiles.toml")},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_an_open_door_is_refused(tried):
    for refused, message in zip(tried["doors"], DOORS, strict=True):
        assert message in refused


def test_a_profile_that_is_wrong_is_refused_with_its_file_and_key(tried):
    for refused, message in zip(tried["refused"], PROFILES.values(), strict=True):
        assert "profiles.toml" in refused
        assert message in refused


def test_a_choice_of_another_shape_gets_a_message(tried):
    for said, option in zip(tried["chosen"], OPTIONS, strict=True):
        assert said.startswith("SpawnException: "), option
        assert "expected one of cpu, gpu" in said
        assert len(said) < 300
    assert tried["forms"][:3] == ["cpu"] * 3, "the first is the default"
    assert "no profile 'cpu, gpu'" in tried["forms"][3]


def test_the_last_words_of_a_job_are_few_and_come_soon(tried):
    for said, expected in zip(tried["words"], LOGS.values(), strict=True):
        assert expected in said
        assert len(said) <= 2000


def test_a_process_that_is_not_the_trainees_is_no_server_of_theirs(tried):
    """After a reboot its number is another's, which the hub would end as root."""
    assert tried["polled"] == [0, None]


def test_a_command_that_runs_as_the_trainee_is_bounded(tried):
    assert tried["commands"] == [
        "RuntimeError: exit status -9: yes",
        "RuntimeError: no answer in 3 s: kill -STOP $$",
        "RuntimeError: error",
        "out",
    ]


# Over Slurm -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm_hub(site, cluster):
    fixture = site.folder / "fixture.toml"
    fixture.write_text((REPOSITORY / "tests/slurm/fixture.toml").read_text())
    settings = {"SLURM_CONF": str(cluster.conf), "DLOJZ_SITE": str(fixture)}
    with Hub(site, "slurm_cluster", HUB_STATE=str(site.folder / "slurm"), **settings) as hub:
        yield hub


@pytest.fixture(scope="module")
def bea(slurm_hub, site):
    """The other trainee, whose server is a job with a GPU. The API accepts any option."""
    trainee = Trainee(slurm_hub, site.names[1])
    return trainee.begin(profile="gpu", cmd="touch ~/evil", options="--comment=evil")


def job_of(cluster, trainee):
    return cluster.call("squeue", "-h", "-u", trainee.name, "-n", "jupyter", "-o", "%A %T").split()


def test_a_server_is_a_slurm_job_of_its_trainee(bea, cluster):
    said = bea.run(
        "import os, pwd, socket, subprocess, dlojz\n"
        "print(pwd.getpwuid(os.getuid()).pw_name, socket.gethostname())\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'], dlojz.__path__[0])\n"
        "print(subprocess.check_output(['srun', '-n1', 'hostname'], text=True, timeout=20))"
    )
    user, node, gpu, package, step = said.split()
    assert (user, gpu, package.startswith(str(CACHE))) == (bea.name, "0", True)
    assert node.startswith("node")
    assert step == node, "a step of one's own need not wait for the server"
    told = bea.run("import ipykernel; print(ipykernel.get_connection_info())")
    assert "curve_secretkey" in told, "others on the node can't listen to the kernel"
    number, state = job_of(cluster, bea)
    script = cluster.call("scontrol", "write", "batch_script", number, "-")
    assert state == "RUNNING"
    assert "--gres=gpu:1" in script
    assert "evil" not in script


def test_a_job_of_the_notebook_goes_to_slurm_and_ends(bea):
    bea.home("dlojz/t.py").write_text("import dlojz.runs.log as log; print(log.__file__)")
    said = bea.run(
        "from dlojz.launch import launcher, submit\njob = submit('t.py')\njob.wait()\n"
        "print(launcher().name, job.state, (job.directory / 'stdout.txt').read_text())"
    )
    name, state, file = said.split()
    assert (name, state) == ("slurm", "COMPLETED")
    assert file.startswith(str(CACHE / "env"))
    made = [bea.home("dlojz/runs/0001"), *bea.home("dlojz/runs/0001").rglob("*")]
    assert bea.home("dlojz/runs/0001/stdout.txt") in made
    assert [p for p in made if p.stat().st_mode & 0o077] == []


def test_a_trainee_works_in_a_browser_over_slurm(bea, cluster, page, tmp_path):
    known = jobs(bea.home("dlojz")).keys()
    with enter(bea.hub, page, bea.name, tmp_path / "kept") as lab:
        lab.shown("00_start.ipynb")
        assert job_of(cluster, bea)[1] == "RUNNING", "the server is a job"
        lab.run("presets.choose()")
        lab.cancel_one("presets.choose()", LONG)
    (made,) = [job for name, job in jobs(bea.home("dlojz")).items() if name not in known]
    assert (made["name"], made["slurm"], made["site"]) == ("long", "CANCELLED", "fixture")


def test_slurm_shows_no_token_and_lets_nobody_cancel_anothers_server(bea, ann, site, cluster):
    secrets = {k: v for k, v in secrets_of(bea.hub, bea).items() if k != "cookie secret"}
    assert {"proxy", "server", "own token"} <= set(secrets)
    places = [str(site.folder), str(cluster.folder)]
    assert "server" in visible(secrets, places), "the search works"
    assert visible(secrets, places, ann.name) == set()
    number, _ = job_of(cluster, bea)
    conf = f"SLURM_CONF={cluster.conf}"
    _, shown = as_user(ann.name, "env", conf, "scontrol", "show", "job", "-dd", number)
    assert f"JobId={number}" in shown
    assert [what for what, secret in secrets.items() if secret in shown] == []
    assert_denied(ann.name, ["env", conf, "scancel", number])
    assert job_of(cluster, bea) == [number, "RUNNING"]
    log = bea.hub.log.read_text()
    assert [what for what, secret in secrets.items() if secret in log] == []


def test_a_server_whose_job_ends_is_not_waited_for(slurm_hub, site):
    """Batchspawner waits ten minutes. The log's last lines say why it ended."""
    trainee = Trainee(slurm_hub, site.names[2])
    local, away = trainee.home(".local"), trainee.home(".local-away")
    if local.exists():
        local.rename(away)
    local.touch()  # a server keeps its files in this folder
    begin = time.monotonic()
    try:  # the hub answers at once, or later if the machine is busy
        with pytest.raises(RuntimeError, match=r"500|gave up"):
            hub_load.Trainee.start(trainee)
    finally:
        local.unlink()
        if away.exists():
            away.rename(local)
    assert time.monotonic() - begin < 60
    said = slurm_hub.log.read_text()
    assert re.search(rf"RuntimeError: job \d+ ended before(.*\n)+.*'{local}", said), said[-3000:]


def test_a_server_over_slurm_tells_the_hub_its_port_and_nothing_else(bea, tmp_path):
    """Batchspawner's own handler sets any attribute: also the commands that root runs."""
    token = {"Authorization": f"token {variables(server_of(bea))['JUPYTERHUB_API_TOKEN']}"}
    page = f"{bea.hub.url}/hub/api/batchspawner"
    port, certificate = 22, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    reports = [
        {"exec_prefix": f"touch {tmp_path}/root; "},
        {"port": port, "certificate": certificate, "job_id": "1"},
        {"port": port},
        {"port": "22", "certificate": certificate},
        {"port": 1 << 16, "certificate": certificate},
        {"port": port, "certificate": 5},
        ["port"],
        None,
    ]
    for report in reports:
        answer = requests.post(page, headers=token, json=report, timeout=10)
        assert (answer.status_code, "expected a port and a cert" in answer.text) == (400, True)
    assert "version" in bea.ask("GET", f"/user/{bea.name}/api").json(), "nothing has changed"


def test_nobody_takes_the_port_of_a_server_that_has_ended(slurm_hub, ann, site):
    trainee = Trainee(slurm_hub, site.names[2])
    trainee.start()
    api = f"/user/{trainee.name}/api"
    server = server_of(trainee)
    (port,) = ports_of(server)
    with attacker(ann.name, "answer", port) as answers:  # as soon as it is free
        server.kill()
        assert answers.stdout.readline() == b"ready\n"
        gone = requests.get(f"{slurm_hub.url}{api}", headers=trainee.token, timeout=10)
        assert (gone.status_code, "the-attacker" in gone.text) == (503, False)
        assert "another program answers at node" in slurm_hub.log.read_text()
    with attacker(ann.name, "stall", port) as stalls:
        assert stalls.stdout.readline() == b"ready\n"
        with pytest.raises(requests.Timeout):
            requests.get(f"{slurm_hub.url}{api}", headers=trainee.token, timeout=0.5)
        assert requests.get(f"{slurm_hub.url}/hub/health", timeout=2).ok
    trainee.ask("DELETE", f"/hub/api/users/{trainee.name}/server")


def test_a_server_that_is_stopped_gives_its_node_back(bea, cluster):
    bea.ask("DELETE", f"/hub/api/users/{bea.name}/server")
    until(lambda: not job_of(cluster, bea))
