"""Which file a resume starts from: what "best", "last" and "auto" mean."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError, MisconfigurationException

__all__ = ["resolve"]


def resolve(wanted: str | os.PathLike[str] | None, checkpoints: Sequence[Any], folders: Iterable[str]) -> str | None:
    """Return the path that `ckpt_path=` stands for, or None to start afresh.

    Args:
        wanted: a path; "best" (the best file of the run just ended); "last" (the newest file, which must exist); "auto" (the newest
            file if there is one); None.
        checkpoints: the trainer's ModelCheckpoints.
        folders: where earlier runs of these settings left their files.

    Raises:
        CheckpointError: when the path does not exist, or "last" finds nothing.
        MisconfigurationException: when "best" is asked for and no ModelCheckpoint has one.
    """
    if wanted is None:
        return None
    if wanted == "best":
        best = next((c.best_model_path for c in checkpoints if c.best_model_path), None)
        if best is None:
            raise MisconfigurationException(
                "ckpt_path='best': no ModelCheckpoint of this trainer has a best file; fit first, or give a path."
            )
        return str(best)
    if wanted in ("last", "auto"):
        known = [c.last_model_path for c in checkpoints if getattr(c, "last_model_path", "")]
        found = newest([*known, *_files(folders)])
        if found is None and wanted == "last":
            raise CheckpointError(f"ckpt_path='last': there is no checkpoint in {', '.join(folders) or 'any folder'}. 'auto' starts afresh then.")
        return found
    if not os.path.exists(wanted):
        raise CheckpointError(f"ckpt_path={os.fspath(wanted)!r} does not exist.")
    return os.fspath(wanted)


def _files(folders: Iterable[str]) -> list[str]:
    return [str(file) for folder in folders for file in Path(folder).glob("*.ckpt") if not file.name.startswith(".")]


def newest(files: Iterable[str]) -> str | None:
    """Return the file that was written last, or None."""
    existing = [file for file in files if os.path.exists(file)]
    return max(existing, key=lambda file: (os.stat(file).st_mtime_ns, file), default=None)
