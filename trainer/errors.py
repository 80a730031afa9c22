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
    "CheckpointError",
    "DataError",
    "MisconfigurationException",
    "SIGTERMException",
    "TrainerError",
    "nearest",
]


class SIGTERMException(SystemExit):
    """Raised at a step boundary after SIGTERM; ends the process with the exit code 143 (128 + 15) unless it is caught."""

    def __init__(self) -> None:
        super().__init__(143)
