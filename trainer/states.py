"""What a trainer is doing, in words. Each member is a string, so `trainer.state.fn == "fit"` holds as well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["RunningStage", "TrainerFn", "TrainerState", "TrainerStatus"]


class _Word(str, Enum):
    __str__ = str.__str__
    __format__ = str.__format__


class TrainerFn(_Word):
    """The function of a trainer that was called; also the `stage` of `setup` and `teardown`."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Word):
    """What a running function is at: a fit also validates."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True in validation and test."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class TrainerStatus(_Word):
    """How the last run stands. An exception makes it "failed", Ctrl-C and SIGTERM make it "interrupted"."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass
class TrainerState:
    """Which function runs (a TrainerFn), in which stage (a RunningStage), and how it stands (a TrainerStatus)."""

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING

    @property
    def finished(self) -> bool:
        """True when the last run came to its end."""
        return self.status == TrainerStatus.FINISHED
