"""Callbacks: checkpointing, seeding, gradient synchronisation, progress and logging. Sub-modules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BackboneFinetuning": "backbone_finetuning",
    "BatchSizeFinder": "batch_size_finder",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "CSVLogger": "loggers.csv",
    "Callback": "callback",
    "DeviceStatsMonitor": "device_stats",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_sync",
    "GradientMonitor": "gradient_monitor",
    "GradientSync": "gradient_sync",
    "HistogramMonitor": "histograms",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "Logger": "loggers.base",
    "MisconfigurationException": "errors",
    "ModelCheckpoint": "checkpoint",
    "ModelPruning": "model_pruning",
    "ModelSummary": "model_summary",
    "NaNGuard": "nan_guard",
    "NonFiniteError": "nan_guard",
    "OnExceptionCheckpoint": "on_exception",
    "PlanReport": "plan_report",
    "ProgressBar": "progress",
    "RichModelSummary": "rich_summary",
    "RichProgressBar": "rich_progress",
    "RichProgressBarTheme": "rich_progress",
    "SampleImages": "sample_images",
    "SeedEverything": "seeding",
    "SpikeDetection": "spike",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "StragglerMonitor": "straggler",
    "TQDMProgressBar": "tqdm_progress",
    "TensorBoardLogger": "loggers.tensorboard",
    "ThroughputMonitor": "throughput",
    "Timer": "timer",
    "TrainingSpikeException": "spike",
    "summarize": "summary",
    "WeightAveraging": "weight_averaging",
    "rank_zero_experiment": "loggers.base",
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
