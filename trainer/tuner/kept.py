"""Everything that training steps may change, kept so that it can be put back bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trainer.errors import MisconfigurationException
from trainer.seed import rng_state, set_rng_state

__all__ = ["Kept"]

_OPENED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects whose attributes are kept; others in containers are only put back as the objects that they are."""


class Kept:
    """What can be reached from some objects through modules, optimizers, schedulers, dicts and lists; and all random streams.

    Copies of tensors are in host memory: an accelerator's memory is what a search may be about. Neither keeping nor restoring needs
    another rank.

    Args:
        things: kept with all that is below them; tensors keep their storage, data, gradient and `requires_grad`.
        shallow: objects (a data module) of which only the attributes themselves, and hyper-parameters, are kept; None is nobody.

    Raises:
        MisconfigurationException: for layers that get their shapes with the first batch, which could not be taken back.
    """

    def __init__(self, *things: Any, shallow: Sequence[Any] = ()) -> None:
        self._seen: dict[int, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # (tensor, its data, their copy)
        self._leaves: list[tuple[torch.Tensor, bool, torch.Tensor | None]] = []  # (tensor, requires_grad, grad)
        self._rng = rng_state()
        for owner in (one for one in shallow if one is not None):
            self._keep(vars(owner))
            self._keep(vars(owner).get("_hparams"))
        pending = list(things)
        with torch.inference_mode(False), torch.no_grad():
            while pending:
                pending += self._keep(pending.pop())

    def _keep(self, thing: Any) -> list[Any]:
        """Keep one thing; return what is in it."""
        if isinstance(thing, _OPENED):
            thing = vars(thing)
        if isinstance(thing, tuple):
            return list(thing)
        if not isinstance(thing, torch.Tensor | dict | list | set | deque) or id(thing) in self._seen:
            return []
        self._seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor):
            self._keep_tensor(thing)
            return []
        self._containers.append((thing, dict(thing) if isinstance(thing, dict) else list(thing)))
        return list(thing.values()) if isinstance(thing, dict) else list(thing)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            raise MisconfigurationException(
                "The module has lazy layers, whose shapes the first batch decides for good. Call the module on a batch before the search."
            )
        if not tensor.is_leaf or tensor.is_inference() or tensor.is_meta:
            return
        self._leaves.append((tensor, tensor.requires_grad, tensor.grad))
        data = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
        self._tensors.append((tensor, data, data.to("cpu", copy=True)))

    def restore(self) -> None:
        """Put everything back. May be called again and again."""
        for container, saved in self._containers:
            if isinstance(container, dict):
                container.update(saved)  # first, so that no moment is without the attributes
                for name in [name for name in container if name not in saved]:
                    del container[name]
            elif isinstance(container, list):
                container[:] = saved
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(saved)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data, copy in self._tensors:
                data.copy_(copy)
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    tensor.data = data  # a run may have moved it to a device, or changed its format
            for tensor, needs, grad in self._leaves:
                tensor.grad = None
                tensor.requires_grad_(needs)
                tensor.grad = grad
        set_rng_state(self._rng)
