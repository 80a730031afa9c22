"""OnExceptionCheckpoint: one file that is there only after a fit that ended by an exception."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["OnExceptionCheckpoint"]


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when a fit ends by an exception (Ctrl-C, too), and removes it again when a fit ends well.

    The file continues after the last complete optimizer step. Only a fit of one process can save here: of several ranks one has failed
    and the others may be anywhere, and a save needs them all; rank 0 warns, and `ModelCheckpoint(every_n_train_steps=)` is the way.

    Args:
        dirpath: folder of the file.
        filename: its name without ".ckpt".

    Raises:
        MisconfigurationException: an empty filename.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise MisconfigurationException("OnExceptionCheckpoint(filename=...): the name must not be empty.")
        self.dirpath, self.filename = os.path.abspath(os.fspath(dirpath)), filename  # a later chdir does not move it
        self._failed = False

    @property
    def ckpt_path(self) -> str:
        """Where the checkpoint is, or would be."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._failed = False

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._failed = True
        if trainer.state.fn != "fit":
            return
        if trainer.world_size > 1:
            trainer.warn(f"OnExceptionCheckpoint: nothing is saved, as a save needs all {trainer.world_size} ranks, and one has failed.")
            return
        trainer.save_checkpoint(self.ckpt_path)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """A fit ended well: what an earlier one left is out of date."""
        if stage == "fit" and not self._failed and trainer.is_global_zero:
            with suppress(FileNotFoundError):
                os.remove(self.ckpt_path)
