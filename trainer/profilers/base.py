"""The contract of profilers, and the one that measures nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["PassThroughProfiler", "Profiler"]

_NULL: AbstractContextManager[Any] = nullcontext()


class Profiler:
    """Base of all profilers: write `start` and `stop`, and `summary` for a report.

    A run calls `setup`, then `start` and `stop` around its actions, `step` ahead of each optimizer step (of each batch outside of a fit), and
    at its end, also after an error, `describe` and `teardown`. Each rank has its own.

    Args:
        dirpath: the folder for files; None for the logger's (`trainer.log_dir`).
        filename: write the report to `<dirpath>/<stage>-<filename>-<rank>.txt`, on every rank; None prints rank 0's.
    """

    module: torch.nn.Module | None = None
    """The module of the run, while there is one. None also where its layers are compiled."""

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename
        self._stage: str | None = None
        self._rank = 0
        self._log_dir: str | None = None

    def start(self, action_name: str) -> None:
        """Begin to measure an action."""
        raise NotImplementedError

    def stop(self, action_name: str) -> None:
        """The action has ended."""
        raise NotImplementedError

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure a block: `with self.trainer.profiler.profile("my part"): ...`"""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def step(self, ahead: int | None = None) -> None:
        """A step of the loop begins; `ahead` is how many are known to come in the run, this one included (None: nobody knows)."""

    def summary(self) -> str:
        """Return the report; "" where there is nothing to report."""
        return ""

    def describe(self) -> None:
        """Print the report on rank 0, or append it to this rank's file."""
        report = self.summary()
        if not report:
            return
        if self.filename is None:
            if self._rank == 0:
                print(report)
            return
        path = os.path.join(self.folder, self._prepare_filename())
        os.makedirs(self.folder, exist_ok=True)
        with open(path, "a") as file:
            file.write(report + "\n")

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run begins.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: the rank of this process among all.
            log_dir: where files go without a `dirpath`.
        """
        self._stage, self._rank, self._log_dir = stage, local_rank or 0, log_dir

    def teardown(self, stage: str | None) -> None:
        """The run is over; release what is held."""
        self.module = None

    @property
    def folder(self) -> str:
        """Where files go."""
        return os.fspath(self.dirpath or self._log_dir or os.curdir)

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """Return `<stage>-<filename>-<rank>[-<action>]<extension>`, without characters that a file system may refuse."""
        parts = [self._stage, self.filename, str(self._rank), action_name]
        return re.sub(r'[\\/:*?"<>|\s]+', "_", "-".join(part for part in parts if part)) + extension

    def _title(self) -> str:
        return f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"

    def __getstate__(self) -> dict[str, Any]:
        """What travels to the ranks of a run, and back."""
        return {name: value for name, value in self.__dict__.items() if name != "module"}


class PassThroughProfiler(Profiler):
    """Measures nothing; `trainer.profiler` without a profiler. Blocks under its `profile` run as if it were not there."""

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        return _NULL
