"""The settings that differ between Slurm clusters, read from `slurm/sites/<site>.toml`.

$DLOJZ_SITE names a site, or a file of your own. By default it is the site with this cluster's name,
else `generic`. The keys are the fields of Site, Gpus and Storage, and explained in slurm/README.md.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

from dlojz.course import course_root

TIME = r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?"
WORD = r"[\w@.,:/+=\[\]-]+"  # for an #SBATCH line or after `module load`
EXPANDED = r"[\w@.,:/+=${}-]*"  # may hold a variable, which the job's shell expands
# Of a variable, in double quotes: NCCL_SOCKET_IFNAME = "^lo,docker0", NCCL_NET = "AWS Libfabric".
VALUE = r"(?:[][\w@.,:/+=^%*~#&|(){} -]|\$(?=[\w{]))*"
NAME = r"[A-Za-z_]\w*"  # of a variable
FEATURE = r"[][\w@.,:/+=&|*()-]"  # a character of "a100|h100" or "[rack1*2&(a100|h100)]"
OPTION = rf"--(?:{FEATURE}|\{{n\}})+"
LIMIT = rf"(?:{TIME}|(?i:UNLIMITED|INFINITE))"  # Slurm prints both


class SiteError(Exception):
    """An error in a site file, with the key and what its value should look like."""


# In each table, Annotated[type, form, example] is a key with the form of its value, which is a
# regular expression, int, float, [form], {form}, or None for a table.


@dataclass(frozen=True)
class Gpus:
    """One kind of GPU node."""

    gpus_per_node: Annotated[int, int, "4"]
    cpus_per_gpu: Annotated[int, int, "8"]
    partition: Annotated[str, WORD, '"gpu"'] = ""
    constraint: Annotated[str, f"{FEATURE}+", '"a100", or "a100|h100"'] = ""
    account: Annotated[str, r"[\w@.{}-]+", '"{account}@a100"'] = ""  # {account}: that of submit
    modules_first: Annotated[Sequence, [WORD], '["arch/a100"]'] = ()
    # (longest time, name)
    qos: Annotated[Sequence, [[LIMIT, WORD]], '[["02:00:00", "qos_gpu-dev"]]'] = ()
    memory_gb: Annotated[int | None, int, "80, of a GPU"] = None
    host_memory_gb: Annotated[int | None, int, "120, of the node for each GPU"] = None
    hour_costs: Annotated[float | None, float, "1.5, an hour of a GPU, in the site's unit"] = None
    time_max: Annotated[str, LIMIT, '"120:00:00"'] = ""  # of its partition, if no QoS says it

    @property
    def longest(self) -> str:
        """Return the longest time that a job may ask for; "" if none is known."""
        return max((time for time, _ in self.qos), key=limit, default=self.time_max)

    def qos_for(self, seconds: int) -> str:
        """Return the QoS with the shortest limit that allows this time; "" if there is none."""
        allowed = [row for row in self.qos if seconds <= limit(row[0])]
        return min(allowed, key=lambda row: limit(row[0]), default=("", ""))[1]


@dataclass(frozen=True)
class Storage:
    """One place for files."""

    path: Annotated[str, r"\S+", '"$WORK"']
    holds: Annotated[str, r".+", '"code, environments and results"']
    quota: Annotated[str, r".+", '"5 TB for each project"'] = ""
    files: Annotated[int | None, int, "500_000, and folders"] = None
    purged_days: Annotated[int | None, int, "30"] = None  # after which untouched files are removed


@dataclass(frozen=True)
class Site:
    """One cluster."""

    name: str
    gpus: Annotated[dict, None, "a table [gpus.a100] for each kind of node"]  # Gpus by name
    description: Annotated[str, r".*", '"our cluster"'] = ""
    cluster: Annotated[str, WORD, '"jean-zay"'] = ""
    default: Annotated[str, WORD, '"a100", one of [gpus.*]'] = ""
    account: Annotated[str, WORD, '"xyz"'] = ""
    hint: Annotated[str, WORD, '"nomultithread"'] = ""
    # The request for n GPUs of a node; "" for none.
    gres: Annotated[str, r"(?:[\w.,:/+=-]|\{n\})*", '"gpu:{n}"'] = "gpu:{n}"
    modules: Annotated[Sequence, [WORD], '["pytorch-gpu/py3.11/2.7.0"]'] = ()
    activate: Annotated[str, EXPANDED, '"$WORK/venv/bin/activate"'] = ""  # a file to source
    environment: Annotated[
        dict, {VALUE}, 'DLOJZ_DATA = "$SCRATCH/imagenet" below [environment]'
    ] = field(default_factory=dict)
    # Additional #SBATCH lines.
    options: Annotated[Sequence, [OPTION], '["--mem=0", "--gpus-per-node={n}"]'] = ()
    signal_s: Annotated[int, int, "90, in seconds"] = 90  # before the time limit, to save
    unit: Annotated[str, r".+", '"GPU hours"'] = "GPU hours"  # in which hours are charged
    container: Annotated[str, WORD, '"apptainer"'] = ""  # the program that runs containers
    storage: Annotated[dict, None, "a table [storage.work] for each place for files"] = field(
        default_factory=dict
    )


def keys(kind) -> dict[str, tuple]:
    """Return the form and an example of each key of a kind of table."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: hint.__metadata__ for name, hint in hints if get_origin(hint) is Annotated}


def seconds(time_max: str) -> int:
    """Return the seconds of a time in Slurm's forms: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(TIME, str(time_max))
    if not match:
        raise ValueError(f"{time_max!r}: expected HH:MM:SS, such as 00:10:00")
    days, *fields = (None if f is None else int(f) for f in match.groups())
    fields = [f for f in fields if f is not None]
    if days is None and len(fields) < 3:
        fields.insert(0, 0)  # without days, a single number is minutes
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    total = 86400 * (days or 0) + 3600 * hours + 60 * minutes + seconds
    if not total:  # Slurm takes 0 for no limit
        raise ValueError(f"{time_max!r}: expected a time longer than 0, such as 00:10:00")
    return total


def limit(time: str) -> float:
    """Return the seconds of a site's limit; infinity for UNLIMITED."""
    return seconds(time) if re.fullmatch(TIME, time) else math.inf


def find(name: str | None = None, cluster: str = "") -> Path:
    """Return the file of a site: by name or path, else for this cluster, else the generic one."""
    folder = course_root() / "slurm" / "sites"
    name = name or os.environ.get("DLOJZ_SITE")
    if name:
        for path in (folder / f"{name}.toml", Path(name).expanduser()):
            if path.is_file():
                return path
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml"))) or "none"
        raise SiteError(f"no site {name!r} (DLOJZ_SITE): expected a .toml file, or one of {known}")
    for path in sorted(folder.glob("*.toml")) if cluster else ():
        if read(path).cluster == cluster:
            return path
    return folder / "generic.toml"


def read(path: Path) -> Site:
    """Return the site in this file. Raises SiteError."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SiteError(f"{path}: can't be read as TOML: {error}") from None
    except RecursionError:
        raise SiteError(f"{path}: can't be read as TOML: it is nested too deeply") from None
    _check(path, "", found, Site)
    for name, kind in (("gpus", Gpus), ("storage", Storage)):
        tables = found.setdefault(name, {})
        if not isinstance(tables, dict) or (kind is Gpus and not tables):
            raise SiteError(f"{path}: {name}: expected {keys(Site)[name][1]}")
        for each, table in tables.items():
            _check(path, f"{name}.{each}.", table, kind)
        found[name] = {each: kind(**table) for each, table in tables.items()}
    found.setdefault("default", next(iter(found["gpus"])))
    if found["default"] not in found["gpus"]:
        raise SiteError(
            f"{path}: default = {found['default']!r}: expected one of {', '.join(found['gpus'])}"
        )
    return Site(Path(path).stem, **found)


def _check(path, prefix, table, kind):
    """Raise SiteError for a key that is not of this kind of table, misses, or has a wrong value."""
    if not isinstance(table, dict):
        raise SiteError(f"{path}: {prefix[:-1]} = {table!r}: expected a table [{prefix[:-1]}]")
    known = keys(kind)
    for name, value in table.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise SiteError(f"{path}: unknown key {prefix}{name}: {guess}Known: {', '.join(known)}")
        form, example = known[name]
        if form is not None and (wrong := _misfit(value, form)) is not None:
            why = wrong and f"{wrong!r} can't be in it: "
            raise SiteError(
                f"{path}: {prefix}{name} = {value!r}: {why}expected something like {example}"
            )
    required = {key.name for key in fields(kind) if key.default is key.default_factory is MISSING}
    for name, (_, example) in known.items():
        if name in required and name not in table:
            raise SiteError(f"{path}: no {prefix}{name}: expected something like {example}")


def _misfit(value, form) -> str | None:
    """Return the first character of a value that does not fit, or ""; None if all of it fits."""
    if form is int:
        return None if type(value) is int and value > 0 else ""
    if form is float:
        return None if type(value) in (int, float) and value > 0 else ""
    if isinstance(form, set):  # a table of names and texts
        if not isinstance(value, dict):
            return ""
        pairs = [(name, NAME) for name in value] + [(text, *form) for text in value.values()]
    elif isinstance(form, list):  # a row, or a list of items of one form
        if not isinstance(value, list) or len(value) != len(form) > 1:
            return ""
        pairs = zip(value, form if len(form) > 1 else form * len(value), strict=True)
    else:
        return _wrong_character(value, form)
    return next((m for part in pairs if (m := _misfit(*part)) is not None), None)


def _wrong_character(value, form) -> str | None:
    if not isinstance(value, str):
        return ""
    if re.fullmatch(form, value):
        return None
    begin = re.match(form, value)
    return value[begin.end() if begin else 0 :][:1]
