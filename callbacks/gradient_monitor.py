"""GradientMonitor: how large the gradients of each layer are."""

from __future__ import annotations

from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["GradientMonitor"]


class GradientMonitor(Callback):
    """Logs the norm of the gradients of each layer, as `grad_norm/<layer>`, and of all together, as `grad_norm`.

    The gradients are those that the optimizer gets, ahead of clipping, averaged over ranks. Norms are computed only in steps whose numbers are
    published (`log_every_n_steps`), and are read together with those; in all other steps nothing is computed. With several optimizers
    the total of each is `grad_norm_0`, `grad_norm_1`, ... Layers without gradients (frozen ones) are left out.

    Args:
        norm_type: 2 for the Euclidean norm, any other p > 0, or "inf" for the largest element.
        depth: how many parts of a parameter's name make a layer: 1 joins all of "encoder.*"; 0 logs the totals alone. None: the modules that
            hold parameters.

    Raises:
        MisconfigurationException: a norm or depth that cannot be; when a fit starts, for a strategy that keeps layers on other ranks alone.
    """

    publishes = True

    def __init__(self, norm_type: float | str = 2.0, depth: int | None = None) -> None:
        try:
            self.norm_type = float(norm_type)
        except (TypeError, ValueError):
            self.norm_type = 0.0
        if not self.norm_type > 0:
            raise MisconfigurationException(f"GradientMonitor(norm_type={norm_type!r}) must be a number > 0 or 'inf'.")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise MisconfigurationException(f"GradientMonitor(depth={depth!r}) must be a whole number >= 0, or None.")
        self.depth = depth

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if any(p.is_meta for p in module.parameters()):
            raise MisconfigurationException(
                f"GradientMonitor: strategy {trainer.strategy.name!r} keeps layers on other ranks, whose gradients this rank never sees. Leave it "
                "out, or use strategy='ddp' or 'fsdp'."
            )

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not trainer.publishes_step:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None and id(p) in mine]
        if not named:
            return
        layers: dict[str, list[torch.Tensor]] = {}
        for (name, _), norm in zip(named, self._norms([grad for _, grad in named]), strict=True):
            layers.setdefault(self._layer(name), []).append(norm)
        joined = {layer: self._join(norms) for layer, norms in layers.items()}
        number = len(trainer.optimizers)
        index = next(i for i, one in enumerate(trainer.optimizers) if one is optimizer)
        self._log(module, "grad_norm" if number == 1 else f"grad_norm_{index}", self._join(list(joined.values())))
        for layer, norm in joined.items() if self.depth != 0 else ():
            self._log(module, f"grad_norm/{layer}", norm)

    @staticmethod
    def _log(module: Any, name: str, norm: torch.Tensor) -> None:
        module.log(name, norm, on_step=True, on_epoch=False, batch_size=1)  # equal on all ranks

    def _layer(self, name: str) -> str:
        owner = name.rpartition(".")[0] or name  # a parameter of the module itself is a layer of its own
        return owner if self.depth is None else ".".join(owner.split(".")[: self.depth])

    def _norms(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the norm of each gradient, of all of it where this rank has a part (collective there), on one device."""
        found: list[torch.Tensor] = [grads[0]] * len(grads)
        kinds: dict[Any, list[int]] = {}
        for i, grad in enumerate(grads):
            kinds.setdefault((grad.device, grad.dtype, type(grad), getattr(grad, "device_mesh", None)), []).append(i)
        for indices in kinds.values():
            for i, norm in zip(indices, torch._foreach_norm([grads[i] for i in indices], self.norm_type), strict=True):
                whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                found[i] = whole.to(grads[0].device, torch.promote_types(whole.dtype, torch.float32), non_blocking=True)
        return found

    def _join(self, norms: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm of several parts from theirs."""
        return torch.linalg.vector_norm(torch.stack(norms), self.norm_type)
