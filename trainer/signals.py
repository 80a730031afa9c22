"""Signals that ask a fit to end: SIGTERM, and SIGUSR1, Slurm's notice ahead of it. A handler notes them; the loop acts at the boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any

from torch.utils.data import get_worker_info

__all__ = ["ENDING", "SIGNALS", "STOP", "USR1", "Notice", "caught_natively"]

STOP, TERM, USR1 = 1, 2, 4
"""What a rank may wish at a boundary, as bits: to stop, as `should_stop` says; to end because of a signal."""
SIGNALS = TERM | USR1

ENDING = {number: bit for name, bit in (("SIGTERM", TERM), ("SIGUSR1", USR1)) if (number := getattr(signal, name, None)) is not None}


class Notice:
    """The signals that this process has got during a fit.

    A handler can be installed in the main thread only; in another thread nothing is noted, and signals do what they did before. One
    that is ignored stays ignored (nohup), and so does a handler that was not installed from Python (faulthandler): it could not be put back.

    Args:
        error: what a signal raises while there is no boundary to wait for.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.bits = 0
        self.waits = False  # True from the moment on when there is a boundary to wait for
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Listen from now on. Handlers of the user's are called as well."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN) and not (handler is signal.SIG_DFL and caught_natively(number)):
                self._before[number] = handler
                signal.signal(number, self._note)

    def close(self) -> None:
        """Put the handlers back, but for one that somebody else has set meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()

    @property
    def name(self) -> str:
        """The signal that asked: SIGTERM where both came."""
        return "SIGTERM" if self.bits & TERM else "SIGUSR1"

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            self._note_in_a_fork(number)
            return
        self.bits |= ENDING[number]
        handler = self._before.get(number)
        if callable(handler):
            handler(number, frame)
        if not self.waits:  # setting up: there is nothing to save yet, so it ends here, as on Ctrl-C
            self.waits = True
            raise self.error

    def _note_in_a_fork(self, number: int) -> None:
        """Do in a process that was forked during the fit what the signal did before it: who made the process may want to end it.

        Workers of a loader class of the user's own are spared: the rank still needs them up to the boundary. (SIGTERM they do not
        hear here, as torch gives them a handler of its own.)
        """
        if get_worker_info() is None:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def caught_natively(number: int) -> bool:
    """True when the system says that a handler is installed (Linux only), whatever Python knows of it."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False
