"""DeviceStatsMonitor: how much of the device's memory, and of the machine, is in use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["DeviceStatsMonitor"]


class DeviceStatsMonitor(Callback):
    """Logs what `trainer.accelerator.get_device_stats(device)` tells, and on request the use of the machine.

    On cuda these are the figures of torch's allocator, in bytes and counts; none of them waits for the device. They are taken at the first
    and last batch of the steps whose numbers are published, and at the end of validation and test, as
    `DeviceStatsMonitor.on_train_batch_end/<figure>`. They are those of rank 0, and go to the loggers alone.

    Args:
        cpu_stats: add `cpu_percent`, `cpu_vm_percent` and `cpu_swap_percent` of the whole machine, which need the package psutil. None: when
            training on the CPU, where psutil is installed. False with the CPU logs nothing.

    Raises:
        MisconfigurationException: when a fit starts, for a trainer without a logger, and for cpu_stats=True without psutil.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._begun = -1  # the step whose first batch was seen last

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and not trainer.loggers:
            raise MisconfigurationException("DeviceStatsMonitor: the trainer has no logger. Give it one, or drop this callback.")
        if self._cpu_stats and find_spec("psutil") is None:
            raise MisconfigurationException("DeviceStatsMonitor(cpu_stats=True) needs the package psutil: install it, or leave cpu_stats out.")
        self._begun = -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.publishes_step and trainer.global_step != self._begun:
            self._begun = trainer.global_step
            self._log(trainer, "on_train_batch_start", trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.publishes_step and trainer.global_step == self._begun + 1:  # the optimizer has stepped
            self._log(trainer, "on_train_batch_end", trainer.global_step)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "on_validation_end", None)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._log(trainer, "on_test_end", None)

    def _log(self, trainer: Any, hook: str, step: int | None) -> None:
        device = trainer.strategy.root_device
        on_cpu = device.type == "cpu"
        if not trainer.is_global_zero or (on_cpu and self._cpu_stats is False):
            return
        stats = dict(trainer.accelerator.get_device_stats(device))
        if self._cpu_stats or (on_cpu and find_spec("psutil") is not None):
            stats.update(_machine())
        trainer.log_metrics({f"{type(self).__qualname__}.{hook}/{name}": value for name, value in stats.items()}, step, loggers_only=True)


def _machine() -> dict[str, float]:
    import psutil  # optional

    return {
        "cpu_percent": psutil.cpu_percent(),  # since the call before
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
