"""The boxes that all of these widgets come in: each is text in front ends without widgets."""

from collections.abc import Callable, Sequence

import ipywidgets


class _Told:
    def __init__(self, children: Sequence, text: Callable[[], str]):
        """Make a box. text: what to show where there are no widgets, as it is by then."""
        super().__init__(children)
        self._text = text

    def __repr__(self):
        return self._text()


class Row(_Told, ipywidgets.HBox):
    """Widgets side by side."""


class Column(_Told, ipywidgets.VBox):
    """Widgets one below the other."""
