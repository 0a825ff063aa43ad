"""The changes of a course's update in a trainee's clone: new files, and the trainee's own.

    dlojz update            bring the course up to date, as the hub's link does, and report
    dlojz update --last     what the last update did

nbgitpuller updates: it commits the trainee's changes and merges the course's, and where both have
changed a file, the trainee's stays. It reports only briefly, in git's words. This module reads its
commits afterwards, and changes nothing.
"""

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from dlojz import course
from dlojz.course import UserError, course_root

RENAMED = re.compile(r"(.+)__(\d{14})(\.[^.]*)?")  # by nbgitpuller: name__20260131120000.py
MOST = 10  # files of a list in a notebook
SEEN = "dlojz-update-seen"  # in .git: the last update shown to the trainee


class UpdateError(UserError):
    """A clone that can't be updated, or has no such file, with the remedy."""


@dataclass(frozen=True)
class Update:
    """The result of an update; each list holds paths in the clone."""

    when: datetime
    commit: str  # the course's
    updated: list[str] = field(default_factory=list)  # now the course's version
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # the trainee's, though the course's has changed
    merged: list[str] = field(default_factory=list)  # with lines of both
    renamed: list[str] = field(default_factory=list)  # the trainee's, named like a new file
    unfinished: bool = False  # fetched, but not merged

    def __str__(self) -> str:
        """Return the report with all of the trainee's files, and the first ones of the course's."""
        return self.text(MOST)

    def text(self, most: int | None = None) -> str:
        """Return the report; most: the number of the course's files in a list."""
        if self.unfinished:
            return f"An update of {self.when:%d %B at %H:%M} was not finished: dlojz update"
        lines = [f"The course was updated on {self.when:%d %B at %H:%M}."]
        for what, files, limit in (
            ("updated", self.updated, most),
            ("new", self.added, most),
            ("removed", self.removed, most),
            ("yours, kept as it was, though the course has another version", self.kept, None),
            ("yours and the course's lines together: read it", self.merged, None),
            ("yours, renamed, because the course has a file of that name", self.renamed, None),
        ):
            if files:
                lines += [f"{what}:", *(f"    {file}" for file in files[:limit])]
                if more := len(files) - len(files[:limit]):
                    lines.append(f"    and {more} more: dlojz update --last")
        if self.kept:
            lines.append(f"for the course's, with yours saved: dlojz update --take {self.kept[0]}")
        return "\n".join(lines)


def update() -> str:
    """Bring the clone up to date, as the hub's link does; return git's output."""
    root, branch = course_root(), _branch()
    address = _git("remote", "get-url", "origin").strip()
    command = [sys.executable, "-m", "nbgitpuller.pull", address, branch, str(root)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    output = done.stdout + done.stderr
    if "No module named" in output:
        raise UpdateError(
            "no nbgitpuller here: expected the hub's environment; "
            "type `git pull`, or `pip install nbgitpuller` and again"
        )
    if done.returncode:
        raise UpdateError(f"{address} could not be pulled:\n{output.strip()[-600:]}")
    return output


def last() -> Update | None:
    """Return the last update; None if there was none since the clone was made."""
    found = _last_fetch()
    if found is None:
        return None
    before, now, when = found
    mine = merge = None  # commits of the trainee's files and of the merge, None without changes
    for line in _git("log", "--format=%H %P", f"{before}..HEAD").splitlines():
        commit, *parents = line.split()
        if now in parents[1:]:
            merge, mine = commit, parents[0]
    if merge is None and _git("merge-base", "HEAD", now).strip() != now:
        return Update(when, now, unfinished=True)
    report = Update(when, now)
    lists = {"A": report.added, "M": report.updated, "T": report.updated, "D": report.removed}
    theirs, after = _blobs(now), _blobs(merge or now)
    own = _blobs(mine) if mine else {}
    words = _git("diff", "--name-status", "--no-renames", "-z", before, now).split("\0")[:-1]
    for status, file in zip(words[::2], words[1::2], strict=True):
        if after.get(file) == theirs.get(file):
            lists[status].append(file)
        elif after.get(file) == own.get(file):
            report.kept.append(file)
        else:
            report.merged.append(file)
    report.renamed.extend(_renamed(report.added, when))
    return report


def take(file: str) -> Path | None:
    """Replace a file by the course's version; return the saved copy of the trainee's, if any."""
    root = course_root()
    path = (Path.cwd() / file).resolve()
    path = path if path.is_relative_to(root) and path.exists() else root / file
    name = str(path.relative_to(root)) if path.is_relative_to(root) else file
    now = f"origin/{_branch()}"
    if name not in _blobs(now):
        raise UpdateError(f"the course has no file {name}: `dlojz update --last` lists files")
    saved = None
    if path.exists() and _git("diff", "--name-only", now, "--", name):
        saved = course.save_copy(path)
    _git("checkout", now, "--", name)
    return saved


def unseen() -> Update | None:
    """Return the last update; None if the trainee has seen it, or it is unfinished."""
    with suppress(OSError, ValueError, UpdateError):
        seen = course_root() / ".git" / SEEN
        if not _log().exists() or (seen.exists() and _text(seen) == _last_line()):
            return None  # without a call of git
        found = last()
        if found and not found.unfinished:
            see()
            return found
    return None


def see():
    """Remember that the trainee has seen the last update."""
    with suppress(OSError, UpdateError):
        (course_root() / ".git" / SEEN).write_text(_last_line(), encoding="utf-8")


def _last_fetch():
    """Return the course's commits before and after its last change, and its time, or None."""
    if not (line := _last_line()):
        return None
    before, now, *_ = line.split()
    seconds = int(re.search(r"> (\d+) ", line)[1])
    return None if set(before) == {"0"} else (before, now, datetime.fromtimestamp(seconds))


def _log() -> Path:
    folder = course_root() / ".git"
    if not folder.is_dir():
        raise UpdateError(f"{course_root()} is not a clone: expected a folder .git in it")
    head = _text(folder / "HEAD").strip()
    return folder / "logs" / "refs" / "remotes" / "origin" / head.removeprefix("ref: refs/heads/")


def _last_line() -> str:
    return _text(_log()).splitlines()[-1] if _log().exists() else ""


def _text(file) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _branch() -> str:
    return _log().relative_to(course_root() / ".git/logs/refs/remotes/origin").as_posix()


def _blobs(commit) -> dict[str, str]:
    """Return {path: git's hash of the content} for the files of a commit."""
    lines = _git("ls-tree", "-r", "-z", commit).split("\0")[:-1]
    return {line.partition("\t")[2]: line.split()[2] for line in lines}


def _renamed(added, when):
    """Return the trainee's files that were renamed because of these new ones."""
    found = []
    for file in _git("ls-files", "--others", "-z").split("\0")[:-1]:
        if match := RENAMED.fullmatch(Path(file).name):
            name = str(Path(file).with_name(match[1] + (match[3] or "")))
            if name in added and match[2] >= f"{when:%Y%m%d%H%M%S}":
                found.append(file)
    return found


def _git(*words) -> str:
    about = {"encoding": "utf-8", "errors": "surrogateescape"}  # names exactly as on the disk
    done = subprocess.run(["git", *words], cwd=course_root(), capture_output=True, **about)
    if done.returncode:
        raise UpdateError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout
