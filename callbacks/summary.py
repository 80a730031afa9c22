"""The table of a module's layers: parameters, modes and, where an example input is known, sizes and FLOPs."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedParameter

from callbacks.errors import MisconfigurationException
from callbacks.example_forward import Seen, obstacle, run_example

__all__ = ["Layer", "Summary", "summarize"]


class Layer(NamedTuple):
    """A row: parameters and FLOPs are None where they are not known, `mode` is "train" or "eval"."""

    kind: str
    parameters: int | None
    mode: str
    seen: Seen | None = None


class Summary:
    """A module's layers down to `max_depth`, with totals over all parameters, shared ones counted once; see `summarize`.

    Attributes:
        layers: Name -> `Layer`; "other params" are those that the module holds itself.
        total_parameters, trainable_parameters: Counts of numbers, of the whole module where it is spread over processes.
        model_size: Size of the parameters as they are stored, in MB (10^6 bytes).
        train_modules, eval_modules: How many modules are in which mode, the root not counted.
        total_flops: Floating-point operations of one forward on the example, or None.
        reason: Why sizes and FLOPs are not known although there is an example, or "".
    """

    def __init__(self, module: torch.nn.Module, max_depth: int = 1, example: Any = None, context: AbstractContextManager[Any] | None = None) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise MisconfigurationException(f"max_depth={max_depth!r}: expected -1 (all layers), 0 (totals only) or more.")
        self.max_depth = max_depth
        self.reason = ""
        seen = {} if example is None else self._try(module, example, context or nullcontext())
        self.total_flops = seen[""].flops if "" in seen else None
        self.layers: dict[str, Layer] = {}
        inner = [(name, sub) for name, sub in module.named_modules() if name]
        for name, sub in inner:
            if max_depth == -1 or name.count(".") < max_depth:
                self.layers[name] = Layer(type(sub).__name__, _count(sub.parameters()), "train" if sub.training else "eval", seen.get(name))
        own = list(module.parameters(recurse=False))
        if own and max_depth != 0:
            self.layers["other params"] = Layer("n/a", _count(own), "n/a")
        known = [p for p in module.parameters() if not isinstance(p, UninitializedParameter)]
        self.lazy = len(known) != len(list(module.parameters()))
        self.total_parameters = sum(p.numel() for p in known)
        self.trainable_parameters = sum(p.numel() for p in known if p.requires_grad)
        self.model_size = sum(p.numel() * p.element_size() for p in known) / 1e6
        self.train_modules = sum(sub.training for _, sub in inner)
        self.eval_modules = len(inner) - self.train_modules

    def _try(self, module: torch.nn.Module, example: Any, context: AbstractContextManager[Any]) -> dict[str, Seen]:
        """Run the example, or note why that cannot be done."""
        self.reason = obstacle(module) or ""
        if not self.reason:
            try:
                return run_example(module, example, context)
            except Exception as error:  # noqa: BLE001  (a table is no reason to end a run)
                self.reason = f"forward(example_input_array) failed: {type(error).__name__}: {error}"
                warnings.warn(f"The summary shows no sizes and FLOPs: {self.reason}", stacklevel=4)
        return {}

    # -- columns, under Lightning's names ----------------------------------------------------------------------------------

    layer_names = property(lambda self: list(self.layers))
    layer_types = property(lambda self: [layer.kind for layer in self.layers.values()])
    param_nums = property(lambda self: [layer.parameters for layer in self.layers.values()])
    in_sizes = property(lambda self: ["?" if layer.seen is None else layer.seen.in_size for layer in self.layers.values()])
    out_sizes = property(lambda self: ["?" if layer.seen is None else layer.seen.out_size for layer in self.layers.values()])

    # -- as text -----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[list[str]]:
        """Return the table's rows of cells, the header first."""
        sized = self.total_flops is not None
        rows = [["", "Name", "Type", "Params", "Mode", *(["FLOPs", "In sizes", "Out sizes"] if sized else [])]]
        for index, (name, layer) in enumerate(self.layers.items()):
            row = [str(index), name, layer.kind, "?" if layer.parameters is None else human(layer.parameters), layer.mode]
            if sized:
                row += ["?"] * 3 if layer.seen is None else [human(layer.seen.flops), str(layer.seen.in_size), str(layer.seen.out_size)]
            rows.append(row)
        return rows

    def totals(self) -> list[tuple[str, str]]:
        """Return (number, what it counts) for the lines below the table."""
        lines = [
            (human(self.trainable_parameters), "Trainable params"),
            (human(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (human(self.total_parameters), "Total params" + (" (lazy layers not counted)" if self.lazy else "")),
            (f"{self.model_size:,.3f}", "Total size of the parameters (MB)"),
            (str(self.train_modules), "Modules in train mode"),
            (str(self.eval_modules), "Modules in eval mode"),
        ]
        if self.total_flops is not None:
            lines.append((human(self.total_flops), "FLOPs of a forward on the example input"))
        elif self.reason:
            lines.append(("?", f"FLOPs and sizes: {self.reason}"))
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        rule = "-" * max(map(len, lines))
        table = [lines[0], rule, *lines[1:], rule] if self.layers else []
        return "\n".join([*table, *(f"{number:<9} {text}" for number, text in self.totals())])


def summarize(module: torch.nn.Module, max_depth: int = 1) -> Summary:
    """Return a `Summary` of `module`; `print()` shows it as a table.

    Where the module has an `example_input_array`, forward runs on it once, in eval mode and without gradients, for the sizes that every layer
    sees and for the FLOPs (matrix products, convolutions and attention; two for a multiply-add). Modes, buffers and random streams are as before
    afterwards. If forward fails, a warning says why, and the rest of the table is there.

    Args:
        module: any torch module.
        max_depth: levels of nested layers to show; 0 none, -1 all.

    Raises:
        MisconfigurationException: `max_depth` below -1.
    """
    return Summary(module, max_depth, getattr(module, "example_input_array", None))


def _count(parameters: Any) -> int | None:
    parameters = list(parameters)
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        return None
    return sum(p.numel() for p in parameters)


def human(count: int) -> str:
    """Shorten a count to three digits and a unit: 1234 -> "1.2 K"."""
    value, units = float(count), ["", "K", "M", "B", "T"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    if not units[0]:
        return str(count)
    return f"{value:.1f} {units[0]}" if value < 99.95 else f"{value:.0f} {units[0]}"
