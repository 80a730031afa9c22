"""StochasticWeightAveraging: the average of the weights at the ends of the last epochs, which a higher learning rate keeps apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.weight_averaging import WeightAveraging

__all__ = ["StochasticWeightAveraging"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class StochasticWeightAveraging(WeightAveraging):
    """Averages the weights at the end of each epoch from `swa_epoch_start` on; after the fit the module holds the average.

    From that epoch on the learning rate goes to `swa_lrs`, and the schedulers of `configure_optimizers` rest. Validation and checkpoints
    show the weights of training, as BatchNorm has no statistics for the average yet: those are computed at the end of the fit, by
    `training_step` over the training data once more, without gradients, and are the same on all ranks. The average is in a checkpoint as
    `averaged_model_state`, and a resume goes on to the bit.

    Args:
        swa_lrs: the learning rate to go to: a number, or one for each parameter group.
        swa_epoch_start: the epoch to begin with, counted from 1, or a share of `max_epochs` (float).
        annealing_epochs: how many epochs the learning rate takes to get there; 0 for at once.
        annealing_strategy: "cos" or "linear".
        avg_fn: `f(averaged, current, number of updates before) -> new average` of one tensor. By default all count equally.
        device: where the averages are kept; None for where each weight is.

    Attributes:
        n_averaged: epochs in the average so far.
        swa_start: index, from 0, of the first epoch; known once a fit starts.

    Raises:
        MisconfigurationException: for arguments outside of what is said above; when a fit starts, for several optimizers, another number of
            rates than of parameter groups, a share of unlimited epochs, and for BatchNorm with manual optimization or pipeline stages, where
            `training_step` cannot be called alone.
    """

    monitors = True  # its `on_train_epoch_end` is among the last, as the learning rate moves there

    # Nothing happens in steps and validations; put so, the loop does not ask.
    on_train_batch_end = Callback.on_train_batch_end
    on_validation_start = Callback.on_validation_start
    on_validation_end = Callback.on_validation_end

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
        device: torch.device | str | int | None = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or not all(isinstance(rate, Real) and not isinstance(rate, bool) and rate > 0 for rate in rates):
            raise MisconfigurationException(f"swa_lrs={swa_lrs!r} must be a number > 0, or a list of them, one for each parameter group.")
        share = isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1
        if not share and (isinstance(swa_epoch_start, bool) or not isinstance(swa_epoch_start, int) or swa_epoch_start < 1):
            raise MisconfigurationException(f"swa_epoch_start={swa_epoch_start!r} must be an epoch >= 1, or a share of max_epochs from 0.0 to 1.0.")
        if isinstance(annealing_epochs, bool) or not isinstance(annealing_epochs, int) or annealing_epochs < 0:
            raise MisconfigurationException(f"annealing_epochs={annealing_epochs!r} must be a whole number >= 0.")
        if annealing_strategy not in ("cos", "linear"):
            raise MisconfigurationException(f"annealing_strategy={annealing_strategy!r} must be 'cos' or 'linear'.")
        super().__init__(device, use_buffers=False, avg_fn=avg_fn)
        self._rates, self._epoch_start = swa_lrs, swa_epoch_start
        self._annealing_epochs, self._annealing_strategy = annealing_epochs, annealing_strategy
        self.swa_start = 0
        self._scheduler: SWALR | None = None
        self._scheduler_state: dict[str, Any] | None = None
        self._training_statistics: dict[str, torch.Tensor] = {}  # of BatchNorm, while those of the average are in the module

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self.swa_start

    # -- when ------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._scheduler, self._scheduler_state, self._training_statistics = None, None, {}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._check(trainer, module)
        statistics = _statistics(module)
        super().on_fit_start(trainer, module)  # loads the average of a checkpoint by way of the module
        _put(module, statistics)

    def _check(self, trainer: Any, module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise MisconfigurationException(f"StochasticWeightAveraging sets the learning rate of one optimizer; this fit has {len(trainer.optimizers)}.")
        groups = trainer.optimizers[0].param_groups
        if isinstance(self._rates, (list, tuple)) and len(self._rates) != len(groups):
            raise MisconfigurationException(f"swa_lrs has {len(self._rates)} learning rates, but the optimizer {len(groups)} parameter groups.")
        epochs, start = trainer.max_epochs, self._epoch_start
        unlimited = epochs in (None, -1)
        if isinstance(start, float):
            if unlimited:
                raise MisconfigurationException(f"swa_epoch_start={start} is a share of max_epochs, which has no limit. Give the number of an epoch.")
            start = int(start * epochs)
        self.swa_start = max(start - 1, 0)
        if not unlimited and self.swa_start >= epochs:
            trainer.warn(f"swa_epoch_start={start} is after the last of max_epochs={epochs} epochs, so nothing is averaged.")
        if any(_tracked(module)) and (not module.automatic_optimization or trainer.strategy.pipeline is not None):
            what = "pipeline stages" if module.automatic_optimization else "manual optimization"
            raise MisconfigurationException(
                f"StochasticWeightAveraging computes the statistics of BatchNorm by calling training_step alone, which does not go with {what}. Use layers "
                "without statistics (GroupNorm, LayerNorm), or WeightAveraging."
            )

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self._scheduler is None and trainer.current_epoch >= self.swa_start:
            for config in trainer.lr_scheduler_configs:
                config.resting = True  # and stays in checkpoints as it is
            self._scheduler = self._make_scheduler(trainer.optimizers[0])

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> SWALR:
        before = [group["lr"] for group in optimizer.param_groups]
        rates = list(self._rates) if isinstance(self._rates, (list, tuple)) else self._rates
        scheduler = SWALR(optimizer, rates, self._annealing_epochs, self._annealing_strategy)
        if self._scheduler_state is not None:
            scheduler.load_state_dict(self._scheduler_state)
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate
        return scheduler

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_end(trainer, module)
        if self._scheduler is not None:
            self._scheduler.step()

    def _finish(self, trainer: Any, module: Any) -> None:
        super()._finish(trainer, module)
        layers = list(_tracked(module))
        if not layers:
            return
        self._training_statistics = _statistics(module)
        momenta = [layer.momentum for _, layer in layers]
        for _, layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # all batches count equally
        try:
            trainer.training_pass()
        finally:
            for (_, layer), momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
        _join_ranks(trainer, [layer for _, layer in layers])

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self._live and self._swapped:
            _put(module, self._training_statistics)
        super().on_exception(trainer, module, exception)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the average; after the end of the fit `state_dict` holds it, and the weights of training are in `current_model_state`."""
        resumable = "optimizer_states" in checkpoint
        if self._swapped:
            super().on_save_checkpoint(trainer, module, checkpoint)
            if resumable:
                checkpoint["current_model_state"].update(self._training_statistics)
        elif self._held is not None and resumable:
            checkpoint["averaged_model_state"] = self._other_state(trainer, module)
        if resumable:
            state = None if self._scheduler is None else self._scheduler.state_dict()
            if state is not None:
                state.pop("anneal_func", None)  # a function, which older torch lists, too
            checkpoint["averaging_state"] = {"n_averaged": self.n_averaged, "swa_scheduler": state}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, module, checkpoint)
        saved = checkpoint.get("averaging_state") or {}
        self._scheduler_state = saved.get("swa_scheduler")
        if "averaged_model_state" in checkpoint:
            self._loaded, self.n_averaged = checkpoint["averaged_model_state"], int(saved["n_averaged"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scheduler": None, "_training_statistics": {}}


def _tracked(module: torch.nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield the BatchNorm layers whose statistics training moves, with the prefix of their keys; those in eval mode are frozen."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.training:
            yield name.replace("_orig_mod.", "") + ".", layer


def _statistics(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the statistics of BatchNorm, under their keys."""
    return {prefix + name: getattr(layer, name).clone() for prefix, layer in _tracked(module) for name in _STATISTICS}


def _put(module: torch.nn.Module, statistics: dict[str, torch.Tensor]) -> None:
    """Put back what `_statistics` returned."""
    if statistics:
        for prefix, layer in _tracked(module):
            for name in _STATISTICS:
                getattr(layer, name).copy_(statistics[prefix + name])


def _join_ranks(trainer: Any, layers: list[_BatchNorm]) -> None:
    """Give all ranks the mean of their statistics over the batches of all. Collective."""
    every = trainer.gather([[getattr(layer, name).cpu() for name in _STATISTICS] for layer in layers])
    if len(every) == 1:
        return
    for layer, *ranks in zip(layers, *every, strict=True):
        total = sum(int(count) for *_, count in ranks)
        for place, name in enumerate(_STATISTICS[:2]):
            mean = sum(rank[place].double() * (int(rank[2]) / total) for rank in ranks)
            getattr(layer, name).copy_(mean)
        layer.num_batches_tracked.fill_(total)
