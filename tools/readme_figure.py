"""Draw the README's figure from recorded runs: `python tools/readme_figure.py`.

The picture holds its own words, which a test compares with the present ones.
"""

import matplotlib as mpl

mpl.use("Agg")
from dlojz import course
from dlojz.figures import ladder

PICTURE = course.course_root() / "notebooks" / "images" / "ladder.png"


def draw():
    """Return the figure of the recorded ladder, without its title, and all of its words."""
    speed, *_ = axes = ladder.plot_ladder(shown=ladder.recorded())
    speed.figure.suptitle("")
    words = [text.get_text() for ax in axes for text in (ax.title, *ax.texts)]
    return speed.figure, "\n".join([*words, speed.figure.get_supxlabel()])


def main():
    figure, words = draw()
    partial = PICTURE.with_suffix(".partial.png")
    figure.savefig(partial, dpi=110, bbox_inches="tight", metadata={"Description": words})
    partial.replace(PICTURE)


if __name__ == "__main__":
    main()
