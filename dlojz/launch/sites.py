"""The settings that differ between Slurm clusters, read from `slurm/sites/<site>.toml`.

$DLOJZ_SITE names a site, or a file of your own. By default it is the site with this cluster's name,
else `generic`. The keys are in KEYS, GPU_KEYS and STORAGE_KEYS, and explained in slurm/README.md.
"""

import difflib
import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from dlojz.course import course_root

TIME = r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?"
WORD = r"[\w@.,:/+=\[\]-]+"  # for an #SBATCH line or after `module load`
EXPANDED = r"[\w@.,:/+=${}-]*"  # may hold a variable, which the job's shell expands
# Of a variable, in double quotes: NCCL_SOCKET_IFNAME = "^lo,docker0", NCCL_NET = "AWS Libfabric".
VALUE = r"(?:[][\w@.,:/+=^%*~#&|(){} -]|\$(?=[\w{]))*"
NAME = r"[A-Za-z_]\w*"  # of a variable
FEATURE = r"[][\w@.,:/+=&|*()-]"  # a character of "a100|h100" or "[rack1*2&(a100|h100)]"
LIMIT = rf"(?:{TIME}|(?i:UNLIMITED|INFINITE))"  # Slurm prints both


class SiteError(Exception):
    """An error in a site file, with the key and what its value should look like."""


@dataclass(frozen=True)
class Gpus:
    """One kind of GPU node."""

    gpus_per_node: int
    cpus_per_gpu: int
    partition: str = ""
    constraint: str = ""
    account: str = ""  # {account} stands for the one given to submit
    modules_first: list[str] = field(default_factory=list)
    qos: list[list[str]] = field(default_factory=list)  # (longest time, name)
    memory_gb: int | None = None  # of a GPU
    host_memory_gb: int | None = None  # of the node, for each GPU
    hour_costs: float | None = None  # an hour of a GPU, in the site's unit
    time_max: str = ""  # the longest that its partition allows, if no QoS says it

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

    path: str
    holds: str  # what belongs there
    quota: str = ""
    files: int | None = None  # and folders, however small
    purged_days: int | None = None  # after which untouched files are removed


@dataclass(frozen=True)
class Site:
    """One cluster."""

    name: str
    gpus: dict[str, Gpus]
    description: str = ""
    cluster: str = ""
    default: str = ""
    account: str = ""
    hint: str = ""
    gres: str = "gpu:{n}"  # the request for n GPUs of a node; "" for none
    modules: list[str] = field(default_factory=list)
    activate: str = ""  # a file to source, such as $WORK/venv/bin/activate
    environment: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)  # additional #SBATCH lines
    signal_s: int = 90  # before the time limit, for a last checkpoint
    unit: str = "GPU hours"  # in which hours are charged
    container: str = ""  # the program that runs containers
    storage: dict[str, Storage] = field(default_factory=dict)


# By key: its form and an example. Forms: a regular expression, int, float, [form], {form}.
KEYS = {
    "description": (r".*", '"our cluster"'),
    "cluster": (WORD, '"jean-zay"'),
    "default": (WORD, '"a100", one of [gpus.*]'),
    "account": (WORD, '"xyz"'),
    "hint": (WORD, '"nomultithread"'),
    "gres": (r"(?:[\w.,:/+=-]|\{n\})*", '"gpu:{n}"'),
    "modules": ([WORD], '["pytorch-gpu/py3.11/2.7.0"]'),
    "activate": (EXPANDED, '"$WORK/venv/bin/activate"'),
    "environment": ({VALUE}, 'DLOJZ_DATA = "$SCRATCH/imagenet" below [environment]'),
    "options": ([rf"--(?:{FEATURE}|\{{n\}})+"], '["--mem=0", "--gpus-per-node={n}"]'),
    "signal_s": (int, "90, in seconds"),
    "gpus": (None, "a table [gpus.a100] for each kind of node"),
    "storage": (None, "a table [storage.work] for each place for files"),
    "unit": (r".+", '"GPU hours"'),
    "container": (WORD, '"apptainer"'),
}
GPU_KEYS = {
    "gpus_per_node": (int, "4"),
    "cpus_per_gpu": (int, "8"),
    "partition": (WORD, '"gpu"'),
    "constraint": (f"{FEATURE}+", '"a100", or "a100|h100"'),
    "account": (r"[\w@.{}-]+", '"{account}@a100"'),
    "modules_first": ([WORD], '["arch/a100"]'),
    "qos": ([[LIMIT, WORD]], '[["02:00:00", "qos_gpu-dev"]]'),
    "memory_gb": (int, "80, of a GPU"),
    "host_memory_gb": (int, "120, of the node for each GPU"),
    "hour_costs": (float, "1.5, an hour of a GPU, in the site's unit"),
    "time_max": (LIMIT, '"120:00:00"'),
}
STORAGE_KEYS = {
    "path": (r"\S+", '"$WORK"'),
    "holds": (r".+", '"code, environments and results"'),
    "quota": (r".+", '"5 TB for each project"'),
    "files": (int, "500_000, and folders"),
    "purged_days": (int, "30"),
}


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
    _check(path, "", found, KEYS, ("gpus",))
    if not found["gpus"] or not isinstance(found["gpus"], dict):
        raise SiteError(f"{path}: gpus: expected {KEYS['gpus'][1]}")
    for kind, table in found["gpus"].items():
        _check(path, f"gpus.{kind}.", table, GPU_KEYS, ("gpus_per_node", "cpus_per_gpu"))
    found["gpus"] = {kind: Gpus(**table) for kind, table in found["gpus"].items()}
    places = found.get("storage", {})
    if not isinstance(places, dict):
        raise SiteError(f"{path}: storage: expected {KEYS['storage'][1]}")
    for name, table in places.items():
        _check(path, f"storage.{name}.", table, STORAGE_KEYS, ("path", "holds"))
    found["storage"] = {name: Storage(**table) for name, table in places.items()}
    found.setdefault("default", next(iter(found["gpus"])))
    if found["default"] not in found["gpus"]:
        raise SiteError(
            f"{path}: default = {found['default']!r}: expected one of {', '.join(found['gpus'])}"
        )
    return Site(Path(path).stem, **found)


def _check(path, prefix, table, keys, required):
    if not isinstance(table, dict):
        raise SiteError(f"{path}: {prefix[:-1]} = {table!r}: expected a table [{prefix[:-1]}]")
    for key, value in table.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise SiteError(f"{path}: unknown key {prefix}{key}: {guess}Known: {', '.join(keys)}")
        form, example = keys[key]
        if form is not None and (wrong := _misfit(value, form)) is not None:
            why = wrong and f"{wrong!r} can't be in it: "
            raise SiteError(
                f"{path}: {prefix}{key} = {value!r}: {why}expected something like {example}"
            )
    for key in required:
        if key not in table:
            raise SiteError(f"{path}: no {prefix}{key}: expected something like {keys[key][1]}")


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
