"""How a batch reaches a step: transfer hooks, number format, device."""

from __future__ import annotations

from typing import Any

from trainer.module import move_to

__all__ = ["receive"]


def receive(run: Any, batch: Any, samples: int | None = None, loader: int = 0) -> Any:
    """Return the batch as the step function gets it, and make it the current one for `self.log`."""
    if run.precision.converts_input:
        batch = run.precision.convert_input(batch)
    if run.data_transfers or run.module_transfers:
        owner = run.datamodule if run.data_transfers else run.module
        batch = owner.on_before_batch_transfer(batch, loader)
        batch = owner.transfer_batch_to_device(batch, run.device, loader)
        batch = owner.on_after_batch_transfer(batch, loader)
    elif run.device.type != "cpu":
        batch = move_to(batch, run.device)
    run.recorder.batch, run.recorder.samples = batch, samples
    return batch


