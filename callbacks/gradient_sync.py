"""GradientSync: how many batches make a step, epoch by epoch, and how gradients cross the ranks."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["GradientAccumulationScheduler", "GradientSync"]


class GradientSync(Callback):
    """Sets the accumulation of each epoch, and a communication hook for DDP.

    Ranks reduce gradients once a step, with its last batch; the batches before it stay local.

    Args:
        accumulate: batches of one optimizer step: a number, or {first epoch: number} with epochs counted from 0.
        comm_hook: a DDP communication hook, `hook(state, bucket) -> Future[Tensor]`, for example
            `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`.
        comm_state: the hook's first argument.

    Raises:
        MisconfigurationException: for a number below 1 or an epoch below 0; when a fit starts, for a communication hook with a
            strategy that takes none.
    """

    def __init__(
        self,
        accumulate: int | Mapping[int, int] = 1,
        comm_hook: Callable[..., Any] | None = None,
        comm_state: Any = None,
    ) -> None:
        schedule = {0: accumulate} if isinstance(accumulate, int) else dict(accumulate)
        for epoch, number in schedule.items():
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise MisconfigurationException(f"accumulate has the epoch {epoch!r}; epochs are whole numbers from 0 on.")
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise MisconfigurationException(f"accumulate={number!r} in epoch {epoch} must be a whole number >= 1.")
        self.schedule = {0: 1, **schedule}
        self._epochs = sorted(self.schedule)
        self.comm_hook, self.comm_state = comm_hook, comm_state

    def accumulation(self, epoch: int) -> int:
        """Return the batches of one step in `epoch`."""
        return self.schedule[self._epochs[bisect.bisect_right(self._epochs, epoch) - 1]]

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.comm_hook is None:
            return
        if not hasattr(trainer.strategy, "comm_hook"):
            raise MisconfigurationException(f"GradientSync(comm_hook=...): strategy {trainer.strategy.name!r} sends no gradients; use 'ddp'.")
        trainer.strategy.comm_hook, trainer.strategy.comm_state = self.comm_hook, self.comm_state

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = self.accumulation(trainer.current_epoch)


class GradientAccumulationScheduler(GradientSync):
    """Lightning's name for `GradientSync(accumulate=scheduling)`."""

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise MisconfigurationException("GradientAccumulationScheduler needs {epoch: batches}; got nothing.")
        super().__init__(scheduling)
        self.scheduling = self.schedule
