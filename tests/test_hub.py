"""The course on a real JupyterHub: its guide, block by block, and two trainees with real accounts.

The guide's blocks are run with a folder, names and a port of the test's own. What they install is
kept from one session to the next.
"""

import contextlib
import fcntl
import grp
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest
import requests
import websocket

REPOSITORY = Path(__file__).parent.parent
HUB = REPOSITORY / "jupyterhub"
GUIDE = (HUB / "README.md").read_text()
# One for each clone: tests of two clones may run at the same time.
CACHE = Path("/var/cache") / f"dlojz-hub-{hashlib.sha256(bytes(REPOSITORY)).hexdigest()[:8]}"

if os.geteuid() or not all(map(shutil.which, ("npm", "useradd", "chpasswd", "git"))):
    if os.environ.get("CI"):
        pytest.fail("needs root, npm and python3-venv: tools/system.sh", pytrace=False)
    pytest.skip("needs root, npm and python3-venv: tools/system.sh", allow_module_level=True)


def blocks():
    """Return the guide's shell blocks, in order."""
    return re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S)


def block(begin):
    """Return the block that begins so."""
    (found,) = [text for text in blocks() if text.startswith(begin)]
    return found


class Site:
    """A folder, accounts and a port in place of those of the guide."""

    def __init__(self, folder):
        self.folder = folder
        begin = f"t{os.getpid() % 10**6}x"
        self.names = [f"{begin}{number}" for number in (1, 2)]
        self.words = {
            "/opt/dlojz": str(CACHE),
            "trainee$number": f"{begin}$number",
            "$(seq -w 30)": "$(seq -w 2)",
            "/root/dlojz-passwords": str(folder / "passwords"),
            "/etc/systemd/system/": f"{folder}/",
            "apt-get update": "",
            "apt-get install -y": "apt-get install --simulate",
        }
        self.with_data = {"DLOJZ_DATA": str(folder / "data")}

    def run(self, text):
        """Run a block of the guide, and return what it prints."""
        for word, ours in self.words.items():
            text = text.replace(word, ours)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DLOJZ_")}
        environment |= self.with_data | {"COURSE": f"file://{self.folder}/upstream"}
        return call("bash", "-euo", "pipefail", "-c", text, env=environment, cwd="/")

    def passwords(self):
        lines = (self.folder / "passwords").read_text().splitlines()
        return dict(line.split(":", 1) for line in lines)


def call(*command, **more):
    """Run a command and return what it prints; a failure shows that, too."""
    out = subprocess.PIPE
    done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, text=True, **more)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def as_user(name, *command):
    """Run a command with the account of a trainee: its exit code, and what it prints."""
    done = subprocess.run(
        ["runuser", "-u", name, "--", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        timeout=60,
    )
    return done.returncode, done.stdout


def copy_course(folder):
    """Make a repository of the files in this clone, as they are now."""
    files = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    for name in files.splitlines():
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    call("git", "init", "-q", "-b", "main", cwd=folder)
    commit(folder)


def commit(folder, text="course"):
    call("git", "add", "-A", cwd=folder)
    call("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", text, cwd=folder)


@pytest.fixture(scope="module")
def site():
    """The guide's steps up to the start of the hub; accounts go with the session."""
    CACHE.mkdir(exist_ok=True)
    groups = [group.gr_name for group in grp.getgrall()]
    with (
        (CACHE / "lock").open("w") as lock,
        tempfile.TemporaryDirectory(
            prefix="dlojz-hub-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("course", "course.git", "state"):
            shutil.rmtree(CACHE / name, ignore_errors=True)
        site = Site(Path(folder))
        site.folder.chmod(0o755)
        shutil.copytree(os.environ["DLOJZ_DATA"], site.folder / "data")
        copy_course(site.folder / "upstream")
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
                subprocess.run(["userdel", "--remove", name], capture_output=True)
            for group in {"dlojz", "dlojz-teachers"} - set(groups):
                subprocess.run(["groupdel", group], capture_output=True)


class Hub:
    """A hub that was started as the guide's unit starts it."""

    def __init__(self, site, configuration, **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1] % 20_000 + 12_000  # two more are derived from it
        self.site, self.url = site, f"http://127.0.0.1:{port}"
        self.log = site.folder / f"{configuration}.log"
        (unit,) = re.findall(r"^ExecStart=(.*)", (HUB / "dlojz-hub.service").read_text(), re.M)
        self.command = unit.replace("/opt/dlojz", str(CACHE)).replace("one_machine", configuration)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HUB_URL": self.url,
            "A_SECRET": "of-the-administrator",
            "DLOJZ_QUEUE": str(site.folder / "queue"),
            "DLOJZ_PRESET": "smoke",
            **site.with_data,
            **settings,
        }

    def __enter__(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                shlex.split(self.command), env=self.environment, stdout=log, stderr=log, cwd="/"
            )
        for _ in range(300):
            if "JupyterHub is now running" in self.log.read_text():
                return self
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def __exit__(self, *error):
        started = [p for p in psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        self.process.wait(30)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Trainee:
    """A trainee who has logged in, with a token of their own."""

    def __init__(self, hub, name):
        self.hub, self.name = hub, name
        self.session = requests.Session()
        form = {"username": name, "password": hub.site.passwords()[name]}
        self.session.get(f"{hub.url}/hub/login")
        form["_xsrf"] = self.session.cookies["_xsrf"]
        answer = self.session.post(f"{hub.url}/hub/login", data=form, allow_redirects=False)
        assert answer.status_code == 302, answer.text
        xsrf = {"X-XSRFToken": next(c.value for c in self.session.cookies if c.name == "_xsrf")}
        answer = self.session.post(f"{hub.url}/hub/api/users/{name}/tokens", headers=xsrf)
        assert answer.status_code == 201, answer.text
        self.token = {"Authorization": f"token {answer.json()['token']}"}

    def ask(self, method, path, **more):
        answer = requests.request(
            method, f"{self.hub.url}{path}", headers=self.token, timeout=60, **more
        )
        assert answer.ok, f"{path}: {answer.status_code} {answer.text}"
        return answer

    def start(self, **options):
        """Start the server, and wait until it answers; return how long it took."""
        begin = time.monotonic()
        self.ask("POST", f"/hub/api/users/{self.name}/server", json=options)
        while time.monotonic() < begin + 60:
            if self.ask("GET", f"/hub/api/users/{self.name}").json()["servers"][""]["ready"]:
                return time.monotonic() - begin
            time.sleep(0.1)
        raise AssertionError(self.hub.log.read_text())

    def pull(self):
        """Do what the course's link does; return what is shown."""
        repository = f"file://{CACHE}/course.git"
        options = {"repo": repository, "branch": "main", "targetpath": "dlojz"}
        text = self.ask("GET", f"/user/{self.name}/git-pull/api", params=options).text
        found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert found[-1]["phase"] == "finished", text
        return "".join(event.get("output", "") for event in found)

    def home(self, path=""):
        return Path(f"~{self.name}").expanduser() / path

    def kernel(self):
        """Start a kernel as a notebook of the course has it; return how to run code in it."""
        path = f"/user/{self.name}/api/kernels"
        kernel = self.ask("POST", path, json={"path": "dlojz/notebooks/00_start.ipynb"}).json()
        address = f"{self.hub.url}{path}/{kernel['id']}/channels".replace("http", "ws", 1)
        return Kernel(websocket.create_connection(address, header=self.token, timeout=60))


class Kernel:
    def __init__(self, channel):
        self.channel = channel

    def __call__(self, code):
        """Run code, and return what it prints."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "t"}
        header |= {"username": "", "date": "2000-01-01T00:00:00Z", "version": "5.3"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell"}
        message["content"] = {"code": code, "silent": False}
        self.channel.send(json.dumps(message))
        said = ""
        while True:
            answer = json.loads(self.channel.recv())
            if answer["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            content = answer["content"]
            said += content.get("text", "") + "\n".join(content.get("traceback", []))
            if answer["msg_type"] == "status" and content["execution_state"] == "idle":
                return said


@pytest.fixture(scope="module")
def hub(site):
    with Hub(site, "one_machine") as hub:
        yield hub


@pytest.fixture(scope="module")
def ann(hub, site):
    trainee = Trainee(hub, site.names[0])
    trainee.start()
    trainee.pull()
    return trainee


JOB = (
    "dlojz/dlojz.py --test --test-nsteps 3 --model shufflenet_v2_x0_5 --image-size 32 -b 4 "
    "--num-workers 0"
)


def test_a_notebook_has_the_shared_package_and_its_job_ends(ann):
    run = ann.kernel()
    assert run("import dlojz; print(dlojz.__path__[0])").strip().startswith(str(CACHE / "env"))
    assert run("import os; print(os.getlogin if 0 else os.getuid())").strip() != "0"
    said = run(
        f"from dlojz.launch import submit\njob = submit('{JOB}')\njob.wait()\n"
        "print(job.state, job.directory, sep='\\n')"
    )
    assert said.split()[-2:] == ["COMPLETED", str(ann.home("dlojz/runs/0001"))], said
