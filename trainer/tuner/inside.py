"""Searches inside a run, which then goes on with what was found: what LearningRateFinder and BatchSizeFinder ask for."""

from __future__ import annotations

from typing import Any

from callbacks.tuning import LRSearch, SizeSearch
from trainer.errors import MisconfigurationException
from trainer.tuner.attribute import set_attribute
from trainer.tuner.rates import check_rate, find_rate
from trainer.tuner.sizes import check_size, find_size

__all__ = ["skipped", "tune"]

_HOOKS = ("on_fit_start", "on_train_epoch_start", "on_validation_start", "on_test_start", "on_predict_start")


def tune(run: Any, search: LRSearch | SizeSearch) -> Any:
    """Search, and let the run go on with the result; return it. None under `fast_dev_run`. Collective.

    Raises:
        MisconfigurationException: in a hook in which a run cannot change its course; what the search itself refuses.
    """
    hook = run.hooks.current
    if hook not in _HOOKS:
        raise MisconfigurationException(f"A search works in one of {', '.join(_HOOKS)}, not in {hook or 'this place'}.")
    if skipped(run.trainer):
        return None
    return _tune_rate(run, search) if isinstance(search, LRSearch) else _tune_size(run, search)


def skipped(trainer: Any) -> bool:
    """True under `fast_dev_run`, with a warning."""
    if trainer.fast_dev_run:
        trainer.warn("fast_dev_run takes a few steps alone, so nothing is searched for.")
    return bool(trainer.fast_dev_run)


def _tune_rate(run: Any, search: LRSearch) -> Any:
    name = check_rate(search, run.module, run.datamodule)
    if search.found is not None:
        rate = curve = search.found
    else:
        curve = find_rate(run, search)
        rate = curve.suggestion()
    if name is None:
        return curve
    if rate is None:
        run.trainer.warn("The learning rate range test gave too few finite losses for a suggestion, so the learning rate stays. Raise num_training.")
        return curve
    set_attribute(name, run.module, run.datamodule, rate)
    if search.found is None:
        run.trainer.print(f"Learning rate found: {rate:.6g} ({name}).")
        _follow(run, rate)
    return curve


def _tune_size(run: Any, search: SizeSearch) -> int:
    if search.found is not None:
        check_size(search, run.job)
        size = search.found
    else:
        size = find_size(run, search)
        run.trainer.print(f"Batch size found: {size} ({search.batch_arg_name}).")
    set_attribute(search.batch_arg_name, run.module, run.datamodule, size)
    for stage in ("train", "validate") if run.fn == "fit" else (run.fn,):
        run.loaders.reload(stage)
    if search.found is None and run.fn == "fit":
        _follow(run, None)
    return size


def _follow(run: Any, rate: float | None) -> None:
    """Let the optimizer be what configure_optimizers makes of the attribute, so that each group gets what belongs to it, and a schedule knows
    its length. An optimizer that has stepped already, or that does not ask the attribute, is given the rate in all groups."""
    bases = _base_rates(run)
    if run.progress.step == 0:
        run.make_optimizers()
        run.rewrap = run.hooks.current != "on_fit_start"  # the loop has the step function of before
    if rate is None or _base_rates(run) != bases:
        return
    for config in run.schedulers:
        if hasattr(config.scheduler, "base_lrs"):
            config.scheduler.base_lrs = [rate] * len(config.scheduler.base_lrs)
    for group in run.optimizers[0].param_groups:
        group["lr"] = rate
        if "initial_lr" in group:
            group["initial_lr"] = rate


def _base_rates(run: Any) -> list[float]:
    return [float(group.get("initial_lr", group["lr"])) for optimizer in run.optimizers for group in optimizer.param_groups]
