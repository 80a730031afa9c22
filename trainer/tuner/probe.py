"""A probe: steps inside an open run that its counters, callbacks, loggers and checkpoints know nothing of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trainer.defaults import Callback, make_loggers
from trainer.hooks import HookTable
from trainer.loops.fit import choose_step, train_epoch
from trainer.optim import StepOptimizer
from trainer.profilers import PassThroughProfiler
from trainer.profiling import MEASURED
from trainer.results import Results
from trainer.run import Run
from trainer.tuner.kept import Kept

__all__ = ["Probe", "all_of", "probing"]


def all_of(run: Any) -> Kept:
    """Keep everything of a run that a probe changes besides what it has of its own."""
    precision = [] if run.precision.scaler is None else [run.precision.scaler]
    return Kept(run.module, run.optimizers, [c.scheduler for c in run.schedulers], vars(run.precision), precision, shallow=[run.datamodule])


class Probe(Run):
    """A run that is open, once more: with the same module, optimizers, strategy and ranks, and counters, data, hooks and numbers of its own.

    Only the module's and the data module's hooks are called, and those of `watchers`. It ends with `done`, which the steps set.
    """

    def __init__(self, run: Run, watchers: list[Callback], changes: dict[str, Any]) -> None:
        shared = {name: value for name, value in vars(run).items() if name not in MEASURED}
        vars(self).update(shared)  # in the place of Run.__init__: it is that run
        self._begin()
        self.should_stop = run.should_stop
        self.begins = "training_step" not in shared  # the run itself has not called the hooks that go ahead of its steps
        self.settings = replace(run.settings, log_every_n_steps=0, bad_loss=None, **changes)
        self.progress = replace(run.progress, step_in_epoch=0, batch=0, epoch_ended=False, validation_owed=0)
        self.results = Results(progress=self.progress, fn=run.fn, status="running")
        self.callbacks, self.bar, self.watch = list(watchers), None, None
        self.profiles, self.profiler = False, PassThroughProfiler()
        self.first_step = self.validates = self.asks_ahead = False
        self.hooks = HookTable(run.trainer, self.callbacks, run.module, run.datamodule)
        self.collector = self.new_collector()
        self.recorder = type(run.recorder)(self)
        self.loaders = self.new_loaders()
        if run.fn == "fit":
            self.step_optimizers = [StepOptimizer(o, self.take_step) for o in run.optimizers]
            self.choose_path()
            self.step_schedulers = []
            choose_step(self)

    def train(self) -> None:
        """Take steps until one of them sets `done`. Collective."""
        if self.begins:
            self.hooks.call("on_train_start")
        while not self.done:
            train_epoch(self)
        if self.begins:
            self.hooks.call("on_train_end")

    def boundary(self) -> None:
        """Between two steps nobody saves and nothing is published; an epoch that gave no step is the last one. Collective."""
        self.whole, self.requests = True, []
        p = self.progress
        self.done = self.done or (p.epoch_ended and not p.step_in_epoch)

    def move_schedulers(self, configs: list[Any], count: int) -> None:
        """Schedulers stand still, but for those that a module with manual optimization moves itself."""

    def write_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing is written."""

    def wants_to_stop(self) -> bool:
        """True when this rank's user code, or a signal, wants the probe to end."""
        return self.should_stop or self.notice.bits != 0


@contextmanager
def probing(run: Run, *watchers: Callback, **changes: Any) -> Iterator[Probe]:
    """Put a probe in the place of `run`, for the trainer and all who ask it, with other settings if `changes` names some."""
    trainer = run.trainer
    before = {name: vars(trainer)[name] for name in ("_run", "results", "settings", "callbacks", "loggers")}
    probe = Probe(run, list(watchers), changes)
    try:
        vars(trainer).update(_run=probe, results=probe.results, settings=probe.settings, callbacks=[], loggers=make_loggers(trainer.loggers, silent=True))
        with torch.inference_mode(False), torch.enable_grad():
            yield probe
    finally:
        vars(trainer).update(before)
        for undo in reversed(probe._undo):
            undo()
        probe.loaders.close()
