"""Checkpoints as folders: every rank writes its parts of sharded tensors, by torch.distributed.checkpoint; rank 0 writes the rest.

A folder holds `table.ckpt`, a checkpoint file as any other but for sharded tensors, of which it has shape and type alone; torch's
files with the parts; and in the table the size and checksum of each of these. It gets its name when every rank has finished.
torch.distributed.checkpoint takes half a second to load, so this file is imported when a folder is written or read.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.checkpoint import checksum, io
from trainer.checkpoint.temporary import temporary_beside
from trainer.dist import Dist
from trainer.errors import CheckpointError

__all__ = ["damage", "load", "save"]

PARTS = "parts"
"""The entry of a folder's table: file name -> (bytes, checksum)."""

_INDEX = ".metadata"  # torch's table of which part lies where


def save(table: dict[str, Any], path: str | os.PathLike[str], dist: Dist) -> None:
    """Write a table in which tensors may be sharded (DTensor) as the folder `path`; what was there is replaced. Collective.

    Raises:
        CheckpointError: on every rank, when any could not write, or for what is not plain; naming the path or the key.
    """
    path = Path(path)
    parts: dict[str, DTensor] = {}
    table = _take_out(table, "", parts)
    problem: Any = None
    if dist.world.is_global_zero:
        try:
            io.check_plain(table)
            io.make_folder(path.parent)
        except Exception as error:
            problem = error
    _agree(problem, path, dist)
    if not dist.world.is_global_zero:
        _write(table, parts, Path(dist.broadcast(None)), path, dist)
        return
    with temporary_beside(path) as temporary:
        dist.broadcast(str(temporary))
        _write(table, parts, temporary, path, dist)


def _write(table: dict[str, Any], parts: dict[str, DTensor], temporary: Path, path: Path, dist: Dist) -> None:
    problem: Any = None
    sums: dict[str, tuple[int, int]] = {}
    try:
        writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)
        torch_checkpoint.save(parts, storage_writer=writer)
        sums = {file.name: checksum.of_file(file) for file in temporary.glob(f"__{dist.world.rank}_*")}
    except (Exception, CheckpointException) as error:  # torch's, which every rank gets and which is no Exception; or this rank's own
        problem = error
    found = dist.gather((sums, None if problem is None else io.root_cause(_innermost(problem))))
    reasons = [reason for _, reason in found if reason is not None]
    if not reasons and dist.world.is_global_zero:
        try:
            table[PARTS] = {name: pair for own, _ in found for name, pair in own.items()}
            table[PARTS][_INDEX] = checksum.of_file(temporary / _INDEX)
            io.save(table, temporary / io.TABLE)
            _put(temporary, path)
            io.sync_folder(path.parent)
        except Exception as error:
            reasons = [io.root_cause(error)]
    reasons = dist.broadcast(reasons)
    if reasons:
        raise CheckpointError(f"Could not save the checkpoint to {path}: {reasons[0]}") from problem


def _agree(problem: Exception | None, path: Path, dist: Dist) -> None:
    """Raise rank 0's problem on all ranks."""
    text = None
    if problem is not None:
        ours = isinstance(problem, CheckpointError)
        text = str(problem) if ours else f"Could not save the checkpoint to {path}: {io.root_cause(problem)}"
    text = dist.broadcast(text)
    if text is not None:
        raise CheckpointError(text) from problem


def _innermost(error: Any) -> BaseException:
    """The error of the rank that failed, out of the one that torch raises on all."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _take_out(value: Any, key: str, parts: dict[str, DTensor]) -> Any:
    """Copy the containers of `value`; each sharded tensor goes to `parts`, and its shape and type stay."""
    if isinstance(value, DTensor):
        parts[key] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return _copied(value, key, lambda item, name: _take_out(item, name, parts))


def _put_in(value: Any, key: str, parts: dict[str, torch.Tensor]) -> Any:
    """The reverse of `_take_out`, with whole tensors."""
    return parts[key] if key in parts else _copied(value, key, lambda item, name: _put_in(item, name, parts))


def _copied(value: Any, key: str, inner: Any) -> Any:
    if isinstance(value, dict):
        copy = type(value)()
        if hasattr(value, "__dict__"):
            vars(copy).update(vars(value))  # the layer versions that a module's state_dict carries
        copy.update({name: inner(item, f"{key}/{name}") for name, item in value.items()})
        return copy
    if type(value) in (list, tuple):
        return type(value)(inner(item, f"{key}/{number}") for number, item in enumerate(value))
    return value


def _put(temporary: Path, path: Path) -> None:
    """Give a finished folder its name. What had it before is behind `temporary` then, or gone."""
    if not os.path.lexists(path):
        os.rename(temporary, path)
    elif not _exchange(temporary, path):
        with temporary_beside(path) as aside:
            os.rename(path, aside)
            os.rename(temporary, path)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, where the system can (Linux)."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


# -- reading ---------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
    """Return the table of a folder, its tensors whole. Each process reads for itself.

    Raises:
        CheckpointError: the folder is not whole, damaged, or not one of ours; the message names it.
    """
    path = Path(path)
    found = damage(path)
    if found is not None:
        raise CheckpointError(f"Could not load the checkpoint {path}: it is damaged: {found}.")
    table = io.load(path / io.TABLE, map_location, weights_only)
    reader = _Reader(path)
    try:
        entries = reader.read_metadata().state_dict_metadata
        parts = {key: torch.empty(e.size, dtype=e.properties.dtype) for key, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells that it reads without other ranks
            torch_checkpoint.load(parts, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"Could not load the checkpoint {path}: {io.root_cause(_innermost(error))}") from error
    table.pop(PARTS)
    return _put_in(table, "", {key: part.to(map_location) for key, part in parts.items()} if map_location != "cpu" else parts)


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with a folder, or None."""
    path = Path(path)
    if not os.path.isfile(path / io.TABLE):
        return f"it is a folder without a file {io.TABLE}"
    found = io.damage(path / io.TABLE)
    if found is not None:
        return f"{io.TABLE}: {found}"
    for name, pair in io.load(path / io.TABLE, "meta")[PARTS].items():
        if not os.path.isfile(path / name):
            return f"{name} is missing"
        if checksum.of_file(path / name) != tuple(pair):
            return f"{name}: its checksum is another than when it was written"
    return None


class _Reader(FileSystemReader):
    """Reads torch's index without running what a stranger may have put into it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / _INDEX, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or torch_checkpoint.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of an index and number formats, and nothing that could do anything."""

    def find_class(self, module: str, name: str) -> Any:
        found = _NEEDED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which has no place there")
        return found


_NEEDED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): Path,
    ("pathlib", "WindowsPath"): Path,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): torch_checkpoint.filesystem._StorageInfo,
}
for _name in (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
):  # fmt: skip
    _NEEDED["torch.distributed.checkpoint.metadata", _name] = getattr(torch_checkpoint.metadata, _name)
