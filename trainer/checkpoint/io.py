"""Checkpoint files: written whole or not at all, holding only what `torch.load(weights_only=True)` reads back.

A final name appears by a rename of a finished, synced file, so a reader finds the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import checksum
from trainer.checkpoint.temporary import temporary_beside
from trainer.errors import CheckpointError, nearest

__all__ = ["check_plain", "damage", "load", "plain", "save"]

TABLE = "table.ckpt"
"""The file of a sharded checkpoint, which is a folder, that holds all but the parts of tensors."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)

_INT_BITS = 2000  # torch's safe unpickler reads integers of up to 255 bytes


def save(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `state` to `path` so that a crash, a kill or a full disk leaves the former file or the new one, both whole.

    The bytes go to a temporary file in the same folder, are synced to the disk and then renamed over `path`. Parent
    folders are made. A symbolic link at `path` is replaced; the file it points to stays. The file ends with a checksum.

    Raises:
        CheckpointError: `state` holds something that is not plain (see `check_plain`), `path` is a folder, or the disk is
            full or not writable. The message names the path; nothing is left behind and the former file is untouched.
    """
    path = Path(path)
    check_plain(state)
    if os.path.isdir(path):
        raise CheckpointError(f"Could not save the checkpoint to {path}: it is a folder. Give the name of a file.")
    try:
        make_folder(path.parent)
        with temporary_beside(path) as temporary:
            with open(temporary, "xb") as file:
                writer = checksum.ChecksumWriter(file)
                torch.save(state, writer)
                writer.seal()
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except Exception as error:
        raise CheckpointError(f"Could not save the checkpoint to {path}: {root_cause(error)}") from error
    sync_folder(path.parent)


def load(
    path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool = True
) -> dict[str, Any]:
    """Return the dictionary that `path` holds, its tensors on `map_location`.

    Args:
        path: a checkpoint of ours or of anybody who wrote a dictionary with `torch.save`.
        map_location: as in `torch.load`.
        weights_only: False lets the file run arbitrary code while loading; only for files from a source you trust.

    Raises:
        CheckpointError: the file does not exist, is damaged, holds no dictionary, or holds objects that only
            `weights_only=False` can load. The message names the path and says what to do.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise CheckpointError(_missing(path))
    check = _Check(path)
    try:
        if not weights_only:
            check.join()  # bytes that may run are not read before they are known to be those that were written
        state = torch.load(path, map_location=map_location, weights_only=weights_only)
    except Exception as error:
        check.join()
        raise CheckpointError(_why_unreadable(path, error, weights_only)) from error
    check.join()
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}, not a dictionary.")
    return state


class _Check(threading.Thread):
    """Compares the checksum of a file while its tensors are read; `join` raises a CheckpointError for a damaged file."""

    def __init__(self, path: Path) -> None:
        super().__init__(name="checksum")
        self.path, self.found = path, None
        self.start()

    def run(self) -> None:
        self.found = damage(self.path)

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.found is not None:
            raise CheckpointError(f"Could not load the checkpoint {self.path}: it is damaged: {self.found}.") from None


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with the bytes of a checkpoint file, or None where nothing is, or nothing can be known (files of others)."""
    try:
        return checksum.damage(path)
    except OSError:  # what cannot be read is no matter of damage: loading says why
        return None


def check_plain(value: Any, where: str = "") -> None:
    """Check that `value` consists of tensors and plain values alone, so that `weights_only=True` can load it.

    Plain are, by exact type: None, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, list,
    tuple, set, dict, OrderedDict, Counter, Tensor and Parameter. `where` is put in front of the key in messages.

    Raises:
        CheckpointError: names the key of the first thing that is not plain, or of an integer of more than 2000 bits.
    """
    pending, seen = [(where, value)], set()
    while pending:
        key, item = pending.pop()
        kind = type(item)
        if kind in _SCALARS or id(item) in seen:
            if kind is int and item.bit_length() > _INT_BITS:
                raise CheckpointError(f"Could not save {key or 'the state'}: the integer has more than {_INT_BITS} bits.")
            continue
        if kind not in (*_TENSORS, *_MAPPINGS, *_SEQUENCES):
            raise CheckpointError(_not_plain(key, item))
        seen.add(id(item))
        inner: list[tuple[str, Any]] = []
        if kind in _MAPPINGS:
            for name, child in item.items():
                child_key = f"{key}.{name}" if key else str(name)
                inner += ((f"{child_key} (the key itself)", name), (child_key, child))
        elif kind in _SEQUENCES:
            inner = [(f"{key}[{index}]", child) for index, child in enumerate(item)]
        if kind in _TENSORS or kind is OrderedDict:  # attributes set on these travel in the file, too
            inner += ((f"{key}.{name}" if key else name, child) for name, child in vars(item).items())
        pending.extend(reversed(inner))  # the stack then gives the first one first


def plain(value: Any) -> Any:
    """Return a copy of `value` in plain containers: what can be made plain without changing its meaning is made so.

    Containers are copied, tensors detached (sharing memory), numpy scalars become Python numbers, numpy arrays tensors
    (lists where torch has no such dtype), and subclasses of dict become dict. Anything else stays for `check_plain` to refuse.

    Raises:
        CheckpointError: a container contains itself.
    """
    return _plain(value, ())


def _plain(value: Any, parents: tuple[int, ...]) -> Any:
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if isinstance(value, torch.Tensor):
        # A subclass that is only a label (say, an image type) is dropped; one that acts on its own data stays as it is.
        labelled = kind not in _TENSORS and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        return value.detach().as_subclass(torch.Tensor) if labelled else value.detach()
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError):  # text, objects, foreign byte order
            return _plain(value.tolist(), parents)
    if kind not in _SEQUENCES and not isinstance(value, dict):
        return value
    if id(value) in parents:
        raise CheckpointError(f"A {kind.__name__} contains itself, which a checkpoint cannot hold.")
    parents = (*parents, id(value))
    if kind in _SEQUENCES:
        return kind(_plain(item, parents) for item in value)
    copy = kind() if kind in _MAPPINGS else {}
    if kind is OrderedDict:
        copy.__dict__.update(vars(value))  # the layer versions that a module's state_dict carries
    for key, item in value.items():
        copy[_plain(key, parents)] = _plain(item, parents)
    return copy


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are not there yet.

    Raises:
        OSError: it cannot be; one that says what is wrong also where a file has the name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(folder)) from error


def sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut. File systems that cannot sync a folder are let be: the file is whole."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def root_cause(error: BaseException) -> str:
    """The system's own words: torch reports a full disk as a wrong position and keeps the OSError as the context."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}."
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _missing(path: Path) -> str:
    if os.path.isdir(path):
        return f"Could not load the checkpoint {path}: it is a folder. Give the name of a file."
    hint = ""
    with contextlib.suppress(OSError):
        hint = nearest(path.name, (file.name for file in path.parent.iterdir() if not file.name.startswith(".")))
    return f"Could not load the checkpoint {path}: there is no such file.{hint}"


def _why_unreadable(path: Path, error: Exception, weights_only: bool) -> str:
    message = f"Could not load the checkpoint {path}: "
    if weights_only:
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        with contextlib.suppress(Exception):  # it fails for a file that is no zip archive, where the error names the first one
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if names:
            return (
                f"{message}it holds objects that could run code while loading ({', '.join(sorted(names)[:5])}). Pass "
                "weights_only=False if you trust where it comes from, or allow these by torch.serialization.add_safe_globals."
            )
    if isinstance(error, (ImportError, AttributeError)):
        return f"{message}a class in it cannot be imported here ({error})."
    if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: torch sought a place before the start
        return message + root_cause(error)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{message}it is damaged, or no file written by torch.save ({first_line})."


def _not_plain(key: str, item: Any) -> str:
    message = (
        f"Could not save {key or 'the state'}: it is a {type(item).__module__}.{type(item).__qualname__}, and a checkpoint "
        "holds only tensors and plain values (numbers, text, lists, dicts)."
    )
    match = re.match(r"(?:.*\.)?\w*hyper_parameters\.(?P<name>\w+)", key)
    if match:
        return f"{message} Leave it out with save_hyperparameters(ignore=[{match['name']!r}]), or pass a plain value for it."
    return message
