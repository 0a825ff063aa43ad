"""The small files in a job's folder."""

import json
from pathlib import Path


class FileError(ValueError):
    """A file of a job that can't be read: which one, and what is wrong with it."""


def read_json(path: Path) -> dict:
    """Return the table in a file; {} if there is no file. Raises FileError."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path.name} can't be read ({error})") from None
    if not isinstance(found, dict):
        raise FileError(f"{path.name} holds no table")
    return found
