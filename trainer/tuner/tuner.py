"""Tuner: searches ahead of a fit, on the devices and with the strategy of a Trainer, in runs of their own that leave nothing behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

from callbacks.tuning import LRSearch, SizeSearch
from trainer.datamodule import DataModule
from trainer.defaults import make_loggers
from trainer.errors import MisconfigurationException
from trainer.module import TrainModule
from trainer.profilers import PassThroughProfiler
from trainer.results import Results
from trainer.tuner.attribute import set_attribute
from trainer.tuner.curve import LRCurve
from trainer.tuner.inside import skipped
from trainer.tuner.kept import Kept
from trainer.tuner.rates import check_rate, find_rate
from trainer.tuner.sizes import check_size, find_size

__all__ = ["Tuner"]

_METHODS = ("fit", "validate", "test", "predict")


class Tuner:
    """Finds a learning rate or a batch size with the user's own steps, before a fit.

    Afterwards everything is as it was, also after an error or Ctrl-C: weights, random streams, modes, hyper-parameters (but for the one that
    was looked for), and the trainer with its counters, callbacks and loggers, none of which take part. Nothing is written.

    Args:
        trainer: its devices, strategy, precision, accumulation, clipping and limits are those of the search.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRCurve | None:
        """Train a few steps, each with a larger learning rate, and return how the loss went; see `LRCurve`. Collective.

        All parameter groups have the rate of the step. The loss of a step is the mean over its samples, of all its batches and ranks.

        Args:
            model, train_dataloaders, val_dataloaders, datamodule: as for `Trainer.fit`.
            dataloaders, method: accepted for Lightning's sake; None and "fit".
            min_lr, max_lr: the first and the last rate.
            num_training: the number of optimizer steps.
            mode: "exponential" or "linear": how the rate grows.
            early_stop_threshold: end when the smoothed loss is more than so many times the best, or a loss is not finite; None: never.
            update_attr: write the suggestion into the attribute, where there is a suggestion.
            attr_name: the attribute, or hyper-parameter, of the module; by default `lr` or `learning_rate`.

        Returns:
            The curve; None under `fast_dev_run`, with a warning.

        Raises:
            MisconfigurationException: for arguments that cannot work, no such attribute, and any but one optimizer.
        """
        if method != "fit":
            raise MisconfigurationException(f"lr_find trains, so method={method!r} must be 'fit'.")
        search = LRSearch(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        loaders = _given(method, train_dataloaders, val_dataloaders, dataloaders)
        return self._search(method, model, loaders, datamodule, search)

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size for which memory suffices on all ranks, write it into the attribute and return it. Collective.

        Args:
            model, datamodule: as for `Trainer.fit`. The loader has to come from one of them, and follow the attribute.
            train_dataloaders, val_dataloaders, dataloaders: a DataModule, or those of other stages.
            method: "fit" (which tries validation, too), "validate", "test" or "predict".
            mode: "power" doubles the size until memory runs out; "binsearch" then goes between the last two.
            steps_per_trial: optimizer steps (batches) taken with a size.
            init_val: the first size; if it does not fit, smaller ones are tried.
            max_trials: how many sizes are tried at most.
            batch_arg_name: the attribute of the module, the data module, or of the hyper-parameters of either.
            margin: by how much the result is lowered, as a share of it, where "binsearch" has met the limit of memory.
            max_val: no larger size is tried, and none that is larger than the data set.

        Returns:
            The size, of one rank's batch; None under `fast_dev_run`, with a warning.

        Raises:
            MisconfigurationException: for arguments that cannot work, no such attribute, loaders that cannot follow it, and several ranks
                that wait for each other inside a step.
            torch.OutOfMemoryError: no size that was tried fits.
        """
        if method not in _METHODS:
            raise MisconfigurationException(f"method={method!r} must be one of {', '.join(_METHODS)}.")
        search = SizeSearch(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        loaders = _given(method, train_dataloaders, val_dataloaders, dataloaders)
        return self._search(method, model, loaders, datamodule, search)

    def _search(self, fn: str, model: Any, loaders: dict[str, Any], datamodule: Any, search: LRSearch | SizeSearch) -> Any:
        """Run the search as the work of a job of its own, put everything back, and set the attribute."""
        if skipped(self._trainer):
            return None
        if self._trainer._run is not None:
            raise MisconfigurationException("A Tuner works outside of runs; inside, use LearningRateFinder or BatchSizeFinder (callbacks=).")
        runner = _alike(self._trainer)
        job = runner._job(fn, model, datamodule, loaders, None)
        if isinstance(search, LRSearch):
            name, job.work = check_rate(search, job.module, job.datamodule), partial(find_rate, search=search)
        else:
            check_size(search, job)
            name, job.work = search.batch_arg_name, partial(_find_size, search=search)
        kept = Kept(job.module, shallow=[job.datamodule])
        try:
            found = runner._performer()(job)
        finally:
            kept.restore()
        value = found.suggestion() if isinstance(found, LRCurve) else found
        if name is not None and value is not None:
            set_attribute(name, job.module, job.datamodule, value)
            self._trainer.print(f"{'Learning rate' if isinstance(found, LRCurve) else 'Batch size'} found: {value:.6g} ({name}).")
        elif name is not None:
            self._trainer.warn(f"There were too few finite losses for a suggestion, so {name} stays as it is. Raise num_training.")
        return found


def _find_size(run: Any, search: SizeSearch) -> int:
    if run.fn != "fit":
        run.strategy.wrap(training=False)
    return find_size(run, search)


def _given(method: str, train: Any, val: Any, others: Any) -> dict[str, Any]:
    """Return the loaders of a call by stage.

    Raises:
        MisconfigurationException: for an argument that belongs to another method.
    """
    if method == "fit":
        if others is not None:
            raise MisconfigurationException("dataloaders= belongs to the other methods; with method='fit' pass train_dataloaders= and val_dataloaders=.")
        return {"train": train, "validate": val}
    if train is not None or val is not None:
        raise MisconfigurationException(f"train_dataloaders= and val_dataloaders= belong to method='fit'; with method={method!r} pass dataloaders=.")
    return {method: others}


def _alike(trainer: Any) -> Any:
    """Return a trainer with the same settings and nothing else: no counters, callbacks, loggers and profiler, and no checkpoint to go on from."""
    made = copy.copy(trainer)
    made._launcher, made.results = trainer._launcher, Results()
    made.callbacks, made.loggers, made.profiler = [], make_loggers(trainer.loggers, silent=True), PassThroughProfiler()
    made.settings = replace(trainer.settings, resume=None, auto_requeue=False)
    made.strategy, made.precision_plugin = copy.deepcopy((trainer.strategy, trainer.precision_plugin))
    return made
