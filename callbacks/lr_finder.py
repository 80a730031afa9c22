"""LearningRateFinder: a learning rate range test at the start of a fit, which then trains with what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from callbacks.callback import Callback
from callbacks.tuning import LRSearch

__all__ = ["LearningRateFinder"]


class LearningRateFinder(Callback):
    """Find a learning rate when a fit starts, and train with it. Arguments are those of `trainer.Tuner.lr_find`.

    The test leaves no trace but the attribute, the optimizer's learning rate and `optimal_lr`. It happens once: a fit that goes on takes
    the rate over from the checkpoint. For tests at other epochs, override `on_fit_start` with nothing and call `self.lr_find(trainer,
    module)` in `on_train_epoch_start`.

    Args:
        min_lr, max_lr: the first and the last learning rate.
        num_training_steps: how many optimizer steps lie between them.
        mode: "exponential" or "linear": how the rate grows.
        early_stop_threshold: end when the smoothed loss is more than so many times the best one; None never does.
        update_attr: write the suggestion into the attribute, and train with it.
        attr_name: the attribute of the module, or of its hyper-parameters; by default `lr` or `learning_rate`.

    Raises:
        MisconfigurationException: for arguments that cannot work.
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self.search = LRSearch(min_lr, max_lr, num_training_steps, mode, early_stop_threshold, update_attr, attr_name)
        self.optimal_lr: Any = None  # what `Tuner.lr_find` returns: results, suggestion(), plot()
        self._found: float | None = None

    def lr_find(self, trainer: Any, module: Any) -> None:
        """Run the test now, from `on_fit_start` or `on_train_epoch_start`, and go on with its suggestion. Collective."""
        self.optimal_lr = trainer.tune(self.search)
        self._found = None if self.optimal_lr is None else self.optimal_lr.suggestion()

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self._found is not None and trainer.global_step:
            trainer.tune(replace(self.search, found=self._found))
        else:
            self.lr_find(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = state_dict.get("found")
