"""The boxes that these widgets come in, which are text where there are none, and their button."""

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


def cancel_button(job) -> ipywidgets.Button:
    """Return a button that cancels a job."""
    button = ipywidgets.Button(description="cancel", layout=ipywidgets.Layout(width="6em"))
    button.on_click(lambda _: job.cancel())
    return button
