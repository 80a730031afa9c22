"""The trainer: subclass `TrainModule`, hand it to `Trainer(...).fit`. Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

import callbacks

_HOME = {
    "Accelerator": "accelerators",
    "AsyncCheckpointIO": "checkpoint.background",
    "AttributeDict": "hparams",
    "BadLossError": "errors",
    "CheckpointError": "errors",
    "CheckpointIO": "checkpoint.plugin",
    "CombinedLoader": "data",
    "DDPStrategy": "strategies",
    "DataError": "errors",
    "DataModule": "datamodule",
    "DataParallelStrategy": "strategies",
    "FSDPStrategy": "strategies",
    "MisconfigurationException": "errors",
    "MixedPrecision": "precision",
    "ModelParallelDDPStrategy": "strategies",
    "ModelParallelStrategy": "strategies",
    "Precision": "precision",
    "RestartError": "errors",
    "SIGTERMException": "errors",
    "StallError": "errors",
    "SingleDeviceStrategy": "strategies",
    "Strategy": "strategies",
    "TorchCheckpointIO": "checkpoint.files",
    "TrainModule": "module",
    "Trainer": "trainer",
    "TrainerError": "errors",
    "isolate_rng": "seed",
    "seed_everything": "seed",
}

__all__ = sorted(_HOME)  # noqa: PLE0605  (a test checks that each name loads)

if getattr(callbacks, "BELONGS_TO", None) != __name__:
    raise ImportError(
        f"The package 'callbacks' that comes with 'trainer' is hidden by {callbacks.__file__}. Rename that file or folder, or take "
        "its folder off sys.path."
    )


def __getattr__(name: str) -> Any:
    """Load the sub-module that defines `name` (PEP 562)."""
    if name in _HOME:
        value = getattr(importlib.import_module(f"trainer.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
