"""One logged name: the values of a step, and the sums of an epoch, on the device of the values. Nothing here waits for it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["REDUCTIONS", "Entry", "merge_states"]

REDUCTIONS = {
    "mean": "mean", torch.mean: "mean", "avg": "mean",
    "sum": "sum", torch.sum: "sum",
    "min": "min", torch.min: "min", min: "min",
    "max": "max", torch.max: "max", max: "max",
}  # fmt: skip


class Entry:
    """One logged name: the values of the current step, and the sums of the current epoch."""

    __slots__ = ("bar", "loader", "logger", "metric", "name", "on_epoch", "on_step", "once", "path", "reduce",
                 "step", "step_items", "total", "weight")  # fmt: skip

    def __init__(self, name: str, reduce: str, on_step: bool, on_epoch: bool, bar: bool, logger: bool) -> None:
        self.name, self.reduce = name, reduce
        self.on_step, self.on_epoch, self.bar, self.logger = on_step, on_epoch, bar, logger
        self.loader: int | None = None
        self.once: bool | None = None  # logged in hooks of an epoch, not of a batch; None: not logged yet
        self.metric: Any = None
        self.path: str | None = None
        self.step: Any = -1
        self.step_items: list[tuple[torch.Tensor, float]] = []
        self.total: torch.Tensor | None = None
        self.weight = 0.0

    def flags(self) -> tuple[Any, ...]:
        """Return all that says how the values are published; `Entry.of` makes an empty entry of it."""
        return self.name, self.reduce, self.on_step, self.on_epoch, self.bar, self.logger, self.loader

    @classmethod
    def of(cls, flags: tuple[Any, ...]) -> Entry:
        entry = cls(*flags[:-1])
        entry.loader = flags[-1]
        return entry

    def label(self, kind: str) -> str:
        """Return the published name of "step" or "epoch" values: marked by the kind where both are published."""
        if not (self.on_step and self.on_epoch):
            return self.name
        suffix = "" if self.loader is None else f"/dataloader_idx_{self.loader}"
        return f"{self.name.removesuffix(suffix)}_{kind}{suffix}"

    def add(self, value: torch.Tensor, weight: float, step: Any) -> None:
        if self.on_step:
            self.add_step(value, weight, step)
        if self.on_epoch:
            self._accumulate(value, weight)

    def add_step(self, value: torch.Tensor, weight: float, step: Any) -> None:
        """Add a value to those of `step`; the first of a new step drops those before."""
        if self.step != step:
            self.step = step
            self.step_items = [(value, weight)]
        else:
            self.step_items.append((value, weight))

    def _accumulate(self, value: torch.Tensor, weight: float) -> None:
        if self.total is None:
            wide = value.double() if value.device.type != "mps" else value.float()
            self.total = wide * weight if self.reduce == "mean" else wide.clone()
        elif self.reduce == "mean":
            self.total.add_(value, alpha=weight)
        elif self.reduce == "sum":
            self.total.add_(value)
        else:
            self.total = getattr(torch, "minimum" if self.reduce == "min" else "maximum")(self.total, value)
        self.weight += weight

    def step_total(self) -> tuple[torch.Tensor, float]:
        """Return (sum, weight) over the batches of the current step."""
        if len(self.step_items) == 1:
            value, weight = self.step_items[0]
            return (value * weight if self.reduce == "mean" and weight != 1 else value), weight
        values = torch.stack([v for v, _ in self.step_items])
        weight = sum(w for _, w in self.step_items)
        if self.reduce == "mean":
            return (values * torch.tensor([w for _, w in self.step_items], device=values.device)).sum(), weight
        if self.reduce == "sum":
            return values.sum(), weight
        return (values.min() if self.reduce == "min" else values.max()), weight


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the epoch sums of several ranks into one, for a resume with another number of ranks."""
    merged: dict[str, Any] = {}
    for state in states:
        for key, part in state.items():
            whole = merged.get(key)
            if whole is None or whole["total"] is None or part["total"] is None:
                merged[key] = part if whole is None or whole["total"] is None else whole
                if whole is not None:
                    merged[key] = {**merged[key], "objects": whole["objects"] + part["objects"]}
                continue
            join = {"min": torch.minimum, "max": torch.maximum}.get(part["reduce"], torch.add)
            merged[key] = {
                **whole,
                "total": join(whole["total"], part["total"]),
                "weight": whole["weight"] + part["weight"],
            }
    return merged
