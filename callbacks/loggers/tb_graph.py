"""The graph of a model, for TensorBoard's Graphs tab."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any

import torch

from callbacks.example_forward import obstacle, on_device_of, unchanged

__all__ = ["draw_graph"]


def draw_graph(writer: Any, model: torch.nn.Module, example: Any) -> str | None:
    """Write the graph of `model`, called with `example` (as `run_example` takes it); return why that cannot be done, or None.

    Args:
        writer: a SummaryWriter.
    """
    reason = obstacle(model)
    if reason is not None:
        return reason
    try:
        traced = copy.deepcopy(model)  # a forward may keep things in the model
        traced.__dict__["_trainer"] = model.__dict__.get("_trainer")  # tracing looks at every attribute
        example = on_device_of(model, example)
        if isinstance(example, dict):
            names, forward = list(example), traced.forward
            traced.forward = lambda *values: forward(**dict(zip(names, values, strict=True)))
            example = tuple(example.values())
        elif isinstance(example, list):
            example = tuple(example)
        with unchanged(traced), torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit.trace, which torch's own SummaryWriter uses
            with contextlib.redirect_stdout(io.StringIO()):  # it prints the errors that it raises
                writer.add_graph(traced, example, use_strict_trace=False)
    except Exception as error:  # noqa: BLE001  (a picture is no reason to end a run)
        return f"{type(error).__name__}: {error}"
    return None
