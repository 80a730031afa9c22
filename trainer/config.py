"""Settings: what the user asked of `Trainer`, checked and frozen. The only place where strings become objects."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec

import torch

from trainer.devices import Devices
from trainer.errors import MisconfigurationException, nearest
from trainer.precision import MixedPrecision, Precision, TruePrecision
from trainer.precision.plugins import canonical
from trainer.strategies import DataParallelStrategy, DDPStrategy, FSDPStrategy, ModelParallelDDPStrategy, SingleDeviceStrategy, Strategy
from trainer.strategies.batchnorm import SYNC_BATCHNORM_DEVICES

__all__ = ["Settings", "make_precision", "make_strategy"]

P = ParamSpec("P")

_STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "ddp_spawn": DDPStrategy,
    "ddp_fork": DDPStrategy,
    "ddp_notebook": DDPStrategy,
    "ddp_find_unused_parameters_false": DDPStrategy,
    "ddp_find_unused_parameters_true": lambda: DDPStrategy(find_unused_parameters=True),
    "dp": DataParallelStrategy,
    "fsdp": FSDPStrategy,
    "model_parallel": ModelParallelDDPStrategy,
    "model_parallel_ddp": lambda: ModelParallelDDPStrategy(devices_per_replica=2),
}


@dataclass(frozen=True)
class Settings:
    """Everything that `Trainer(...)` decided. A change makes a new object (`dataclasses.replace`)."""

    devices: Devices
    num_nodes: int
    max_epochs: int | None
    max_epochs_is_default: bool
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    limits: dict[str, int | float | None]
    overfit_batches: int | float
    fast_dev_run: int
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    default_root_dir: str
    deterministic: bool | str
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    uneven: str
    sync_batchnorm: bool
    detect_anomaly: bool
    reload_dataloaders_every_n_epochs: int
    seed: int | None
    resume: str | None
    timeout: timedelta | None


def make_strategy(strategy: str | Strategy, devices: int) -> Strategy:
    """Return the strategy object of a name; "auto" is one device, or DDP where there are several.

    Raises:
        MisconfigurationException: for an unknown name, with the nearest.
    """
    if strategy == "auto":
        strategy = "ddp" if devices > 1 else "single_device"
    if isinstance(strategy, str):
        if strategy not in _STRATEGIES:
            raise MisconfigurationException(
                f"strategy={strategy!r} is unknown.{nearest(strategy, _STRATEGIES)} Choose one of auto, {', '.join(_STRATEGIES)}, or "
                "give a Strategy object."
            )
        strategy = _STRATEGIES[strategy]()
    if not isinstance(strategy, Strategy):
        raise MisconfigurationException(f"strategy must be a name or a Strategy, got {type(strategy).__name__}.")
    return strategy


def sync_batchnorm(wanted: bool, strategy: Strategy, device_type: str) -> bool:
    """Return whether BatchNorm layers are to take their statistics over all ranks: where there are several.

    Raises:
        MisconfigurationException: on a device that torch's SyncBatchNorm does not know; between the replicas of one process.
    """
    if wanted and isinstance(strategy, DataParallelStrategy):
        raise MisconfigurationException("sync_batchnorm=True works between processes, not between the replicas of strategy='dp'. Use 'ddp'.")
    if wanted and strategy.distributed and device_type not in SYNC_BATCHNORM_DEVICES:
        raise MisconfigurationException(
            f"sync_batchnorm=True: torch's SyncBatchNorm works on {' and '.join(SYNC_BATCHNORM_DEVICES)} devices, not on {device_type}. "
            "Leave it out, or use layers that need no statistics of a batch (GroupNorm, LayerNorm)."
        )
    return bool(wanted) and strategy.distributed


def make_precision(precision: Any, device_type: str) -> Precision:
    """Return the precision object of a name (or the object itself).

    Raises:
        MisconfigurationException: for an unknown name, with the nearest.
    """
    if isinstance(precision, Precision):
        return precision
    name = canonical(precision)
    if name == "32-true":
        return Precision()
    if name in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(name, device_type)
    return TruePrecision(name)


# -- checks of single arguments ----------------------------------------------------------------------------------------------


def limit(name: str, value: Any) -> int | float | None:
    """A number of batches (int >= 0), or a fraction of them (float in [0, 1]); None and 1.0 mean all.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is None or (isinstance(value, float) and value == 1.0):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MisconfigurationException(f"{name}={value!r} must be a whole number of batches or a fraction between 0.0 and 1.0.")
    if isinstance(value, float) and value > 1.0 and value.is_integer():
        return int(value)
    if value < 0 or (isinstance(value, float) and value > 1.0):
        raise MisconfigurationException(f"{name}={value!r} must be a whole number >= 0 or a fraction between 0.0 and 1.0.")
    return value


def at_least(name: str, value: Any, low: int, *, none: bool = False, also: Iterable[int] = ()) -> Any:
    """Return a whole number that is at least `low`, or one of `also`, or None where `none` allows it.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (value < low and value not in also):
        extra = "".join(f" or {x}" for x in also) + (" or None" if none else "")
        raise MisconfigurationException(f"{name}={value!r} must be a whole number >= {low}{extra}.")
    return value


def seed(value: Any) -> int | None:
    """Return a seed in [0, 2**32), or None.

    Raises:
        MisconfigurationException: for anything else.
    """
    if at_least("seed", value, 0, none=True) is not None and value >= 2**32:
        raise MisconfigurationException(f"seed={value!r} must be less than 2**32.")
    return value


def positive(name: str, value: Any) -> float | None:
    """Return a number >= 0, or None.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
        raise MisconfigurationException(f"{name}={value!r} must be a number >= 0 or None.")
    return value


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return `value` if it is one of `choices`.

    Raises:
        MisconfigurationException: naming the choices and the nearest.
    """
    if value not in choices:
        raise MisconfigurationException(
            f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.{nearest(str(value), map(str, choices))}"
        )
    return value


def val_interval(value: Any, every_n_epoch: int | None) -> int | float:
    """A number of optimizer steps (int >= 1), or a fraction of an epoch (float in (0, 1]).

    Raises:
        MisconfigurationException: for anything else, or a fraction across epochs.
    """
    value = 1.0 if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 or (isinstance(value, float) and value > 1):
        raise MisconfigurationException(
            f"val_check_interval={value!r} must be a whole number of optimizer steps or a fraction of an epoch in (0.0, 1.0]."
        )
    if every_n_epoch is None and isinstance(value, float):
        raise MisconfigurationException("check_val_every_n_epoch=None needs a whole number of steps in val_check_interval.")
    return value


def time_limit(value: Any) -> timedelta | None:
    """Read max_time: a timedelta, a dict of its arguments, or "DD:HH:MM:SS".

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, Mapping):
        try:
            return timedelta(**value)
        except TypeError:
            pass
    elif isinstance(value, str) and len(parts := value.split(":")) == 4 and all(part.isdigit() for part in parts):
        days, hours, minutes, seconds = map(int, parts)
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    raise MisconfigurationException(f"max_time={value!r} must be a timedelta, a dict of its arguments, or 'DD:HH:MM:SS'.")


def duration(name: str, value: Any) -> timedelta | None:
    """Read a number of seconds > 0, or a timedelta; None means the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = timedelta(seconds=value)
    if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
        raise MisconfigurationException(f"{name}={value!r} must be a number of seconds > 0 or a timedelta.")
    return value


def root_dir(value: Any) -> str:
    """Return the absolute folder for everything a run writes; fixed at construction, so a later chdir does not move it.

    Raises:
        MisconfigurationException: for what is no path.
    """
    value = os.curdir if value is None else value
    if not isinstance(value, (str, os.PathLike)):
        raise MisconfigurationException(f"default_root_dir={value!r} must be a path.")
    return os.path.abspath(os.path.expanduser(os.fspath(value)))


def plugins(given: Any) -> list[Any]:
    """Return the plug-ins: Precision objects and checkpoint I/O.

    Raises:
        MisconfigurationException: for an object that is neither.
    """
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for one in found:
        if not isinstance(one, Precision) and not (hasattr(one, "save_checkpoint") and hasattr(one, "load_checkpoint")):
            raise MisconfigurationException(
                "plugins must be Precision objects or objects with save_checkpoint(table, path) and load_checkpoint(path, weights_only); "
                f"got {type(one).__name__}."
            )
    return found


def known_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Answer an unknown keyword argument of `init` with the nearest name.

    Raises:
        TypeError: naming both.
    """
    known = [name for name, p in inspect.signature(init).parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"Trainer has no argument {name!r}.{nearest(name, known)}")
        return init(*args, **kwargs)

    return checked


def apply_global_switches(settings: Settings) -> Callable[[], None]:
    """Set torch's process-wide switches that the settings name; return what puts them back."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.is_anomaly_enabled(),
    )
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    if settings.benchmark is not None or settings.deterministic:
        torch.backends.cudnn.benchmark = bool(settings.benchmark)
    if settings.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)

    def restore() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        torch.autograd.set_detect_anomaly(before[3])

    return restore
