"""Worker processes of DataLoaders: how they start, what they hear, and that they end, whatever process of the run is killed.

Torch's workers and their rank share an event, by which the workers learn that they are to end. Python's has a lock: a process killed while it holds
it leaves the others waiting for it forever, the rank inside `Event.set`, the workers inside `Event.is_set`. Ours has none. A worker that waits for
something else that nobody will ever give (or for its data set) looks by itself whether its rank is alive.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawValue
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from trainer.signals import ENDING

__all__ = ["Reader", "end_kept_workers", "end_workers", "sheltered"]

_ENDING_S = 1.0  # how long the end of a process may take after that of its connections
_LOOK_S = 1.0  # how often a worker asks who its parent is, where the pipe from it does not tell


@contextmanager
def sheltered(loader: DataLoader, keyed: bool = False) -> Iterator[None]:
    """Workers that `loader` starts inside begin with `WorkerInit`; until then they collect no garbage.

    Args:
        keyed: the loader's data set is a fetcher of ours, which holds the user's.
    """
    if not loader.num_workers:
        yield
        return
    plain, context, collects = loader.worker_init_fn, loader.multiprocessing_context, gc.isenabled()
    before = set(multiprocessing.active_children())
    loader.worker_init_fn = WorkerInit(plain, collects, keyed)
    loader.multiprocessing_context = _with_flags(context or multiprocessing.get_context())
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        loader.worker_init_fn, loader.multiprocessing_context = plain, context
        for worker in set(multiprocessing.active_children()) - before:  # they do not hear SIGTERM, torch's last means
            worker._popen.terminate = worker._popen.kill


class _Flag:
    """What torch uses of a `multiprocessing.Event`, as one byte of shared memory."""

    def __init__(self) -> None:
        self._byte = RawValue("b", 0)

    def set(self) -> None:
        self._byte.value = 1

    def is_set(self) -> bool:
        return bool(self._byte.value)


def _with_flags(context: Any) -> Any:
    """Return a copy of a multiprocessing context whose events are flags."""
    context = copy.copy(context)
    context.Event = _Flag
    return context


class WorkerInit:
    """What a worker does first: hear no signal that is for the rank, leave with the rank, then the user's `worker_init_fn`.

    SIGTERM and SIGUSR1 do nothing to a worker: Slurm, or who signals a process group, sends them to all, and the rank still needs its
    workers up to the boundary at which it saves. They end with the rank. (A handler, for what is ignored stays so in programs they start.)

    What a forked worker inherits is never collected there: among it may be garbage of the rank (a process group, a DDP wrapper of
    an earlier fit) whose destructor waits for threads that only the rank has.

    `get_worker_info().dataset` is the user's data set, as without us.
    """

    def __init__(self, function: Callable[[int], None] | None, collects: bool, keyed: bool) -> None:
        self.function, self.collects, self.keyed = function, collects, keyed

    def __call__(self, worker_id: int) -> None:
        gc.freeze()
        if self.collects:
            gc.enable()
        for number in ENDING:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
        threading.Thread(target=_leave_with, args=(multiprocessing.parent_process(),), daemon=True).start()
        if self.keyed:
            info = get_worker_info()
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses plain assignment
        if self.function is not None:
            self.function(worker_id)


def _nothing(number: int, frame: Any) -> None:
    """The handler of a signal that is not for this process."""


def _leave_with(parent: Any) -> None:
    """End this process as soon as `parent` has ended, whatever its main thread is waiting for.

    The pipe tells at once, but not while a process that was forked later holds its other end; whose child this is tells then.
    """
    place = os.getppid()
    while parent.is_alive() and os.getppid() == place:
        parent.join(_LOOK_S)
    os._exit(1)


class Reader:
    """A DataLoader's iterator. Where a worker was killed that says so, and not that a connection to somebody was reset."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except (ConnectionError, EOFError) as error:
            dead = self._dead()
            if dead is None:
                raise
            how = f"was killed by signal {-dead.exitcode}" if dead.exitcode < 0 else f"ended with the exit code {dead.exitcode}"
            raise RuntimeError(f"A worker of the DataLoader (pid {dead.pid}) {how}, while a batch was read from it.") from error

    def _dead(self) -> Any:
        """A worker that ended as it should not have. Its connections end a moment before it does."""
        workers = getattr(self._iterator, "_workers", ())
        deadline = time.monotonic() + _ENDING_S
        while workers and not any(worker.exitcode for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.01)
        return next((worker for worker in workers if worker.exitcode), None)

    def _shutdown_workers(self) -> None:
        end_workers(self._iterator)


def end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator now, whoever else still holds it (a traceback, say)."""
    stop = getattr(iterator, "_shutdown_workers", None)
    if stop is not None:
        stop()


def end_kept_workers(loader: Any) -> None:
    """End the persistent workers of a DataLoader, which outlive its passes; the next pass starts new ones."""
    iterator = getattr(loader, "_iterator", None)
    if isinstance(loader, DataLoader) and iterator is not None:
        end_workers(iterator)
        loader._iterator = None
