"""What earlier runs with the settings of a trainer have left: their checkpoints."""

from __future__ import annotations

import glob
import os
from typing import Any

from trainer.checkpoint import find

__all__ = ["checkpoint_folders", "checkpoint_for", "where_to_go_on"]


def checkpoint_for(trainer: Any, wanted: str | os.PathLike[str] | None) -> str | None:
    """Return the path that `ckpt_path=` stands for, or None to start afresh.

    Raises:
        CheckpointError, MisconfigurationException: see `find.resolve`.
    """
    return find.resolve(wanted, trainer.checkpoint_callbacks, checkpoint_folders(trainer), getattr(trainer.checkpoint_io, "damage", None))


def checkpoint_folders(trainer: Any) -> list[str]:
    """Return the folders to look in. With a `dirpath` for every callback these alone: others are other runs."""
    callbacks, root = trainer.checkpoint_callbacks, trainer.default_root_dir
    names = [c.filename for c in callbacks if getattr(c, "filename", None)]
    folders = [os.path.abspath(c.dirpath) for c in callbacks if c.dirpath]
    if folders and len(folders) == len(callbacks):
        return find.with_subfolders(folders, names)
    folders.append(os.path.join(root, "checkpoints"))
    for logger in trainer.loggers:
        pattern = os.path.join(glob.escape(os.path.join(logger.save_dir or root, str(logger.name or ""))), "*", "checkpoints")
        folders += glob.glob(pattern) or [pattern]
    return find.with_subfolders(folders, names)


def where_to_go_on(trainer: Any) -> str:
    """Say where the last checkpoint is, for whoever interrupted a fit."""
    newest = find.newest(find.files(checkpoint_folders(trainer)))
    return "There is no checkpoint to go on from." if newest is None else f"The newest checkpoint is {newest}; fit(..., ckpt_path='auto') goes on from it."
