"""Loggers: callbacks that receive what is published. Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {"CSVLogger": "csv", "Logger": "base", "TensorBoardLogger": "tensorboard"}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Load the sub-module that defines `name` (PEP 562)."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"callbacks.loggers.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'callbacks.loggers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
