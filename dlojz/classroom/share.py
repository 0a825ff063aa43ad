"""A trainee's consent to share, off by default, and the file that is shared after it.

The consent is kept in share.json beside progress.json, and the shared file has a drawn name.
"""

import fcntl
import getpass
import grp
import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from dlojz import launch
from dlojz.classroom import members, summary
from dlojz.course import UserError, write_atomically

ADJECTIVES = "amber brave calm clever eager gentle happy keen lively merry quick quiet sunny swift"
ANIMALS = "badger beaver crane dolphin falcon fox heron lynx marten otter owl robin seal swallow"
KEPT = "share.json"
RUNS = 50  # that have ended, besides those that wait or run
NOT_UPDATED = "the class board was not updated"
UNLESS_STOPPED = "Your work is kept; `dlojz share --stop` ends sharing"
warned = []  # the first error of this process: only that one is reported


@dataclass(frozen=True)
class Consent:
    """A trainee's consent: what to share, and where, under which name."""

    folder: str
    pseudonym: str
    file: str  # the name of the shared file, which says nothing about its owner
    stopped: bool = False  # the consent is withdrawn, but the file could not be removed

    @property
    def path(self) -> Path:
        return Path(self.folder) / self.file


def consent_of(progress: Path) -> Consent | None:
    """Return what the trainee of this progress.json agreed to; None by default."""
    try:
        return Consent(**json.loads(progress.with_name(KEPT).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{progress.with_name(KEPT)} is not readable ({error}): nothing is shared; remove it"
        ) from None


def drawn() -> str:
    """Return a pseudonym that says nothing about anybody: "quick-otter-27"."""
    words = [secrets.choice(some.split()) for some in (ADJECTIVES, ANIMALS)]
    return "-".join([*words, str(10 + secrets.randbelow(90))])


def plan(folder: str | Path, pseudonym: str | None) -> Consent:
    """Return a consent to give, with nothing written yet. Raise UserError if that cannot work."""
    where = Path(folder).expanduser().resolve()
    if not where.is_dir():
        raise UserError(f"no folder {where}: expected the one that your instructor has named")
    if not os.access(where, os.W_OK | os.X_OK):
        raise UserError(f"{where} can't be written by you: ask your instructor")
    if pseudonym is None:
        name = next(name for name in iter(drawn, "") if not _problem(name, where))
    elif problem := _problem(name := pseudonym, where):
        raise UserError(f"--as {name!r} {problem}, or leave out --as: then a name is drawn")
    return Consent(str(where), name, f"{secrets.token_hex(8)}.json")


def _problem(name, folder) -> str:
    """Return what is wrong with a pseudonym, and what to choose instead; "" if nothing is."""
    if not summary.PSEUDONYM.fullmatch(name):
        return "is not a name: give at most 24 letters, digits, spaces and . _ -"
    if any(len(login) > 2 and login.casefold() in name.casefold() for login in _logins()):
        return "holds your login name: choose another"
    return f"is taken in {folder}: choose another" if name.casefold() in _taken(folder) else ""


def _logins():
    found = {os.environ.get(name) for name in ("USER", "LOGNAME")}
    with suppress(OSError, KeyError):  # a user without a name
        found.add(getpass.getuser())
    return found - {None, ""}


def _taken(folder) -> set[str]:
    """Return the names in use; none in a folder that only the instructor may list."""
    with suppress(OSError):
        return {member.name.casefold() for member in members.read(folder).members}
    return set()


def preview(consent: Consent, progress: Path) -> str:
    """Return exactly what the shared file will hold."""
    return summary.text(_summary(consent, progress))


def readers(folder: str | Path) -> str:
    """Return which users can read a file that is shared in this folder, in words."""
    found = os.stat(folder)
    if not found.st_mode & stat.S_ISGID:
        return "everyone on this system who can open the folder"
    try:
        return f"the group {grp.getgrgid(found.st_gid).gr_name}"
    except KeyError:
        return f"the group {found.st_gid}"


def dangers(folder: str | Path) -> list[str]:
    """Return what is wrong with a shared folder, for the one who made it to mend."""
    mode = os.stat(folder).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return [f"others may remove your file there: ask for `chmod +t {folder}`"]
    return []


def begin(consent: Consent, progress: Path):
    """Keep a consent and share for the first time; raise OSError if that fails."""
    _put(consent, preview(consent, progress))
    try:
        progress.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(progress.with_name(KEPT), json.dumps(asdict(consent)))
    except OSError:  # without the record nobody could remove the file
        consent.path.unlink()
        raise


def stop(progress: Path) -> Path | None:
    """Withdraw the consent and remove what was shared; return its path, None if there was none.

    Raises OSError if it could not be removed. Nothing more is written all the same.
    """
    consent, kept = consent_of(progress), progress.with_name(KEPT)
    if consent is None:
        return None
    with _locked(progress):  # what is just being written comes before
        write_atomically(kept, json.dumps(asdict(consent) | {"stopped": True}))
        consent.path.unlink(missing_ok=True)
        kept.unlink()
    return consent.path


def publish(progress: Path):
    """Share what there is now, if the trainee agreed to it.

    A board is not worth an error in a notebook: what fails is reported once, and nothing is raised.
    """
    try:
        consent = consent_of(progress)
        if consent is None or consent.stopped:
            return
        with _locked(progress):
            if consent == consent_of(progress):  # it may have been withdrawn just now
                _put(consent, summary.text(_summary(consent, progress)))
    except Exception as error:  # whatever it is: see above
        if not warned:
            warned.append(error)
            print(f"note: {NOT_UPDATED} ({error}). {UNLESS_STOPPED}", file=sys.stderr)


def _summary(consent, progress):
    kept = {}
    with suppress(FileNotFoundError):  # nothing kept yet
        kept = json.loads(progress.read_text())
    jobs = launch.in_queue(last=RUNS)
    known = ((_submitted(job), status) for job, status in jobs)
    return summary.of(kept, known, consent.pseudonym)


@cache
def _submitted(job) -> dict:
    """Return when a job was submitted; read once, because each answer asks for it again."""
    return {"submitted": job.info.get("submitted")}


@contextmanager
def _locked(progress) -> Iterator[None]:
    with progress.with_name("share.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several notebooks, the last to write has read last
        yield


def _put(consent, text):
    """Replace the shared file in one step.

    The temporary file must be new, which mkstemp makes sure of: others can write into the folder,
    and might have put a link there that leads to a file of this user.
    """
    group = bool(os.stat(consent.folder).st_mode & stat.S_ISGID)
    handle, temporary = tempfile.mkstemp(dir=consent.folder, prefix=".")
    try:
        with os.fdopen(handle, "w") as file:
            os.fchmod(handle, 0o640 if group else 0o644)
            file.write(text)
        os.replace(temporary, consent.path)
    except OSError:  # a full disk: leave nothing behind
        with suppress(OSError):
            os.unlink(temporary)
        raise
