"""The settings that differ between Slurm clusters, read from `slurm/sites/<site>.toml`.

$DLOJZ_SITE names a site, or a file of your own. By default it is the site with this cluster's name,
else `generic`. The keys are in KEYS, GPU_KEYS and STORAGE_KEYS, and explained in slurm/README.md.
"""

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from dlojz.course import course_root

TIME = r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?"
WORD = r"[\w@.,:/+=\[\]-]+"  # for an #SBATCH line or after `module load`
EXPANDED = r"[\w@.,:/+=${}-]*"  # may hold a variable, which the job's shell expands


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
    qos: list[list[str]] = field(default_factory=list)  # (longest time, name), shortest first
    memory_gb: int | None = None  # of a GPU
    host_memory_gb: int | None = None  # of the node, for each GPU
    hour_costs: float | None = None  # an hour of a GPU, in the site's unit
    time_max: str = ""  # the longest that its partition allows, if no QoS says it

    @property
    def longest(self) -> str:
        """Return the longest time that a job may ask for; "" if none is known."""
        return self.qos[-1][0] if self.qos else self.time_max


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
    "gres": (r"[\w:{}]*", '"gpu:{n}"'),
    "modules": ([WORD], '["pytorch-gpu/py3.11/2.7.0"]'),
    "activate": (EXPANDED, '"$WORK/venv/bin/activate"'),
    "environment": ({EXPANDED}, 'DLOJZ_DATA = "$SCRATCH/imagenet" below [environment]'),
    "options": ([rf"--{WORD}"], '["--mem=0", "--exclusive"]'),
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
    "constraint": (WORD, '"a100"'),
    "account": (r"[\w@.{}-]+", '"{account}@a100"'),
    "modules_first": ([WORD], '["arch/a100"]'),
    "qos": ([[TIME, WORD]], '[["02:00:00", "qos_gpu-dev"]]'),
    "memory_gb": (int, "80, of a GPU"),
    "host_memory_gb": (int, "120, of the node for each GPU"),
    "hour_costs": (float, "1.5, an hour of a GPU, in the site's unit"),
    "time_max": (TIME, '"120:00:00"'),
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
        if form is not None and not _fits(value, form):
            raise SiteError(f"{path}: {prefix}{key} = {value!r}: expected something like {example}")
    for key in required:
        if key not in table:
            raise SiteError(f"{path}: no {prefix}{key}: expected something like {keys[key][1]}")


def _fits(value, form):
    if form is int:
        return type(value) is int and value > 0
    if form is float:
        return type(value) in (int, float) and value > 0
    if isinstance(form, set):  # a table of names and texts
        return isinstance(value, dict) and all(
            re.fullmatch(r"[A-Za-z_]\w*", name) and _fits(text, next(iter(form)))
            for name, text in value.items()
        )
    if isinstance(form, list) and len(form) == 1:  # a list of items of one form
        return isinstance(value, list) and all(_fits(v, form[0]) for v in value)
    if isinstance(form, list):  # a row
        return isinstance(value, list) and len(value) == len(form) and all(map(_fits, value, form))
    return isinstance(value, str) and re.fullmatch(form, value) is not None
