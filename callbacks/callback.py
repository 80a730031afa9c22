"""The base class of callbacks: every place in a run where one may act.

The page docs/loop.md shows the order of the hooks as pseudocode of the loop; a test compares it with a recorded run.
Hooks only ask (`trainer.should_stop = True`, `trainer.at_boundary(fn)`); the loop acts at the boundary between two steps.
"""

from __future__ import annotations

from typing import Any

from callbacks.errors import MisconfigurationException, nearest

__all__ = ["Callback"]


class Callback:
    """Override the hooks you need; a hook that nobody overrides costs nothing in the loop.

    Every hook receives the trainer and the module (the caller's own TrainModule, never a wrapper). Hooks run on every
    rank. A method named like a hook that does not exist (`on_train_batch_ends`) is an error when the class is used.
    """

    monitors: bool = False
    """True for callbacks that read the numbers of the epoch just ended: their `on_train_epoch_end` runs after those were published."""

    stops_in_steps: bool = False
    """True for a callback that may set `trainer.should_stop` in a hook of a step. (Those of other packages are taken to do so.)"""

    publishes: bool = False
    """True for callbacks that publish numbers under names that are known only then; other callbacks may monitor those."""

    # -- identity and state ------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps `state_dict()`; distinct for every callback of a run."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """Return a state key that tells apart instances constructed with other arguments."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: tensors and plain containers only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # -- the run as a whole ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """On every rank before loaders and optimizers are made; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """The last hook of a run; release files, bars and handles here."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Weights are placed, optimizers exist."""

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Training is over; `on_train_end` has run."""

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Before the few validation batches that are tried ahead of step 1."""

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        """After them. Nothing they logged is kept."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """A run is about to end with `exception`."""

    # -- training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Before the first epoch."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Before the first batch of an epoch (also of one that is resumed in its middle)."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """After an epoch and its validation. See `monitors` for when."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Before a batch. `batch_idx` counts this rank's batches in the epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch; on the last batch of a step the optimizer has stepped and `global_step` counts it."""

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Before gradients are set to None."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Before `loss.backward()`; `loss` is already weighted."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """After every backward; gradients may be scaled (16-mixed)."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    # -- validation ------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Before validation; the module is in eval mode and gradients are off."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """After validation; what it logged is published."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """After the last validation batch; the last place to log."""

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    # -- test ------------------------------------------------------------------------------------------------------------

    def on_test_start(self, trainer: Any, module: Any) -> None:
        """Before test; the module is in eval mode and gradients are off."""

    def on_test_end(self, trainer: Any, module: Any) -> None:
        """After test; what it logged is published."""

    def on_test_epoch_start(self, trainer: Any, module: Any) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        """After the last test batch; the last place to log."""

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    # -- prediction ------------------------------------------------------------------------------------------------------

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        """Before prediction; the module is in eval mode and gradients are off."""

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        """After prediction."""

    def on_predict_epoch_start(self, trainer: Any, module: Any) -> None:
        """Before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        """After the last prediction batch."""

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a prediction batch."""

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Add to or change the table that is about to be written (every rank has its own; rank 0's is written)."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Read from a table that was just loaded."""


_STATE_NAMES = {"state_key", "state_dict", "load_state_dict"}
HOOKS = frozenset(n for n in vars(Callback) if not n.startswith("_") and n not in _STATE_NAMES | {"monitors", "publishes", "stops_in_steps"})
"""The names of all callback hooks."""


def check_hook_names(cls: type, known: frozenset[str]) -> None:
    """Refuse a class with a method `on_...` that is no hook.

    Raises:
        MisconfigurationException: naming the method and the nearest hook.
    """
    for klass in cls.__mro__:
        for name, value in vars(klass).items():
            if name.startswith("on_") and name not in known and callable(value) and nearest(name, known):
                raise MisconfigurationException(
                    f"{cls.__qualname__}.{name} is not a hook, so it would never be called.{nearest(name, known)}"
                )
