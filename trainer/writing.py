"""When and how a run's checkpoints are written: now or at the boundary, here or in the background, by rank 0 or by all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from trainer.checkpoint import io, state
from trainer.checkpoint.background import AsyncCheckpointIO, Step, write
from trainer.errors import CheckpointError
from trainer.launchers.transport import loads, pickle_error

__all__ = ["LOST", "Writing"]

LOST = 8  # beside the bits of `signals`
"""What rank 0 wishes at a boundary when something cannot be written in the background: that all ranks end with its error."""


class Writing:
    """The part of `Run` that writes."""

    background: AsyncCheckpointIO | None = None
    """What writes while training goes on; set, on every rank, by the first save of that kind."""
    _under_way: tuple[list[Step], Callable[[int], None] | None] | None = None

    def save_checkpoint(self, path: Any, weights_only: bool = False) -> None:
        """Write a checkpoint; see `write_checkpoint`. Collective."""
        self.write_checkpoint([path], weights_only)

    def write_checkpoint(
        self, steps: Sequence[Step], weights_only: bool = False, background: bool = False, ended: Callable[[int], None] | None = None
    ) -> None:
        """Write a checkpoint of this moment now where the state is whole, else of the coming boundary. Collective.

        Between the first batch of a step and the boundary after it, hooks, validation and epoch numbers are still to come, of
        which a resume could not know. A run that is failing reaches no boundary: alone it saves what there is.

        Args:
            steps: paths to write to, and what rank 0 calls between: each once all before it are done.
            weights_only: leave out all but weights, counters and hyper-parameters.
            background: take a copy and return. The next save, or the end of the run, waits for it and raises its error.
            ended: called with the number of steps that were done, on every rank, before an error is raised.

        Raises:
            Exception: on every rank, what rank 0 could not write, a CheckpointError of ours, which names the path; a CheckpointError on
                a rank of several that is failing.
        """
        if self.failing and not self.dist.alone:
            path = next((step for step in steps if not callable(step)), "disk")
            raise CheckpointError(f"Could not save the checkpoint to {path}: the run is failing, and a save needs all ranks.")
        if not self.whole and not self.failing:
            self.requests.append(lambda trainer: self.write_checkpoint(steps, weights_only, background, ended))
            return
        with self.profiler.profile("save_checkpoint"):
            self._write(steps, weights_only, background, ended)

    def _write(self, steps: Sequence[Step], weights_only: bool, background: bool, ended: Callable[[int], None] | None) -> None:
        writer = self._writer(background)
        done: list[Step] = []
        try:
            self.finish_saves()
            table = self.checkpoint(weights_only)
            problem = self._try(writer, io.plain(table) if self.strategy.sharded else table, steps, done)
        except BaseException:  # a hook's error, Ctrl-C: nothing more of this save will come
            if ended is not None:
                ended(len(done))
            raise
        if writer is not None and self.dist.broadcast(problem is None):
            self._under_way = (done, ended)
        else:
            self._end(problem, done, ended)

    def _writer(self, background: bool) -> AsyncCheckpointIO | None:
        """Return what writes in the background, if this save is to be written there."""
        storage = self.trainer.checkpoint_io
        wanted = background or isinstance(storage, AsyncCheckpointIO)
        if wanted and self.strategy.sharded:
            self.tell_once("Sharded checkpoints are not written in the background: the step waits until all ranks have written.")
            return None
        if wanted and self.background is None:
            self.background = storage if isinstance(storage, AsyncCheckpointIO) else AsyncCheckpointIO(storage)
            self._undo.append(self._wait_quietly)
        return self.background if wanted else None

    def _try(self, writer: AsyncCheckpointIO | None, table: dict[str, Any], steps: Sequence[Step], done: list[Step]) -> Exception | None:
        """Write, or begin to; return what went wrong on this rank."""
        try:
            if self.strategy.sharded:
                self._write_parts(table, steps, done)
            elif self.world.is_global_zero and writer is not None:
                writer.begin(state.finish(table), steps, done)
            elif self.world.is_global_zero:
                write(self.trainer.checkpoint_io, state.finish(table), steps, done)
        except Exception as error:
            return error
        return None

    def _write_parts(self, table: dict[str, Any], steps: Sequence[Step], done: list[Step]) -> None:
        """Write a sharded table, every rank its part, one path after the other. Collective."""
        storage, problem = self.trainer.checkpoint_io, None
        storage = storage.checkpoint_io if isinstance(storage, AsyncCheckpointIO) else storage
        for step in steps:
            if not callable(step):
                storage.save_sharded(table, step, self.dist)  # raises on all ranks, or on none
            elif self.world.is_global_zero:
                try:
                    step()
                except Exception as error:
                    problem = error
            if self.dist.broadcast(problem is not None):
                break
            done.append(step)
        if problem is not None:
            raise problem

    def finish_saves(self) -> None:
        """Wait for what is being written in the background; nothing happens where nothing is. Collective.

        Raises:
            Exception: on every rank, that with which the writing ended.
        """
        if self._under_way is None:
            return
        problem = None
        if self.world.is_global_zero:
            try:
                self.background.wait()
            except Exception as error:
                problem = error
        done, ended = self._under_way
        self._under_way = None
        self._end(problem, done, ended)

    def _end(self, problem: Exception | None, done: list[Step], ended: Callable[[int], None] | None) -> None:
        """Let every rank know how a save ended. Collective."""
        text = None if problem is None else pickle_error(problem) or pickle_error(CheckpointError(f"{type(problem).__name__}: {problem}"))
        found, count = self.dist.broadcast((text, len(done)))
        if ended is not None:
            ended(count)
        if found is not None:
            raise problem if problem is not None else loads(found)

    def _wait_quietly(self) -> None:
        """At the end of a run that failed, whose error comes first. Each rank for itself."""
        if self._under_way is None:
            return
        done, ended = self._under_way
        try:
            self.background.wait()
        except Exception as error:
            warnings.warn(f"A checkpoint that was being written when the run ended is not there: {error}", stacklevel=2)
        self._under_way = None
        if ended is not None and self.world.is_global_zero:
            ended(len(done))
