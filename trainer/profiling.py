"""Where a profiler looks into a run: around the functions that the run calls, which are wrapped once, and only where there is a profiler."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from trainer.datamodule import DataModule
from trainer.module import TrainModule
from trainer.profilers import PassThroughProfiler, Profiler

__all__ = ["MEASURED", "Profiling"]

MEASURED = {"publish_step": "publish", "boundary": "boundary", "make_optimizers": "configure_optimizers"}
"""Methods that a profiler replaces on the run itself -> the action as which they are measured."""


class Profiling:
    """The part of `Run` that knows the profiler. Without one `profiles` is False, and everything is called directly."""

    profiles: bool = False
    profiler: Profiler = PassThroughProfiler()

    def open_profiler(self) -> None:
        """Let the profiler see hooks from here on, and what happens once a run."""
        self.profiler = self.trainer.profiler
        self.profiles = not isinstance(self.profiler, PassThroughProfiler)
        if not self.profiles:
            return
        self.profiler.setup(stage=self.fn, local_rank=self.world.rank, log_dir=self.trainer.log_dir)
        self._undo.append(self._close_profiler)
        if self.settings.compile is None:
            self.profiler.module = self.module
        hooks = self.hooks
        hooks.functions = {name: tuple(_Hook(self.profiler, name, f) for f in found) for name, found in hooks.functions.items()}
        if self.transfers is not None:
            self.transfers = [_Hook(self.profiler, f.__name__, f) for f in self.transfers]
        hooks.within = partial(_within, self.profiler, hooks.within)
        for name, action in MEASURED.items():
            setattr(self, name, self.profiled(action, getattr(self, name)))

    def profile_steps(self) -> None:
        """Let it see the parts of a training step, which go through methods of the module then, as if those were overridden."""
        self.custom_backward = self.custom_zero_grad = True
        self.custom_clip = self.custom_clip or bool(self.settings.gradient_clip_val)
        if not self.by_closure:  # there the whole `optimizer_step` is seen
            precision = self.precision
            precision.step = self.profiled("optimizer_step", precision.step)
            self._undo.append(lambda: precision.__dict__.pop("step", None))

    def profiled(self, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, measured as `action` where there is a profiler."""
        if not self.profiles:
            return function
        profiler = self.profiler

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with profiler.profile(action):
                return function(*args, **kwargs)

        return call

    def profiled_groups(self, epoch: Any) -> Iterator[Any]:
        """Yield the groups of a pass over the training data; the waits for batches are measured, and each group begins a step."""
        groups = epoch.groups(self.accumulate)
        fetches = True  # the first: there the workers start
        while True:
            self.profiler.step(self._steps_ahead(epoch))
            if fetches:
                with self.profiler.profile("train_dataloader_next"):
                    group = next(groups, None)
            else:
                group = next(groups, None)
            if group is None:
                return
            if epoch.takes_ahead:  # its batches are fetched while the group is iterated
                fetches, group.batches = False, self._fetched(iter(group.batches), group.size)
            yield group

    def _fetched(self, batches: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            with self.profiler.profile("train_dataloader_next"):
                batch = next(batches)
            yield batch

    def profiled_batches(self, word: str, passing: Any) -> Iterator[Any]:
        """Yield the batches of a validation, test or prediction; outside of a fit each begins a step."""
        batches = passing.batches()
        while True:
            if self.fn != "fit":
                self.profiler.step(passing.remaining)
            with self.profiler.profile(f"{word}_dataloader_next"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _steps_ahead(self, epoch: Any) -> int | None:
        """Return how many optimizer steps the fit has at least; the profiler asks once, ahead of the first."""
        s, p = self.settings, self.progress
        known = [] if s.max_steps == -1 else [s.max_steps - p.step]
        if epoch.remaining is not None and s.max_epochs not in (None, -1):
            known.append(math.ceil(epoch.remaining / self.accumulate) * (s.max_epochs - p.epoch))
        return min(known, default=None)

    def _close_profiler(self) -> None:
        """Tell what there is, also of a run that failed."""
        try:
            self.profiler.describe()
        finally:
            self.profiler.teardown(self.fn)


class _Hook:
    """A function of the hook table, measured. `func` is the method behind it, which tells whose it is."""

    __slots__ = ("_action", "_function", "_profiler", "func")

    def __init__(self, profiler: Profiler, hook: str, function: Callable[..., Any]) -> None:
        self._profiler, self._function = profiler, function
        self.func = getattr(function, "func", function)
        owner = getattr(self.func, "__self__", None)
        kind = "TrainModule" if isinstance(owner, TrainModule) else "DataModule" if isinstance(owner, DataModule) else "Callback"
        name = hook.partition("/")[0]
        self._action = name if owner is None else f"[{kind}]{type(owner).__name__}.{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.profile(self._action):
            return self._function(*args, **kwargs)


def _within(profiler: Profiler, within: Callable[..., Any], name: str, function: Callable[..., Any], *args: Any) -> Any:
    with profiler.profile(name):
        return within(name, function, *args)
