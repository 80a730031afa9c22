"""The loggers and callbacks of a trainer: the user's, and the default ones that are missing."""

from __future__ import annotations

from typing import Any

import callbacks as callback_package
from callbacks.callback import Callback
from callbacks.loggers.base import Logger
from callbacks.loggers.silent import SilentLogger
from trainer import plugins
from trainer.errors import MisconfigurationException
from trainer.hooks import check_callback

__all__ = ["Callback", "Logger", "make_callbacks", "make_loggers"]


def make_loggers(logger: Any, silent: bool = False) -> list[Any]:
    """The loggers of an argument of `Trainer`; `silent` puts one in their place that keeps nothing."""
    if logger is False:
        return []
    if logger is None or logger is True:
        return [SilentLogger() if silent else callback_package.TensorBoardLogger()]
    found = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    found = [_logger_of(one) if isinstance(one, str) else one for one in found]
    for one in found:
        if not isinstance(one, callback_package.Logger):
            raise MisconfigurationException(f"logger must be True, False, a name, a Logger or a list of them; got {_full_name(one)}.")
    return [SilentLogger()] if silent and found else found


def _logger_of(name: str) -> Any:
    """The logger of a name: a built-in one, else a plug-in's."""
    if name == "csv":
        return callback_package.CSVLogger()
    if name == "tensorboard":
        return callback_package.TensorBoardLogger()
    return plugins.make("loggers", "logger", name, callback_package.Logger, ("csv", "tensorboard"))


def _full_name(thing: Any) -> str:
    """Tell a class from an object, and Lightning's class from ours of the same name."""
    cls = thing if isinstance(thing, type) else type(thing)
    return f"{'the class ' if isinstance(thing, type) else ''}{cls.__module__}.{cls.__qualname__}"


def make_callbacks(given: Any, checkpoint: bool, bar: bool, summary: bool, forbid_checkpoint: bool, forbid_bar: bool) -> list[Any]:
    """The user's callbacks, then the default ones that are missing; checkpoints last, so that they see what others did."""
    found: list[Any] = []
    for one in list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]:
        made = plugins.make("callbacks", "callbacks", one, (callback_package.Callback, list)) if isinstance(one, str) else one
        found += made if isinstance(one, str) and isinstance(made, list) else [made]
    for one in found:
        if not isinstance(one, callback_package.Callback):
            raise MisconfigurationException(f"callbacks must be Callback objects; got {_full_name(one)}.")
        check_callback(one)
    checkpoints = any(hasattr(c, "best_model_path") for c in found)
    if forbid_checkpoint and checkpoints:
        raise MisconfigurationException("enable_checkpointing=False, but callbacks= holds a ModelCheckpoint; drop one of the two.")
    bars = [type(c).__name__ for c in found if hasattr(c, "get_metrics")]
    if forbid_bar and bars:
        raise MisconfigurationException(f"enable_progress_bar=False, but callbacks= holds a {bars[0]}; drop one of the two.")
    if len(bars) > 1:
        raise MisconfigurationException(f"callbacks= holds {len(bars)} progress bars ({', '.join(bars)}); a trainer has one. Drop the others.")
    if bar and not bars:
        found.append(callback_package.TQDMProgressBar())
    if summary and not any(isinstance(c, callback_package.ModelSummary) for c in found):
        found.append(callback_package.ModelSummary())
    if checkpoint and not checkpoints:
        found.append(callback_package.ModelCheckpoint())
    return sorted(found, key=lambda c: hasattr(c, "best_model_path"))
