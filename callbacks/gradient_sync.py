"""GradientSync: how many batches make a step, epoch by epoch, how gradients cross the ranks, and whether weights do instead."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, nearest

__all__ = ["GradientAccumulationScheduler", "GradientSync"]

COMM_HOOKS = ("bf16", "fp16", "powersgd")


class GradientSync(Callback):
    """Sets the accumulation of each epoch, and how the ranks of DDP exchange gradients or weights.

    Ranks reduce gradients once a step, with its last batch; the batches before it stay local.

    Post-local SGD (`average_every=n`): after `warmup_steps` steps of DDP each rank steps on its own gradients, and every n-th step
    the mean of the ranks' weights takes their place (optimizer states stay the rank's own). Validation and the weights of a
    checkpoint are the mean over ranks at that moment, and looking at it changes nothing: a checkpoint also keeps each rank's own weights
    and optimizer states, so a resume on as many ranks goes on to the bit. On another number all ranks begin with the mean. When the
    fit ends the mean stays.

    Args:
        accumulate: batches of one optimizer step: a number, or {first epoch: number} with epochs counted from 0.
        comm_hook: "bf16" or "fp16" (gradients travel in 16 bits), "powersgd" (as low-rank matrices), or a DDP communication hook
            `hook(state, bucket) -> Future[Tensor]` of yours.
        comm_state: the first argument of your hook.
        comm_options: for "powersgd", the arguments of torch's PowerSGDState (matrix_approximation_rank, start_powerSGD_iter, ...).
        average_every: average weights every so many steps in the place of gradients; None averages gradients.
        warmup_steps: steps with averaged gradients ahead of the first local one.

    Raises:
        MisconfigurationException: for a number below 1 or an epoch below 0, an unknown hook, arguments that exclude each other; when a
            fit starts, for a strategy that has no place for a hook or for averages, and for averages with 16-mixed or LBFGS.
    """

    def __init__(
        self,
        accumulate: int | Mapping[int, int] = 1,
        comm_hook: str | Callable[..., Any] | None = None,
        comm_state: Any = None,
        comm_options: Mapping[str, Any] | None = None,
        average_every: int | None = None,
        warmup_steps: int = 0,
    ) -> None:
        schedule = {0: accumulate} if isinstance(accumulate, int) else dict(accumulate)
        for epoch, number in schedule.items():
            if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
                raise MisconfigurationException(f"accumulate has the epoch {epoch!r}; epochs are whole numbers from 0 on.")
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise MisconfigurationException(f"accumulate={number!r} in epoch {epoch} must be a whole number >= 1.")
        self.schedule = {0: 1, **schedule}
        self._epochs = sorted(self.schedule)
        self.comm_hook, self.comm_state, self.comm_options = comm_hook, comm_state, dict(comm_options or {})
        self.average_every, self.warmup_steps = average_every, warmup_steps
        self._check_hook()
        for name, value, low in (("average_every", 1 if average_every is None else average_every, 1), ("warmup_steps", warmup_steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise MisconfigurationException(f"{name}={value!r} must be a whole number >= {low}.")
        if warmup_steps and average_every is None:
            raise MisconfigurationException("warmup_steps are the steps ahead of local ones: give average_every as well.")

    def _check_hook(self) -> None:
        hook = self.comm_hook
        if isinstance(hook, str) and hook not in COMM_HOOKS:
            raise MisconfigurationException(
                f"comm_hook={hook!r} is unknown.{nearest(hook, COMM_HOOKS)} Choose one of {', '.join(COMM_HOOKS)}, or give a function."
            )
        if not (hook is None or isinstance(hook, str) or callable(hook)):
            raise MisconfigurationException(f"comm_hook must be a name or a function hook(state, bucket); got {type(hook).__name__}.")
        if self.comm_options and hook != "powersgd":
            raise MisconfigurationException("comm_options are those of comm_hook='powersgd'; a function gets comm_state.")
        if self.comm_state is not None and not callable(hook):
            raise MisconfigurationException("comm_state is the first argument of a comm_hook that is a function.")
        if hook == "powersgd":
            _power_sgd(self.comm_options)

    def accumulation(self, epoch: int) -> int:
        """Return the batches of one step in `epoch`."""
        return self.schedule[self._epochs[bisect.bisect_right(self._epochs, epoch) - 1]]

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        strategy = trainer.strategy
        if self.comm_hook is not None:
            if not hasattr(strategy, "comm_hook"):
                raise MisconfigurationException(f"GradientSync(comm_hook=...): strategy {strategy.name!r} sends no gradients; use 'ddp'.")
            strategy.comm_hook, strategy.comm_state = _hook(self.comm_hook, self.comm_state, self.comm_options)
        if max(self.schedule.values()) > 1 and not module.automatic_optimization:
            raise MisconfigurationException(
                f"{type(self).__name__}: accumulation works in automatic optimization only; in manual optimization step every n-th batch yourself."
            )
        static = getattr(strategy, "ddp_kwargs", {}).get("static_graph")
        if static and (self.average_every is not None or max(self.schedule.values()) > 1):
            raise MisconfigurationException(
                "GradientSync: with static_graph=True torch's DDP reduces the gradients of every batch, so neither accumulate > 1 nor "
                "average_every is possible; use DDPStrategy(static_graph=False)."
            )
        if self.average_every is None or stage != "fit":
            return
        if not hasattr(strategy, "average"):
            raise MisconfigurationException(
                f"GradientSync(average_every=...): strategy {strategy.name!r} has no ranks that could step on their own; use 'ddp'."
            )
        if trainer.precision == "16-mixed":
            raise MisconfigurationException(
                "GradientSync(average_every=...) with precision='16-mixed': each rank would have a loss scale of its own; use 'bf16-mixed'."
            )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._steps = trainer.global_step
        if self.comm_hook == "powersgd" and self._steps:
            trainer.warn("PowerSGD begins anew: what it has not sent yet, and its matrices, are in no checkpoint. The resume is not to the bit.")
        if self.average_every is None:
            return
        if any(type(optimizer).__name__ == "LBFGS" for optimizer in trainer.optimizers):
            raise MisconfigurationException("GradientSync(average_every=...) with LBFGS: ranks would search along lines of their own.")
        trainer.strategy.local = self._steps >= self.warmup_steps

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = trainer.global_step
        if self.average_every is None or steps == self._steps:  # steps are the same on all ranks
            return
        self._steps = steps
        strategy = trainer.strategy
        if strategy.local and (steps - self.warmup_steps) % self.average_every == 0:
            strategy.average()
        strategy.local = steps >= self.warmup_steps

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = self.accumulation(trainer.current_epoch)


class GradientAccumulationScheduler(GradientSync):
    """Lightning's name for `GradientSync(accumulate=scheduling)`.

    Args:
        scheduling: {first epoch, from 0: batches of one optimizer step}; epochs ahead of the first one named take single batches.

    Raises:
        MisconfigurationException: as GradientSync, for an empty schedule, and when a fit starts with Trainer(accumulate_grad_batches=) as well.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise MisconfigurationException("GradientAccumulationScheduler needs {epoch: batches}; got nothing.")
        super().__init__(scheduling)
        self.scheduling, self.epochs = self.schedule, self._epochs

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has steps of several batches."""
        return max(self.schedule.values()) > 1

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the batches of one step in `epoch`."""
        return self.accumulation(epoch)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and trainer.accumulate_grad_batches != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulationScheduler both say how many batches "
                "make a step. Give one of them."
            )
        super().setup(trainer, module, stage)


def _hook(hook: Any, state: Any, options: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Return (hook, its first argument), as DDP registers them; the state of one run is not that of the next."""
    if callable(hook):
        return hook, state
    if hook == "powersgd":
        return powerSGD_hook.powerSGD_hook, _power_sgd(options)
    return (default_hooks.bf16_compress_hook if hook == "bf16" else default_hooks.fp16_compress_hook), None


def _power_sgd(options: dict[str, Any]) -> Any:
    """Make torch's state of PowerSGD.

    Raises:
        MisconfigurationException: for arguments that it does not take.
    """
    try:
        return powerSGD_hook.PowerSGDState(process_group=None, **options)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"comm_options={options!r} do not fit torch's PowerSGDState: {error}") from error
