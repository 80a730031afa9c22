"""EarlyStopping: end training when a metric no longer gets better."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.monitor import check_mode, missing_monitor, rank_of

__all__ = ["EarlyStopping", "EarlyStoppingReason"]


class EarlyStoppingReason(IntEnum):
    """Why EarlyStopping ended training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Ask to stop when `monitor` has not improved for `patience` checks.

    It reads the published metrics, which are the same on all ranks, so all ranks decide alike. The check is made at the end of a training
    epoch when validation runs once an epoch or not at all, otherwise at the end of validation.

    Args:
        monitor: Name of the metric.
        min_delta: Smallest change that counts as an improvement, in the metric's unit; its sign does not matter.
        patience: Checks without improvement until the stop.
        verbose: Print improvements and the reason of the stop.
        mode: "min" or "max", whichever is better.
        strict: Whether a missing metric is an error; otherwise a warning, and the check is left out.
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop as soon as the metric is better than this.
        divergence_threshold: Stop as soon as the metric is worse than this.
        check_on_train_epoch_end: Force the place of the check.
        log_rank_zero_only: Accepted for compatibility; messages are always rank 0's.

    Attributes:
        wait_count: Checks since the last improvement.
        best_score: The best value so far, a 0-d tensor.
        stopped_epoch: The epoch of the stop, 0 when it did not stop.
        stopping_reason, stopping_reason_message: Why it stopped.

    Raises:
        MisconfigurationException: a mode other than "min" and "max"; with `strict`, a metric that nobody logged.
    """

    monitors = True
    mode_dict: ClassVar[dict[str, Any]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if not isinstance(monitor, str) or isinstance(min_delta, str) or isinstance(patience, str):
            raise MisconfigurationException(
                f"EarlyStopping({monitor!r}, min_delta={min_delta!r}, patience={patience!r}): the order is monitor (a name), min_delta, patience."
            )
        check_mode("EarlyStopping", mode)
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._at_train_epoch_end = check_on_train_epoch_end
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def monitor_op(self) -> Callable[..., torch.Tensor]:
        """What says whether one score is better than another: `torch.lt` or `torch.gt`."""
        return self.mode_dict[self.mode]

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": int(self.stopping_reason),
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the saved run was. `patience` stays as constructed: a resumed run may be given more."""
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._at_train_epoch_end = self._check_on_train_epoch_end
        if self._at_train_epoch_end is None:
            once_an_epoch = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
            self._at_train_epoch_end = once_an_epoch or not trainer.enable_validation

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._at_train_epoch_end and not trainer.fast_dev_run:
            self._check(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._at_train_epoch_end or trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fast_dev_run:
            return
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            place = "training epoch" if self._at_train_epoch_end else "validation"
            error = missing_monitor(
                "EarlyStopping", self.monitor, metrics, f"It is looked for at the end of each {place} (check_on_train_epoch_end)."
            )
            if self.strict:
                raise error
            trainer.warn(str(error))
            return
        current = metrics[self.monitor]
        reason, message = self._judge(torch.as_tensor(current).detach().squeeze())
        if reason:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason, self.stopping_reason_message = reason, message
        if message and self.verbose:
            trainer.print(message)

    def _judge(self, current: torch.Tensor) -> tuple[EarlyStoppingReason, str | None]:
        """Update the count with a new value; return why to stop (NOT_STOPPED: go on) and what to say."""
        value, best = float(current), float(self.best_score)
        if self.check_finite and not math.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"Metric {self.monitor} = {value} is not finite; best was {best:.3f}. Stopping."
        if self.stopping_threshold is not None and self._better(value, self.stopping_threshold):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"Metric {self.monitor} = {value} is better than stopping_threshold = {self.stopping_threshold}. Stopping.",
            )
        if self.divergence_threshold is not None and not math.isnan(value) and self._better(self.divergence_threshold, value):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"Metric {self.monitor} = {value} is worse than divergence_threshold = {self.divergence_threshold}. Stopping.",
            )
        if self._better(value + self.min_delta if self.mode == "min" else value - self.min_delta, best):
            self.best_score, self.wait_count = current.clone(), 0
            return EarlyStoppingReason.NOT_STOPPED, f"Metric {self.monitor} improved to {value:.3f} (before: {best:.3f})."
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, None
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"Metric {self.monitor} has not improved in the last {self.wait_count} checks; best was {best:.3f}. Stopping.",
        )

    def _better(self, value: float, other: float) -> bool:
        return rank_of(value, self.mode) < rank_of(other, self.mode)
