"""The logger of `Trainer(fast_dev_run=...)`: code that writes to `self.logger.experiment` runs, and nothing is written."""

from __future__ import annotations

from typing import Any

from callbacks.loggers.base import DummyExperiment, Logger

__all__ = ["SilentLogger"]


class SilentLogger(Logger):
    """Takes everything and keeps nothing."""

    name = ""
    version = ""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> Any:
        """An object that has every method, none of which does anything."""
        return self._experiment

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Do nothing."""
