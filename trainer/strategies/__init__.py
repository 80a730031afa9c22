"""Strategies: where the module lives, how it is wrapped, and when gradients cross the ranks."""

from trainer.strategies.base import SingleDeviceStrategy, Strategy
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.dp import DataParallelStrategy
from trainer.strategies.fsdp import FSDPStrategy
from trainer.strategies.mesh import ModelParallelStrategy
from trainer.strategies.model_parallel import ModelParallelDDPStrategy

__all__ = ["DataParallelStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelDDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy", "Strategy"]
