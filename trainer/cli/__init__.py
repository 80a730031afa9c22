"""The command line: `TrainerCLI(Model, Data)` makes a program with fit, validate, test and predict out of their arguments."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("jsonargparse") is None:
    raise ModuleNotFoundError(
        'trainer.cli needs the package jsonargparse: pip install "torch-trainer-kit[cli]", or pip install "jsonargparse[signatures]>=4.53"'
    )

from trainer.cli.command import TrainerCLI
from trainer.cli.optimizers import (
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
)
from trainer.cli.parser import TrainerArgumentParser
from trainer.cli.saving import SaveConfigCallback

__all__ = ["LRSchedulerCallable", "OptimizerCallable", "ReduceLROnPlateau", "SaveConfigCallback", "TrainerArgumentParser", "TrainerCLI"]
