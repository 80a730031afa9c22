"""When a checkpoint is due: each n optimizer steps, after a time, or at the end of epochs. The hooks here only ask for it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["IntervalTimer", "SaveTriggers"]


class SaveTriggers(Callback):
    """Asks the trainer to call `_save` at the coming boundary. A subclass says in `_save` what happens then.

    Raises:
        MisconfigurationException: more than one trigger, or a value that is none.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        train_time_interval: timedelta | None,
        every_n_epochs: int | None,
        save_on_train_epoch_end: bool | None,
    ) -> None:
        no_trigger = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self._every_n_epochs = int(no_trigger) if every_n_epochs is None else every_n_epochs
        self._every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._check_triggers()
        self._timer = IntervalTimer(train_time_interval)
        self._due = False  # a save was asked for, and is still to come
        self._start_over()

    def _check_triggers(self) -> None:
        name = type(self).__name__
        for argument in ("every_n_train_steps", "every_n_epochs"):
            if getattr(self, f"_{argument}") < 0:
                raise MisconfigurationException(f"{name}({argument}={getattr(self, f'_{argument}')}): expected 0 or more.")
        interval = self.train_time_interval
        if interval is not None and not isinstance(interval, timedelta):
            raise MisconfigurationException(f"{name}(train_time_interval={interval!r}): expected a datetime.timedelta.")
        if sum((self._every_n_train_steps >= 1, self._every_n_epochs >= 1, interval is not None)) > 1:
            raise MisconfigurationException(
                f"{name}: give only one of every_n_train_steps, every_n_epochs and train_time_interval; use two callbacks for two rhythms."
            )

    def _start_over(self) -> None:
        self._first_step = self._seen_step = self._epoch_end_step = -1
        self._asked_epoch = 0
        self._validated = False  # in this run, the sanity check not counted
        self._awaits_validation = False

    @property
    def every_n_epochs(self) -> int:
        """Epochs between two saves; 0 when another trigger is used."""
        return self._every_n_epochs

    @property
    def every_n_train_steps(self) -> int:
        """Optimizer steps between two saves; 0 when another trigger is used."""
        return self._every_n_train_steps

    def _save(self, trainer: Any) -> None:
        """At the boundary, on all ranks. Collective."""
        raise NotImplementedError

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._start_over()
        self._first_step = self._seen_step = trainer.global_step
        if self._due and trainer.validation_owed:  # the save waits for its numbers
            self._ask(trainer)
        self._timer.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._every_n_epochs or not (self._every_n_train_steps or self.train_time_interval):
            return
        step = trainer.global_step
        if step == self._seen_step:  # inside an accumulation window
            return
        self._seen_step = step
        if self._every_n_train_steps:
            due = step % self._every_n_train_steps == 0
        else:
            due = self._timer.due(trainer)
        if due:
            self._ask(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._epoch_end_step = trainer.global_step
        self._awaits_validation = trainer.enable_validation
        at_train_epoch_end = self._save_on_train_epoch_end
        if at_train_epoch_end is None:
            at_train_epoch_end = not trainer.enable_validation
        if at_train_epoch_end and self._epoch_due(trainer):
            self._ask(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._skip(trainer):
            return
        self._validated = True
        if not self._save_on_train_epoch_end and self._epoch_due(trainer):
            self._ask(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """A fit that ends inside an epoch (max_steps, max_time, a stop) saves as at that epoch's end: nothing is lost."""
        inside = trainer.global_step not in (self._first_step, self._epoch_end_step)
        if inside and self._epoch_due(trainer) and not self._skip(trainer):
            self._asked_epoch = trainer.current_epoch
            self._save(trainer)

    def _epoch_due(self, trainer: Any) -> bool:
        return self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _skip(self, trainer: Any) -> bool:
        return bool(trainer.fast_dev_run) or trainer.state.fn != "fit" or trainer.sanity_checking

    def _ask(self, trainer: Any) -> None:
        if not self._skip(trainer):
            self._due = True
            self._asked_epoch = trainer.current_epoch  # the boundary may lie behind the epoch's end
            trainer.at_boundary(self._save)


class IntervalTimer:
    """Says, equally on all ranks, when an interval of wall-clock time has passed, with few collectives.

    With several ranks the clock is rank 0's, and its answer is broadcast together with the number of steps until it is asked
    again: half of what the pace so far leaves to the deadline. So an interval costs about log2(steps) broadcasts, not one a step.
    """

    def __init__(self, interval: timedelta | None) -> None:
        self.seconds = interval.total_seconds() if interval is not None else 0.0
        self.start()

    def start(self) -> None:
        """Begin a new interval now."""
        self._since = time.monotonic()
        self._steps = 0
        self._ask_at = 1

    def due(self, trainer: Any) -> bool:
        """Call once per optimizer step. Collective."""
        self._steps += 1
        if self._steps < self._ask_at:
            return False
        answer = None
        if trainer.is_global_zero:
            elapsed = time.monotonic() - self._since
            steps_left = (self.seconds - elapsed) * self._steps / max(elapsed, 1e-9)
            answer = (elapsed >= self.seconds, max(1, int(min(steps_left / 2, 1e9))) if trainer.world_size > 1 else 1)
        due, wait = trainer.broadcast(answer)
        self._ask_at = self._steps + wait
        if due:
            self.start()
        return due
