"""The chapters: one lesson of the course, whole, in one folder.

    from dlojz.chapters import n03_channels_last as n03
    n03.plot_memory(tensor)           # from figures.py of that folder

A folder has all that only its notebook uses: exercise.py and hints.toml (its check),
quiz.toml, answers.toml, figures.py, job.py (which runs a prepared file), experiments/.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec


def face(chapter: str, *modules: str) -> tuple[Callable, Callable]:
    """Return `__getattr__` and `__dir__` of a chapter that shows the names of these modules.

    They are imported when a name is first used, and not for a module of the folder: an exercise, a
    job and the command `dlojz` need no matplotlib.
    """

    def there():
        return [import_module(f"{chapter}.{name}") for name in modules]

    def get(name):
        if find_spec(f"{chapter}.{name}"):
            return import_module(f"{chapter}.{name}")
        for module in there() if not name.startswith("_") else ():
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"{chapter} has no {name!r}: see dir({chapter.rpartition('.')[2]})")

    def names():
        own = (vars(module).items() for module in there())
        return sorted(n for values in own for n, v in values if _is_public(n, v, chapter))

    return get, names


def _is_public(name, value, chapter):
    return name[0] != "_" and str(getattr(value, "__module__", "")).startswith(chapter)
