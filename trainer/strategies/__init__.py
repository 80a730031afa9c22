"""Strategies: where the module lives, how it is wrapped, and when gradients cross the ranks."""

from trainer.strategies.base import SingleDeviceStrategy, Strategy
from trainer.strategies.ddp import DDPStrategy

__all__ = ["DDPStrategy", "SingleDeviceStrategy", "Strategy"]
