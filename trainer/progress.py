"""The counters of a fit: plain numbers that are saved, restored, and advanced at one place in the loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Progress"]


@dataclass
class Progress:
    """Where a fit is.

    `step` counts optimizer steps over the whole fit, `epoch` is the index of the current epoch, `step_in_epoch` and
    `batch` count this epoch's optimizer steps and this rank's batches. `epoch_ended` is True from the moment the epoch's
    own work (validation, hooks, schedulers) is done until the next epoch begins: a checkpoint written in between
    resumes with the next epoch. `validation_owed` says that a signal cut the validation after this step short: 1 inside an epoch, 2 at
    its end, 0 for none.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    batch: int = 0
    epoch_ended: bool = False
    validation_owed: int = 0

    def next_epoch(self) -> None:
        """Move to the start of the following epoch."""
        self.epoch += 1
        self.step_in_epoch = self.batch = 0
        self.epoch_ended = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain numbers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters back."""
        for name in asdict(self):
            setattr(self, name, state.get(name, 0))  # files of before a counter was there
