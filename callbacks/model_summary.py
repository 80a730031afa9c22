"""ModelSummary: a table of a module's layers and their parameters, printed at the start of fit."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["ModelSummary", "Summary", "summarize"]


class Summary:
    """A module's layers down to `max_depth` (-1: all), with totals over all parameters, shared ones counted once.

    Attributes:
        layers: Name -> (type, number of parameters or None where a lazy layer does not know yet, "train" or "eval").
        total_parameters, trainable_parameters: Counts of numbers.
        model_size: Size of the parameters as they are stored, in MB (10^6 bytes).
        train_modules, eval_modules: How many modules are in which mode, the root not counted.

    Raises:
        MisconfigurationException: `max_depth` below -1.
    """

    def __init__(self, module: torch.nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise MisconfigurationException(f"max_depth={max_depth!r}: expected -1 (all layers), 0 (totals only) or more.")
        self.max_depth = max_depth
        self.layers: dict[str, tuple[str, int | None, str]] = {}
        inner = [(name, sub) for name, sub in module.named_modules() if name]
        for name, sub in inner:
            if max_depth == -1 or name.count(".") < max_depth:
                self.layers[name] = (type(sub).__name__, _count(sub.parameters()), "train" if sub.training else "eval")
        own = list(module.parameters(recurse=False))
        if own and max_depth != 0:
            self.layers["other params"] = ("n/a", _count(own), "n/a")
        known = [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
        self.lazy = len(known) != len(list(module.parameters()))
        self.total_parameters = sum(p.numel() for p in known)
        self.trainable_parameters = sum(p.numel() for p in known if p.requires_grad)
        self.model_size = sum(p.numel() * p.element_size() for p in known) / 1e6
        self.train_modules = sum(sub.training for _, sub in inner)
        self.eval_modules = len(inner) - self.train_modules

    def __str__(self) -> str:
        rows = [["", "Name", "Type", "Params", "Mode"]]
        for index, (name, (kind, count, mode)) in enumerate(self.layers.items()):
            rows.append([str(index), name, kind, "?" if count is None else _human(count), mode])
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        rule = "-" * max(map(len, lines))
        totals = [
            (_human(self.trainable_parameters), "Trainable params"),
            (_human(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (_human(self.total_parameters), "Total params" + (" (lazy layers not counted)" if self.lazy else "")),
            (f"{self.model_size:,.3f}", "Total size of the parameters (MB)"),
            (str(self.train_modules), "Modules in train mode"),
            (str(self.eval_modules), "Modules in eval mode"),
        ]
        table = [lines[0], rule, *lines[1:], rule] if self.layers else []
        return "\n".join([*table, *(f"{number:<9} {text}" for number, text in totals)])


def summarize(module: torch.nn.Module, max_depth: int = 1) -> Summary:
    """Return a Summary of `module`; `print()` shows it as a table."""
    return Summary(module, max_depth)


class ModelSummary(Callback):
    """Print the table of `summarize` when fit starts, on rank 0.

    Args:
        max_depth: Levels of nested layers to show; 0 prints nothing, -1 shows all.

    Raises:
        MisconfigurationException: `max_depth` below -1, when fit starts.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self._max_depth = max_depth

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self._max_depth and trainer.is_global_zero:
            trainer.print(str(summarize(module, self._max_depth)))


def _count(parameters: Any) -> int | None:
    parameters = list(parameters)
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        return None
    return sum(p.numel() for p in parameters)


def _human(count: int) -> str:
    """Shorten a count to three digits and a unit: 1234 -> "1.2 K"."""
    value, units = float(count), ["", "K", "M", "B", "T"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    if not units[0]:
        return str(count)
    return f"{value:.1f} {units[0]}" if value < 99.95 else f"{value:.0f} {units[0]}"
