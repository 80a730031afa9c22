"""Processes of this machine that begin as copies of this one: a start takes a fraction of a second, and nothing is pickled."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.errors import MisconfigurationException
from trainer.launchers.local import LocalLauncher, loopback
from trainer.launchers.rank import work
from trainer.launchers.supervisor import Line
from trainer.launchers.transport import share_classes
from trainer.world import World

__all__ = ["ForkLauncher", "unforkable"]

T = TypeVar("T")
_BACKWARD = "pt_autograd"  # the name of the threads that torch starts, one a GPU, with the first backward pass


class ForkLauncher(LocalLauncher):
    """A LocalLauncher whose ranks are forked: they see all that this process holds, share its memory until they write to it, and load nothing.

    For notebooks and short runs. The threads of a process do not survive a fork, so the ranks compute with one thread each on the CPU; and
    what belongs to a process must not exist yet: a CUDA context, or (on machines with a GPU) the threads of a backward pass.
    """

    name = "fork"
    _start_method = "fork"

    def launch(self, task: Callable[[World], T]) -> T:
        """Call `task(world)` in each new process; return rank 0's result once all have ended. See `LocalLauncher.launch`.

        Raises:
            MisconfigurationException: a copy of this process could not work (see `unforkable`).
        """
        if reason := unforkable():
            raise MisconfigurationException(f"{reason} Use strategy='ddp', which starts new processes.")
        return self._launch(task, lambda folder: (_forked, folder, task))


def unforkable() -> str:
    """Return why a copy of this process could not train, or ""."""
    if torch.cuda.is_initialized():
        return "This process has used CUDA, and a copy of it could not. Fit before anything else touches a GPU."
    threads = (Path("/proc/self/task", thread, "comm") for thread in os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else ()
    if any(_BACKWARD in _first_line(thread) for thread in threads):
        return "On a machine with a GPU, a process that has run a backward pass cannot be copied for another. Fit first."
    if "fork" not in multiprocessing.get_all_start_methods():
        return "This system cannot fork."
    return ""


def _first_line(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""


def _forked(folder: str, task: Callable[[World], Any]) -> None:
    """The life of a rank, from the fork on."""
    os.setsid()  # it can then be killed with all that it starts
    torch.multiprocessing._prctl_pr_set_pdeathsig(0)  # that the launching process died is told by the line, which cleans up after it
    for number in signal.valid_signals():  # the handlers are those of the launching process; a new one would have none
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name, value in loopback().items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    share_classes()
    line = Line(folder, int(os.environ["RANK"]))
    work(folder, line, lambda: task)
