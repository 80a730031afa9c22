"""The weights inside one optimizer step, and reading what a training step returned."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from trainer.errors import MisconfigurationException
from trainer.optim import scale_grads

__all__ = ["Window", "read_output"]


class Window:
    """The weight of each batch of a group, so that their summed gradients are those of one large batch.

    Without counts each batch weighs what the data layer knows of it: its share of the samples, or 1/size. Where the training
    step gives counts, backward runs from `loss * count`, and the sum is divided by all counts of all ranks at the end:
    sum_i(count_i * grad_i) / sum_i(count_i), the gradient of the mean over all samples or tokens.
    """

    __slots__ = ("_counts", "_group", "_share", "_used", "size")

    def __init__(self, group: Any) -> None:
        self._group, self.size = group, group.size
        self.restart()

    def restart(self) -> None:
        """Begin again: a closure is evaluated once more."""
        self._counts: list[Any] = []
        self._used, self._share = 0, 0.0  # batches without a count that were not skipped, and the sum of their weights

    def samples(self, i: int) -> int | None:
        """Return how many samples batch `i` holds on this rank, where the data layer knows it."""
        counts = self._group.counts
        return None if counts is None else counts[i]

    def use(self, i: int, count: Any) -> Any:
        """Note that batch `i` takes part; return what to multiply its loss by, None for 1."""
        if count is not None:
            if self._used:
                raise _mixed()
            if self.samples(i) == 0:  # a batch of other ranks' samples, only there to keep step with them
                count = 0 * count
            self._counts.append(count)
            return count
        if self._counts:
            raise _mixed()
        weight = self.weight(i)
        self._used += 1
        self._share += weight
        return None if weight == 1.0 else weight

    def weight(self, i: int, count: Any = None) -> Any:
        """Return what the loss of batch `i` is multiplied by: its count, its share of the samples, or 1/size."""
        if count is not None:
            return count
        return 1.0 / self.size if self._group.weights is None else self._group.weights[i]

    @property
    def empty(self) -> bool:
        """True when every batch was skipped."""
        return not self._counts and not self._used

    def correct(self, run: Any) -> Any:
        """Bring the summed gradients to the mean: by the counts, or by the share of batches that were not skipped. Collective.

        Return what they were multiplied by; None for 1.
        """
        factor: Any
        if self._counts:
            total = torch.as_tensor(sum(self._counts), dtype=torch.float64 if run.device.type != "mps" else torch.float32)
            if not run.dist.alone:  # the ranks' gradients were averaged: world_size times the mean is their sum
                total = run.dist.sum(total.reshape(1).clone()) / run.world.world_size
            total = total.reshape(()).to(run.device)
            factor = 1.0 / torch.where(total == 0, 1.0, total)  # nothing was counted: the gradients are zero, and stay so
        elif 0 < self._used < self.size:
            factor = 1.0 / self._share
        else:
            return None
        for optimizer in run.optimizers:
            scale_grads(optimizer, factor)
        return factor


def _mixed() -> MisconfigurationException:
    return MisconfigurationException(
        "training_step gave a 'count' for some batches of a step and not for others; give it always or never."
    )


def read_output(run: Any, output: Any) -> tuple[torch.Tensor | None, Any]:
    """Return (loss, count) from what `training_step` returned.

    Raises:
        MisconfigurationException: naming what came back and what is expected.
    """
    count = None
    loss = output
    if type(output) is not torch.Tensor:
        if output is None:
            if not run.takes_none:
                raise MisconfigurationException(
                    "training_step returned None on a run of several ranks: the others would wait for its gradients. Return the loss times "
                    "zero, or use Trainer(bad_loss='skip') to leave the step out on all of them (not with FSDP and SyncBatchNorm, where they "
                    "wait in the forward already)."
                )
            return None, None
        if isinstance(output, dict):
            loss, count = output.get("loss"), output.get("count")
            if not (count is None or isinstance(count, Real) or (isinstance(count, torch.Tensor) and count.numel() == 1)):
                raise MisconfigurationException(
                    f"training_step gave 'count' as {type(count).__name__}; it must be the number of samples or tokens in the batch."
                )
    if not isinstance(loss, torch.Tensor):
        got = f"a dict with the keys {', '.join(map(repr, output)) or 'none'}" if isinstance(output, dict) else type(loss).__name__
        raise MisconfigurationException(f"training_step returned {got}. {_EXPECTED}")
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"training_step returned a loss of shape {tuple(loss.shape)}; it must be one number (.mean()). {_EXPECTED}"
        )
    if not loss.requires_grad and run.optimizers:
        raise MisconfigurationException(
            "training_step returned a loss that is detached from the weights (requires_grad is False): no gradient would reach "
            f"them. Is it made under no_grad, detached, or of frozen layers only? {_EXPECTED}"
        )
    return loss, count


_EXPECTED = "Expected: a scalar tensor, a dict with such a tensor under 'loss' (and maybe 'count'), or None to skip the batch."
