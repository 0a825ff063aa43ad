"""Temporary values of attributes, for a dry run of a program."""

from contextlib import contextmanager


@contextmanager
def replaced(owner, **new):
    """Give a module, a class or another object these attributes, until the context ends."""
    own = vars(owner)
    old = {name: own[name] for name in new if name in own}
    try:
        for name, value in new.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in new:
            if name in old:
                setattr(owner, name, old[name])
            else:  # it was inherited, or computed when it was asked for
                delattr(owner, name)
