"""How a batch reaches a step: transfer hooks, number format, device, and the arguments that the step takes."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from trainer.data import DevicePrefetcher
from trainer.module_hooks import move_to

__all__ = ["copy_ahead", "receive", "takes_index"]


def receive(run: Any, batch: Any, samples: int | None = None, loader: int = 0) -> Any:
    """Return the batch as the step function gets it, and make it the current one for `self.log`."""
    if run.precision.converts_input:
        batch = run.precision.convert_input(batch)
    if run.transfers is not None:
        before, move, after = run.transfers
        batch = after(move(before(batch, loader), run.device, loader), loader)
    elif run.device.type != "cpu":
        batch = move_to(batch, run.device)  # costs nothing for what `copy_ahead` moved already
    run.recorder.batch, run.recorder.samples = batch, samples
    return batch


def copy_ahead(run: Any, epoch: Any) -> None:
    """On cuda, copy the next batch while the current one is computed on, unless a hook must see batches on the host first."""
    if run.device.type == "cuda" and epoch.takes_ahead and run.transfers is None:
        epoch.ahead = lambda batches: iter(DevicePrefetcher(batches, partial(move_to, device=run.device), run.device))


def takes_index(step: Any) -> bool:
    """True when a step function takes `batch_idx` (by position) besides the batch."""
    kinds = [p.kind for p in inspect.signature(step).parameters.values()]
    positional = [k for k in kinds if k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds
