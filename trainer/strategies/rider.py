"""What the ranks wish, sent in a bucket of gradients: a few numbers more in a message that goes out anyway, in the place of one of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Rider"]

BITS = 8  # more than `Run.wishes` has


class Rider(torch.nn.Module):
    """A parameter that has no part in the model: its gradient is what this rank wishes, and its average what any rank does.

    A bit is 1.0 or 0.0, in the number format of the other gradients; the mean over ranks is above 0 where any rank has it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.flag = torch.nn.Parameter(torch.zeros(BITS, dtype=dtype))
        self.wishes: Callable[[], int] | None = None  # asked in the next backward

    def board(self, output: Any) -> Any:
        """Return what `training_step` returned, its loss with the flag in its graph. A loss without a gradient stays as it is."""
        if isinstance(output, torch.Tensor):
            return _Board.apply(output, self.flag, self) if output.requires_grad else output
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            return {**output, "loss": _Board.apply(loss, self.flag, self)}
        return output

    def ask(self, wishes: Callable[[], int]) -> None:
        """Send `wishes()` with the gradients of the backward that comes next."""
        self.wishes, self.flag.grad = wishes, None

    def answer(self) -> int | None:
        """Return the bits that any rank had; None when no backward came."""
        grad, self.wishes, self.flag.grad = self.flag.grad, None, None
        return None if grad is None else sum(1 << i for i, share in enumerate(grad.tolist()) if share)


class _Board(torch.autograd.Function):
    """The loss itself; backward gives the flag its gradient, whatever the loss is multiplied by."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, flag: torch.Tensor, rider: Rider) -> torch.Tensor:
        ctx.rider = rider
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        flag, wishes = ctx.rider.flag, ctx.rider.wishes
        bits = 0 if wishes is None else wishes()
        if not bits:
            return grad, torch.zeros_like(flag), None
        return grad, torch.tensor([float(bits >> i & 1) for i in range(BITS)], dtype=flag.dtype), None
