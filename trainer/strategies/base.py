"""The strategy's contract, and the strategy of one process on one device.

A strategy places and wraps the module and decides when gradients are synchronised. It makes no optimizer, opens no process
group and touches no file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer.dist import Dist

__all__ = ["SingleDeviceStrategy", "Strategy"]

_NULL = nullcontext()


class Strategy:
    """Base of all strategies. A run calls `setup` once; afterwards `training_step` is what the loop calls.

    Args are settings only: a strategy object can be pickled before a run and used again after it.
    """

    name: str = ""
    distributed: bool = False
    """True when each device gets a process of its own."""

    module: Any = None
    dist: Dist
    root_device: torch.device = torch.device("cpu")
    training_step: Callable[..., Any]

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        """Move the module to `device`. Collective."""
        self.module, self.root_device, self.dist = module, device, dist
        self._previous_device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
        module.to(device)

    def wrap(self, training: bool) -> None:
        """Set `training_step` to what computes a loss, after optimizers exist. Collective."""
        self.training_step = self.module.training_step

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one forward and backward; ranks reduce gradients only where `last` is True."""
        return _NULL

    def sync_gradients(self) -> None:
        """Average all gradients over ranks, for backward passes that no wrapper saw (manual optimization). Collective."""

    def sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that validation and checkpoints see one set. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the bare module's weights; keys never carry a wrapper's prefix."""
        return self.module.state_dict()

    def teardown(self) -> None:
        """Take the wrapper off. Weights go back to where they came from, which leaves no accelerator memory behind."""
        self.__dict__.pop("training_step", None)
        module, device = self.__dict__.pop("module", None), self.__dict__.pop("_previous_device", None)
        self.__dict__.pop("dist", None)
        if module is not None and device is not None:
            module.to(device)

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("module", "dist", "training_step", "_ddp", "_complete", "_previous_device")
        return {k: v for k, v in self.__dict__.items() if k not in dropped}


class SingleDeviceStrategy(Strategy):
    """One process, one device: `training_step` is the module's own."""

    name = "single_device"
