"""The structure of a file by torch.save, read without running anything from it: tensors by shape and type, unknown objects by name."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from typing import Any

import torch

from trainer.errors import CheckpointError

__all__ = ["Tensor", "Unknown", "outline"]


class Tensor:
    """What a file says of a tensor."""

    def __init__(self, shape: Any, dtype: str) -> None:
        self.shape, self.dtype = tuple(int(n) for n in shape), dtype

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """How many bytes they take."""
        dtype = getattr(torch, self.dtype, None)
        return self.numbers * (dtype.itemsize if isinstance(dtype, torch.dtype) else 0)


class Unknown:
    """Stands for an object of a class that is not needed to tell what is in a file. Whatever a pickle does to it, nothing happens."""

    kind = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Unknown:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def append(self, item: Any) -> None:
        """Keep nothing."""

    def extend(self, items: Any) -> None:
        """Keep nothing."""

    def add(self, item: Any) -> None:
        """Keep nothing."""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def outline(path: str | os.PathLike[str]) -> Any:
    """Return what a file holds, with `Tensor` and `Unknown` objects in it.

    Raises:
        CheckpointError: it is no archive by torch.save (since torch 1.6), or damaged; the message names it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                return _Unpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"Could not read {path}: it is damaged, or no file written by torch.save ({type(error).__name__}: {error}).") from None


class _Unpickler(pickle.Unpickler):
    """Calls functions of this file and makes plain containers; every other name becomes a class that does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name.endswith("Storage"):
            return _DTYPES.get(name, name)
        return type("Unknown", (Unknown,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> str:
        """A storage, of which only the type of its numbers is told."""
        return str(pid[1]).removeprefix("torch.")


def _tensor(storage: str, offset: int, size: Any, *rest: Any) -> Tensor:
    return Tensor(size, storage)


def _typed_tensor(storage: str, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Tensor:
    return Tensor(size, str(dtype).removeprefix("torch."))


def _parameter(tensor: Any, *rest: Any) -> Any:
    return tensor


def _meta_tensor(dtype: Any, size: Any, *rest: Any) -> Tensor:
    return Tensor(size, str(dtype).removeprefix("torch."))


def _bytes(text: Any, encoding: Any = None) -> bytes:
    return str(text).encode("latin1", errors="replace")


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "complex"): complex,
    ("__builtin__", "complex"): complex,
    ("_codecs", "encode"): _bytes,
    ("torch", "Size"): tuple,
    ("torch", "device"): str,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
}

_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
