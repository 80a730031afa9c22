"""Writing checkpoints in a thread, from a copy of the state, while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trainer.checkpoint.files import TorchCheckpointIO
from trainer.checkpoint.plugin import CheckpointIO
from trainer.checkpoint.snapshot import Snapshots

__all__ = ["AsyncCheckpointIO", "write"]

Step = str | os.PathLike[str] | Callable[[], None]
"""Where to write a table, or what to do once all before it is written."""


def write(io: CheckpointIO, table: dict[str, Any], steps: Sequence[Step], done: list[Step]) -> None:
    """Take one step after the other, each noted in `done` when it is over.

    Raises:
        Exception: of the step that could not be done; those after it are left out.
    """
    for step in steps:
        if callable(step):
            step()
        else:
            io.save_checkpoint(table, step)
        done.append(step)


class AsyncCheckpointIO:
    """A CheckpointIO that writes while training goes on: `Trainer(plugins=[AsyncCheckpointIO()])`.

    A save copies the state to the host and returns. The next save, a load and the end of a run wait until the file is whole; an
    error of the writing comes up there, or at a boundary before. The memory of the copy is kept for the next one.

    Args:
        checkpoint_io: what writes and reads; default TorchCheckpointIO.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io: Any = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        self._thread: threading.Thread | None = None  # not a daemon: the exit of the program waits for it
        self._error: BaseException | None = None
        self._snapshots = Snapshots()

    @property
    def failed(self) -> bool:
        """True when the writing ended with an error that nobody has seen yet."""
        return self._error is not None

    def save_checkpoint(self, table: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Take a copy and begin to write it.

        Raises:
            Exception: that with which the writing before ended; nothing is begun then.
        """
        self.begin(table, [path], [])

    def begin(self, table: dict[str, Any], steps: Sequence[Step], done: list[Step]) -> None:
        """Take a copy of `table` and begin to do `steps` with it (see `write`).

        Raises:
            Exception: that with which the writing before ended; nothing is begun then.
        """
        self.wait()
        work = partial(write, self.checkpoint_io, self._snapshots.take(table), steps, done)
        thread = threading.Thread(target=self._run, args=(work,), name="checkpoint-writer")
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            Exception: that with which the writing ended, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def load_checkpoint(self, path: str | os.PathLike[str], weights_only: bool) -> dict[str, Any]:
        """Wait for what is being written, then read.

        Raises:
            Exception: that with which the writing ended.
        """
        self.wait()
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)

    def damage(self, path: str | os.PathLike[str]) -> str | None:
        """Ask `checkpoint_io`, where it can tell, what is wrong with a checkpoint."""
        look = getattr(self.checkpoint_io, "damage", None)
        return None if look is None else look(path)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # it belongs to whoever waits
            self._error = error

    def __getstate__(self) -> dict[str, Any]:
        """What is being written stays with the process that does it."""
        return {"checkpoint_io": self.checkpoint_io, "_thread": None, "_error": None, "_snapshots": Snapshots()}
