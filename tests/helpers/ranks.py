"""Real ranks for tests: `run_ranks(fn, world_size=2)` calls `fn()` in that many processes, set up as torchrun would.

The processes are forked from one server that has torch loaded already (a forkserver that lives as long as the test session), so
a start costs a fraction of a second instead of two.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from trainer.launchers.rendezvous import loopback_store
from trainer.launchers.transport import Report, dumps, loads

__all__ = ["RankError", "RemoteTraceback", "run_ranks"]

ROOT = Path(__file__).resolve().parents[2]
# What every fit loads anyway. torch._dynamo: torch loads it, for a second or two, when the first optimizer of a process is made.
_PRELOAD = [
    *("numpy", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.pipelining", "torch.nn.attention", "torch.utils.serialization"),
    *("cloudpickle", "trainer", "trainer.trainer", "trainer.strategies.model_parallel", "trainer.strategies.sharding"),
    *("callbacks.checkpoint", "callbacks.loggers.plain", "tests.helpers.modules", __name__),
]
_GRACE_S = 3.0  # how long the other ranks may take to end after the first one failed
_REASON_S = 30.0  # the same after one lost its connection, whose reason another rank is yet to tell


class RankError(RuntimeError):
    """A rank ended without handing back a result or an exception: it was killed or left through os._exit."""


class RemoteTraceback(Exception):
    """The cause of an exception re-raised from a rank; its text is the traceback as that rank saw it."""

    def __str__(self) -> str:
        return str(self.args[0])


def run_ranks(fn: Callable[..., Any], world_size: int = 2, timeout: float = 180, **kwargs: Any) -> list[Any]:
    """Call `fn(**kwargs)` in `world_size` processes at once and return their results by rank.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and torchelastic's names in its environment, beside
    the caller's own environment, and starts in the caller's working directory. It does not open a process group. `fn`, its
    arguments and its results travel by cloudpickle, functions and classes of a test module by value.

    Raises:
        the exception of the rank that failed first, with `RemoteTraceback` as its cause. That a rank lost its connection to one that
            failed may be known before the reason is, so such an error counts only where no rank gives another.
        RankError: a process died without a word.
        TimeoutError: not all had ended after `timeout` seconds; the message shows the stacks of those that hung.
    """
    task = _dumps(fn, kwargs)
    context = _start_server()
    folder = tempfile.mkdtemp(prefix="ranks-")  # where ranks that hang write their stacks
    processes, readers = [], []
    try:
        _store, port = loopback_store()  # held by the test, as torchrun holds it
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            environment = {**os.environ, **_torchrun_environment(rank, world_size, port)}
            stacks = os.path.join(folder, f"{rank}.txt")
            process = context.Process(target=_child, args=(task, writer, environment, stacks), name=f"rank-{rank}")
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        return _collect(processes, readers, timeout, folder)
    finally:
        for process in processes:
            _kill_session(process)
        for reader in readers:
            reader.close()
        shutil.rmtree(folder, ignore_errors=True)


def _dumps(fn: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    """Pickle the task; what a test module defines goes by value, so that a rank need not import the module (and pytest)."""
    names = {getattr(value, "__module__", None) for value in (fn, *kwargs.values())}
    modules = [sys.modules[name] for name in names if name in sys.modules and name.rpartition(".")[2].startswith("test_")]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps((fn, kwargs))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _collect(processes: list[Any], readers: list[Connection], timeout: float, folder: str) -> list[Any]:
    """Wait for every rank's answer; the first failure ends the wait for the others after a short grace."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failed: BaseException | None = None
    victim = False
    pending = {reader: rank for rank, reader in enumerate(readers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if failed is not None:
                break
            raise TimeoutError(f"ranks {sorted(pending.values())} still ran after {timeout} s.\n{_stacks(processes, pending, folder)}")
        for reader in ready:
            rank = pending.pop(reader)
            try:
                kind, answer = loads(reader.recv_bytes())
            except EOFError:
                processes[rank].join()
                kind, answer = "died", RankError(f"rank {rank} died with exit code {processes[rank].exitcode}.")
            if kind and (failed is None or (victim and kind != "victim")):
                failed, victim = answer if isinstance(answer, BaseException) else _with_traceback(rank, *answer), kind == "victim"
                deadline = min(deadline, time.monotonic() + (_REASON_S if victim else _GRACE_S))
            results[rank] = answer
    if failed is not None:
        raise failed
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    slow = {None: r for r, p in enumerate(processes) if p.is_alive()}
    if slow:
        raise TimeoutError(f"a rank gave its result but did not end within {timeout} s.\n{_stacks(processes, slow, folder)}")
    return [results[rank] for rank in sorted(results)]


def _with_traceback(rank: int, pickled: bytes | None, text: str) -> BaseException:
    try:
        error = loads(pickled) if pickled is not None else RankError(text)
    except Exception:
        error = RankError(text)
    error.__cause__ = RemoteTraceback(f"\n\nrank {rank}:\n{text}")
    return error


def _stacks(processes: list[Any], pending: dict[Any, int], folder: str) -> str:
    """Ask the ranks that hang for the stacks of their threads (SIGUSR1 -> faulthandler) and return them."""
    texts = []
    for rank in sorted(pending.values()):
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    for rank in sorted(pending.values()):
        path = Path(folder, f"{rank}.txt")
        while path.exists() and "in <module>\n" not in path.read_text() and time.monotonic() < deadline:  # where the main thread's stack ends
            time.sleep(0.05)  # the handler runs also inside a blocked C call; only the process has to get its turn
        texts.append(f"--- rank {rank} ---\n{path.read_text() if path.exists() else '(not started)'}")
    return "\n".join(texts)


def _kill_session(process: Any) -> None:
    """Kill a rank with all it started (it leads a session of its own) and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def _start_server() -> Any:
    """Return the forkserver context, its server running. The server starts with `python -c`: it needs PYTHONPATH to preload."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def _child(task: bytes, writer: Connection, environment: dict[str, str], stacks: str) -> None:
    """One rank: take the caller's environment, run the task, answer ("", result) or (kind of failure, (pickled exception, text))."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives a killed test session
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not the server's: loader workers start as in any rank
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            fn, kwargs = loads(task)
            answer = dumps(("", fn(**kwargs)))
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: the test decides what they mean
            report = Report.of(int(environment["RANK"]), error)
            answer = dumps((report.kind, (report.error, report.text)))
        writer.send_bytes(answer)
        writer.close()
        faulthandler.unregister(signal.SIGUSR1)
