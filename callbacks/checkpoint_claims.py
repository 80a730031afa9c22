"""Claims on file names, so that two runs that save into one folder at once never choose the same.

A claim is a symbolic link beside the file, ".<name>.claim", to "<process>@<machine>": making it either succeeds or finds another's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid

__all__ = ["claim", "release", "release_of_the_dead"]

_ABANDONED_S = 24 * 3600.0  # nobody writes one file for so long


def claim(path: str) -> bool:
    """Return whether `path` is free, and then make it ours until `release`. A file system without links knows files alone."""
    mark = _mark(path)
    with contextlib.suppress(OSError):  # the save will say what is wrong with the folder
        os.makedirs(os.path.dirname(mark), exist_ok=True)
    for _ in range(2):
        if os.path.lexists(path):
            return False
        try:
            os.symlink(_owner(), mark)
        except FileExistsError:
            if not _drop_dead(mark):
                return False
        except OSError:
            return True
        else:
            if os.path.lexists(path):  # it was finished between the look and the claim
                release(path)
                return False
            return True
    return False


def release(path: str) -> None:
    """Give up our claim on `path`, if there is one."""
    mark = _mark(path)
    with contextlib.suppress(OSError):
        if os.readlink(mark) == _owner():
            os.remove(mark)


def release_of_the_dead(path: str) -> None:
    """Remove the claim that a process left on `path` when it was killed behind its save; who lives keeps it."""
    _drop_dead(_mark(path))


def _mark(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:200]}.claim")


def _owner() -> str:
    return f"{os.getpid()}@{platform.node()}"


def _drop_dead(mark: str) -> bool:
    """Remove the claim of a process that died over its save; True when it is gone."""
    try:
        owner = os.readlink(mark)
        process, _, machine = owner.partition("@")
        old = time.time() - os.lstat(mark).st_mtime > _ABANDONED_S
        if not old and (machine != platform.node() or (owner != _owner() and _alive(int(process)))):
            return False
        aside = f"{mark}.{uuid.uuid4().hex[:8]}"
        os.rename(mark, aside)  # of two that do this, one succeeds
        os.remove(aside)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
