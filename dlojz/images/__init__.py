"""Images of ImageNet's shape: drawn, kept in a folder, found there. Imports nothing of ours."""

from dlojz.images.folder import DataError, generate, unfinished

__all__ = ["DataError", "generate", "unfinished"]
