"""AdvancedProfiler: which functions an action spends its time in, by Python's cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from typing import Any

from trainer.errors import MisconfigurationException
from trainer.profilers.base import Profiler

__all__ = ["AdvancedProfiler"]


class AdvancedProfiler(Profiler):
    """Lists for each action the Python functions that ran in it, with their calls and times. Slows a run down several times.

    What runs in an action inside of another counts for the inner one alone.

    Args:
        dirpath, filename: see Profiler.
        line_count_restriction: how many functions of an action are listed: a number (int) or a share of them (float up to 1.0).
        dump_stats: also write `<stage>-<filename>-<rank>-<action>.prof`, to be read with `pstats` or a viewer of such files.

    Raises:
        MisconfigurationException: when an action stops that has not started; for a restriction that is no such number.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        if isinstance(line_count_restriction, bool) or not isinstance(line_count_restriction, (int, float)) or line_count_restriction < 0:
            raise MisconfigurationException(
                f"line_count_restriction={line_count_restriction!r} must be a number of functions (int) or a share of them (0.0 to 1.0)."
            )
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []  # the innermost last; only its profile is on

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._forget()

    def start(self, action_name: str) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            raise MisconfigurationException(f"The profiler's action {action_name!r} stopped, but was not started.")
        self.profiled_actions[self._running[-1]].disable()
        self._running.reverse()
        self._running.remove(action_name)  # the last one of this name
        self._running.reverse()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        lines = []
        for name, profile in self.profiled_actions.items():
            profile.create_stats()
            if not profile.stats:  # pstats takes no empty ones
                continue
            text = io.StringIO()
            stats = pstats.Stats(profile, stream=text)
            if self.dump_stats:
                os.makedirs(self.folder, exist_ok=True)
                stats.dump_stats(os.path.join(self.folder, self._prepare_filename(name, ".prof")))
            stats.strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
            lines += [f"Profile stats for: {name} rank: {self._rank}", text.getvalue()]
        return "\n".join([self._title(), *lines]) if lines else ""

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        self._forget()

    def _forget(self) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self.profiled_actions, self._running = {}, []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "profiled_actions": {}, "_running": []}
