"""Big data of a task: tensors and arrays lie once in a file beside the pickle, and every rank maps it (pickle protocol 5).

The mapping is copy-on-write: ranks that only read share the memory of the file; what one writes is its own, page by page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["REDUCERS", "Apart", "base_folder", "read", "write"]

_APART = 16 * 1024  # bytes; smaller buffers stay in the pickle, and become ordinary memory
_ALIGNMENT = 64
_MEMORY_FILES = "/dev/shm"


class Apart:
    """Takes the big buffers of a pickle (as its `buffer_callback`) and keeps them in order; nothing is copied."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True for a buffer that stays in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _APART:
            return True
        self.buffers.append(raw)
        return False

    @property
    def size(self) -> int:
        """Bytes of the file that holds the buffers."""
        return sum(_aligned(raw.nbytes) for raw in self.buffers)


def base_folder(size: int) -> str | None:
    """Return where a file of `size` bytes is best made: in memory where there is room, else None, for the usual place."""
    if size and os.path.isdir(_MEMORY_FILES) and os.access(_MEMORY_FILES, os.W_OK | os.X_OK):
        if shutil.disk_usage(_MEMORY_FILES).free > size * 5 // 4:
            return _MEMORY_FILES
    return None


def write(path: str, payload: bytes, apart: Apart) -> None:
    """Store a pickle in `path` and its buffers in `path`.bulk."""
    with open(f"{path}.bulk", "wb") as file:
        for raw in apart.buffers:
            file.write(raw)
            file.write(bytes(_aligned(raw.nbytes) - raw.nbytes))
    with open(path, "wb") as file:
        pickle.dump(([raw.nbytes for raw in apart.buffers], payload), file, protocol=5)


def read(path: str) -> Any:
    """Load what `write` stored. The mapping outlives the file's name, and lasts as long as a tensor uses it."""
    with open(path, "rb") as file:
        sizes, payload = pickle.load(file)
    if not sizes:
        return pickle.loads(payload)
    with open(f"{path}.bulk", "rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers, start = [], 0
    for size in sizes:
        buffers.append(mapped[start : start + size])
        start += _aligned(size)
    return pickle.loads(payload, buffers=buffers)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# -- tensors: torch alone would write their memory into the pickle, and once for each tensor that shares it -------------------


def _reduce_typed(storage: torch.TypedStorage) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu":
        return storage.__reduce__()
    return _typed, (untyped, storage.dtype)


def _reduce_untyped(storage: torch.UntypedStorage) -> Any:
    """Hand over the memory itself; pickle's memo then keeps one storage one, for all tensors that look at it."""
    if storage.device.type != "cpu":
        return storage.__reduce__()
    if not storage.nbytes():
        return torch.UntypedStorage, (0,)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # the memory lives as long as a view of it
    return _untyped, (pickle.PickleBuffer(memory),)


def _typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _untyped(memory: memoryview | bytearray) -> torch.UntypedStorage:
    found = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return found if isinstance(memory, memoryview) else found.clone()  # one of torch's own can also be resized


REDUCERS: dict[type, Callable[[Any], Any]] = {torch.TypedStorage: _reduce_typed, torch.UntypedStorage: _reduce_untyped}
