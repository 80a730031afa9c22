"""One call of `fit`, `validate`, `test` or `predict`, in the form in which it travels to the processes that do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import outcome
from trainer.datamodule import DataModule
from trainer.module import TrainModule
from trainer.seed import rng_state, set_rng_state
from trainer.world import World

__all__ = ["Job", "Task"]


@dataclass
class Job:
    """What was asked for."""

    fn: str
    module: TrainModule
    datamodule: DataModule | None
    loaders: dict[str, Any]
    ckpt_path: str | None
    continues: bool = False
    """The file is the newest of a run that goes on here ("last", "auto"), so it is this run's to replace."""
    weights_only: bool = True
    verbose: bool = True
    return_predictions: bool = True
    work: Callable[[Any], Any] | None = None
    """What is done with the open run in place of the loop of `fn`: a search, in which no callbacks take part."""


class Task:
    """A job and its trainer, callable in the process of one rank."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self.job, self.trainer = job, trainer
        self.saves_on = ("SIGUSR1",) if job.fn == "fit" else ()  # what a launcher passes on besides SIGTERM
        self.rng = rng_state(devices=False)  # rank 0 continues the caller's random streams

    def __call__(self, world: World) -> dict[str, Any] | None:
        if world.rank == 0:
            set_rng_state(self.rng)
        given = list(self.trainer.callbacks)
        self.trainer._launcher = None  # nobody is launched from here (a forked rank has the caller's own trainer)
        value = self.trainer.execute(world, self.job)
        return outcome.collect(self.trainer, self.job, value, given) if world.rank == 0 else None
