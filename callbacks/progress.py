"""Progress bars: tqdm on a terminal and in a notebook, a few plain lines where the output is a file."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.progress_drawing import Bar, BarPass, LinePass, Lines, Pass, bar_class

__all__ = ["ProgressBar", "TQDMProgressBar"]

_HIDDEN = Pass()


class ProgressBar(Callback):
    """Base of progress bars: counts, descriptions and the numbers to show. The bar of ranks other than 0 is disabled.

    A subclass draws; its `disable` and `enable` must switch that off and on, and `print` must leave the bar intact.
    """

    monitors = True  # the end of an epoch is drawn with the epoch's numbers

    def __init__(self) -> None:
        self._trainer: Any = None
        self._enabled = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

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

    @property
    def sanity_check_description(self) -> str:
        """Shown during the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Shown during training; the epoch is appended."""
        return "Epoch"

    @property
    def validation_description(self) -> str:
        """Shown during validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Shown during test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Shown during prediction."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """This rank's batches in an epoch; infinite when it is not known."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the first validation loader, or of the sanity check's."""
        return self._total("val", 0)

    @property
    def total_val_batches(self) -> int | float:
        """Batches of all validation loaders."""
        return sum(self.trainer.num_val_batches) if self.trainer.enable_validation else 0

    def _total(self, stage: str, loader: int) -> int | float:
        if stage == "train":
            return self.total_train_batches
        sanity = stage == "val" and self.trainer.sanity_checking
        totals = getattr(self.trainer, "num_sanity_val_batches" if sanity else f"num_{stage}_batches")
        return totals[loader] if loader < len(totals) else math.inf

    # -- what subclasses override ----------------------------------------------------------------------------------------

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

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._trainer = None


class TQDMProgressBar(ProgressBar):
    """A bar for the epoch, one for validation, test and prediction, with the time left and the published numbers.

    On a terminal and in a notebook it is drawn by tqdm, at most each `refresh_rate` batches and each tenth of a second. Where the
    output is a file or a pipe, it writes plain lines without control characters: the first after 10 s, then with growing pauses of
    up to 5 minutes; at the end of epochs, no more often than each 10 s; and when training ends.

    Args:
        refresh_rate: Batches between two drawings; 0 turns the bar off.
        process_position: Lines to leave free above the bar.
        leave: Keep the bar of every epoch on the screen.

    Raises:
        MisconfigurationException: a negative argument.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        if refresh_rate < 0 or process_position < 0:
            raise MisconfigurationException(
                f"TQDMProgressBar(refresh_rate={refresh_rate}, process_position={process_position}): expected 0 or more."
            )
        self._refresh_rate = refresh_rate
        self._process_position = process_position
        self._leave = leave
        self._forget()

    def _forget(self) -> None:
        self._train: Pass = _HIDDEN
        self._evaluation: Pass = _HIDDEN  # validation, test or prediction
        self._lines = Lines()
        self._bar_class: type | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_train": _HIDDEN, "_evaluation": _HIDDEN, "_bar_class": None}

    @property
    def refresh_rate(self) -> int:
        """Batches between two drawings."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Lines left free above the bar."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn on this rank."""
        return self._enabled and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """The opposite of `is_enabled`."""
        return not self.is_enabled

    @property
    def train_progress_bar(self) -> Any:
        """The tqdm bar of training, or None where there is none."""
        return self._train.bar

    @property
    def val_progress_bar(self) -> Any:
        """The tqdm bar of the running validation, or None."""
        return self._evaluation.bar

    test_progress_bar = predict_progress_bar = val_progress_bar

    def disable(self) -> None:
        super().disable()
        self._train = self._evaluation = _HIDDEN

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None) -> None:
        """Print above the bar."""
        if self._train.bar is None and self._evaluation.bar is None:
            print(*args, sep=sep, end=end, file=file, flush=True)
        else:
            Bar.write(sep.join(map(str, args)), file=file or sys.stdout, end=end)

    # -- passes ----------------------------------------------------------------------------------------------------------

    def _begin(self, stage: str, description: str, loader: int = 0, nested: bool = False, closing: str = "say") -> Pass:
        if not self.is_enabled:
            return _HIDDEN
        total = self._total(stage, loader)
        if self._bar_class is None:
            shown: Pass = LinePass(self._lines, self._refresh_rate, description, total, closing)
        else:
            # the bar of an epoch is replaced by the next one's; the last one stays on the screen (see on_train_end)
            leave = self._leave if stage == "train" else not nested
            shown = BarPass(self._bar_class, self._refresh_rate, description, total, self._process_position + nested, leave)
        shown.loader = loader
        return shown

    def _begin_evaluation(self, stage: str, loader: int = 0) -> None:
        self._evaluation.close()
        trainer = self.trainer
        nested = trainer.state.fn == "fit"
        if nested and trainer.sanity_checking:
            description = self.sanity_check_description
        else:
            description = {"val": self.validation_description, "test": self.test_description}.get(stage, self.predict_description)
        if len(getattr(trainer, f"num_{stage}_batches")) > 1:
            description += f" DataLoader {loader}"
        self._evaluation = self._begin(stage, description, loader, nested, closing="" if nested else "say")

    def _evaluated(self, stage: str, batch_idx: int, loader: int) -> None:
        shown = self._evaluation
        if shown is _HIDDEN:
            return
        if loader != shown.loader:
            self._end_evaluation()
            self._begin_evaluation(stage, loader)
            shown = self._evaluation
        shown.done = done = batch_idx + 1
        if done >= shown.next_batch and time.monotonic() >= shown.next_time:
            shown.draw(done, self.get_metrics(self.trainer, self.trainer.lightning_module))

    def _end_evaluation(self) -> None:
        if self._evaluation is not _HIDDEN:
            self._evaluation.end(self.get_metrics(self.trainer, self.trainer.lightning_module))
            self._evaluation.close()
            self._evaluation = _HIDDEN

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._forget()
        super().setup(trainer, module, stage)
        self._bar_class = bar_class() if self.is_enabled else None

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._lines.finish()
        self._evaluation.close()
        self._train.close()
        self._train = self._evaluation = _HIDDEN
        super().teardown(trainer, module, stage)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._train.close()
        self._train = self._begin("train", f"{self.train_description} {trainer.current_epoch}", closing="due")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = self._train  # up to `draw`, this is all that a usual batch costs
        shown.done = done = batch_idx + 1
        if done >= shown.next_batch and time.monotonic() >= shown.next_time:
            shown.draw(done, self.get_metrics(trainer, module))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.is_enabled:
            self._train.end(self.get_metrics(trainer, module))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._lines.finish()
        if self._train.bar is not None:
            self._train.bar.leave = True
        self._train.close()
        self._train = _HIDDEN

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._begin_evaluation("val")

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("val", batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._end_evaluation()

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self._begin_evaluation("test")

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("test", batch_idx, dataloader_idx)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._end_evaluation()

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._begin_evaluation("predict")

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("predict", batch_idx, dataloader_idx)

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._end_evaluation()
