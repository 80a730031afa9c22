"""Processes of this machine, started by torchelastic from any program: a script without a guard, a notebook, a thread.

What travels is a pickled task in a private folder, so the ranks never import the caller's main script, and its top-level code
runs once. See `worker` for what a rank does, and `supervisor` for how ends are noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.errors import MisconfigurationException, SIGTERMException
from trainer.launchers import bulk
from trainer.launchers.base import Launcher, ProcessError
from trainer.launchers.blame import culprit
from trainer.launchers.parent import ParentState
from trainer.launchers.rendezvous import BACKEND, checks
from trainer.launchers.supervisor import Event, RankLeft, Supervisor, socket_path
from trainer.launchers.transport import Report, dumps, loads
from trainer.signals import ENDING
from trainer.world import World

__all__ = ["LocalLauncher"]

T = TypeVar("T")
_WORKER = Path(__file__).with_name("worker.py")
GRACE_S = 30.0
_SOCKET_PATH_LIMIT = 100  # bytes; the systems' own limits are 104 and 108


class LocalLauncher(Launcher):
    """Runs a task in `num_processes` new processes of this machine and returns rank 0's result.

    The task is any callable that cloudpickle can send: functions and classes of the main script, lambdas, closures. The ranks
    start in the caller's working directory with its import path and environment, and print where the caller prints. They share
    the machine's cores: OMP_NUM_THREADS is set to cores / processes (at least 1) where it is unset, so that CPU training uses
    the whole machine and no core twice; torchrun's value, 1, would leave the rest idle. All sockets are bound to loopback.

    SIGTERM is passed on to the ranks, and so is SIGUSR1 to those of a fit, which save at the coming boundary; whatever else ends this
    process ends them at once.

    Args:
        num_processes: how many ranks.
        grace_s: for how long (seconds) ranks that were told to end may take for it, a save included; then they are killed.
    """

    name = "local"
    _start_method = "spawn"  # of a function as entry; a program is started anew

    def __init__(self, num_processes: int, grace_s: float = GRACE_S) -> None:
        if num_processes < 1:
            raise MisconfigurationException(f"the local launcher needs at least 1 process, got {num_processes}.")
        if grace_s < 0:
            raise MisconfigurationException(f"LocalLauncher(grace_s={grace_s}) must be a number of seconds >= 0.")
        self.num_processes, self.grace_s = num_processes, grace_s

    def check(self, processes_per_node: int | None = None, num_nodes: int | None = None) -> None:
        """The processes are ours to make, on this one machine (see `Launcher.check`)."""
        if num_nodes not in (None, 1):
            raise MisconfigurationException(
                f"num_nodes={num_nodes} needs a launcher on every node: start the program with torchrun or srun."
            )
        if processes_per_node not in (None, self.num_processes):
            raise MisconfigurationException(f"devices={processes_per_node} differs from the launcher's {self.num_processes} processes.")

    def launch(self, task: Callable[[World], T]) -> T:
        """Call `task(world)` in each new process; return rank 0's result once all have ended.

        However this ends, no process, no file and no signal handler of it is left.

        Raises:
            the exception of the rank that failed first, of its own type, with the rank and its traceback as a note (as the
                cause on Python 3.10); a RuntimeError carrying its text where it cannot be pickled. The other ranks end within
                about three seconds.
            ProcessError: a rank was killed or left without a word.
            KeyboardInterrupt, SIGTERMException: this process got the signal; the ranks got it as well and have ended.
            MisconfigurationException: the task cannot be pickled.
        """
        apart = bulk.Apart()
        try:
            payload = dumps(task, apart)
        except Exception as error:
            where = culprit(task, fails=_cannot_travel)
            raise MisconfigurationException(
                f"the task cannot be sent to the ranks: {error}{f'; it is {where}' if where else ''}. Make open files, locks and handles in "
                "`setup` or another hook of the run, or drop them in `__getstate__`."
            ) from error

        def program(folder: str) -> tuple[Any, ...]:
            Path(folder, "filters").write_bytes(dumps(list(warnings.filters)))
            _write_start(folder, self.num_processes)
            bulk.write(os.path.join(folder, "task"), payload, apart)
            return sys.executable, str(_WORKER), folder

        return self._launch(task, program, bulk.base_folder(apart.size))

    def _launch(self, task: Any, program: Callable[[str], tuple[Any, ...]], base: str | None = None) -> Any:
        """Start what `program(folder)` names (an executable or a function, and its arguments) as the ranks of `task`."""
        try:
            with _private_folder(base) as folder, ParentState(getattr(task, "saves_on", ())):
                failure = self._run(folder, *program(folder))
                if failure is None:
                    return _result(folder)
        except SignalException as error:  # torchelastic's; its ranks have got the signal and ended
            failure = _stopped_by(error.sigval)
        raise failure from None

    def _run(self, folder: str, entry: Any, *args: Any) -> BaseException | None:
        """Start the ranks and wait for all to end; return the exception to raise, if any."""
        exits: dict[int, int] = {}
        with Supervisor(folder, self.num_processes) as supervisor:
            config = self._config(folder)
            checks[config.run_id] = supervisor.check
            try:
                elastic_launch(config, entry)(*args)
            except RankLeft:
                pass
            except ChildFailedError as error:
                exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            finally:
                del checks[config.run_id]
        chosen = _first_failure(supervisor.events, supervisor.killed, exits)
        return None if chosen is None else _exception(folder, chosen, supervisor.events, exits)

    def _config(self, folder: str) -> LaunchConfig:
        wanted: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": self.num_processes,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": BACKEND,
            "local_addr": "127.0.0.1",
            "max_restarts": 0,
            "monitor_interval": 0.05,
            "start_method": self._start_method,
            "logs_specs": DefaultLogsSpecs(log_dir=os.path.join(folder, "elastic")),
            "shutdown_timeout": max(1, round(self.grace_s)),
            # A signal that the caller ignores (nohup, a shell's background job) stays ignored.
            "signals_to_handle": "SIGINT" if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else "",
        }
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # the last two are younger than torch 2.9
        return LaunchConfig(**{name: value for name, value in wanted.items() if name in known})


def _cannot_travel(value: Any) -> bool:
    try:
        dumps(value, bulk.Apart())
    except Exception:
        return True
    return False


def _result(folder: str) -> Any:
    try:
        data = Path(folder, "result").read_bytes()
    except FileNotFoundError:
        raise ProcessError("rank 0 left without a result (exit code 0): did the task call os._exit?") from None
    return loads(data)


def _stopped_by(number: signal.Signals) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return SIGTERMException() if number in ENDING else SystemExit(128 + number)


def _first_failure(events: list[Event], killed: set[int], exits: dict[int, int]) -> Event | None:
    """Choose the failure to tell: the first that is not the consequence of another."""
    for event in events:
        stopped = event.after_end and exits.get(event.rank, -signal.SIGTERM) == -signal.SIGTERM
        consequence = event.rank in killed or stopped
        if event.kind != "victim" and not (event.kind == "died" and consequence):
            return event
    if events:
        return events[0]
    return Event(min(exits), "died") if exits else None


def _exception(folder: str, event: Event, events: list[Event], exits: dict[int, int]) -> BaseException:
    if event.kind == "died":
        return ProcessError(_death(event.rank, exits.get(event.rank, 0)))
    report: Report = loads(Path(folder, f"report.{event.rank}").read_bytes())
    others = []
    for other in events:
        path = Path(folder, f"report.{other.rank}")
        if other is not event and path.exists():
            others.append(loads(path.read_bytes()).line)
    error = report.exception(others)
    if isinstance(error, SystemExit) and not error.code:  # success for a program, not for a rank that others wait for
        return ProcessError(f"rank {event.rank} left the run by sys.exit().")
    return error


def _death(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} left without a result (exit code {code}); what it printed last says why."
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    hint = " The system may have run out of memory." if -code == signal.SIGKILL else ""
    return f"rank {rank} was killed by signal {-code} ({name}).{hint}"


def _write_start(folder: str, num_processes: int) -> None:
    """Store what the ranks need before and after they can load torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    start = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "argv": sys.argv,
        "environment": {
            "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
            **loopback(),
        },
    }
    Path(folder, "start.json").write_text(json.dumps(start), encoding="utf-8")


def loopback() -> dict[str, str]:
    """Variables that keep the ranks of one machine on its loopback interface."""
    interface = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


@contextlib.contextmanager
def _private_folder(base: str | None = None) -> Iterator[str]:
    """A folder that only this user can read, and that is gone afterwards."""
    folder = tempfile.mkdtemp(prefix="trainer-", dir=base)
    if len(os.fsencode(socket_path(folder))) > _SOCKET_PATH_LIMIT:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="trainer-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
