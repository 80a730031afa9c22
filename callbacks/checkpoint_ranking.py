"""Which checkpoints are worth keeping: the books of ModelCheckpoint."""

from __future__ import annotations

from typing import Any

import torch

from callbacks.checkpoint_triggers import SaveTriggers
from callbacks.errors import MisconfigurationException
from callbacks.monitor import check_mode, missing_monitor, rank_of

__all__ = ["Ranking"]


class Ranking(SaveTriggers):
    """Scores states by `monitor`, and knows which files are the best, and which one a new one displaces.

    Raises:
        MisconfigurationException: `mode` or `save_top_k` make no ranking.
    """

    BOOKS = ("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path", "_link_only_path")
    """The attributes that name files."""

    def _open_books(self, monitor: str | None, mode: str, save_top_k: int) -> None:
        check_mode("ModelCheckpoint", mode)
        if save_top_k < -1:
            raise MisconfigurationException(f"ModelCheckpoint(save_top_k={save_top_k}): expected -1 (all), 0 (none) or more.")
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None): ranking needs a metric. Give `monitor`, or keep the newest"
                " (save_top_k=1), all (-1) or none (0)."
            )
        self.monitor, self.mode, self.save_top_k = monitor, mode, save_top_k
        self.best_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(float("inf") if mode == "min" else -float("inf"))
        self.current_score: torch.Tensor | None = None
        self.last_model_path = ""
        self._link_only_path = ""  # a file that only the link `last` keeps alive
        self._told: set[str] = set()

    def _books(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.BOOKS}

    def _candidates(self, trainer: Any) -> dict[str, Any]:
        return {**trainer.callback_metrics, "epoch": self._asked_epoch, "step": trainer.global_step}

    def _score(self, trainer: Any, values: dict[str, Any]) -> torch.Tensor | None:
        """Return what ranks the state of this step; None without a number that belongs to it."""
        if self.monitor is None:
            return None
        if self.monitor in values:
            measured = trainer.metric_steps.get(self.monitor, trainer.global_step)
            if measured != trainer.global_step:
                if self.every_n_train_steps and self._first("stale"):
                    trainer.warn(
                        f"ModelCheckpoint: {self.monitor!r} was measured at step {max(measured, 0)}, not at step {trainer.global_step}, so this "
                        "state is not ranked and can never be 'best'. Validate at the steps that save (val_check_interval), or give the ranking to a "
                        "second ModelCheckpoint that saves after validations.",
                    )
                return None
            self.current_score = torch.as_tensor(values[self.monitor]).detach().clone()
            return self.current_score
        if self._epoch_end_step >= 0 and (self._validated or not self._awaits_validation):
            raise missing_monitor("ModelCheckpoint", self.monitor, set(values) - {"epoch", "step"}, "Call self.log() with this name.")
        if self._first("unknown"):
            trainer.warn(f"ModelCheckpoint: there is no {self.monitor!r} yet. Nothing is ranked until there is.")
        return None

    def _wanted(self, score: torch.Tensor | None) -> bool:
        if self.save_top_k == 0 or (self.monitor is not None and score is None):
            return False
        return self.monitor is None or self.check_monitor_top_k(None, score)

    def check_monitor_top_k(self, trainer: Any, current: torch.Tensor | float | None = None) -> bool:
        """Return whether a checkpoint scored `current` would be among the kept ones. Ties do not displace; NaN displaces nothing."""
        if current is None or self.save_top_k == 0:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        return rank_of(current, self.mode) < self._rank(self._ranked()[self.save_top_k - 1])

    def _rank(self, path: str) -> tuple[bool, float]:
        return rank_of(self.best_k_models[path], self.mode)

    def _ranked(self) -> list[str]:
        """The ranked files, best first; of equally good ones the oldest comes last, so it is the first to go."""
        return sorted(reversed(list(self.best_k_models)), key=self._rank)

    def _displaced(self, keep: bool) -> set[str]:
        """The files of ours that the coming one makes superfluous."""
        gone = {self._link_only_path} - {""}
        if not keep:
            return gone
        if self.monitor is None and self.save_top_k == 1:
            gone.add(self.best_model_path)
        elif self.monitor is not None and self.save_top_k > 0:
            gone.update(self._ranked()[self.save_top_k - 1 :])
        return gone - {""}

    def _enter(self, path: str, score: torch.Tensor | None, keep: bool, stale: set[str]) -> None:
        """Write the coming file into the books, before it is saved: the state inside the file then counts the file itself."""
        self._link_only_path = "" if keep else path
        if not keep:
            return
        if self.monitor is None:
            self.best_model_path = path
            return
        kept = {old: value for old, value in self.best_k_models.items() if old not in stale and old != path}
        self.best_k_models = {**kept, path: score}
        if self.save_top_k in (-1, len(self.best_k_models)):  # before, there is no k-th
            self.kth_best_model_path = self._ranked()[-1]
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        best = min(self.best_k_models, key=self._rank)
        best_is_nan = self._rank(best)[0]
        self.best_model_path = "" if best_is_nan else best
        self.best_model_score = None if best_is_nan else self.best_k_models[best]

    def _first(self, what: str) -> bool:
        """True the first time that `what` is to be told."""
        first = what not in self._told
        self._told.add(what)
        return first
