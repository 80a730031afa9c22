"""Which "version_<n>" a run writes to: the next free one, or that of the run which it goes on with."""

from __future__ import annotations

import os
from collections.abc import Collection

__all__ = ["next_version", "note_checkpoints", "version_of"]

_NOTE = ".checkpoints."  # and the logger's kind; in a version's folder: folders elsewhere that hold checkpoints of its run, a line each


def next_version(folder: str) -> int:
    """Return one more than the highest "version_<n>" in `folder`."""
    return max(_versions(folder), default=-1) + 1


def version_of(folder: str, checkpoint: str, kind: str, taken: Collection[object] = ()) -> int | None:
    """Return the n of "<folder>/version_<n>" whose run saved `checkpoint`, in it or in a folder that it noted; of several the newest.

    Args:
        folder: holds the versions.
        checkpoint: its path.
        kind: the logger's class: loggers of one run may share `folder`.
        taken: versions of other loggers.

    Returns:
        None where there is no such version.
    """
    place = os.path.realpath(os.path.dirname(os.path.abspath(checkpoint)))
    known = {n: os.path.realpath(os.path.join(folder, f"version_{n}")) for n in sorted(_versions(folder), reverse=True) if n not in taken}
    inside = (n for n, version in known.items() if f"{place}{os.sep}".startswith(version + os.sep))
    noted = (n for n, version in known.items() if place in _noted(version, kind))
    return next(inside, next(noted, None))


def note_checkpoints(version: str, place: str, kind: str) -> None:
    """Note in a version's folder, for a logger of this kind, that its run saves checkpoints in `place`, unless that lies in it."""
    version, place = os.path.realpath(version), os.path.realpath(place)
    if not f"{place}{os.sep}".startswith(version + os.sep) and place not in _noted(version, kind):
        with open(os.path.join(version, _NOTE + kind), "a", encoding="utf-8") as file:
            file.write(os.path.relpath(place, version) + "\n")  # all may be moved together


def _noted(version: str, kind: str) -> list[str]:
    path = os.path.join(version, _NOTE + kind)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [os.path.realpath(os.path.join(version, line)) for line in file.read().splitlines()]


def _versions(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [int(n[8:]) for n in names if n.startswith("version_") and n[8:].isdigit()]
