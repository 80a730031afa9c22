"""BatchSizeFinder: the largest batch size that memory suffices for, found when a run starts, which then uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from callbacks.callback import Callback
from callbacks.tuning import SizeSearch

__all__ = ["BatchSizeFinder"]


class BatchSizeFinder(Callback):
    """Find the largest batch size when a fit, validation, test or prediction starts, and use it. Arguments: see `Tuner.scale_batch_size`.

    The search leaves no trace but the attribute and `optimal_batch_size`. It happens once a fit: one that goes on takes the size over from
    the checkpoint. For searches at other epochs, override `on_fit_start` with nothing and call `self.scale_batch_size(trainer, module)` in
    `on_train_epoch_start`.

    Args:
        mode: "power" doubles the size until memory runs out; "binsearch" then also tries sizes between.
        steps_per_trial: steps taken with each size.
        init_val: the first size.
        max_trials: how many sizes are tried at most.
        batch_arg_name: the attribute of the module, the data module, or of the hyper-parameters of either.
        margin: by how much the size is lowered, as a share of it, where "binsearch" has found the limit.
        max_val: no larger size is tried.

    Raises:
        MisconfigurationException: for arguments that cannot work.
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self.search = SizeSearch(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self.optimal_batch_size: int | None = init_val
        self._found: int | None = None

    def scale_batch_size(self, trainer: Any, module: Any) -> None:
        """Run the search now, from the first hook of a run or of an epoch, and go on with the size. Collective."""
        self._found = trainer.tune(self.search)
        self.optimal_batch_size = self._found

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self._found is not None and trainer.global_step:
            trainer.tune(replace(self.search, found=self._found))
        else:
            self.scale_batch_size(trainer, module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, module)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self.scale_batch_size(trainer, module)

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self.scale_batch_size(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._found = self.optimal_batch_size = state_dict.get("found")
