"""ProgressBar: the base of progress bars, with what a bar needs to know and what a trainer tells it."""

from __future__ import annotations

import math
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.progress_drawing import Status

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """Base of progress bars: counts, descriptions and the numbers to show. The bar of ranks other than 0 is disabled.

    A subclass draws in the hooks; its `disable` and `enable` must switch that off and on, and `print` must leave the bar intact. A trainer has
    one bar, `trainer.progress_bar_callback`, through which `trainer.print` prints, and which it tells what goes on ahead of the first batch
    (`show_status`, `show_draining`).
    """

    monitors = True  # the end of an epoch is drawn with the epoch's numbers
    _trainer: Any = None
    _enabled = True
    _current_eval_dataloader_idx: int | None = None
    _status: Status | None = None

    def __init__(self) -> None:
        self._trainer, self._enabled = None, True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None, "_status": None}

    @property
    def trainer(self) -> Any:
        """The trainer of the current run.

        Raises:
            MisconfigurationException: outside a run.
        """
        if self._trainer is None:
            raise MisconfigurationException(f"{type(self).__name__}.trainer: there is no run.")
        return self._trainer

    # -- descriptions and totals -----------------------------------------------------------------------------------------

    sanity_check_description = property(lambda self: "Sanity Checking", doc="Shown during the sanity check.")
    train_description = property(lambda self: "Training", doc="Shown ahead of the first epoch.")
    validation_description = property(lambda self: "Validation", doc="Shown during validation.")
    test_description = property(lambda self: "Testing", doc="Shown during test.")
    predict_description = property(lambda self: "Predicting", doc="Shown during prediction.")

    @property
    def total_train_batches(self) -> int | float:
        """This rank's batches in an epoch; infinite when it is not known."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the validation loader that is read, or of the sanity check's."""
        return self._total("sanity_val" if self.trainer.sanity_checking else "val")

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the test loader that is read."""
        return self._total("test")

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the prediction loader that is read."""
        return self._total("predict")

    @property
    def total_val_batches(self) -> int | float:
        """Batches of all validation loaders."""
        return sum(self.trainer.num_val_batches) if self.trainer.enable_validation else 0

    def _total(self, stage: str) -> int | float:
        totals, loader = getattr(self.trainer, f"num_{stage}_batches"), self._current_eval_dataloader_idx or 0
        return totals[loader] if loader < len(totals) else math.inf

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Note which loader is read; True when it was another one, or none, before."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Note that no loader is read."""
        self._current_eval_dataloader_idx = None

    # -- what subclasses override ----------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn on this rank."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """The opposite of `is_enabled`."""
        return not self.is_enabled

    def disable(self) -> None:
        """Draw nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Draw again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print like the builtin."""
        print(*args, **kwargs)

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, int | float | str]:
        """Return what the bar shows: the first logger's version and what was logged with `prog_bar=True`. Override to change it."""
        shown: dict[str, int | float | str] = {}
        version = trainer.logger.version if trainer.logger is not None else None
        if version not in (None, ""):
            shown["v_num"] = version[-4:] if isinstance(version, str) else version
        for name, value in trainer.progress_bar_metrics.items():
            shown[name] = value.item() if hasattr(value, "item") else value
        return shown

    def show_status(self, text: str | None) -> None:
        """Say what the run does ahead of its batches ("Setting up"), until the next call; None: nothing more.

        It is printed as a line of its own if it lasts, and how long it took behind it.
        """
        if self._status is not None:
            self._status.end()
        self._status = Status(text, self.print) if text and self.is_enabled else None

    def show_draining(self, done: int, total: int) -> None:
        """A resumed run has passed over `done` of the `total` items (or batches) of data that cannot be positioned."""
        if done <= 1 and self.is_enabled:
            self.print(f"Passing over {total} items of data, which cannot be positioned ...")

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.show_status(None)
        self._trainer = None
