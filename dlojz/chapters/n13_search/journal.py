"""Optuna's journal of a study, on a disk that may be full or of NFS, by workers that may be killed.

Optuna adds a line for each operation, under a lock, and reads only lines that are whole. But it
appends to a torn one, and then can read neither: https://github.com/optuna/optuna/issues/5138.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from dlojz.course import UserError
from dlojz.runs.log import MALFORMED


class JournalError(UserError):
    """A journal that can't be read, and what to do."""


class Lock(JournalFileOpenLock):
    """Optuna's lock for NFS. With it, a torn last line is cut off: its writer was killed."""

    def __init__(self, journal: Path):
        super().__init__(str(journal))
        self._journal = journal

    def acquire(self) -> bool:
        super().acquire()
        try:
            _mend(self._journal)
        except BaseException:
            self.release()
            raise
        return True


def _mend(journal: Path):
    with journal.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 20)))
        end = file.read()
        if not end.endswith(b"\n"):
            file.truncate(size - len(end) + end.rfind(b"\n") + 1)


def storage(journal: Path) -> JournalStorage:
    """Return the storage of a study, for several processes at once. Raises JournalError."""
    with _reading(journal):
        return JournalStorage(JournalFileBackend(str(journal), Lock(journal)))


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one worker of a study count its trials and ask for the next one."""
    lock = JournalFileOpenLock(str(folder / "asking"))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _reading(journal):
    try:
        yield
    except (AssertionError, *MALFORMED) as error:  # what other lines raise in Optuna
        raise JournalError(
            f"{journal} is damaged ({type(error).__name__}: {error}), expected a line of JSON for "
            f"each operation: move {journal.parent} away, and begin a study of another name"
        ) from None
