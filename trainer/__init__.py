"""The trainer: subclass `TrainModule`, hand it to `Trainer(...).fit`. Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

import callbacks

_HOME = {
    "Accelerator": "accelerators",
    "AdvancedProfiler": "profilers",
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
    "PassThroughProfiler": "profilers",
    "Precision": "precision",
    "Profiler": "profilers",
    "PyTorchProfiler": "profilers",
    "RestartError": "errors",
    "RunningStage": "states",
    "SIGTERMException": "errors",
    "StallError": "errors",
    "SimpleProfiler": "profilers",
    "SingleDeviceStrategy": "strategies",
    "Strategy": "strategies",
    "TorchCheckpointIO": "checkpoint.files",
    "TrainModule": "module",
    "Trainer": "trainer",
    "TrainerError": "errors",
    "Tuner": "tuner",
    "TrainerFn": "states",
    "TrainerState": "states",
    "TrainerStatus": "states",
    "grad_norm": "utilities",
    "compare_plans": "planning",
    "isolate_rng": "seed",
    "plan": "planning",
    "rank_zero_debug": "utilities",
    "rank_zero_deprecation": "utilities",
    "rank_zero_info": "utilities",
    "rank_zero_only": "utilities",
    "rank_zero_warn": "utilities",
    "seed_everything": "seed",
}

_OF_CALLBACKS = {"summarize"}

__all__ = sorted({*_HOME, *_OF_CALLBACKS})  # noqa: PLE0605  (a test checks that each name loads)

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
    if name in _OF_CALLBACKS:
        return getattr(callbacks, name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
