"""A trainee's consent to share, off by default, and the file that is shared after it.

The consent is kept in share.json beside progress.json, and the shared file has a drawn name.
"""

import getpass
import grp
import json
import os
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from dlojz import course, launch
from dlojz.classroom import members, summary
from dlojz.course import FULL, FileError, NoRoomError, UserError, locked, progress

ADJECTIVES = "amber brave calm clever eager gentle happy keen lively merry quick quiet sunny swift"
ANIMALS = "badger beaver crane dolphin falcon fox heron lynx marten otter owl robin seal swallow"
KEPT, LOCK = "share.json", "share.lock"
RUNS = 50  # that have ended, besides those that wait or run
warned = []  # the first error of this process: only that one is reported


@dataclass(frozen=True)
class Consent:
    """A trainee's consent: what to share, and where, under which name."""

    folder: str
    pseudonym: str
    file: str  # the name of the shared file, which says nothing about its owner
    stopped: bool = False  # the consent is withdrawn, but the file could not be removed
    inode: int = 0  # of the folder: another one may be in its place; 0 if it is not known

    def __post_init__(self):
        if not (members.SHARED.fullmatch(self.file) and Path(self.folder).is_absolute()):
            raise ValueError("it names no shared file")

    @property
    def path(self) -> Path:
        return Path(self.folder) / self.file


def _beside(name):
    return progress.file().with_name(name)


def consent_of() -> Consent | None:
    """Return the trainee's consent; None by default."""
    path = _beside(KEPT)
    if not os.path.lexists(path):
        return None
    try:
        return Consent(**course.read_table(path))
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{path} is damaged ({error}). What you shared may be there still: "
            "`dlojz share --stop FOLDER` removes it from the class's folder"
        ) from None


def drawn() -> str:
    """Return a pseudonym that says nothing about its bearer: "quick-otter-27"."""
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
    return Consent(str(where), name, f"{secrets.token_hex(8)}.json", inode=where.stat().st_ino)


def _problem(name, folder) -> str:
    """Return the problem of a pseudonym, and a better choice; "" if it has none."""
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


def preview(consent: Consent) -> str:
    """Return exactly what the shared file will hold."""
    jobs = [(_submitted(job), status) for job, status in launch.in_queue(last=RUNS)]
    return summary.text(summary.of(progress.load(), jobs, consent.pseudonym))


@cache
def _submitted(job) -> float | None:
    """Return the time of a job's submission; read once, because each answer asks for it again."""
    return job.info.get("submitted")


def readers(folder: str | Path) -> str:
    """Return the users who can read a file that is shared in this folder, in words."""
    found = os.stat(folder)
    if not found.st_mode & stat.S_ISGID:
        return "everyone on this system who can open the folder"
    with suppress(KeyError):
        return f"the group {grp.getgrgid(found.st_gid).gr_name}"
    return f"the group {found.st_gid}"


def dangers(folder: str | Path) -> list[str]:
    """Return the dangers of a shared folder, for its owner to mend."""
    mode = os.stat(folder).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        return [f"others may remove your file there: ask for `chmod +t {folder}`"]
    return []


def begin(consent: Consent):
    """Keep a consent and share for the first time; raise OSError if that fails."""
    text, kept = preview(consent), _beside(KEPT)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with locked(_beside(LOCK)):
        # First the consent: without it, nobody could remove the file.
        course.write_atomically(kept, json.dumps(asdict(consent)))
        try:
            _put(consent, text)
        except OSError:
            kept.unlink()
            raise


def stop(folder: str | Path | None = None) -> Path | None:
    """Withdraw the consent and remove what was shared; return its path, None if there was none.

    folder: where to look for the file if the consent is lost or damaged.
    Raises UserError or OSError if it could not be removed. Nothing more is written all the same.
    """
    kept, consent = _beside(KEPT), None
    try:
        consent = consent_of()
    except FileError:
        if not folder:
            raise
    consent = consent or (folder and _own_in(Path(folder).expanduser().resolve()))
    if not consent:
        return None
    with locked(_beside(LOCK)) as holder:  # what is just being written comes before
        with suppress(NoRoomError):  # so there is nothing more to write, either
            course.write_atomically(kept, json.dumps(asdict(consent) | {"stopped": True}))
        if holder:
            raise UserError(
                f"{consent.path} is still there: process {holder} is about to write it, and may be "
                f"stopped. Type `kill -CONT {holder}`, then again `dlojz share --stop`"
            )
        _remove(consent, kept)
        kept.unlink(missing_ok=True)
    return consent.path


def _remove(consent, kept):
    """Remove the shared file; raise UserError if it may be in a folder that can't be seen now."""
    same = gone = False
    with suppress(OSError):
        same = os.stat(consent.folder).st_ino == consent.inode
    try:
        consent.path.unlink()
    except FileNotFoundError:
        gone = True  # somebody has removed it, if the folder is the same
    if not same and (gone or consent.inode):
        raise UserError(
            f"{consent.path} may be shared still: {consent.folder} is not there, or is not the "
            "folder that it was (not mounted? renamed?). Nothing more is written. Type "
            "`dlojz share --stop` again when it is back; if it is gone for good, remove "
            f"{kept}"
        )


def _own_in(folder) -> Consent | None:
    """Return a consent for the file that this user has in a folder; None if there is none."""
    try:
        shared = [file for file in os.scandir(folder) if members.SHARED.fullmatch(file.name)]
    except PermissionError:
        raise UserError(
            f"{folder} can't be listed by you: ask your instructor to remove your file there"
        ) from None
    own = [file for file in shared if file.stat(follow_symlinks=False).st_uid == os.geteuid()]
    if len(own) > 1:
        files = " ".join(sorted(file.path for file in own))
        raise UserError(f"several files are yours: remove the one that you shared: {files}")
    return Consent(str(folder), "", own[0].name) if own else None


def publish():
    """Share what there is now, if the trainee agreed to it.

    A board is not worth an error in a notebook: what fails is reported once, and nothing is raised.
    """
    try:
        consent = consent_of()
        if consent is None or consent.stopped:
            return
        with locked(_beside(LOCK)) as holder:
            if holder:
                raise UserError(f"process {holder} is about to write it, and may be stopped")
            if consent == consent_of():  # it may have been withdrawn just now
                _put(consent, preview(consent))
    except Exception as error:  # whatever it is: see above
        if not warned:
            warned.append(error)
            print(
                f"note: the class board was not updated ({error}). Your work is kept; "
                "`dlojz share --stop` ends sharing",
                file=sys.stderr,
            )


def _put(consent, text):
    """Replace the shared file in one step; raise NoRoomError where the class's disk is full.

    The temporary file must be new, which mkstemp makes sure of: others can write into the folder,
    and might have put a link there that leads to a file of this user.
    """
    temporary = ""
    try:
        group = bool(os.stat(consent.folder).st_mode & stat.S_ISGID)
        handle, temporary = tempfile.mkstemp(dir=consent.folder, prefix=".")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o640 if group else 0o644)
            file.write(text)
        os.replace(temporary, consent.path)
    except OSError as error:
        with suppress(OSError):  # leave nothing behind
            os.unlink(temporary)
        if error.errno not in FULL:
            raise
        what = f"{consent.path} could not be written: {FULL[error.errno]}"
        raise NoRoomError(error.errno, f"{what}: ask your instructor to make room there") from error
