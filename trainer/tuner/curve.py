"""What a learning rate range test found: the losses, the suggestion, the plot."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainer.errors import MisconfigurationException

__all__ = ["LRCurve"]


class LRCurve:
    """The result of `Tuner.lr_find`.

    Attributes:
        results: {"lr": [...], "loss": [...]}: the learning rate of each step, and the smoothed loss (NaN where there was none).
        mode, lr_min, lr_max, num_training: as they were asked for.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate where the loss falls most steeply as the curve is drawn: over log(lr) with mode "exponential", else over lr.

        Args:
            skip_begin, skip_end: so many points at the beginning and at the end are left out.

        Returns:
            None where fewer than two points are left, not counting those whose loss is not finite.
        """
        where = self._steepest(skip_begin, skip_end)
        return None if where is None else self.results["lr"][where]

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        losses = self.results["loss"]
        places = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        if len(places) < 2:
            return None
        at = torch.tensor(places, dtype=torch.float64)  # the rates are evenly spaced on their axis
        slope = torch.gradient(torch.tensor([losses[i] for i in places], dtype=torch.float64), spacing=(at,))[0]
        return places[int(slope.argmin())]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the losses over the learning rates with matplotlib; return the figure.

        Args:
            suggest: mark the suggestion.
            show: open a window.
            ax: the axes to draw on, in place of those of a new figure.

        Raises:
            MisconfigurationException: where matplotlib is missing.
        """
        try:
            import matplotlib.pyplot as plt  # optional
        except ImportError as error:
            raise MisconfigurationException("plot() draws with matplotlib, which is not installed: pip install matplotlib") from error
        if ax is None:
            _, ax = plt.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and (where := self._steepest(10, 1)) is not None:
            ax.plot(rates[where], losses[where], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return ax.figure
