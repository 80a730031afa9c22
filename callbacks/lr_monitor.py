"""LearningRateMonitor: publish the learning rates (and momenta, weight decays) that the steps use."""

from __future__ import annotations

from collections import Counter
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, nearest

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Log the learning rate of every parameter group.

    A point at optimizer step s shows the rate with which step s was made (s counts from 1). Points are logged each
    `log_every_n_steps` steps and at an epoch's last step, or once an epoch, at its first step.

    Names: "lr-SGD"; "lr-SGD-1" for a second SGD; "lr-SGD/pg1", "lr-SGD/pg2" for several parameter groups, or the group's own "name";
    a scheduler config's "name" replaces "lr-SGD". Momentum and weight decay append "-momentum" and "-weight_decay". Where an optimizer gets a
    second group during the fit (finetuning), "lr-SGD" goes on as "lr-SGD/pg1".

    Args:
        logging_interval: "step", "epoch", or None for the interval of each scheduler.
        log_momentum: Log momenta too (the first beta of Adam-like optimizers).
        log_weight_decay: Log weight decays too.

    Attributes:
        lrs: All logged rates, name -> list.

    Raises:
        MisconfigurationException: an unknown interval; at the start of training, a trainer without a logger.
    """

    def __init__(self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): expected 'step', 'epoch' or None."
                + nearest(str(logging_interval), ("step", "epoch"))
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._groups: list[tuple[str, Any, int, str | None]] = []  # label, optimizer, index of the group, interval of its scheduler
        self._count = 0
        self._logged_step = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": []}  # optimizers do not travel

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if not trainer.loggers:
            raise MisconfigurationException("LearningRateMonitor: the trainer has no logger. Give it one, or drop this callback.")
        if not trainer.lr_scheduler_configs:
            trainer.warn("LearningRateMonitor: there is no learning-rate scheduler; the rates will be constant.")
        self._name(trainer)
        self._logged_step = -1

    def _name(self, trainer: Any) -> None:
        self._groups = _name_groups(trainer)
        self._count = sum(len(optimizer.param_groups) for optimizer in trainer.optimizers)
        for label, *_ in self._groups:
            self.lrs.setdefault(label, self.lrs.pop(label.removesuffix("/pg1"), []))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.logging_interval != "step":  # not in on_train_epoch_start, which comes again where an epoch is resumed
            self._log(trainer, trainer.global_step + 1, "epoch" if self.logging_interval is None else "any")
        if self.logging_interval == "epoch":
            return
        step, every = trainer.global_step + 1, trainer.log_every_n_steps  # the step that this batch belongs to; 0: never
        if not every or step == self._logged_step or (step % every and not trainer.is_last_batch):
            return
        self._logged_step = step
        self._log(trainer, step, "step" if self.logging_interval is None else "any")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._groups = []

    def _log(self, trainer: Any, step: int, interval: str) -> None:
        if self._count != sum(len(optimizer.param_groups) for optimizer in trainer.optimizers):
            self._name(trainer)
        values: dict[str, float] = {}
        for label, optimizer, index, scheduled in self._groups:
            if interval != "any" and scheduled not in (None, interval):
                continue
            group = optimizer.param_groups[index]
            values[label] = float(group["lr"])
            self.lrs[label].append(values[label])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                values[f"{label}-momentum"] = self.last_momentum_values[f"{label}-momentum"] = float(momentum)
            if self.log_weight_decay:
                decay = float(group.get("weight_decay", 0))
                values[f"{label}-weight_decay"] = self.last_weight_decay_values[f"{label}-weight_decay"] = decay
        if values:
            trainer.log_metrics(values, step=step)


def _name_groups(trainer: Any) -> list[tuple[str, Any, int, str | None]]:
    """Name every parameter group: first those with a scheduler, in the schedulers' order, then the others."""
    owners: list[tuple[Any, str | None, str | None]] = []
    for config in trainer.lr_scheduler_configs:
        owners.append((config.scheduler.optimizer, config.name, config.interval))
    owners += [(o, None, None) for o in trainer.optimizers if all(o is not known for known, *_ in owners)]
    seen: Counter[str] = Counter()
    groups = []
    for optimizer, name, interval in owners:
        base = name or f"lr-{type(optimizer).__name__}"
        seen[base] += 1
        if seen[base] > 1:
            base = f"{base}-{seen[base] - 1}"
        names = [group.get("name") for group in optimizer.param_groups]
        named = [n for n in names if n is not None]
        if len(named) != len(set(named)):
            raise MisconfigurationException(f"LearningRateMonitor: parameter groups of one optimizer share a name: {sorted(named)}.")
        for index, own in enumerate(names):
            suffix = f"/{own}" if own is not None else f"/pg{index + 1}" if len(names) > 1 else ""
            groups.append((base + suffix, optimizer, index, interval))
    return groups
