"""What a launch changes in the process that starts the ranks, and puts back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing import SignalException

from trainer.signals import caught_natively

__all__ = ["ParentState"]

_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class ParentState:
    """What a launch changes in this process, put back: signal handlers and a variable; and torchelastic's loggers, silent meanwhile.

    They warn of each rank that is stopped, and report events as they happen; the exception that is raised says what matters.

    Launches from several threads may overlap: the first saves what they share, and the last puts it back.
    """

    _lock = threading.Lock()
    _users = 0
    _variable: str | None = None
    _silenced: ClassVar[list[logging.Logger]] = []

    def __init__(self, saves_on: Iterable[str] = ()) -> None:
        self._passed = [getattr(signal, name) for name in ("SIGTERM", *saves_on) if hasattr(signal, name)]
        self._told = False

    def __enter__(self) -> None:
        sys.stdout.flush()  # the ranks write to the same streams
        sys.stderr.flush()
        cls = ParentState
        with cls._lock:
            if cls._users == 0:
                cls._variable = os.environ.get(_SIGNALS_VARIABLE)
                cls._silenced = [logger for logger in _elastic_loggers() if not logger.disabled]
                for logger in cls._silenced:
                    logger.disabled = True
            cls._users += 1
        signals = [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *self._passed]
        on_main = threading.current_thread() is threading.main_thread()  # elsewhere torchelastic installs no handlers
        self._handlers = {number: signal.getsignal(number) for number in signals} if on_main else {}
        for number, handler in self._handlers.items():
            foreign = handler is signal.SIG_DFL and caught_natively(number)
            if number in self._passed and handler not in (None, signal.SIG_IGN) and not foreign:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: Any) -> None:
        """Let torchelastic tell the ranks, once: while they save, another signal must not cut that short."""
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        if not self._told:
            self._told = True
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._handlers.items():
            if handler is not None:  # None: it was not installed from Python and cannot be put back
                signal.signal(number, handler)
        cls = ParentState
        with cls._lock:
            cls._users -= 1
            if cls._users == 0:
                for logger in cls._silenced:
                    logger.disabled = False
                os.environ.pop(_SIGNALS_VARIABLE, None)
                if cls._variable is not None:
                    os.environ[_SIGNALS_VARIABLE] = cls._variable


def _elastic_loggers() -> list[logging.Logger]:
    """torchelastic's loggers, and that of the module it forks with; some have a level of their own, so silencing their parent would not do."""
    prefixes = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    return [logging.getLogger(name) for name in (*names, "torchelastic-events-null")]
