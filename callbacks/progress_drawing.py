"""How a pass over batches is shown: a tqdm bar on a terminal or in a notebook, rare plain lines in a file, or not at all.

Everything here runs only when something is drawn; the test whether to draw is `TQDMProgressBar`'s.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

DRAW_SECONDS = 0.1
"""Shortest time between two drawings of a bar."""

LINE_SECONDS = 10.0
LINE_SECONDS_MAX = 300.0
"""Plain lines: the first pause between two, doubled after each up to the second."""


class Bar(tqdm):
    """tqdm without its watching thread and its inter-process lock: one process draws, and nothing is left running."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())


class Pass:
    """One pass over a loader that is not shown; also the interface of those that are.

    `next_batch` and `next_time` say from which batch and which time.monotonic() on `draw` has something to do;
    the caller sets `done`, the number of batches that are over.
    """

    loader = 0
    next_batch: float = math.inf
    next_time: float = math.inf
    done = 0
    bar: Any = None

    def draw(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Show that `done` batches of the pass are over."""

    def end(self, metrics: Mapping[str, Any]) -> None:
        """Show the final state: `done` batches."""

    def close(self) -> None:
        """Release the bar."""


class BarPass(Pass):
    """A pass shown by tqdm."""

    def __init__(self, kind: type, every: int, description: str, total: float, position: int, leave: bool) -> None:
        self.every, self.next_batch, self.next_time = every, 1, 0.0
        self.bar = kind(
            desc=description,
            total=_finite(total),
            position=position,
            leave=leave,
            **_width(),
            file=sys.stdout,
            smoothing=0,
        )
        self.begun = False

    def draw(self, done: int, metrics: Mapping[str, Any]) -> None:
        if not self.begun:  # a resumed epoch begins in its middle: the rate counts from there
            self.begun, self.bar.initial = True, done - 1
        self.bar.n = done
        self.bar.set_postfix_str(_text(metrics), refresh=False)
        self.bar.refresh()
        self.next_batch = done + self.every
        self.next_time = time.monotonic() + DRAW_SECONDS

    def end(self, metrics: Mapping[str, Any]) -> None:
        self.bar.n = self.done
        self.bar.set_postfix_str(_text(metrics), refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()


class Lines:
    """Keeps plain lines rare over a whole run."""

    def __init__(self) -> None:
        self.pause = LINE_SECONDS
        self.last = -math.inf  # when a line was written
        self.unsaid: str | None = None

    def say(self, text: str) -> None:
        """Write a line."""
        print(text, flush=True)
        self.last, self.unsaid = time.monotonic(), None

    def say_if_due(self, text: str) -> None:
        """Write a line if the last is long enough ago, else keep it for `finish`."""
        if time.monotonic() - self.last >= LINE_SECONDS:
            self.say(text)
        else:
            self.unsaid = text

    def finish(self) -> None:
        """Write the line that was kept, if it is still the newest."""
        if self.unsaid is not None:
            self.say(self.unsaid)


class LinePass(Pass):
    """A pass shown by plain lines: while it lasts, and at its end always (`closing` "say"), if due ("due") or never ("")."""

    def __init__(self, lines: Lines, every: int, description: str, total: float, closing: str) -> None:
        self.lines, self.every, self.description, self.total, self.closing = lines, every, description, total, closing
        self.started = time.monotonic()
        self.next_batch, self.next_time = 1, 0.0  # the first batch is looked at, for where the pass begins
        self.first: int | None = None

    def draw(self, done: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done - 1
            self.next_time = max(self.started, self.lines.last) + self.lines.pause
        if now >= self.next_time:
            self.lines.say(self._line(now, metrics, over=False))
            self.lines.pause = min(2 * self.lines.pause, LINE_SECONDS_MAX)
            self.next_time = now + self.lines.pause
        self.next_batch = done + self.every

    def end(self, metrics: Mapping[str, Any]) -> None:
        if self.closing:
            text = self._line(time.monotonic(), metrics, over=True)
            (self.lines.say if self.closing == "say" else self.lines.say_if_due)(text)

    def _line(self, now: float, metrics: Mapping[str, Any], over: bool) -> str:
        took = now - self.started
        total = _finite(self.total)
        count = str(self.done) if total is None else f"{self.done}/{total}"
        here = self.done - (self.first or 0)
        if over or total is None:
            span = f"in {tqdm.format_interval(took)}"
        else:
            span = f"{tqdm.format_interval(took / here * (total - self.done))} left"
        return ", ".join(part for part in (f"{self.description}: {count}", span, _text(metrics)) if part)


def bar_class() -> type | None:
    """Return the tqdm class for where standard output goes, or None where plain lines are due."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and hasattr(shell, "kernel"):
        if importlib.util.find_spec("ipywidgets") is None:
            return None
        from tqdm.notebook import tqdm as notebook  # optional: needs ipywidgets

        return type("NotebookBar", (notebook,), {"monitor_interval": 0})
    return Bar if sys.stdout is not None and sys.stdout.isatty() else None


def _width() -> dict[str, Any]:
    """Follow the terminal's size; one that reports none (a container's, a CI job's) is taken for 80 by 24."""
    try:
        known = os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal underneath: a notebook
        known = True
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}


def _finite(total: float) -> int | None:
    return int(total) if math.isfinite(total) else None


def _text(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items())
