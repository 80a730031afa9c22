"""HistogramMonitor: how weights and gradients are distributed, layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from callbacks.binning import Histogram, extent, histogram
from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["HistogramMonitor"]


class HistogramMonitor(Callback):
    """Shows histograms of each parameter as `weights/<name>` and of its gradient as `gradients/<name>`, in every logger that can.

    The gradients are those that the optimizer gets in that step, averaged over ranks, ahead of clipping; the weights are those after it.
    Values are counted where they are, and rank 0 writes. Where a strategy shards parameters (fsdp, tensor parallel), every rank counts its part
    and only the counts are exchanged, so a parameter is never put together; otherwise the other ranks do nothing. In all other steps nothing is
    computed. Values that are not finite are left out.

    Args:
        every_n_steps: optimizer steps from one to the next. None: the last step of each epoch.
        weights, gradients: which of the two to show.

    Raises:
        MisconfigurationException: an interval below 1; neither of the two; when a fit starts, for a strategy that keeps layers on other
            ranks alone.
    """

    def __init__(self, every_n_steps: int | None = None, weights: bool = True, gradients: bool = True) -> None:
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise MisconfigurationException(f"HistogramMonitor(every_n_steps={every_n_steps!r}) must be a whole number of steps >= 1, or None.")
        if not (weights or gradients):
            raise MisconfigurationException("HistogramMonitor(weights=False, gradients=False) would show nothing; leave it out.")
        self.every_n_steps, self.weights, self.gradients = every_n_steps, weights, gradients
        self._step = 0  # the last one whose weights were looked at
        self._shown: tuple[int, set[str]] = (0, set())  # a step, and the gradients shown in it

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if any(p.is_meta for p in module.parameters()):
            raise MisconfigurationException(
                f"HistogramMonitor: strategy {trainer.strategy.name!r} keeps layers on other ranks, whose values this rank never sees. Leave it "
                "out, or use strategy='ddp' or 'fsdp'."
            )
        self._step, self._shown = trainer.global_step, (0, set())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        step = trainer.global_step + 1
        if not self.gradients or not self._due(trainer, step):
            return
        if self._shown[0] != step:
            self._shown = (step, set())
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {n: p.grad for n, p in module.named_parameters() if id(p) in mine and p.grad is not None and n not in self._shown[1]}
        self._shown[1].update(named)  # an optimizer may step more than once in a batch; the first time counts
        _show(trainer, "gradients", named, step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if not self.weights or step == self._step:
            return
        self._step = step
        if self._due(trainer, step):
            _show(trainer, "weights", dict(module.named_parameters()), step)

    def _due(self, trainer: Any, step: int) -> bool:
        return trainer.is_last_batch if self.every_n_steps is None else step % self.every_n_steps == 0


def _show(trainer: Any, kind: str, named: dict[str, torch.Tensor], step: int) -> None:
    """Count and log `named`. Collective, where one of them is sharded."""
    if any(hasattr(value, "to_local") for value in named.values()):
        counted = _over_ranks(trainer, named)
    elif trainer.is_global_zero:
        counted = {name: histogram(value) for name, value in named.items()}
    else:
        return
    for name, found in counted.items() if trainer.is_global_zero else ():
        if found is not None:
            for logger in trainer.loggers:
                logger.log_histogram(f"{kind}/{name}", found, step)


def _over_ranks(trainer: Any, named: dict[str, torch.Tensor]) -> dict[str, Histogram | None]:
    """Count parts on the ranks that have them: first the ends, which all must know, then what lies between. Collective."""
    parts = {name: _own_part(trainer, value) for name, value in named.items()}
    ends = trainer.gather({name: extent(part) for name, part in parts.items() if part is not None})
    ranges = {}
    for name in named:
        found = [their[name] for their in ends if name in their]
        low, high = min(low for low, _ in found), max(high for _, high in found)
        ranges[name] = (low, high) if low <= high else None
    counts = trainer.gather({name: histogram(part, *ranges[name]) for name, part in parts.items() if part is not None and ranges[name]})
    sums: dict[str, Histogram | None] = dict.fromkeys(named)
    for theirs in counts:
        for name, count in theirs.items():
            sums[name] = count if sums[name] is None else sums[name] + count
    return sums


def _own_part(trainer: Any, value: Any) -> torch.Tensor | None:
    """Return what this rank counts of a tensor: rank 0 of whole ones; of sharded ones each its part, once. None: nothing."""
    if hasattr(value, "to_local") and any(placement.is_partial() for placement in value.placements):
        value = value.full_tensor()
    if not hasattr(value, "to_local"):
        return value if trainer.is_global_zero else None
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    copies = [place[i] for i, placement in enumerate(value.placements) if placement.is_replicate()]
    return value.to_local() if 0 in mesh.mesh and not any(copies) else None
