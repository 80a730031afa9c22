"""The life of one local rank: load the task, run it, hand back its result or its exception."""

from __future__ import annotations

import atexit
import os
import sys

from trainer.launchers import bulk
from trainer.launchers.environment import TorchrunLauncher
from trainer.launchers.supervisor import Line
from trainer.launchers.transport import Report, dumps, write_whole

__all__ = ["main"]


def main(folder: str, line: Line) -> None:
    """Run the task stored in `folder`; leave the result (rank 0) or a report of the exception there.

    Nothing is printed about an exception: the launching process raises it, once.
    """
    rank = int(os.environ["RANK"])
    try:
        task = bulk.read(os.path.join(folder, "task"))
        result = task(TorchrunLauncher().world)
        if rank == 0:
            write_whole(os.path.join(folder, "result"), dumps(result))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they belong to the caller
        report = Report.of(rank, error)
        write_whole(os.path.join(folder, f"report.{rank}"), dumps(report))
        sys.stdout.flush()
        line.failed(report.kind)
        sys.exit(1)
    line.done()
    leave()


def leave() -> None:
    """End the process with exit code 0, without tearing the interpreter down.

    gloo's threads outlive their process group. One that drops its last tensor while the interpreter is being torn down aborts
    the process, and a run that ended well would be told as a crash.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
