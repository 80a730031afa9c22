"""Optimizers and schedulers whose classes and arguments come from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.errors import MisconfigurationException

__all__ = ["SCHEDULERS", "LRSchedulerCallable", "OptimizerCallable", "ReduceLROnPlateau", "configure_by"]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's ReduceLROnPlateau, which also knows the name of the metric that it looks at.

    Args:
        optimizer: The optimizer.
        monitor: Name of the metric.
        args, kwargs: Further arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


SCHEDULERS = (LRScheduler, ReduceLROnPlateau)

OptimizerCallable = Callable[[Iterable], Optimizer]
"""The type of a module's argument that makes an optimizer of parameters: `optimizer: OptimizerCallable = torch.optim.Adam`."""

LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
"""The type of a module's argument that makes a scheduler of an optimizer."""


def configure_by(module: Any, configure: Callable[..., Any], optimizer: Callable[[Any], Any], scheduler: Callable[[Any], Any] | None) -> Any:
    """Make the optimizer of the module's parameters, and what goes with it: what `module.configure_optimizers` does.

    Raises:
        MisconfigurationException: for torch's ReduceLROnPlateau, which does not say which metric it looks at.
    """
    made = optimizer(module.parameters())
    found = None if scheduler is None else scheduler(made)
    if isinstance(found, torch.optim.lr_scheduler.ReduceLROnPlateau) and not hasattr(found, "monitor"):
        raise MisconfigurationException(
            "--lr_scheduler torch.optim.lr_scheduler.ReduceLROnPlateau does not say which metric it looks at. Use "
            "--lr_scheduler trainer.cli.ReduceLROnPlateau --lr_scheduler.monitor NAME."
        )
    return configure(module, made, found)
