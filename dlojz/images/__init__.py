"""Images of ImageNet's shape: drawn, and kept in a folder. Imports nothing of ours."""

from dlojz.images.folder import DataError, generate

__all__ = ["DataError", "generate"]
