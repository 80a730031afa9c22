"""The life of one local rank: load the task, run it, hand back its result or its exception."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.launchers import bulk
from trainer.launchers.environment import TorchrunLauncher
from trainer.launchers.supervisor import Line
from trainer.launchers.transport import Report, dumps, loads, write_whole
from trainer.signals import ENDING
from trainer.world import World

__all__ = ["main", "work"]


def main(folder: str, line: Line) -> None:
    """Run the task stored in `folder` (see `work`), and end the process."""
    take_filters(folder)
    work(folder, line, lambda: bulk.read(os.path.join(folder, "task")))
    leave()


def work(folder: str, line: Line, load: Callable[[], Callable[[World], Any]]) -> None:
    """Run the task that `load` returns; leave the result (rank 0) or a report of the exception in `folder`.

    Nothing is printed about an exception: the launching process raises it, once.
    """
    rank = int(os.environ["RANK"])
    try:
        task = load()
        result = task(TorchrunLauncher().world)
        if rank == 0:
            write_whole(os.path.join(folder, "result"), dumps(result))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they belong to the caller
        report = Report.of(rank, error)
        if report.kind == "stopped":  # some are told twice: by the launcher, and by who told the launcher
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
        write_whole(os.path.join(folder, f"report.{rank}"), dumps(report))
        sys.stdout.flush()
        line.failed(report.kind)
        sys.exit(1)
    line.done()


def take_filters(folder: str) -> None:
    """Show and hide the warnings that the launching process shows and hides."""
    filters = loads(Path(folder, "filters").read_bytes())
    warnings.resetwarnings()
    warnings.filters.extend(filters)


def leave() -> None:
    """End the process with exit code 0, without tearing the interpreter down.

    gloo's threads outlive their process group. One that drops its last tensor while the interpreter is being torn down aborts
    the process, and a run that ended well would be told as a crash.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
