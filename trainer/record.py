"""What `self.log` calls in a run: defaults by hook, the weight of a value, and checks with clear messages."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.metrics import batch_size_of, is_metric

__all__ = ["Kept", "Recorder", "Silent"]

_BATCHLESS = {
    "on_train_start", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end",
    "on_test_start", "on_test_epoch_start", "on_test_epoch_end",
}  # fmt: skip
_WITH_BATCH = {
    "training_step", "validation_step", "test_step", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_start",
    "on_validation_batch_end", "on_test_batch_start", "on_test_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping",
}  # fmt: skip


class Recorder:
    """Turns calls of `self.log` into additions to the run's collector. The loop tells it which batch is current."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.loader: int | None = None  # the index of the loader, where there are several
        self.batch: Any = None
        self.samples: int | None = None  # of the current batch on this rank; None: to be read off the batch
        self.place: Any = None  # in evaluation: which batch this is
        self.muted = False  # a closure is evaluated again: what it logs was logged the first time
        self.homes: dict[str, set[int]] = {}  # name without the index of its loader -> the loaders it was logged for
        self.held: dict[int, list[Any]] = {}  # by thread of a replica: its calls, until `replay`

    def start_batch(self, batch: Any, samples: int | None = None) -> None:
        """Make `batch` the current one. `samples` is its weight where the data layer knows it."""
        self.batch, self.samples = batch, samples

    def hold(self, call: tuple[Any, ...]) -> bool:
        """Keep a call of `add` for `replay` if this thread belongs to a replica; False if it does not.

        Raises:
            MisconfigurationException: for a metric object, of which each replica has a copy, and for what is no number.
        """
        calls = self.held.get(get_ident())
        if calls is None:
            return False
        module, name, value, *rest = call
        if is_metric(value):
            raise MisconfigurationException(
                f"self.log({name!r}) was given a {type(value).__name__} on a replica of strategy='dp', whose state ends with the step. "
                "Log its value, update it in on_train_batch_end, or use strategy='ddp'."
            )
        calls.append((module, name, _scalar(name, value), *rest))
        return True

    def replay(self, calls: list[Any], batch: Any, samples: int) -> None:
        """Add what a replica logged; `batch` is its part of the batch, and `samples` the weight of its values."""
        self.start_batch(batch, samples)
        for module, name, value, *rest in calls:
            value = value if value.device.type == "cpu" else value.to(self.run.device, non_blocking=True)
            self.add(module, name, value, *rest)

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
        once = hook in _BATCHLESS
        if not once and hook not in _WITH_BATCH:
            raise misplaced(name, hook)
        if self.muted:
            return
        training = run.stage == "train"
        by_step = training and not once
        on_step = by_step if on_step is None else on_step
        on_epoch = not by_step or not on_step if on_epoch is None else on_epoch
        if on_step and once:
            raise MisconfigurationException(f"self.log({name!r}, on_step=True) in {hook}: there is no step here; use on_epoch=True.")
        if not on_step and not on_epoch:
            raise MisconfigurationException(f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing; set one of them.")
        loader = None if once or not add_dataloader_idx else self.loader
        entry = run.collector.entry(
            name, loader, reduce_fx, on_step, on_epoch, bar, True if logger is None else logger
        )
        if entry.once is not once and entry.once is not None:
            raise MisconfigurationException(
                f"self.log({name!r}) was called for batches and once more for the whole epoch (in {hook}); give each its own name."
            )
        entry.once = once
        if self.loader is not None and not once and not add_dataloader_idx:
            self.homes.setdefault(entry.label("epoch"), set()).add(self.loader)
        if is_metric(value):
            self._add_metric(entry, module, value, metric_attribute)
            return
        if rank_zero_only and run.world.rank != 0:
            return
        if self.samples == 0 and not once:  # a batch that another rank logs
            return
        entry.add(_scalar(name, value), self._weight(once, batch_size), run.step_id if training else self.place)

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
            if self.run.records is not None:
                self.run.strategy.adopt(metric)
            entry.path = attribute or next((path for path, m in module.named_modules() if m is metric), None)
        latest = getattr(metric, "_forward_cache", None)  # torchmetrics keeps the value of the last batch here
        if not entry.on_step:
            return
        if latest is not None:
            step = self.run.step_id if self.run.stage == "train" else self.place
            entry.add_step(_scalar(entry.name, latest), self._weight(False, None), step)
        elif not entry.on_epoch:
            raise MisconfigurationException(
                f"self.log({entry.name!r}) was given a {type(metric).__name__} that has no value for this batch. Call it (metric(...)) in place "
                "of update(...), or log it with on_step=False, on_epoch=True."
            )


class Silent(Recorder):
    """The recorder of `Trainer(barebones=True)`: nothing is logged."""

    def add(self, *_: Any) -> None:
        """Do nothing, and say so once."""
        self.run.tell_once("self.log does nothing with Trainer(barebones=True).")


class Kept:
    """Stands in for the recorder while compiled code runs, whose graph hands out what was logged; the recorder gets it afterwards."""

    held = ()

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add(self, module: torch.nn.Module, name: str, value: Any, *rest: Any) -> None:
        """Keep one call of `Recorder.add`. A tensor is copied now: the step may change it in place afterwards."""
        self.calls.append((module, name, _scalar(name, value) if isinstance(value, torch.Tensor) else value, *rest))

    def take(self) -> list[Any]:
        """Return the calls, and begin anew."""
        calls, self.calls = self.calls, []
        return calls


def misplaced(name: str, hook: str) -> MisconfigurationException:
    """Return the error for logging where nothing is published."""
    return MisconfigurationException(
        f"self.log({name!r}) does nothing in {hook or 'this place'!r}: log in a step or in a hook of an epoch or batch. A number goes "
        "straight to a logger with self.logger.log_metrics({...}, step)."
    )


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor and hasattr(value, "full_tensor"):  # a DTensor: this rank may hold a part of the number
            value = value.detach().full_tensor()
        if value.numel() != 1:
            raise MisconfigurationException(
                f"self.log({name!r}) takes one number; got a tensor of shape {tuple(value.shape)}. Reduce it first (.mean())."
            )
        return value.detach().reshape(()).clone()  # the caller may change its tensor in place afterwards
    if not isinstance(value, str):
        try:
            return torch.tensor(float(value), dtype=torch.float64)
        except (TypeError, ValueError):  # an array of several numbers, or no number at all
            pass
    raise MisconfigurationException(f"self.log({name!r}) takes one number, a tensor of one element or a metric; got {type(value).__name__}.")
