"""Checkpoints: what is in one (`state`) and how its bytes reach the disk and come back (`io`). Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "check_plain": "io",
    "clean": "temporary",
    "leftovers": "temporary",
    "load": "io",
    "plain": "io",
    "save": "io",
    "strip_prefixes": "keys",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Load the sub-module that defines `name` (PEP 562)."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
