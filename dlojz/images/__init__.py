"""Images of ImageNet's shape: their drawing, their folder, the search in it, and their headers."""

from dlojz.images.dataset import DataError, generate, unfinished

__all__ = ["DataError", "generate", "unfinished"]
