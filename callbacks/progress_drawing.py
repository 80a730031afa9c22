"""What progress bars are made of: a pass over batches and its numbers, rare plain lines for a file, the time that a fit still takes.

Everything here runs only when something is drawn; the test whether to draw is in `progress_passes.py`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["FitClock", "LinePass", "Lines", "Pass", "Status", "finite", "interval", "listed"]

DRAW_SECONDS = 0.1
"""Shortest time between two drawings of a bar."""

LINE_SECONDS = 10.0
LINE_SECONDS_MAX = 300.0
"""Plain lines: the first pause between two, doubled after each up to the second."""

STATUS_SECONDS = 2.0
"""What a run does ahead of its batches is told on a terminal when it lasts longer, in a file after LINE_SECONDS."""


class Pass:
    """One pass over a loader that is not shown; also the interface, and what is common, of those that are.

    `next_batch` and `next_time` say from which batch and which time.monotonic() on `draw` has something to do;
    the caller sets `done`, the number of batches that are over.

    Args:
        every: batches between two drawings.
        total: batches until the pass ends as far as it is known; infinite when it is not.
        whole: batches of a pass that begins at the first and is not cut short.
    """

    next_batch: float = math.inf
    next_time: float = math.inf
    done = 0
    over = False
    bar: Any = None

    def __init__(self, every: int = 1, description: str = "", total: float = math.inf, whole: float | None = None) -> None:
        self.every, self.description, self.total = every, description, total
        self.whole = total if whole is None else whole
        self.first: int | None = None  # a resumed epoch begins in its middle: the rate counts from there
        self.started = time.monotonic()

    def mark(self, done: int) -> None:
        """Take note of the first batch: what a limit leaves of the epoch is counted from there."""
        if self.first is None:
            self.first = done - 1
            self.total = min(self.whole, self.total + self.first)
        if done > self.total:
            self.total = math.inf if self.whole < done else self.whole

    def draw(self, done: int, metrics: Mapping[str, Any], left: float | None) -> None:
        """Show that `done` batches of the pass are over, and how many seconds the fit has `left`."""

    def end(self, metrics: Mapping[str, Any], left: float | None) -> None:
        """Show the final state: `done` batches."""

    def restart(self) -> None:
        """Measure from now on: the data are where the pass begins."""
        self.started = time.monotonic()

    def keep(self) -> None:
        """Leave what is drawn on the screen."""

    def close(self) -> None:
        """Release the bar."""

    # -- numbers for those who write them themselves --------------------------------------------------------------------

    @property
    def took(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds until the pass ends, None when it is not known."""
        here = self.done - (self.first or 0)
        return self.took / here * (self.total - self.done) if here > 0 and math.isfinite(self.total) else None

    @property
    def count(self) -> str:
        return f"{self.done}" if finite(self.total) is None else f"{self.done}/{finite(self.total)}"


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

    def __init__(self, lines: Lines, closing: str, every: int, description: str, total: float, whole: float | None = None) -> None:
        super().__init__(every, description, total, whole)
        self.lines, self.closing = lines, closing
        self.next_batch, self.next_time = 1, 0.0  # the first batch is looked at, for where the pass begins

    def draw(self, done: int, metrics: Mapping[str, Any], left: float | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.next_time = max(self.started, self.lines.last) + self.lines.pause
        self.mark(done)
        if now >= self.next_time:
            self.lines.say(self._line(metrics, left, over=False))
            self.lines.pause = min(2 * self.lines.pause, LINE_SECONDS_MAX)
            self.next_time = now + self.lines.pause
        self.next_batch = done + self.every

    def end(self, metrics: Mapping[str, Any], left: float | None) -> None:
        if self.closing:
            (self.lines.say if self.closing == "say" else self.lines.say_if_due)(self._line(metrics, left, over=True))

    def _line(self, metrics: Mapping[str, Any], left: float | None, over: bool) -> str:
        span = f"in {interval(self.took)}" if over or self.left is None else f"{interval(self.left)} left"
        parts = (f"{self.description}: {self.count}", span, fit_left(left), listed(metrics))
        return ", ".join(part for part in parts if part)


class FitClock:
    """Judges how long a fit still takes, from what was done since its first batch in this run; validation counts as it came up to now.

    Limits are the trainer's `max_epochs`, `max_steps` and `max_time`, and a Timer's.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.length: float = math.inf  # of an epoch, in batches, where only one that is over tells
        self._first: tuple[tuple[float, float], tuple[float, float]] | None = None  # (epochs, when), (steps, when)

    def epochs(self, trainer: Any, batches: int) -> float:
        """Return how many epochs are done, `batches` of the running one; not a number where its length is not known."""
        length = trainer.num_training_batches if math.isfinite(trainer.num_training_batches) else self.length
        if not batches:
            return trainer.current_epoch
        return trainer.current_epoch + batches / length if math.isfinite(length) else math.nan

    def left(self, trainer: Any, batches: int) -> float | None:
        """Return the seconds until the first of the fit's limits is reached, as far as one can tell; None when one cannot."""
        clock, epochs, steps, found = time.monotonic(), self.epochs(trainer, batches), trainer.global_step, []
        if self._first is None:  # measured from the end of the first batch, which is often a slow one
            whole = trainer.current_epoch, self.began
            self._first = whole if math.isnan(epochs) else (epochs, clock), (steps, clock)
        for (first, since), now, limit in zip(self._first, (epochs, steps), (trainer.max_epochs, trainer.max_steps), strict=True):
            if limit not in (None, -1) and now > first:
                found.append((clock - since) / (now - first) * (limit - now))
        if trainer.max_time is not None:
            found.append(trainer.max_time.total_seconds() - (clock - self.began))
        found += [left for c in trainer.callbacks if hasattr(c, "time_remaining") and (left := c.time_remaining()) is not None]
        return max(min(found), 0.0) if found else None


class Status:
    """A line that says what goes on, if it goes on for longer than a moment, and one that says how long it took."""

    def __init__(self, text: str, say: Callable[[str], Any]) -> None:
        self._text, self._say, self._said = text, say, False
        self._began = time.monotonic()
        terminal = sys.stdout is not None and sys.stdout.isatty()
        self._timer = threading.Timer(STATUS_SECONDS if terminal else LINE_SECONDS, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        self._said = True
        self._say(f"{self._text} ...")

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._said:
            self._say(f"{self._text}: done in {interval(time.monotonic() - self._began)}")


def finite(total: float) -> int | None:
    """Return a total as drawing libraries want it: None when it is not known."""
    return int(total) if math.isfinite(total) else None


def interval(seconds: float) -> str:
    """Return "MM:SS", or "H:MM:SS" from an hour on."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def fit_left(left: float | None) -> str:
    """Say how much time the fit has left; nothing when it is over or not known."""
    return f"fit {interval(left)} left" if left is not None and left >= 0.5 else ""


def listed(metrics: Mapping[str, Any]) -> str:
    """Return "name=value, ..." with four digits."""
    return ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items())
