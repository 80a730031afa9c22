"""Metric objects (torchmetrics and the like) that were given to `self.log`: what they are, and their state in a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["copies", "is_metric", "load_object", "metrics_of", "object_state", "put_back", "unmoved"]


def is_metric(value: Any) -> bool:
    """True for a torchmetrics-like object: it has `update`, `compute` and `reset`."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def object_state(metric: Any) -> dict[str, Any]:
    """Return what a metric object, and those inside it, have summed up: torchmetrics shows it as `metric_state`."""
    return {
        path: {"count": getattr(part, "update_count", 0), "state": _on_host(part.metric_state)}
        for path, part in _parts(metric).items()
        if hasattr(part, "metric_state")
    }


def load_object(key: str, metric: Any, states: list[dict[str, Any]], device: torch.device) -> None:
    """Put back the state of a metric object; where several ranks saved one, they are joined as torchmetrics joins ranks."""
    parts = _parts(metric)
    if metric is None or not states[0] or not states[0].keys() <= parts.keys():
        _warn(key, "whose state the checkpoint could not keep (no metric_state, or no attribute of the module)")
        return
    for path in states[0]:
        part = parts[path]
        for name in states[0][path]["state"]:
            values = [_to_device(state[path]["state"][name], device) for state in states]
            joined = values[0] if len(values) == 1 else _join(values, getattr(part, "_reductions", {}).get(name))
            if joined is None:
                _warn(key, f"whose {name!r} of {len(values)} ranks cannot be joined for this number of ranks")
                joined = values[0]
            setattr(part, name, joined)
        part._update_count = sum(state[path]["count"] for state in states)  # torchmetrics shows it as update_count, to be read only


def metrics_of(module: torch.nn.Module) -> list[Any]:
    """Return the metric objects inside a module that show their state."""
    return [part for part in module.modules() if is_metric(part) and hasattr(part, "metric_state")]


def copies(metrics: list[Any]) -> list[tuple[Any, dict[str, Any], int]]:
    """Return what `metrics` have summed up, copied on their devices, for `put_back`."""
    return [
        (m, {name: list(v) if isinstance(v, list) else v.clone() for name, v in m.metric_state.items()}, getattr(m, "update_count", 0))
        for m in metrics
    ]


def put_back(copied: list[tuple[Any, dict[str, Any], int]]) -> None:
    """Set metric objects back to what `copies` found."""
    for metric, values, count in copied:
        for name, value in values.items():
            setattr(metric, name, value)
        metric._update_count = count


@contextmanager
def unmoved(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Run a block after which the metric objects of `module` are as before: for a batch that only keeps step with other ranks."""
    metrics = metrics_of(module)
    before = [object_state(metric) for metric in metrics]
    yield
    for metric, state in zip(metrics, before, strict=True):
        load_object("", metric, [state], device)


def _join(values: list[Any], reduction: Any) -> Any:
    """Lists are put one after the other; tensors go through the metric's `dist_reduce_fx`. None: there is no rule."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    return reduction(torch.stack(values)) if callable(reduction) else None


def _warn(key: str, why: str) -> None:
    warnings.warn(f"{key!r} is a metric object {why}: its value for this epoch does not count everything.", stacklevel=3)


def _parts(metric: Any) -> dict[str, Any]:
    """The metric itself, as "", and the metrics inside it (a wrapper keeps no state of its own)."""
    return dict(metric.named_modules()) if isinstance(metric, torch.nn.Module) else {"": metric}


def _on_host(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), state)


def _to_device(state: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(device, copy=True), state)  # a metric may change its state in place
