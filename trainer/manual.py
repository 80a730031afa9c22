"""What a module calls to reach its optimizers, in manual optimization most of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """A part of `TrainModule`."""

    trainer: Any

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list when there are several. Their `step` handles precision and hooks."""
        found = self.trainer._step_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list when there are several, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization: scales the loss as the precision asks and averages gradients over ranks.

        Where ranks hold different numbers of samples (a short last batch), each weighs as many as it has. Collective.

        Raises:
            MisconfigurationException: in automatic optimization.
        """
        self.trainer._manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of `optimizer` in place by "norm" (default) or "value"; without a value nothing happens."""
        self.trainer._clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of `optimizer` require gradients, until `untoggle_optimizer`."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        saved = self.__dict__.setdefault("_toggled", {})
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for p in group["params"]:
                    saved.setdefault(id(p), (p, p.requires_grad))
                    p.requires_grad = saved[id(p)][1] if id(p) in mine else False

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Put back the `requires_grad` of every parameter that `toggle_optimizer` changed."""
        for p, flag in self.__dict__.pop("_toggled", {}).values():
            p.requires_grad = flag

    @contextmanager
    def toggled_optimizer(self, optimizer: Any, toggle_model: bool = True) -> Iterator[None]:
        """Run a block with `toggle_optimizer` in force."""
        if toggle_model:
            self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            if toggle_model:
                self.untoggle_optimizer(optimizer)
