"""WeightAveraging and EMAWeightAveraging: a running average of the weights, which validation, checkpoints and the end result use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["EMAWeightAveraging", "WeightAveraging"]


class WeightAveraging(Callback):
    """Keeps an average of the weights beside those that are trained.

    Validation inside the fit computes with the averages, and at the end of the fit they are what the module holds. A checkpoint's
    `state_dict` holds them, too; the weights of training are beside it, under `current_model_state`, and a resume goes on to the bit. The
    first update takes the weights as they are; before it there is no average, and everything uses the weights of training.

    Under strategies that shard the weights each rank averages its own part. After an exception the module holds the weights of training.

    Args:
        device: where the averages are kept; None for where each weight is. "cpu" spares accelerator memory and costs a copy an update.
        use_buffers: average floating-point buffers as well (the running statistics of BatchNorm). Otherwise, and for counters, the
            module's own are used.
        avg_fn: `f(averaged, current, number of updates before) -> new average` of one tensor, element by element.
        multi_avg_fn: `f(list of averaged, list of current, number of updates before)`, which changes the averages in place. Without
            either all updates count equally.

    Attributes:
        n_averaged: updates so far.

    Raises:
        MisconfigurationException: for both functions at once; when a fit starts, with a second callback of this kind, and with ranks that
            step on their own (`GradientSync(average_every=...)`).
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        avg_fn: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
        multi_avg_fn: Callable[[list[torch.Tensor], list[torch.Tensor], int], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise MisconfigurationException("Give avg_fn (one tensor) or multi_avg_fn (lists of tensors), not both.")
        self._device = None if device is None else torch.device(device)
        self._use_buffers, self._avg_fn = use_buffers, avg_fn
        self._multi_avg_fn = multi_avg_fn or get_swa_multi_avg_fn()
        self.n_averaged = 0
        self._held: list[torch.Tensor] | None = None  # the averages; the weights of training while those are in the module
        self._swapped = False
        self._live = False  # inside a fit
        self._loaded: dict[str, Any] | None = None  # whole averages of a checkpoint, until the module is placed

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Say whether to take the weights into the average; override it to choose. By default after every optimizer step.

        Asked once after each optimizer step with its index, and once after each epoch with its index; both count from 0, the other is None.
        """
        return step_idx is not None

    # -- when ------------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        others = [c for c in trainer.callbacks if c is not self]
        if any(isinstance(c, WeightAveraging) for c in others):
            raise MisconfigurationException("Two callbacks average weights, but a checkpoint has place for one average. Remove one.")
        if any(getattr(c, "average_every", None) is not None for c in others):
            raise MisconfigurationException(
                f"{type(self).__name__} with GradientSync(average_every=...): each rank would average weights of its own. Use one of them."
            )
        self._held, self._swapped, self._loaded, self.n_averaged = None, False, None, 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._live = True
        if self._loaded is not None:  # loaded into the placed module, the averages are cut and moved as its weights are
            self._held = self._copies(module)
            elsewhere = {_plain(key) for key, value in module.state_dict().items() if value.is_meta}
            _load(trainer, module, {key: value for key, value in self._loaded.items() if key not in elsewhere}, strict=False)
            self._loaded, self._swapped = None, True
            self._swap(trainer, module)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = trainer.global_step
        if steps != self._steps:
            self._steps = steps
            if self.should_update(step_idx=steps - 1):
                self._update(module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self._live and self._held is not None:
            self._swap(trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._live and self._swapped:
            self._swap(trainer, module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._held is not None:
            self._finish(trainer, module)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """A resumed fit with nothing left to do leaves the averages in the module as well."""
        if self._held is not None and not self._swapped:
            self._finish(trainer, module)

    def _finish(self, trainer: Any, module: Any) -> None:
        """Leave the averages in the module. Collective."""
        self._swap(trainer, module)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self._live and self._swapped:
            self._exchange(module)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Keep what a checkpoint of the fit's end needs, the weights of training; on the CPU, where they are in nobody's way."""
        if self._live:
            self._live = False
            kept = self._swapped and trainer.strategy.plain_afterwards
            self._held = [t.cpu() for t in self._held] if kept else None

    # -- averages and weights --------------------------------------------------------------------------------------------

    def _tensors(self, module: Any) -> list[torch.Tensor]:
        """What is averaged: this rank's part of each parameter, and the buffers that a checkpoint keeps."""
        found = list(module.parameters())
        if self._use_buffers:
            for part in module.modules():
                found += [b for name, b in part._buffers.items() if b is not None and name not in part._non_persistent_buffers_set]
        own = (t.detach() for t in found if not t.is_meta and (t.is_floating_point() or t.is_complex()))  # meta: of other ranks
        return [t.to_local() if hasattr(t, "to_local") else t for t in own]

    def _copies(self, module: Any) -> list[torch.Tensor]:
        return [t.to(self._device or t.device, copy=True) for t in self._tensors(module)]

    @torch.no_grad()
    def _update(self, module: Any) -> None:
        if self._held is None:
            self._held = self._copies(module)
        else:
            by_kind: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for averaged, current in zip(self._held, self._tensors(module), strict=True):
                alike = by_kind.setdefault((averaged.device, averaged.dtype), ([], []))
                alike[0].append(averaged)
                alike[1].append(current.to(averaged.device))
            for averages, currents in by_kind.values():
                self._average(averages, currents)
        self.n_averaged += 1

    def _average(self, averages: list[torch.Tensor], currents: list[torch.Tensor]) -> None:
        if self._avg_fn is None:
            self._multi_avg_fn(averages, currents, self.n_averaged)
            return
        for averaged, current in zip(averages, currents, strict=True):
            averaged.copy_(self._avg_fn(averaged, current, self.n_averaged))

    @torch.inference_mode(False)  # of a validation, whose views could not be changed later
    @torch.no_grad()
    def _exchange(self, module: Any) -> None:
        """Let the module and this callback exchange what they hold."""
        for mine, held in zip(self._tensors(module), self._held or [], strict=True):
            before = mine.clone()
            mine.copy_(held)
            held.copy_(before)
        self._swapped = not self._swapped

    def _swap(self, trainer: Any, module: Any) -> None:
        """Exchange, and make all ranks and forward passes see it. Collective."""
        with trainer.strategy.editing():
            self._exchange(module)
        trainer.strategy.sync_buffers()  # each rank has averaged its own; rank 0's count

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the averages into `state_dict`. The weights of training move to `current_model_state`, unless weights alone are saved."""
        resumable = "optimizer_states" in checkpoint
        if resumable:
            checkpoint["averaging_state"] = {"n_averaged": self.n_averaged}
        if self._held is None:
            return
        shown = checkpoint["state_dict"]
        other = self._other_state(trainer, module)
        averaged, training = (shown, other) if self._swapped else (other, shown)
        checkpoint["state_dict"] = averaged
        if resumable:
            checkpoint["current_model_state"] = training

    def _other_state(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Return the weights that are not in the module at the moment, in the form of a checkpoint. Collective."""
        exchange = (lambda: self._swap(trainer, module)) if self._live else (lambda: self._exchange(module))
        exchange()
        strategy = trainer.strategy
        state = (strategy.module_parts() if strategy.sharded else strategy.module_state()) if self._live else module.state_dict()
        state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        exchange()
        return {_plain(key): value for key, value in state.items()}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("averaging_state")
        if saved is None:
            trainer.warn(f"The checkpoint was made without {type(self).__name__}; the average begins with the next update.")
        elif "current_model_state" in checkpoint:  # the module holds the averages now
            self._loaded, self.n_averaged = checkpoint["state_dict"], int(saved["n_averaged"])
            _load(trainer, module, checkpoint["current_model_state"], strict=module.strict_loading)

    def __getstate__(self) -> dict[str, Any]:
        """Weights do not travel: they come back to the caller's process in the module."""
        return {**self.__dict__, "_held": None, "_loaded": None, "_swapped": False, "_live": False}


def _plain(key: str) -> str:
    return key.replace("_orig_mod.", "")  # the mark of a layer that the user gave to torch.compile; no checkpoint keeps it


def _load(trainer: Any, module: Any, state: dict[str, Any], strict: bool) -> None:
    """Load weights under the names of a checkpoint. Collective."""
    own = {_plain(key): key for key in module.state_dict()}
    trainer.strategy.load_module(module, {own.get(key, key): value for key, value in state.items()}, strict=strict)


class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average: each update is `decay * average + (1 - decay) * weights`.

    Args:
        device, use_buffers: as in WeightAveraging.
        decay: from 0 (the weights themselves) to 1 (never moves).
        update_every_n_steps: update after the steps whose index, from 0, it divides; 0 for no step.
        update_starting_at_step: index of the first step that may update; None for the first.
        update_starting_at_epoch: index of the first epoch whose end updates as well; None for no epoch.

    Raises:
        MisconfigurationException: for a decay outside of 0 to 1, or a negative number of steps.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise MisconfigurationException(f"decay={decay} must lie between 0 and 1; 0.999 is usual.")
        if update_every_n_steps < 0:
            raise MisconfigurationException(f"update_every_n_steps={update_every_n_steps} must be 0 or more.")
        super().__init__(device, use_buffers, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            started = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return started and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        return self.update_starting_at_epoch is not None and epoch_idx is not None and epoch_idx >= self.update_starting_at_epoch
