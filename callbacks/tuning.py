"""What a search for a learning rate or a batch size is told: checked when it is made, the same for the callbacks and for `trainer.Tuner`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from callbacks.errors import MisconfigurationException, nearest

__all__ = ["LRSearch", "SizeSearch"]


@dataclass(frozen=True)
class LRSearch:
    """A learning rate range test. `found` is the rate of an earlier one, which is taken over in the place of a new one."""

    min_lr: float = 1e-8
    max_lr: float = 1.0
    num_training: int = 100
    mode: str = "exponential"
    early_stop_threshold: float | None = 4.0
    update_attr: bool = True
    attr_name: str = ""
    found: float | None = None

    def __post_init__(self) -> None:
        _one_of(self, "mode", ("exponential", "linear"))
        _whole(self, "num_training", 2)
        lowest = self.min_lr > 0 if self.mode == "exponential" else self.min_lr >= 0
        if not (lowest and self.min_lr < self.max_lr < float("inf")):
            raise MisconfigurationException(
                f"min_lr={self.min_lr}, max_lr={self.max_lr}: the rates grow from min_lr, which is above 0 (or 0, with mode='linear'), to a larger max_lr."
            )
        if self.early_stop_threshold is not None and not self.early_stop_threshold > 1:
            raise MisconfigurationException(
                f"early_stop_threshold={self.early_stop_threshold} must be above 1 (the test ends at so many times the best loss), or None."
            )


@dataclass(frozen=True)
class SizeSearch:
    """A search for the largest batch size that memory suffices for. `found` is the size of an earlier one, as above."""

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192
    found: int | None = None

    def __post_init__(self) -> None:
        _one_of(self, "mode", ("power", "binsearch"))
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            _whole(self, name, 1)
        if not 0 <= self.margin < 1:
            raise MisconfigurationException(f"margin={self.margin} must be a share of the batch size: 0 or more, and below 1.")


def _one_of(search: Any, name: str, choices: tuple[str, ...]) -> None:
    value = str(getattr(search, name)).lower()
    if value not in choices:
        raise MisconfigurationException(f"{name}={getattr(search, name)!r} must be one of {', '.join(choices)}.{nearest(value, choices)}")
    object.__setattr__(search, name, value)


def _whole(search: Any, name: str, low: int) -> None:
    value = getattr(search, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise MisconfigurationException(f"{name}={value!r} must be a whole number >= {low}.")
