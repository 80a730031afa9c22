"""Callbacks: checkpointing, seeding, gradient synchronisation, progress and logging. Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CSVLogger": "loggers.csv",
    "Callback": "callback",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_sync",
    "GradientSync": "gradient_sync",
    "LearningRateMonitor": "lr_monitor",
    "Logger": "loggers.base",
    "MisconfigurationException": "errors",
    "ModelCheckpoint": "checkpoint",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress",
    "SeedEverything": "seeding",
    "TQDMProgressBar": "progress",
    "TensorBoardLogger": "loggers.tensorboard",
}

BELONGS_TO = "trainer"  # by this `trainer` tells us from a user's own package of the same name

__all__ = sorted(_HOME)  # noqa: PLE0605  (a test checks that each name loads)


def __getattr__(name: str) -> Any:
    """Load the sub-module that defines `name` (PEP 562), so that `import callbacks` costs nothing."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"callbacks.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
