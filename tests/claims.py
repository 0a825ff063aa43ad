"""What texts say of recordings: each sentence is made from the recording, and looked for."""

from functools import cache

from dlojz import course


@cache
def text(document):
    """Return the text of a page of the course, or of a solved notebook."""
    root = course.course_root()
    places = (root / "solutions" / f"{document}.ipynb", root / "solutions" / document)
    return next(path for path in (*places, root / document) if path.is_file()).read_text()


def claims(document):
    """Make a test of a generator of sentences, or (document, sentence), that must be there."""

    def decorate(sentences):
        def test():
            said = [(document, w) if isinstance(w, str) else w for w in sentences()]
            missing = [words for where, words in said if words not in text(where)]
            assert not missing, missing

        test.__name__, test.__doc__ = sentences.__name__, sentences.__doc__
        return test

    return decorate
