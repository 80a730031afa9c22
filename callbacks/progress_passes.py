"""The hooks of a progress bar that shows every pass over batches: epochs, validation, sanity check, test, prediction, draining."""

from __future__ import annotations

import time
from typing import Any

from callbacks.errors import MisconfigurationException
from callbacks.progress import ProgressBar
from callbacks.progress_drawing import FitClock, LinePass, Lines, Pass

__all__ = ["PassesBar"]

_HIDDEN = Pass()
_HIDDEN.over = True


class PassesBar(ProgressBar):
    """Shows each pass as `_pass` draws it, or by rare plain lines where `_draws` is False: standard output is no terminal.

    A batch that is not drawn costs one call and a look at the clock.

    Raises:
        MisconfigurationException: a negative `refresh_rate`.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise MisconfigurationException(f"{type(self).__name__}(refresh_rate={refresh_rate}): expected 0 or more.")
        self._refresh_rate, self._leave = refresh_rate, leave
        self._forget()

    def _forget(self) -> None:
        self._train: Pass = _HIDDEN
        self._evaluation: Pass = _HIDDEN  # validation, test or prediction
        self._drain: Pass = _HIDDEN
        self._lines, self._clock = Lines(), FitClock()
        self._draws = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_train": _HIDDEN, "_evaluation": _HIDDEN, "_drain": _HIDDEN}

    @property
    def refresh_rate(self) -> int:
        """Batches between two drawings."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether anything is drawn on this rank."""
        return self._enabled and self._refresh_rate > 0

    def disable(self) -> None:
        super().disable()
        for shown in (self._drain, self._evaluation, self._train):
            shown.close()
        self._train = self._evaluation = self._drain = _HIDDEN

    @property
    def train_progress_bar(self) -> Any:
        """What is drawn for training (tqdm's bar, rich's `Task`), or None where nothing is."""
        return self._train.bar

    @property
    def val_progress_bar(self) -> Any:
        """The same for the validation, test or prediction that is running."""
        return self._evaluation.bar

    test_progress_bar = predict_progress_bar = val_progress_bar

    # -- what subclasses say ---------------------------------------------------------------------------------------------

    def _can_draw(self, alone: bool) -> bool:
        """True when standard output can show a bar; `alone`: this process is not one of several ranks."""
        raise NotImplementedError

    def _pass(self, stage: str, description: str, total: float, whole: float, nested: bool) -> Pass:
        """Return a drawn pass of "train", "sanity_val", "val", "test", "predict" or "drain"; `nested` inside of another that is shown."""
        raise NotImplementedError

    # -- passes ----------------------------------------------------------------------------------------------------------

    def _begin(self, stage: str, description: str, total: float, whole: float, nested: bool = False, closing: str = "say") -> Pass:
        if self.is_disabled:
            return _HIDDEN
        if self._draws:
            return self._pass(stage, description, total, whole, nested)
        return LinePass(self._lines, closing, self._refresh_rate, description, total, whole)

    def _begin_evaluation(self, stage: str, loader: int = 0) -> None:
        self._evaluation.close()
        self.has_dataloader_changed(loader)
        trainer, total = self.trainer, self._total(stage)
        description = getattr(self, _DESCRIPTIONS[stage])
        if len(getattr(trainer, f"num_{stage}_batches")) > 1:
            description += f" DataLoader {loader}"
        nested = stage == "val" and trainer.state.fn == "fit"
        if nested and self._train is not _HIDDEN and self._train.done:  # the epoch's bar stands still meanwhile
            self._train.draw(self._train.done, self.get_metrics(trainer, trainer.lightning_module), self._clock.left(trainer, self._train.done))
        self._evaluation = self._begin(stage, description, total, total, nested, "" if trainer.state.fn == "fit" else "say")

    def _evaluated(self, stage: str, batch_idx: int, loader: int) -> None:
        shown = self._evaluation
        if shown is _HIDDEN:
            return
        if loader != self._current_eval_dataloader_idx:
            self._end_evaluation()
            self._begin_evaluation(stage, loader)
            shown = self._evaluation
        shown.done = done = batch_idx + 1
        if done >= shown.next_batch and time.monotonic() >= shown.next_time:
            shown.draw(done, self._shown_metrics(), None)

    def _end_evaluation(self) -> None:
        if self._evaluation is not _HIDDEN:
            self._evaluation.end(self._shown_metrics(), None)
            self._evaluation.close()
            self._evaluation = _HIDDEN
        self.reset_dataloader_idx_tracker()

    def _shown_metrics(self) -> dict[str, Any]:
        """The numbers beside an evaluation: those of a fit are beside the epoch."""
        return {} if self.trainer.state.fn == "fit" else self.get_metrics(self.trainer, self.trainer.lightning_module)

    def show_draining(self, done: int, total: int) -> None:
        shown = self._drain
        if shown is _HIDDEN:
            if self.is_disabled or done >= total:
                return
            shown = self._drain = self._begin("drain", "Resuming: passing over data", total, total, nested=True, closing="")
            if not self._draws:
                super().show_draining(0, total)
        shown.done = done
        if done >= shown.next_batch and time.monotonic() >= shown.next_time:
            shown.draw(done, {}, None)
        if done >= total:
            shown.end({}, None)
            shown.close()
            self._drain = _HIDDEN
            self._train.restart()

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self._forget()
        super().setup(trainer, module, stage)
        self._draws = self.is_enabled and self._can_draw(trainer.world_size == 1)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._lines.finish()
        self._train.keep()  # of a fit that failed: where it stood
        for shown in (self._drain, self._evaluation, self._train):
            shown.close()
        self._train = self._evaluation = self._drain = _HIDDEN
        super().teardown(trainer, module, stage)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._clock = FitClock()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._train.close()
        whole = total = self.total_train_batches
        if trainer.max_steps != -1:  # the epoch in which the fit ends
            total = min(whole, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs - 1}"
        self._train = self._begin("train", f"Epoch {trainer.current_epoch}{last}", total, whole, closing="due")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shown = self._train  # up to `draw`, this is all that a usual batch costs
        shown.done = done = batch_idx + 1
        if done >= shown.next_batch and time.monotonic() >= shown.next_time:
            shown.draw(done, self.get_metrics(trainer, module), self._clock.left(trainer, done))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self._train is not _HIDDEN:
            done = self._train.done
            self._clock.length, self._train.over = done, True
            self._train.end(self.get_metrics(trainer, module), self._clock.left(trainer, done))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if not self._train.over:  # a fit that ends inside an epoch
            self._train.end(self.get_metrics(trainer, module), None)
        self._lines.finish()
        self._train.keep()
        self._train.close()
        self._train = _HIDDEN

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._begin_evaluation("sanity_val" if trainer.sanity_checking else "val")

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated("sanity_val" if trainer.sanity_checking else "val", batch_idx, dataloader_idx)

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


_DESCRIPTIONS = {
    "sanity_val": "sanity_check_description",
    "val": "validation_description",
    "test": "test_description",
    "predict": "predict_description",
}
