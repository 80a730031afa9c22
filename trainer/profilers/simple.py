"""SimpleProfiler: how long each action takes, by the clock."""

from __future__ import annotations

import os
import time
from threading import get_ident

from trainer.errors import MisconfigurationException
from trainer.profilers.base import Profiler

__all__ = ["SimpleProfiler"]


class SimpleProfiler(Profiler):
    """Measures how long each action of a run takes, and how often it happens.

    Times are those of the host: work that was handed to an accelerator counts where the host waits for it.

    Args:
        dirpath, filename: see Profiler.
        extended: report the number of calls, the longest one and the share of the run as well.

    Attributes:
        recorded: action -> [calls, seconds in all, seconds of the longest] of this rank; of rank 0 after a run in other processes.

    Raises:
        MisconfigurationException: when an action starts that has not stopped, or stops that has not started.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.recorded: dict[str, list[float]] = {}
        self._running: dict[tuple[int, str], float] = {}  # by thread: replicas of one process run side by side
        self._began = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.recorded, self._running, self._began = {}, {}, time.perf_counter()

    def start(self, action_name: str) -> None:
        key = get_ident(), action_name
        if key in self._running:
            raise MisconfigurationException(f"The profiler's action {action_name!r} was started and has not stopped. Give parts inside of it other names.")
        self._running[key] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        now, key = time.perf_counter(), (get_ident(), action_name)
        if key not in self._running:
            raise MisconfigurationException(f"The profiler's action {action_name!r} stopped, but was not started.")
        seconds = now - self._running.pop(key)
        row = self.recorded.setdefault(action_name, [0, 0.0, 0.0])
        row[0] += 1
        row[1] += seconds
        row[2] = max(row[2], seconds)

    def summary(self) -> str:
        if not self.recorded:
            return ""
        total = time.perf_counter() - self._began
        rows = [("Action", "Mean (s)", "Total (s)", "Calls", "Longest (s)", "Share (%)")]
        rows.append(("Total", "-", f"{total:.5g}", "-", "-", "100"))
        for name, (calls, seconds, longest) in sorted(self.recorded.items(), key=lambda item: -item[1][1]):
            share = 100 * seconds / total if total else 0.0
            rows.append((name, f"{seconds / calls:.5g}", f"{seconds:.5g}", str(calls), f"{longest:.5g}", f"{share:.4g}"))
        if not self.extended:
            rows = [row[:3] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(row, widths) for row in rows]
        rule = "-" * len(lines[0])
        return "\n".join([self._title(), rule, lines[0], rule, *lines[1:], rule])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers = (f"{text:<{width}}" if i == 0 else f"{text:>{width}}" for i, (text, width) in enumerate(zip(row, widths, strict=True)))
    return "  ".join([name, *numbers])
