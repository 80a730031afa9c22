"""The numbers of a run on their way to monitors, the progress bar and the loggers."""

from __future__ import annotations

import math
from typing import Any

from trainer.errors import MisconfigurationException
from trainer.hparams import CLASS_PATH
from trainer.metrics import Published

__all__ = ["Publishing"]


class Publishing:
    """The part of `Run` that publishes."""

    def publishes(self) -> bool:
        """True when the step at hand is to be published: each `log_every_n_steps`-th, and the last of an epoch or of the fit."""
        n, step = self.settings.log_every_n_steps, self.step_id
        return bool(n) and (step % n == 0 or self.last_group or step == self.settings.max_steps)

    def publish_step(self) -> None:
        """Publish the numbers of the step just taken, once. Collective."""
        if self.published_step != self.step_id:
            before, self.published_step = self.published_step, self.step_id
            published = self.collector.publish_step(self.step_id)
            self.spread(published, "train")
            self._tell_of_nan(published.callback, before)

    def _tell_of_nan(self, numbers: dict[str, float], before: int) -> None:
        """Say once that a number of training went bad: it costs nothing here, as the numbers are on the host."""
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if bad and "nan" not in self._told:
            self._told.add("nan")
            self.trainer.warn(
                f"{bad[0]!r} is {numbers[bad[0]]} in step {self.step_id}; the numbers before that were published are of step {before}. "
                "Trainer(bad_loss='raise') names the first batch with a bad loss, detect_anomaly=True the operation with a bad gradient."
            )

    def spread(self, published: Published, stage: str) -> None:
        """Hand published numbers to monitors, the progress bar and the loggers."""
        self.trainer.results.add(published)
        self.known_names.update(published.callback)
        if published.logger:
            self.to_loggers(published.logger, stage)

    def to_loggers(self, numbers: dict[str, float], stage: str, step: int | None = None) -> None:
        """Send numbers to every logger, on rank 0; the x axis is the count of optimizer steps."""
        if self.world.is_global_zero:
            step = self.progress.step if step is None else step
            for logger in self.trainer.loggers:
                logger.publish({**numbers, "epoch": float(self.progress.epoch)}, step, stage)

    def _log_hyperparameters(self) -> None:
        params: dict[str, Any] = {}
        for owner in (self.datamodule, self.module):
            if owner is not None and owner._log_hyperparams:
                shared = params.keys() & owner.hparams.keys() - {CLASS_PATH} if self.trainer.loggers else ()
                for name in shared:
                    if not _same(params[name], owner.hparams[name]):
                        raise MisconfigurationException(
                            f"The hyper-parameter {name!r} of the module and of the data module differ, and loggers can keep one. Rename one, or call "
                            "save_hyperparameters(logger=False) or (ignore=...) in one of them."
                        )
                params.update(owner.hparams)
        if self.world.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_hyperparams(params)


def _same(one: Any, other: Any) -> bool:
    """True for equal values; values that cannot say count as different."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (RuntimeError, ValueError):  # of tensors and arrays
        return False
