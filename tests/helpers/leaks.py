"""What a test may leave behind: nothing. `Snapshot.take()` before a test, `leaks()` after it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch.distributed

__all__ = ["MARK", "Snapshot"]

ROOT = Path(__file__).resolve().parents[2]
MARK = "TRAINER_TEST_SESSION"  # in the environment of all that a test session starts: finds processes that lost their parent
_GRACE_S = 30.0  # processes and threads that are on their way out may finish
_CACHES = {".git", ".pytest_cache", ".venv", ".coverage", "__pycache__"}
# torch sets the latter two: when the first optimizer is made, and when the first compiled code is loaded.
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


@dataclass
class Snapshot:
    """The state of the test process that a test must put back."""

    environment: dict[str, str]
    processes: set[int]
    threads: set[int | None]
    files: set[str]
    handlers: dict[signal.Signals, Any]

    @classmethod
    def take(cls) -> Snapshot:
        """Read the state as it is now."""
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        threads = {thread.ident for thread in threading.enumerate()}
        return cls(_environment(), _processes(), threads, _files(), handlers)

    def leaks(self, grace_s: float = _GRACE_S) -> list[str]:
        """Say what differs now, one line each, and put it right, so that the next test starts clean."""
        found = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            found.append("an open torch.distributed process group")
        _wait_until(lambda: not self._new_processes() and not self._new_threads(), grace_s)
        for pid in self._new_processes():
            found.append(f"process {pid}: {_command(pid)}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found += [f"thread {thread.name} (not a daemon)" for thread in self._new_threads()]
        found += self._environment_changes()
        found += [f"{name} in the repository" for name in sorted(_files() - self.files)]
        for number, handler in self.handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
                found.append(f"a handler for {number.name}")
        return found

    def _new_processes(self) -> set[int]:
        return _processes() - self.processes

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if not thread.daemon and thread.ident not in self.threads]

    def _environment_changes(self) -> list[str]:
        now = _environment()
        names = sorted(name for name in {*now, *self.environment} if now.get(name) != self.environment.get(name))
        lines = [f"environment variable {name}: {self.environment.get(name)!r} -> {now.get(name)!r}" for name in names]
        for name in names:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                del os.environ[name]
        return lines


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _files() -> set[str]:
    return set(os.listdir(ROOT)) - _CACHES


def _processes() -> set[int]:
    """Live processes that descend from this one or carry this session's mark (Linux; elsewhere none are seen)."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(entry.name)] = int(parent)
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                marked.add(int(entry.name))
    own = os.getpid()
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {pid for pid in parents if pid not in servers and pid != own and (pid in marked or _descends(pid, own, parents))}


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "(gone)"


def _wait_until(condition: Callable[[], bool], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
