"""Real texts of unequal lengths, and their rows in batches: padded, in buckets, or packed."""

import ast
import random
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

PADDING, UNKNOWN, HIDDEN = range(3)  # numbers that are no words
WINDOW = 8  # batches whose texts are sorted together, in buckets
EIGHTS = 8  # the columns of a batch are a multiple of it


@dataclass(frozen=True)
class Batch:
    """Rows of texts, by their numbers, and the columns of the tensor that holds them."""

    rows: list[list[int]]
    columns: int

    def __len__(self):
        return sum(map(len, self.rows))


@cache
def docstrings() -> list[list[str]]:
    """Return the docstrings of Python's standard library, as words, in its order."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            found += [re.findall(r"\w+|[^\w\s]", text.lower())] if text else []
    return found


def texts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Return that many docstrings, shuffled, as numbers of their words.

    A text is cut at `longest` words, and rare words are UNKNOWN.
    """
    known = Counter(chain(*docstrings())).most_common(vocabulary - 3)
    numbers = {word: number for number, (word, _) in enumerate(known, 3)}
    shuffled = random.Random(0).sample(docstrings(), min(count, len(docstrings())))
    return [[numbers.get(word, UNKNOWN) for word in text[:longest]] for text in shuffled]


def _cut(order, size) -> list[list[int]]:
    """Return the whole batches of an order; what is left over is no batch."""
    return [order[n : n + size] for n in range(0, len(order) - size + 1, size)]


def _padded(batches, lengths) -> list[Batch]:
    """Return batches of a text for each row, as long as their longest one."""
    width = [max(lengths[n] for n in batch) for batch in batches]
    return [
        Batch([[n] for n in batch], -(-columns // EIGHTS) * EIGHTS)
        for batch, columns in zip(batches, width, strict=True)
    ]


def whole(lengths, size, longest) -> list[Batch]:
    """Return batches that are padded to the longest of all texts."""
    return [Batch(b.rows, longest) for b in by_batch(lengths, size, longest)]


def by_batch(lengths, size, longest) -> list[Batch]:
    """Return batches that are padded to their own longest text."""
    return _padded(_cut([*range(len(lengths))], size), lengths)


def buckets(lengths, size, longest) -> list[Batch]:
    """Return batches of similar lengths, in a random order within each window."""
    found, order = [], [*range(len(lengths))]
    for start in range(0, len(order), WINDOW * size):
        near = _cut(sorted(order[start : start + WINDOW * size], key=lengths.__getitem__), size)
        found += random.Random(start).sample(near, len(near))
    return _padded(found, lengths)


def by_length(lengths, size, longest) -> list[Batch]:
    """Return batches of all texts sorted by length: short ones are trained on first."""
    return _padded(_cut(sorted(range(len(lengths)), key=lengths.__getitem__), size), lengths)


def first_fit(lengths, longest) -> list[list[int]]:
    """Return rows of texts: each goes into the first row that still has room for it."""
    rows, room = [], []
    for n, length in enumerate(lengths):
        at = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(longest)
        rows[at].append(n)
        room[at] -= length
    return rows


def packed(lengths, size, longest) -> list[Batch]:
    """Return batches of full rows, with about as many texts as the others have."""
    rows = first_fit(lengths, longest)
    return [Batch(b, longest) for b in _cut(rows, max(1, round(size * len(rows) / len(lengths))))]


LAYOUTS = {
    "longest of all": whole,
    "longest of its batch": by_batch,
    "buckets": buckets,
    "sorted": by_length,
    "packed": packed,
}
