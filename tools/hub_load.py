"""The cost of a class on a JupyterHub: many trainees log in at once, and each runs a check.

make hub                                               # prints the password
python tools/hub_load.py PASSWORD --trainees 30

Everything is real: servers, pulls, kernels, jobs and verdicts. The memory (PSS) of servers,
kernels, jobs and the launcher's own processes is counted apart. It runs on the hub's machine.
"""

import argparse
import json
import sys
import time
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import psutil
import requests
import websocket

from dlojz import course

KINDS = {  # the first of these words in a command decides
    "dlojz.jobs.waiter": "launcher",
    "ipykernel": "kernels",
    "share/dlojz/server.py": "servers",
    "configurable-http-proxy": "hub",
    "bin/jupyterhub": "hub",
}
SMALL = "--test --data synthetic --test-nsteps 8 --model shufflenet_v2_x0_5 --image-size 32 -b 8"
CHECK = """
job = submit("solutions/dlojz_01_gpu.py {flags}")
job.wait()
verdict = check("01_gpu", job)
print(verdict if not verdict.passed else "", "VERDICT", verdict.passed)
"""
EACH_S = 3  # between two looks at the memory


def log_in(session: requests.Session, url: str, name: str, password: str) -> requests.Response:
    """Fill in the hub's form, and return its answer."""
    page = session.get(f"{url}/hub/login")
    if "_xsrf" not in session.cookies:
        raise RuntimeError(f"{page.url}: {page.status_code}, expected the form of a JupyterHub")
    form = {"username": name, "password": password, "_xsrf": session.cookies["_xsrf"]}
    return session.post(f"{url}/hub/login", data=form, allow_redirects=False)


class Trainee:
    """A trainee who has logged in, with a token of their own."""

    def __init__(self, url: str, name: str, password: str):
        self.url, self.name = url, name
        self.session = requests.Session()
        answer = log_in(self.session, url, name, password)
        if answer.status_code != 302:
            raise RuntimeError(f"{name} can't log in at {url}: {answer.status_code}, expected 302")
        xsrf = {"X-XSRFToken": next(c.value for c in self.session.cookies if c.name == "_xsrf")}
        answer = self.session.post(f"{url}/hub/api/users/{name}/tokens", headers=xsrf)
        answer.raise_for_status()
        self.token = {"Authorization": f"token {answer.json()['token']}"}

    def ask(self, method: str, path: str, within_s: float = 60, **more) -> requests.Response:
        """Ask the hub or the server, and return the answer."""
        address = f"{self.url}{path}"
        answer = requests.request(method, address, headers=self.token, timeout=within_s, **more)
        if not answer.ok:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer

    def start(self, within_s: float = 90, **options) -> float:
        """Start the server, and wait until it answers; return the seconds."""
        begin = time.monotonic()
        self.ask("POST", f"/hub/api/users/{self.name}/server", within_s, json=options)
        while time.monotonic() < begin + within_s:
            found = self.ask("GET", f"/hub/api/users/{self.name}").json()["servers"]
            if not found:
                raise RuntimeError(f"the hub gave up the server of {self.name}: its log says why")
            if found[""]["ready"]:
                return time.monotonic() - begin
            time.sleep(0.1)
        raise RuntimeError(f"the server of {self.name} is not ready after {within_s} s")

    def pull(self, repository: str, branch: str = "main", within_s: float = 60) -> str:
        """Pull the course, as its link does; return the output."""
        options = {"repo": repository, "branch": branch, "targetpath": "dlojz"}
        path = f"/user/{self.name}/git-pull/api"
        text = self.ask("GET", path, within_s, params=options).text
        found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        if not found or found[-1]["phase"] != "finished":
            raise RuntimeError(text)
        return "".join(event.get("output", "") for event in found)

    def kernel(self, within_s: float = 60) -> "Kernel":
        """Start a kernel like that of a notebook of the course, and return it."""
        path = f"/user/{self.name}/api/kernels"
        where = {"path": "dlojz/notebooks/00_start.ipynb"}
        kernel = self.ask("POST", path, within_s, json=where).json()
        return Kernel(f"{self.url}{path}/{kernel['id']}/channels", self.token, within_s)


class Kernel:
    """A kernel on a trainee's server."""

    def __init__(self, address: str, token: dict, within_s: float = 60):
        self.address, self.token = address.replace("http", "ws", 1), token
        self.connect(within_s)

    def connect(self, within_s: float = 60):
        """Open the channel, also again after a restart of the hub."""
        self.channel = websocket.create_connection(
            self.address, header=self.token, timeout=within_s
        )

    def __call__(self, code: str) -> str:
        """Run code, and return its output."""
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


# The cost ----------------------------------------------------------------------------------------


def memory() -> dict[str, dict[int, int]]:
    """Return the memory (PSS, bytes) of each process of a hub and its trainees, by kind and pid.

    A trainee's processes have a name in their environment, which the hub gave to their server.
    """
    kinds = defaultdict(dict)
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        kind = next((kind for word, kind in KINDS.items() if word in words), "jobs")
        with suppress(psutil.Error):  # it has just ended
            if kind == "hub" or "JUPYTERHUB_USER" in process.environ():
                kinds[kind][process.pid] = process.memory_full_info().pss
    return kinds


def said_of(kinds: dict[str, dict[int, int]]) -> str:
    """Return the number and GiB of each kind of process, in words."""
    order = ("hub", "servers", "kernels", "launcher", "jobs")
    parts = [
        f"{kind} {len(kinds[kind])}: {total(kinds[kind]) / 2**30:.2f} GiB"
        for kind in order
        if kinds.get(kind)
    ]
    return ", ".join(parts)


def total(found: dict[int, int]) -> int:
    return sum(found.values())


def largest(seen: list[dict[str, dict[int, int]]]) -> dict[str, dict[int, int]]:
    """Return the processes of each kind at the moment of its largest memory."""
    kinds = {kind for each in seen for kind in each}
    return {kind: max((each.get(kind, {}) for each in seen), key=total) for kind in kinds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("password", help="password that the trial printed")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the hub (%(default)s)")
    clone = f"file://{course.course_root()}"
    parser.add_argument("--repository", default=clone, help="the course (%(default)s)")
    parser.add_argument("--branch", default="main", help="branch of it (%(default)s)")
    parser.add_argument("--trainees", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=30, help="minutes for all checks together")
    parser.add_argument("--flags", default=SMALL, help="flags of each trainee's job, in quotes")
    args = parser.parse_args()
    if args.trainees < 1:
        parser.error(f"--trainees {args.trainees}: expected at least 1")
    try:
        sys.exit(crowd(args))
    except requests.ConnectionError:
        sys.exit(f"no hub answers at {args.url}: start one with make hub, or name it with --url")
    except RuntimeError as error:
        sys.exit(str(error))


def crowd(args) -> int:
    """Let all trainees work at once, print the cost; return the number without a verdict."""
    within, begin = 60 * args.minutes, time.monotonic()
    with ThreadPoolExecutor(args.trainees) as pool:
        log_in_as = partial(Trainee, args.url, password=args.password)
        names = [f"load{number:02d}" for number in range(args.trainees)]
        trainees = list(pool.map(log_in_as, names))
        seconds = list(pool.map(lambda one: one.start(within), trainees))
        told(begin, f"all servers are ready, the last after {max(seconds):.0f} s")
        told(begin, said_of(memory()))
        list(pool.map(lambda one: one.pull(args.repository, args.branch, within), trainees))
        kernels = list(pool.map(lambda one: _begun(one, within), trainees))
        told(begin, "all have the course, and the first cell of notebook 01 has run")
        told(begin, said_of(memory()))
        code = CHECK.format(flags=args.flags)
        verdicts = [pool.submit(_checked, kernel, code, within) for kernel in kernels]
        seen = []
        while not all(verdict.done() for verdict in verdicts):
            seen.append(memory())
            time.sleep(EACH_S)
        told(begin, f"at most: {said_of(largest(seen))}")
        ends = Counter(_end(verdict) for verdict in verdicts)
        told(begin, f"verdicts: {dict(ends)}")
        for trainee in trainees:
            trainee.ask("DELETE", f"/hub/api/users/{trainee.name}/server")
    return args.trainees - ends["passed"]


def _begun(trainee, within):
    notebook = json.loads((course.course_root() / "notebooks" / "01_gpu.ipynb").read_text())
    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    kernel = trainee.kernel(within)
    kernel("".join(first["source"]))
    return kernel


def _checked(kernel, code, within):
    """Run the check. The server may have dropped the channel, which was not read meanwhile."""
    kernel.connect(within)
    return kernel(code)


def _end(verdict):
    """Return the result of a check: "passed", or its output."""
    output = verdict.result() if not verdict.exception() else str(verdict.exception())
    if "VERDICT True" in output:
        return "passed"
    return output.strip()


def told(begin, text):
    print(f"{time.monotonic() - begin:6.0f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
