"""A JupyterHub of the tests' own, as the guide sets it up: its folder, accounts, port, trainees."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import hub_load
import psutil
import requests

REPOSITORY = Path(__file__).parent.parent
HUB = REPOSITORY / "jupyterhub"
GUIDE = (HUB / "README.md").read_text()
# One for each clone: tests of two clones may run at the same time.
CACHE = Path("/var/cache") / f"dlojz-hub-{hashlib.sha256(bytes(REPOSITORY)).hexdigest()[:8]}"


def blocks():
    """Return the guide's shell blocks, in order."""
    return re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S)


def block(begin):
    """Return the block that begins so."""
    (found,) = [text for text in blocks() if text.startswith(begin)]
    return found


def link(hub, repository):
    """Return the course's link, as the guide makes it."""
    return call(sys.executable, HUB / "link.py", hub, repository).strip()


class Site:
    """A folder, accounts and a port in place of those of the guide."""

    def __init__(self, folder):
        self.folder = folder
        begin = f"t{os.getpid() % 10**6}x"
        self.names = [f"{begin}{number}" for number in (1, 2, 3)]
        self.words = {
            "/opt/dlojz": str(CACHE),
            "trainee$number": f"{begin}$number",
            "$(seq -w 30)": "$(seq -w 3)",
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
        env={"PATH": os.environ["PATH"]},
        timeout=60,
    )
    return done.returncode, done.stdout


def assert_denied(name, *attempts):
    """Try commands with the account of a trainee: none is allowed."""
    for attempt in attempts:
        code, said = as_user(name, *attempt)
        assert code != 0, attempt
        assert re.search("not permitted|denied", said), said


def copy_course(folder):
    """Make a repository of the files in this clone, as they are now."""
    files = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    for name in files.splitlines():
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    call("git", "init", "-q", "-b", "main", cwd=folder)
    # It is cloned once: packed small, it would cost more than it saves.
    call("git", "config", "core.compression", "0", cwd=folder)
    call("git", "config", "pack.window", "0", cwd=folder)
    commit(folder)


def commit(folder, text="course"):
    call("git", "add", "-A", cwd=folder)
    call("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", text, cwd=folder)


def bring_bytecode(env):
    """Link our packages' bytecode into an environment to be: that saves 18 core-seconds.

    Bytecode names the date and the size of its source: where these differ, it is made again.
    """
    ours = Path(sysconfig.get_path("purelib"))
    theirs = env / "lib" / ours.parent.name / ours.name
    for file in ours.rglob("*.pyc"):
        copy = theirs / file.relative_to(ours)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy.hardlink_to(file)
        except OSError:  # another file system
            shutil.copy2(file, copy)


class Hub:
    """A hub that was started as the guide's unit starts it."""

    def __init__(self, site, configuration, user="root", **settings):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1] % 7_000 + 12_000  # two more are derived from it
        self.site, self.url = site, f"http://127.0.0.1:{port}"
        self.socket = Path(f"/run/dlojz-hub-{port}")
        self.log, self.left = site.folder / f"{configuration}.log", []
        (unit,) = re.findall(r"^ExecStart=(.*)", (HUB / "dlojz-hub.service").read_text(), re.M)
        unit = unit.replace("/opt/dlojz", str(CACHE)).replace("one_machine", configuration)
        self.command = f"runuser -u {user} -- {unit}" if user != "root" else unit
        self.environment = {
            "PATH": os.environ["PATH"],
            "HUB_URL": self.url,
            "A_SECRET": "of-the-administrator",
            "DLOJZ_PRESET": "smoke",
            **site.with_data,
            **settings,
        }

    def begin(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                shlex.split(self.command), env=self.environment, stdout=log, stderr=log, cwd="/"
            )

    def __enter__(self):
        self.begin()
        for _ in range(300):
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/hub/health").ok:
                    return self
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def stop(self):
        """End the hub, as systemd does: it alone gets the signal."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(30)
        return started

    def __exit__(self, *error):
        for process in {*self.stop(), *self.left}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.socket.unlink(missing_ok=True)


class Trainee(hub_load.Trainee):
    """A trainee of the test's hub."""

    def __init__(self, hub, name, password=None):
        self.hub = hub
        super().__init__(hub.url, name, password or hub.site.passwords()[name])

    def start(self, **options):
        try:
            return super().start(**options)
        except RuntimeError as error:
            raise AssertionError(self.hub.log.read_text()) from error

    def pull(self):
        return super().pull(f"file://{CACHE}/course.git")

    def begin(self, **options):
        """Start the server, pull the course and run a notebook's kernel."""
        self.start(**options)
        self.pull()
        self.run = self.kernel()
        return self

    def home(self, path=""):
        return Path(f"~{self.name}").expanduser() / path


LOOK = """
import os, sys
secrets = [line.encode() for line in sys.stdin.read().split()]
found = set()
def look(path):
    try:
        with open(path, "rb") as file:
            text = file.read(1 << 22)
    except OSError:
        return
    found.update(secret.decode() for secret in secrets if secret in text)
for pid in filter(str.isdigit, os.listdir("/proc")):
    if pid != str(os.getpid()):
        look(f"/proc/{pid}/cmdline"), look(f"/proc/{pid}/environ")
for top in sys.argv[1:]:
    for folder, _, names in os.walk(top):
        for name in names:
            if os.path.isfile(os.path.join(folder, name)):
                look(os.path.join(folder, name))
print(*sorted(found), sep="\\n")
"""


def variables(process):
    """Return the environment that a process was started with."""
    with contextlib.suppress(psutil.Error):  # it has ended
        return process.environ()
    return {}


def server_of(trainee):
    """Return the process of a trainee's server at their hub."""
    in_job = "SLURM_CONF" in trainee.hub.environment
    return next(
        process
        for process in psutil.process_iter(["cmdline", "username"])
        if process.info["username"] == trainee.name
        and f"{CACHE}/env/share/dlojz/server.py" in (process.info["cmdline"] or [])
        and ("SLURM_JOB_ID" in variables(process)) == in_job
    )


def ports_of(process):
    """Return the ports that a process listens on."""
    return [c.laddr.port for c in process.net_connections("inet") if c.status == "LISTEN"]


def secrets_of(hub, trainee):
    """Return what nobody else may read: what it is -> the secret."""
    found = {"cookie secret": (CACHE / "state" / "cookie_secret").read_text().strip()}
    for process in psutil.Process(hub.process.pid).children(recursive=True):
        about = variables(process)
        if "CONFIGPROXY_AUTH_TOKEN" in about:
            found["proxy"] = about["CONFIGPROXY_AUTH_TOKEN"]
    found["password"] = hub.site.passwords()[trainee.name]
    found["own token"] = trainee.token["Authorization"].split()[1]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.username() != trainee.name:
                continue
            about = variables(process)
            found["server"] = about.get("JUPYTERHUB_API_TOKEN", found.get("server"))
            found["oauth"] = about.get("JUPYTERHUB_OAUTH_ACCESS_TOKEN", found.get("oauth"))
    for file in Path("/run/dlojz", trainee.name).glob("kernel-*.json"):
        found["kernel"] = json.loads(file.read_text())["key"]
    return {what: secret for what, secret in found.items() if secret}


def visible(secrets, places, user=None):
    """Return which of the secrets a user finds in files and processes; None: root."""
    command = [sys.executable if user is None else "/usr/bin/python3", "-c", LOOK, *places]
    if user:
        command = ["runuser", "-u", user, "--", *command]
    given = "\n".join(secrets.values())
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return {what for what, secret in secrets.items() if secret in done.stdout.split()}


@contextlib.contextmanager
def attacker(name, *words):
    """Let a trainee play the attacker in the background."""
    command = ["runuser", "-u", name, "--", "/usr/bin/python3", "-", *map(str, words)]
    with (REPOSITORY / "tests/attacker.py").open() as program:
        process = subprocess.Popen(command, stdin=program, stdout=subprocess.PIPE, cwd="/tmp")
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=10)


def attempts(name, *words):
    """Return what an attacker of this name succeeded with."""
    with attacker(name, *words) as process:
        said = process.stdout.read().decode()
        assert process.wait(10) == 0
    return said
