"""The public home of the project's exceptions (defined in `callbacks.errors`, which imports nothing of `trainer`)."""

from __future__ import annotations

from callbacks.errors import (
    CheckpointError,
    DataError,
    MisconfigurationException,
    TrainerError,
    nearest,
)

__all__ = [
    "BadLossError",
    "CheckpointError",
    "DataError",
    "MisconfigurationException",
    "RestartError",
    "SIGTERMException",
    "StallError",
    "TrainerError",
    "nearest",
]


class BadLossError(TrainerError, ArithmeticError):
    """A training step's loss was NaN, infinite or None, under `Trainer(bad_loss="raise")`; the message says where and for which samples."""


class SIGTERMException(SystemExit):
    """SIGTERM ended a run: reaches the caller of `fit`, and ends the process with the exit code 143 (128 + 15) unless it is caught."""

    def __init__(self) -> None:
        super().__init__(143)


class RestartError(TrainerError, RuntimeError):
    """torchelastic (torchrun) restarts a fit again and again that gets no further; the message says from which step."""


class StallError(TrainerError, RuntimeError):
    """A rank waited for the others longer than `Trainer(timeout=)`; the message says where each of them was."""
