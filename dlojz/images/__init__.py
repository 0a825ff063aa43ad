"""Images of ImageNet's shape: their drawing, their folder, and the search in it."""

from dlojz.images.folder import DataError, generate, unfinished

__all__ = ["DataError", "generate", "unfinished"]
