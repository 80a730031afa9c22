"""What a fit does when its machine is taken away: save at the boundary, say where, and end on all ranks at the same step."""

from __future__ import annotations

import os
from typing import Any

from callbacks.checkpoint_files import PREEMPTED
from trainer.errors import SIGTERMException
from trainer.launchers import restarted

__all__ = ["Leaving", "ask_to_requeue", "folder_of_saves"]


class Leaving:
    """The part of `Run` that knows signals."""

    def heed(self, signals: int) -> None:
        """End the fit here because a rank has got a signal: save, unless checkpoints are turned off. Collective.

        A fit whose last step this was ends as ever; `Trainer.execute` then raises the exception.

        Raises:
            SIGTERMException: on all ranks, after the file is there.
            CheckpointError: it could not be written.
        """
        self.notice.bits |= signals  # those who did not get it know as well
        folder, step = folder_of_saves(self.trainer, self.callbacks), self.progress.step
        if folder is None:
            story = "Nothing is saved, as checkpoints are turned off."
        else:
            path = os.path.join(folder, PREEMPTED)
            self.save_checkpoint(path)
            self.finish_saves()
            for logger in self.trainer.loggers if self.world.is_global_zero else ():
                logger.after_save_checkpoint(next(c for c in self.callbacks if hasattr(c, "best_model_path")))
            story = f"Saved {path}; fit(..., ckpt_path='auto') goes on from there."
        self.trainer.print(f"{self.notice.name} ends the fit after step {step}. {story}")
        if not self.done:
            self.dist.farewell()
            raise SIGTERMException


def folder_of_saves(trainer: Any, callbacks: Any) -> str | None:
    """Return where "auto" and "last" look; None when this trainer writes no checkpoints."""
    savers = [callback for callback in callbacks if hasattr(callback, "best_model_path")]
    if not savers or trainer.fast_dev_run:
        return None
    folder = next((folder for saver in savers if (folder := getattr(saver, "dirpath", None))), None)
    return str(folder) if folder else os.path.join(trainer.default_root_dir, "checkpoints")


def ask_to_requeue(trainer: Any) -> None:
    """Put the Slurm job back into the queue, once for all ranks."""
    if trainer.is_global_zero:
        problem = restarted.requeue()
        trainer.print("The job is back in Slurm's queue." if problem is None else f"The job could not be put back into Slurm's queue: {problem}")
