"""Waiting for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["gone", "wait_for"]


def gone(pid: int) -> bool:
    """True when a process has ended (a zombie that nobody reaped yet counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Return when `condition()` is true; fail when it is not after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
