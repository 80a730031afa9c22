"""What `self.log` calls in a run: defaults by hook, the weight of a value, and checks with clear messages."""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.metrics import batch_size_of, is_metric

__all__ = ["Recorder"]

_ONCE_AN_EPOCH = {"on_train_start", "on_train_epoch_start", "on_train_epoch_end"}
_BATCHLESS = {
    *_ONCE_AN_EPOCH, "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_test_start", "on_test_epoch_start", "on_test_epoch_end",
}  # fmt: skip
_NEVER = {
    "", "setup", "teardown", "prepare_data", "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_test_end",
    "on_sanity_check_start", "on_sanity_check_end", "on_exception", "configure_optimizers",
}  # fmt: skip


class Recorder:
    """Turns calls of `self.log` into additions to the run's collector. The loop tells it which batch is current."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.loader: int | None = None  # the index of the loader, where there are several
        self.batch: Any = None
        self.samples: int | None = None  # of the current batch on this rank; None: to be read off the batch

    def start_batch(self, batch: Any, samples: int | None = None) -> None:
        """Make `batch` the current one. `samples` is its weight where the data layer knows it."""
        self.batch, self.samples = batch, samples

    def add(
        self,
        module: torch.nn.Module,
        name: str,
        value: Any,
        bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        add_dataloader_idx: bool,
        batch_size: int | None,
        metric_attribute: str | None,
        rank_zero_only: bool,
    ) -> None:
        """Add one value; see `TrainModule.log`."""
        run = self.run
        hook = run.hooks.current
        if hook in _NEVER or run.stage == "predict":
            raise MisconfigurationException(
                f"self.log({name!r}) does nothing in {hook or 'this place'!r}: log in a step or in a hook of an epoch or batch."
            )
        training = run.stage == "train"
        once = hook in _BATCHLESS
        if on_step is None:
            on_step = training and not once and not on_epoch if on_epoch is not None else training and not once
        if on_epoch is None:
            on_epoch = not on_step or not training
        if on_step and once:
            raise MisconfigurationException(f"self.log({name!r}, on_step=True) in {hook}: there is no step here; use on_epoch=True.")
        if not on_step and not on_epoch:
            raise MisconfigurationException(f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing; set one of them.")
        loader = None if once or not add_dataloader_idx else self.loader
        entry = run.collector.entry(
            name, loader, reduce_fx, on_step, on_epoch, bar, True if logger is None else logger
        )
        if is_metric(value):
            self._add_metric(entry, module, value, metric_attribute)
            return
        if rank_zero_only and run.world.rank != 0:
            return
        entry.add(_scalar(name, value), self._weight(once, batch_size), run.step_id)

    def _weight(self, once: bool, batch_size: int | None) -> float:
        if batch_size is not None:
            return batch_size
        if once:
            return 1
        if self.samples is None:
            self.samples = batch_size_of(self.batch)
        return self.samples

    def _add_metric(self, entry: Any, module: torch.nn.Module, metric: Any, attribute: str | None) -> None:
        """Remember a metric object: it is computed and reset when the epoch is published."""
        if entry.on_epoch and entry.metric is None:
            entry.metric = metric
            entry.path = attribute or next((path for path, m in module.named_modules() if m is metric), None)
        latest = getattr(metric, "_forward_cache", None)  # torchmetrics keeps the value of the last batch here
        if entry.on_step and latest is not None:
            on_epoch, entry.on_epoch = entry.on_epoch, False
            entry.add(_scalar(entry.name, latest), self._weight(False, None), self.run.step_id)
            entry.on_epoch = on_epoch


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise MisconfigurationException(
                f"self.log({name!r}) takes one number; got a tensor of shape {tuple(value.shape)}. Reduce it first (.mean())."
            )
        return value.detach().reshape(()).clone()  # the caller may change its tensor in place afterwards
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        return torch.tensor(float(value), dtype=torch.float64)
    raise MisconfigurationException(f"self.log({name!r}) takes a number, a tensor or a metric; got {type(value).__name__}.")
