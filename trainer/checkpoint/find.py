"""Which file a resume starts from: what "best", "last" and "auto" mean."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint import io
from trainer.errors import CheckpointError, MisconfigurationException, nearest

__all__ = ["files", "newest", "resolve", "with_subfolders"]


def resolve(
    wanted: str | os.PathLike[str] | None,
    checkpoints: Sequence[Any],
    folders: Iterable[str],
    damage: Callable[[str], str | None] | None = None,
) -> str | None:
    """Return the path that `ckpt_path=` stands for, or None to start afresh.

    Args:
        wanted: a path; "best" (the best file of the run just ended, or of the newest earlier one); "last" (the newest file, which must exist); "auto" (the newest
            file if there is one); None.
        checkpoints: the trainer's ModelCheckpoints.
        folders: where earlier runs of these settings left their files.
        damage: says what is wrong with a file; "last" and "auto" then take the newest with which nothing is, and a warning tells of
            the others. None trusts them all.

    Raises:
        CheckpointError: when the path does not exist, "last" finds nothing, or all that "last" or "auto" find is damaged: a run that
            was to go on is not started afresh.
        MisconfigurationException: when "best" is asked for and no ModelCheckpoint has one; for Lightning's "hpc" and "registry".
    """
    if wanted is None:
        return None
    if wanted == "best":
        best = next((c.best_model_path for c in checkpoints if c.best_model_path), None) or _best_of(newest(files(folders), damage))
        if best is None:
            raise MisconfigurationException(f"ckpt_path='best': no ModelCheckpoint of this trainer has a best file; {_why_none(checkpoints)}")
        return str(best)
    if wanted in ("last", "auto"):
        known = [c.last_model_path for c in checkpoints if getattr(c, "last_model_path", "")]
        found = newest([*known, *files(folders)], damage)
        if found is None and wanted == "last":
            raise CheckpointError(f"ckpt_path='last': there is no checkpoint in {', '.join(folders) or 'any folder'}. 'auto' starts afresh then.")
        return found
    if wanted in ("hpc", "registry"):
        raise MisconfigurationException(f"ckpt_path={wanted!r}: use 'auto', which also finds what a run left when its machine was taken away.")
    if not os.path.exists(wanted):
        raise CheckpointError(f"ckpt_path={os.fspath(wanted)!r} does not exist.{nearest(os.fspath(wanted), ('auto', 'last', 'best'))}")
    return os.fspath(wanted)


def _why_none(checkpoints: Sequence[Any]) -> str:
    """Return why there is no best file, and what to do."""
    unranked = [c for c in checkpoints if getattr(c, "last_model_path", "") and getattr(c, "monitor", None)]
    if not unranked:
        return "fit first, or give a path."
    return (
        f"{unranked[0].monitor!r} was not measured at any step that saved, so nothing was ranked. Validate at those steps (val_check_interval), "
        "rank with a second ModelCheckpoint that saves after validations, or take 'last'."
    )


def _best_of(file: str | None) -> str | None:
    """Return the best file of the run that wrote `file`, by what it knows of it, where it was or beside `file`."""
    if file is None:
        return None
    table = io.load(Path(file, io.TABLE) if os.path.isdir(file) else file)
    states = [state for state in table.get("callbacks", {}).values() if isinstance(state, dict)]
    paths = [path for state in states if isinstance(path := state.get("best_model_path"), str) and path]
    beside = [os.path.join(os.path.dirname(file), os.path.basename(path)) for path in paths]  # the folder may have been moved
    return next((path for path in (*paths, *beside) if os.path.exists(path)), None)


def with_subfolders(folders: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return `folders` and, below them, those that a "/" in one of `names` (file names with fields in braces) has made."""
    folders = list(folders)
    found = list(folders)
    for name in dict.fromkeys(names):
        below = os.path.dirname("*".join(map(glob.escape, re.split(r"\{[^{}]*\}", name))))  # without fields: metrics may be called "val/loss"
        if below:
            matches = [match for folder in folders for match in glob.glob(os.path.join(glob.escape(folder), below))]
            found += [match for match in matches if os.path.isdir(match) and not match.endswith(".ckpt")]  # a sharded checkpoint is a folder
    return list(dict.fromkeys(found))


def files(folders: Iterable[str]) -> list[str]:
    return [str(file) for folder in folders for file in Path(folder).glob("*.ckpt") if not file.name.startswith(".")]


def newest(files: Iterable[str], damage: Callable[[str], str | None] | None = None) -> str | None:
    """Return the file that was written last, of those with which nothing is wrong; None when there are no files.

    Raises:
        CheckpointError: something is wrong with each of them; what, the message says.
    """
    existing = {file: (os.stat(file).st_mtime_ns, file) for file in files if os.path.exists(file)}
    wrong = []
    for file in sorted(existing, key=lambda file: existing[file], reverse=True):
        trouble = damage(file) if damage is not None else None
        if trouble is None:
            for line in wrong:
                warnings.warn(f"The checkpoint {line}. Going on from {file}.", stacklevel=2)
            return file
        wrong.append(f"{file} is damaged: {trouble}")
    if wrong:
        raise CheckpointError(f"No checkpoint is whole. {'; '.join(wrong)}. Remove them to start afresh.")
    return None
