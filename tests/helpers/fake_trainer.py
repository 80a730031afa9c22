"""A trainer of a few lines, for tests of callbacks: it counts, keeps the numbers it is given, and writes real files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["FakeTrainer"]


class FakeTrainer(SimpleNamespace):
    """The public face that callbacks touch. `step()`, `validate()` and `end_epoch()` call hooks in the loop's order."""

    def __init__(self, root: Any, callbacks: Any = (), **changes: Any) -> None:
        defaults: dict[str, Any] = {
            "global_step": 0, "current_epoch": 0, "callback_metrics": {}, "logged_metrics": {}, "progress_bar_metrics": {}, "loggers": [],
            "logger": None, "log_dir": None, "default_root_dir": str(root), "is_global_zero": True, "world_size": 1, "should_stop": False,
            "sanity_checking": False, "state": SimpleNamespace(fn="fit", stage="train"), "fast_dev_run": False, "enable_validation": True,
            "ckpt_path": None, "continues": False, "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "log_every_n_steps": 1, "is_last_batch": False,
            "validation_owed": False, "publishes_step": True, "batch_indices": None, "data_shares": 1, "records": True,
            "lightning_module": None, "optimizers": [], "lr_scheduler_configs": [], "num_training_batches": 4, "num_val_batches": [2],
            "num_test_batches": [2], "num_predict_batches": [2], "num_sanity_val_batches": [2], "max_epochs": 2,
            "max_steps": -1, "max_time": None, "accumulate_grad_batches": 1, "precision_plugin": None,
            "metric_steps": {},
        }  # fmt: skip
        super().__init__(**{**defaults, **changes})
        self.callbacks, self.requests, self.saved, self.logged, self.broadcasts, self.printed = list(callbacks), [], [], [], 0, []

    @property
    def logging_step(self) -> int:
        return self.global_step

    # -- what callbacks call ---------------------------------------------------------------------------------------------

    def at_boundary(self, fn: Any) -> None:
        self.requests.append(fn)

    def save_checkpoint(self, path: str, weights_only: bool = False) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.tmp").write_text(f"epoch {self.current_epoch} step {self.global_step}")
        os.replace(f"{path}.tmp", path)
        self.saved.append((os.path.basename(path), self.global_step, weights_only))

    def write_checkpoint(self, steps: Any, weights_only: bool = False, background: bool = False, ended: Any = None) -> None:
        done = 0
        try:
            for step in steps:
                if not callable(step):
                    self.save_checkpoint(step, weights_only)
                elif self.is_global_zero:
                    step()
                done += 1
        finally:
            if ended is not None:
                ended(done)

    def finish_saves(self) -> None:
        pass

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.broadcasts += 1
        return obj

    def gather(self, obj: Any) -> list[Any]:
        return [obj]

    def rewrap(self) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, loggers_only: bool = False) -> None:
        self.logged.append((step, metrics))

    def print(self, *args: Any) -> None:
        self.printed.append(" ".join(map(str, args)))

    def warn(self, message: str) -> None:
        if self.is_global_zero:
            warnings.warn(message, stacklevel=2)

    # -- what tests call -------------------------------------------------------------------------------------------------

    def hook(self, name: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, self.lightning_module, *args, **kwargs)

    def start(self) -> FakeTrainer:
        self.hook("setup", stage="fit")
        self.hook("on_fit_start")
        self.hook("on_train_start")
        return self

    def step(self, **metrics: float) -> None:
        """One optimizer step, up to its boundary."""
        self.global_step += 1
        self.hook("on_train_batch_end", None, None, self.global_step - 1)
        self.set(**metrics)
        self.boundary()

    def boundary(self) -> None:
        asked, self.requests = self.requests, []
        for fulfil in asked:
            fulfil(self)

    def set(self, **metrics: float) -> None:
        named = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
        self.callback_metrics.update(named)
        self.metric_steps.update(dict.fromkeys(named, self.global_step))

    def epoch(self, steps: int = 1, **metrics: float) -> None:
        """An epoch of some steps, validated at its end if `enable_validation`."""
        for i in range(steps):
            self.global_step += 1
            self.hook("on_train_batch_end", None, None, i)
            if i < steps - 1:
                self.boundary()
        if self.enable_validation:
            self.set(**metrics)
            self.hook("on_validation_end")
        self.set(**metrics)
        self.hook("on_train_epoch_end")
        self.boundary()
        self.current_epoch += 1
