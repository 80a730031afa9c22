"""The line between a launching process and its ranks: who is alive, who failed first, and when the rest has to go.

Each rank holds one connection to a socket in the launch's private folder. The kernel closes it when either end dies, however it
dies: the launcher learns at once that a rank is gone, and a rank that its launcher is gone, and then ends with all it started.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field

__all__ = ["Line", "RankLeft", "Supervisor", "socket_path"]

_RELEASE = b"r"
# After the first failure: how long the other ranks may live, and how long the failed rank waits for their word before it ends
# (its exit makes torchelastic stop them). A rank that lost its peer waits for the one that says why; ranks stopped by SIGTERM
# all leave at one step, each after its own clean-up.
_LIMITS_S = {"fault": (3.0, 0.0), "died": (3.0, 0.0), "victim": (3.0, 2.0), "interrupted": (30.0, 0.0), "stopped": (30.0, 30.0)}

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """A forked child (a data worker) must not keep a connection open whose end is a message."""
    for connection in list(_open_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close_inherited)


def socket_path(folder: str) -> str:
    """The socket's place in a launch's folder."""
    return os.path.join(folder, "line")


@dataclass
class _Rank:
    connection: socket.socket
    rank: int = -1
    pid: int = 0
    said: str = ""  # "", "done" or the kind of a failure
    received: bytes = b""
    release_at: float | None = None


@dataclass
class Event:
    """A rank's failure, in the order of time. `kind` is a report's kind, or "died" for an end without a word."""

    rank: int
    kind: str
    after_end: bool = False  # another rank that had failed had ended, or was free to, which makes torchelastic stop this one


class RankLeft(Exception):
    """Ends a launch that would wait for a rank that is gone."""


@dataclass
class Supervisor:
    """The launcher's end of the line, a thread that accepts the ranks, notes their failures and enforces the limits."""

    folder: str
    world_size: int
    events: list[Event] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)  # ranks that did not end by themselves in time

    def __enter__(self) -> Supervisor:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path(self.folder))
        self._listener.listen(self.world_size)
        self._wake, self._waker = socket.socketpair()
        self._ranks: list[_Rank] = []
        self._kill_at: float | None = None
        self._closing = False
        self._one_ended = False
        self._silent_since: float | None = None
        for one in (self._listener, self._wake, self._waker):
            _open_sockets.add(one)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._stop)
        self._thread = threading.Thread(target=self._run, name="trainer-supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Kill what still runs (there is something only after a forced stop) and end the thread."""
        self._waker.send(b"x")
        self._thread.join()
        pids = [rank.pid for rank in self._ranks]
        for rank in list(self._ranks):
            self._kill(rank)
            rank.connection.close()
        for one in (self._listener, self._wake, self._waker):
            one.close()
        self._selector.close()
        _reap(pids)

    def check(self) -> None:
        """Called by torchelastic while, as far as it knows, all is well: it misses a forked rank that leaves with exit code 0.

        Raises:
            RankLeft: a rank left without a word, a second ago or more.
        """
        if self._silent_since is not None and time.monotonic() > self._silent_since + 1.0:
            raise RankLeft

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._pause()):
                key.data()
            self._act_on_time()

    def _stop(self) -> None:
        self._closing = True

    def _pause(self) -> float | None:
        times = [rank.release_at for rank in self._ranks if rank.release_at is not None]
        times += [self._kill_at] if self._kill_at is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _act_on_time(self) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            if rank.release_at is not None and rank.release_at <= now:
                rank.release_at = None
                self._one_ended = True
                with contextlib.suppress(OSError):
                    rank.connection.send(_RELEASE)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            for rank in self._ranks:
                self._kill(rank)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _open_sockets.add(connection)
        rank = _Rank(connection)
        self._ranks.append(rank)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(rank))

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._gone(rank)
            return
        *lines, rank.received = (rank.received + data).split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            if word == "hello":
                rank.rank, rank.pid = map(int, numbers)
            else:
                rank.said = word
                if word != "done":
                    self._failed(rank, word)

    def _gone(self, rank: _Rank) -> None:
        self._selector.unregister(rank.connection)
        rank.connection.close()
        self._ranks.remove(rank)
        if rank.said != "done" and rank.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)  # its data workers: they would notice only after seconds
        if rank.said == "":
            self._silent_since = self._silent_since or time.monotonic()
            self._failed(rank, "died")
        self._one_ended |= rank.said != "done"
        self._release_when_all_spoke()

    def _failed(self, rank: _Rank, kind: str) -> None:
        self.events.append(Event(rank.rank, kind, self._one_ended))
        now = time.monotonic()
        life, wait = _LIMITS_S[kind]
        self._kill_at = now + life if self._kill_at is None else min(self._kill_at, now + life)
        rank.release_at = now + wait
        if kind == "fault":  # the reason is known: nobody needs to wait for it
            for other in self._ranks:
                if other.said == "victim":
                    other.release_at = now
        self._release_when_all_spoke()

    def _release_when_all_spoke(self) -> None:
        spoken = [rank for rank in self._ranks if rank.said]
        if len(spoken) == len(self._ranks):
            for rank in spoken:
                if rank.release_at is not None:
                    rank.release_at = 0.0

    def _kill(self, rank: _Rank) -> None:
        """Kill a rank and what it started. Its connection is open, so the number is still its own."""
        if rank.pid:
            self.killed.add(rank.rank)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)


def _reap(pids: list[int]) -> None:
    """Wait for killed children, so that they do not stay as zombies; torchelastic is no longer there to do it."""
    deadline = time.monotonic() + 2.0
    for pid in filter(None, pids):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)


class Line:
    """A rank's end of the line. When the launcher is gone, the rank goes as well, and takes the launch's folder with it."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._released = threading.Event()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open_sockets.add(self._connection)
        try:
            self._connection.connect(socket_path(folder))
            self._say(f"hello {rank} {os.getpid()}")
        except OSError:  # the launcher died while this process started
            _end_with_all(folder)
        threading.Thread(target=self._watch, name="trainer-line", daemon=True).start()

    def done(self) -> None:
        """The task returned, and its result is stored."""
        self._say("done")

    def failed(self, kind: str) -> None:
        """The task raised, and the report is stored; return when this rank may end (see `_LIMITS_S`)."""
        self._say(kind)
        self._released.wait(timeout=60)

    def _say(self, line: str) -> None:
        self._connection.sendall(line.encode() + b"\n")

    def _watch(self) -> None:
        while self._receive() == _RELEASE:
            self._released.set()
        _end_with_all(self._folder)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(1)
        except OSError:
            return b""


def _end_with_all(folder: str) -> None:
    """Remove what the dead launcher cannot remove, and kill this rank with all its own children."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():  # torchelastic starts each rank in a session of its own
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
