"""Temporary names of files that are being written, and what writers that died left under them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["clean", "leftovers", "temporary_beside"]

# Who writes: process, machine (8 digits; ModelCheckpoint's names of earlier versions do without), and 8 random digits.
_TEMPORARY = re.compile(r"^\..+\.(?P<pid>\d+)\.(?P<host>[0-9a-f]{8})?[0-9a-f]{8}\.tmp$")
_ABANDONED_S = 24 * 3600.0  # a temporary that nobody wrote to for so long belongs to no living writer

_mine: set[str] = set()
"""What this process is writing now. Another file under its number is of a former process that had the same one."""


def temporary_name(name: str) -> str:
    """Return a hidden name for what will become `name`, which says who writes it."""
    # Shortened, as a file name has at most 255 bytes.
    head = name.encode()[:180].decode(errors="ignore")
    return f".{head}.{os.getpid()}.{_host()}{secrets.token_hex(4)}.tmp"


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`. What is still there at the end, a file or a folder, is removed."""
    temporary = path.with_name(temporary_name(path.name))
    _mine.add(temporary.name)
    try:
        yield temporary
    finally:
        remove(temporary)
        _mine.discard(temporary.name)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be."""
    with contextlib.suppress(OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            path.unlink()


def leftovers(folder: str | os.PathLike[str]) -> list[Path]:
    """Return, in order of name, the temporary files and folders in `folder` whose process died while it saved.

    Those of this machine count when no process has their number any more; others (a shared disk, a number that was given anew)
    when nobody wrote to them for a day.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        return []
    return sorted(file for file in folder.iterdir() if _is_abandoned(file))


def clean(folder: str | os.PathLike[str]) -> list[Path]:
    """Remove what `leftovers` finds in `folder`; return what was removed. Files of live processes stay."""
    removed = []
    for file in leftovers(folder):
        remove(file)  # another process may clean as well, or own the file
        if not os.path.lexists(file):
            removed.append(file)
    return removed


def _host() -> str:
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def _is_abandoned(file: Path) -> bool:
    match = _TEMPORARY.match(file.name)
    claim = file.name.startswith(".") and file.name.endswith(".claim")
    if (match is None and not claim) or file.name in _mine:
        return False
    try:
        if time.time() - file.lstat().st_mtime > _ABANDONED_S:
            return True
        if claim:  # of ModelCheckpoint on a name: a link to "<process>@<machine>"
            process, _, machine = os.readlink(file).partition("@")
            here = machine == platform.node() and int(process) != os.getpid()
        else:
            process, here = match["pid"], match["host"] == _host()
        if not here:
            return False
        if int(process) == os.getpid():
            return True
        os.kill(int(process), 0)  # signal 0 only asks whether the process exists
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # it exists and is somebody else's, the file went away meanwhile, or is none of ours
        pass
    return False
