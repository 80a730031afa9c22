"""What a run leaves in its Trainer: counters and the numbers last published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.progress import Progress

__all__ = ["Results"]


@dataclass
class Results:
    """Counters, metrics and the state of the last (or current) run. Plain values: it travels between processes."""

    progress: Progress = field(default_factory=Progress)
    callback_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    logged_metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    bar_metrics: dict[str, float] = field(default_factory=dict)
    metric_steps: dict[str, int] = field(default_factory=dict)
    position: Any = None
    sums: list[dict[str, Any]] = field(default_factory=list)
    fn: str | None = None
    status: str = "initializing"
    received_sigterm: bool = False
    ckpt_path: str | None = None
    continues: bool = False

    def add(self, published: Any) -> None:
        """Take in the numbers of one publish point."""
        self.callback_metrics.update({k: torch.tensor(v) for k, v in published.callback.items()})
        self.logged_metrics.update({k: torch.tensor(v) for k, v in published.logger.items()})
        self.bar_metrics.update(published.bar)
        self.metric_steps.update(dict.fromkeys(published.callback, self.progress.step))

    def restore_metrics(self, numbers: dict[str, float], steps: dict[str, int]) -> None:
        """Take back the numbers of a checkpoint, and the steps at which they were published."""
        self.callback_metrics.update({k: torch.tensor(v) for k, v in numbers.items()})
        self.metric_steps.update({**dict.fromkeys(numbers, -1), **steps})

    def clear_metrics(self) -> None:
        """Forget all numbers: a new validation, test or fit starts."""
        self.callback_metrics.clear()
        self.logged_metrics.clear()
        self.bar_metrics.clear()
        self.metric_steps.clear()
