"""Images of ImageNet's shape: their drawing, their folder, the search in it, and their headers."""

from dlojz.images.dataset import DataError, generate, make_equal, unfinished

__all__ = ["DataError", "generate", "make_equal", "unfinished"]
