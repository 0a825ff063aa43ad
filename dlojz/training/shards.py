"""The reader of a checkpoint's files, which runs no code in them.

`torch.load` with `weights_only` is safe for tensors. In a folder of shards torch unpickles more:
its index `.metadata`, and the plain values among the tensors, such as a learning rate. So the index
is read here, with only the classes that it needs, and plain values are read with `weights_only`.
"""

import io
import operator
import os
import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dlojz.course import open_regular

# Each class by the name that torch writes, because some are private and may go.
CLASSES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
# The functions that torch would call, and their substitutes.
INSTEAD = {
    ("builtins", "getattr"): operator.getitem,  # the member of an enum
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("pathlib", "PosixPath"): lambda *_: None,  # the folder that it was written to
    ("pathlib._local", "PosixPath"): lambda *_: None,  # the same, by Python 3.13
}


def tensors(file):
    """Return the content of a `torch.save` file on the CPU: tensors, plain values, lists, dicts."""
    with open_regular(file) as stream:
        return torch.load(stream, map_location="cpu", weights_only=True)


def read(state: dict, folder: Path):
    """Read shards into the tensors of `state`, in all processes together."""
    dcp.load(state, storage_reader=_Reader(folder), planner=_Planner())


class _Index(pickle.Unpickler):
    def find_class(self, module, name):
        if name in CLASSES.get(module, ()):
            return super().find_class(module, name)
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in INSTEAD:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return INSTEAD[module, name]


class _Reader(dcp.FileSystemReader):
    """A reader of shards that are whole and inside their folder."""

    def __init__(self, folder):
        super().__init__(folder)
        with open_regular(Path(folder, ".metadata")) as stream:
            self._index = _Index(stream).load()
        ends = {}
        for place in self._index.storage_data.values():
            name = place.relative_path
            ends[name] = max(ends.get(name, 0), place.offset + place.length)
        for name, end in ends.items():
            _check(folder, name, end)

    def read_metadata(self):
        return self._index


def _check(folder, name, size):
    if Path(name).name != name:
        raise ValueError(f".metadata names {name!r}, expected a file in {folder}")
    with open_regular(Path(folder, name)) as stream:
        found = os.fstat(stream.fileno()).st_size
    if found < size:
        raise ValueError(f"{name} has {found} bytes, expected {size}: it is cut short")


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
