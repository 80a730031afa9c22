"""Launchers: which processes take part in a run, who makes them, and which of them this one is.

The only place that reads the environment. Sub-modules load on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ForkLauncher": "fork",
    "InProcessLauncher": "base",
    "Launcher": "base",
    "LocalLauncher": "local",
    "ProcessError": "base",
    "SlurmLauncher": "environment",
    "TorchrunLauncher": "environment",
    "detect": "environment",
    "unforkable": "fork",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"trainer.launchers.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trainer.launchers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
