"""ModelSummary: prints the table of a module's layers at the start of fit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException
from callbacks.summary import Summary

__all__ = ["ModelSummary"]


class ModelSummary(Callback):
    """Print the table of `summarize` when fit starts, on rank 0.

    A forward on the module's `example_input_array` runs in the fit's precision. Where the module is spread over processes (FSDP, model
    parallel), parameters are those of the whole, and no forward runs: print `summarize(module)` ahead of the fit for sizes and FLOPs.

    Args:
        max_depth: Levels of nested layers to show; 0 prints nothing, -1 shows all.

    Raises:
        MisconfigurationException: `max_depth` below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise MisconfigurationException(f"max_depth={max_depth!r}: expected -1 (all layers), 0 (no table) or more.")
        self._max_depth = max_depth

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self._max_depth and trainer.is_global_zero:
            example, precision = getattr(module, "example_input_array", None), trainer.precision_plugin
            if example is not None and precision is not None:
                example = precision.convert_input(example)
            context = nullcontext() if precision is None else precision.forward_context()
            self.show(trainer, Summary(module, self._max_depth, example, context))

    def show(self, trainer: Any, summary: Summary) -> None:
        """Print `summary`; override to show it in another way."""
        trainer.print(str(summary))
