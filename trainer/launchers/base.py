"""What a launcher is, and the one that launches nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from trainer.errors import MisconfigurationException, TrainerError
from trainer.world import World

__all__ = ["InProcessLauncher", "Launcher", "ProcessError"]

T = TypeVar("T")


class ProcessError(TrainerError, RuntimeError):
    """A rank's process ended without handing back a result or an exception: killed, crashed, or left through `os._exit`."""


class Launcher(ABC):
    """Calls a task in every process of a run, handing each its `World`."""

    name: ClassVar[str]
    world: World | None = None  # of a process that was started already; None for a launcher that makes processes

    @abstractmethod
    def launch(self, task: Callable[[World], T]) -> T:
        """Call `task(world)` in each process; return this process's result, or rank 0's where the processes are children."""

    def check(self, processes_per_node: int | None = None, num_nodes: int | None = None) -> None:
        """Compare what a Trainer asks for with the processes that exist, before any of them waits for another.

        Raises:
            MisconfigurationException: when the processes were started by somebody else in another number.
        """


class InProcessLauncher(Launcher):
    """Calls the task here and now, as the only rank."""

    name = "in-process"
    world = World()

    def launch(self, task: Callable[[World], T]) -> T:
        """Return `task(World())`; exceptions pass through untouched."""
        return task(World())

    def check(self, processes_per_node: int | None = None, num_nodes: int | None = None) -> None:
        """One process on one node is all there is (see `Launcher.check`)."""
        for name, wanted in (("processes", processes_per_node), ("nodes", num_nodes)):
            if wanted not in (None, 1):
                raise MisconfigurationException(f"one process cannot act as {wanted} {name}; choose another launcher.")
