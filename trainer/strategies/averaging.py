"""Averages over ranks, one flat vector a number format and device: of gradients that no wrapper reduced, and of weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["average", "gradients_of"]

Reduce = Callable[[torch.Tensor], torch.Tensor]


def gradients_of(params: list[torch.nn.Parameter], maximum: Reduce) -> list[torch.Tensor]:
    """Return the gradients of `params` that any rank has; one that this rank lacks becomes zero. Collective.

    Args:
        maximum: takes the element-wise maximum over the ranks, in place.
    """
    held = maximum(torch.tensor([p.grad is not None for p in params], dtype=torch.int64)).tolist()
    grads = []
    for p, anyone in zip(params, held, strict=True):
        if anyone:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            grads.append(p.grad)
    return grads


def average(tensors: list[torch.Tensor], total: Reduce, ranks: int) -> None:
    """Put the mean over the ranks in the place of each of `tensors`. Collective.

    Args:
        total: adds up over the ranks, in place.
        ranks: how many those are.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        flat = total(torch.cat([t.reshape(-1) for t in alike])).div_(ranks)
        pieces = flat.split([t.numel() for t in alike])
        torch._foreach_copy_(alike, [piece.view_as(t) for piece, t in zip(pieces, alike, strict=True)])
