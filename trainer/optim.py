"""Optimizers and schedulers: reading what `configure_optimizers` returned, and the optimizer object that users step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer.errors import MisconfigurationException, nearest

__all__ = ["LRSchedulerConfig", "StepOptimizer", "parse_optimizers"]


@dataclass
class LRSchedulerConfig:
    """When and how a learning-rate scheduler moves.

    It moves after every `frequency`-th optimizer step (interval "step") or epoch (interval "epoch"), unless it is `resting`: a callback
    has taken the learning rate over.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True
    resting: bool = field(default=False, init=False)


_KEYS = [f.name for f in fields(LRSchedulerConfig) if f.init]
_FORMS = (
    "configure_optimizers must return an optimizer, a list of optimizers, two lists (optimizers, schedulers), a dict with "
    "'optimizer' and maybe 'lr_scheduler', a tuple or list of such dicts, or None"
)


def parse_optimizers(returned: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read any of the six forms of `configure_optimizers`.

    Raises:
        MisconfigurationException: naming what came back and what is expected.
    """
    optimizers: list[Optimizer] = []
    schedulers: list[LRSchedulerConfig] = []

    def add(item: Any) -> None:
        if isinstance(item, Optimizer):
            optimizers.append(item)
        elif isinstance(item, dict):
            if not isinstance(item.get("optimizer"), Optimizer):
                raise MisconfigurationException(f"{_FORMS}; got a dict without an 'optimizer' (keys: {', '.join(map(str, item))}).")
            unknown = set(item) - {"optimizer", "lr_scheduler", "monitor"}
            if unknown:
                name = sorted(unknown)[0]
                raise MisconfigurationException(
                    f"configure_optimizers returned the unknown key {name!r}.{nearest(name, ['optimizer', 'lr_scheduler', 'monitor'])}"
                )
            optimizers.append(item["optimizer"])
            if item.get("lr_scheduler") is not None:
                schedulers.append(_scheduler(item["lr_scheduler"], item.get("monitor")))
        else:
            raise MisconfigurationException(f"{_FORMS}; got {type(item).__name__}.")

    if returned is None:
        return [], []
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and all(isinstance(part, (list, tuple)) for part in returned):
            for item in returned[0]:
                add(item)
            schedulers.extend(_scheduler(s) for s in returned[1])
        else:
            for item in returned:
                add(item)
    else:
        add(returned)
    _check_ownership(optimizers, schedulers)
    return optimizers, schedulers


def _scheduler(given: Any, monitor: str | None = None) -> LRSchedulerConfig:
    if not isinstance(given, dict):
        config = LRSchedulerConfig(given, monitor=monitor)
    else:
        unknown = sorted(set(given) - set(_KEYS))
        if unknown:
            raise MisconfigurationException(f"The lr_scheduler dict has the unknown key {unknown[0]!r}.{nearest(unknown[0], _KEYS)}")
        if "scheduler" not in given:
            raise MisconfigurationException("The lr_scheduler dict lacks 'scheduler'.")
        config = LRSchedulerConfig(**{"monitor": monitor, **given})
    scheduler = config.scheduler
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
        raise MisconfigurationException(
            f"An lr_scheduler needs the methods step and state_dict; got {type(scheduler).__name__}."
        )
    if config.interval not in ("step", "epoch"):
        raise MisconfigurationException(f"lr_scheduler interval={config.interval!r} must be 'step' or 'epoch'.")
    if isinstance(config.frequency, bool) or not isinstance(config.frequency, int) or config.frequency < 1:
        raise MisconfigurationException(f"lr_scheduler frequency={config.frequency!r} must be a whole number >= 1.")
    if isinstance(scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    if config.reduce_on_plateau and config.monitor is None:
        raise MisconfigurationException(
            "ReduceLROnPlateau needs the name of the number it watches: {'scheduler': ..., 'monitor': 'val_loss'}."
        )
    return config


def _check_ownership(optimizers: list[Optimizer], schedulers: list[LRSchedulerConfig]) -> None:
    for config in schedulers:
        owner = getattr(config.scheduler, "optimizer", None)
        if isinstance(config.scheduler, LRScheduler) and isinstance(owner, Optimizer) and all(owner is not o for o in optimizers):
            raise MisconfigurationException(
                f"{type(config.scheduler).__name__} moves an optimizer that configure_optimizers did not return."
            )


class StepOptimizer:
    """An optimizer as `self.optimizers()` and `optimizer_step` hand it out.

    Everything is the wrapped optimizer's, but `step` unscales, clips and counts as the run asks.
    """

    def __init__(self, optimizer: Optimizer, take_step: Callable[[Optimizer, Callable[[], Any] | None], Any]) -> None:
        self.optimizer = optimizer
        self._take_step = take_step

    __class__ = property(lambda self: type(self.optimizer))  # type: ignore[assignment]  # isinstance(self.optimizers(), torch.optim.SGD)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure` computes loss and gradients first."""
        return self._take_step(self.optimizer, closure)

    def toggle_model(self, sync_grad: bool = True) -> Any:
        """Kept for Lightning's sake; use `module.toggled_optimizer(optimizer)`."""
        raise MisconfigurationException("Use `with self.toggled_optimizer(optimizer):` in place of optimizer.toggle_model().")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)


def grads_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients that `optimizer` will use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def scale_grads(optimizer: Optimizer, factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `optimizer` in place, on whichever devices they are."""
    grads = [g if type(g) is torch.Tensor else g.to_local() for g in grads_of(optimizer)]  # torch's lists are all cut tensors, or none
    if not isinstance(factor, torch.Tensor):
        torch._foreach_mul_(grads, factor)
        return
    for device in {g.device for g in grads}:
        torch._foreach_mul_([g for g in grads if g.device == device], factor.to(device, non_blocking=True))


def clip(optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
    """Clip the gradients of `optimizer`: by total norm ("norm") or each element ("value"). Reads nothing from the device."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not value or not params:
        return
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(params, value)
    else:
        torch.nn.utils.clip_grad_norm_(params, value)
