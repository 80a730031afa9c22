"""Timer: how long training, validation, test and prediction take, and a limit for training."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, nearest

__all__ = ["Timer"]

_STAGES = ("train", "validate", "test", "predict")


class Timer(Callback):
    """Measures the stages of a run, and stops training when `duration` is used up.

    Training time goes on counting where a checkpoint, or the fit before, ended, so a limit holds for the whole of a training that is
    resumed; nothing is trained when it is used up already. The time inside of validation counts as training time, too. Of the other
    stages the last pass is known. `Trainer(max_time=)` limits each fit by itself.

    Args:
        duration: a timedelta, a dict of its arguments, or "DD:HH:MM:SS"; None only measures.
        interval: where training may stop: after a "step", or at the end of an "epoch". All ranks stop together, with the first whose
            time is up.
        verbose: rank 0 says that the limit was reached.

    Raises:
        MisconfigurationException: a duration that cannot be read, an unknown interval.
    """

    def __init__(self, duration: str | timedelta | dict[str, float] | None = None, interval: str = "step", verbose: bool = True) -> None:
        if interval not in ("step", "epoch"):
            raise MisconfigurationException(
                f"Timer(interval={interval!r}): expected 'step' or 'epoch'.{nearest(str(interval), ('step', 'epoch'))}"
            )
        self._duration = _seconds(duration)
        self._interval, self._verbose = interval, verbose
        self.stops_in_steps = interval == "step"
        self._before = 0.0  # of training: seconds of the runs that this one continues
        self._starts: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def start_time(self, stage: str = "train") -> float | None:
        """Return when the stage ("train", "validate", "test", "predict") last began, in seconds of `time.monotonic()`."""
        return self._starts.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when the stage last ended; None while it runs and before."""
        return self._ends.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds that the stage has taken: all of training, or the last (or running) pass of another stage."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._before if stage == "train" else 0.0
        return before if start is None else before + (time.monotonic() if end is None else end) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return how many seconds are left of the limit; None without one."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    # -- measuring ---------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._before = self.time_elapsed()  # also of a fit of this trainer that goes on
        self._starts.pop("train", None)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._begin("train")
        self._check(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._end("train")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._begin("validate")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._end("predict")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        for stage in self._starts.keys() - self._ends.keys():
            self._end(stage)

    def _begin(self, stage: str) -> None:
        self._ends.pop(stage, None)
        self._starts[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
        self._ends[stage] = time.monotonic()

    # -- the limit ---------------------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._check(trainer)

    def _check(self, trainer: Any) -> None:
        """Ask to stop; the boundary makes one decision of all ranks' wishes, so nothing is sent here."""
        if self._duration is None or trainer.should_stop or self.time_elapsed() < self._duration:
            return
        trainer.should_stop = True
        if self._verbose:
            trainer.print(f"Timer: the limit of {timedelta(seconds=self._duration)} is reached; training stops.")

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._starts.clear()
        self._ends.clear()
        self._before = float(state_dict.get("time_elapsed", {}).get("train", 0.0))


def _known(stage: str) -> str:
    if stage not in _STAGES:
        raise MisconfigurationException(f"Timer knows no stage {stage!r}.{nearest(str(stage), _STAGES)} There are: {', '.join(_STAGES)}.")
    return stage


def _seconds(duration: Any) -> float | None:
    if isinstance(duration, str) and (found := re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())):
        days, hours, minutes, seconds = map(int, found.groups())
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif isinstance(duration, dict):
        try:
            duration = timedelta(**duration)
        except TypeError:
            pass
    if duration is not None and not isinstance(duration, timedelta):
        raise MisconfigurationException(f"Timer(duration={duration!r}) must be a timedelta, a dict of its arguments, or 'DD:HH:MM:SS'.")
    return None if duration is None else duration.total_seconds()
