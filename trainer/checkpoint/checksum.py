"""The checksum of a checkpoint file: a comment at the end of the zip archive that torch.save writes, which every reader of zips skips.

It covers every byte of the file. Reading it costs a pass at some gigabytes a second, which goes on while torch reads the tensors.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

__all__ = ["ChecksumWriter", "damage", "has_checksum", "of_file"]

_COMMENT = b"checksum crc32 %08x"
_FOUND = re.compile(rb"checksum crc32 ([0-9a-f]{8})")
_LENGTH = len(_COMMENT % 0)
_FIELD = _LENGTH.to_bytes(2, "little")  # an archive ends with the length of its comment, two bytes, and the comment
_END = b"PK\x05\x06"  # begins the last record of an archive: 22 bytes and the comment
_BLOCK = 1 << 22


class ChecksumWriter:
    """A file to which torch.save can write, and which knows the checksum of what it was given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._crc = file, 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """Add the checksum: the comment of an archive that had none."""
        self._file.seek(-2, os.SEEK_END)
        self._file.write(_FIELD + _COMMENT % self._crc)


def has_checksum(path: str | os.PathLike[str]) -> bool:
    """True for a file of ours, whole or not."""
    with open(path, "rb") as file:
        return _FOUND.fullmatch(_tail(file)[-_LENGTH:]) is not None


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with the bytes of a file, or None where nothing is, or nothing can be known (files of others).

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        start, tail = file.read(4), _tail(file)
        if len(tail) < 22:
            return "it is too short" if tail else "it is empty"
        end = tail[: -_LENGTH - 2]
        found = _FOUND.fullmatch(tail[-_LENGTH:])
        if found is None or not end.startswith(_END) or tail[-_LENGTH - 2 : -_LENGTH] != _FIELD:
            if found is None and (tail[-22:-18] == _END and tail[-2:] == b"\0\0"):
                return None  # an archive without a comment: torch.save's own
            if start == b"PK\x03\x04" or found is not None:
                return "its end is missing or was changed"
            return None if start.strip(b"\0") else "it begins with zeros"
        file.seek(0)
        size = os.fstat(file.fileno()).st_size - _LENGTH - 2
        crc = zlib.crc32(b"\0\0", _crc(file.read, size))
    return None if crc == int(found[1], 16) else "its checksum is another than when it was written"


def of_file(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return (bytes, checksum) of a file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        return size, _crc(file.read, size)


def _tail(file: BinaryIO) -> bytes:
    """The last record of an archive with our comment."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - 22 - _LENGTH))
    return file.read()


def _crc(read: Callable[[int], bytes], size: int) -> int:
    crc = 0
    while size > 0 and (block := read(min(size, _BLOCK))):
        crc = zlib.crc32(block, crc)
        size -= len(block)
    return crc
