"""Settings: what the user asked of `Trainer`, checked and frozen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from trainer.arguments import (
    activation_checkpointing,
    at_least,
    checkpoint,
    duration,
    limit,
    one_of,
    positive,
    root_dir,
    seed,
    time_limit,
    val_interval,
)
from trainer.devices import Devices
from trainer.errors import MisconfigurationException, nearest
from trainer.strategies import DataParallelStrategy, ModelParallelStrategy, Strategy
from trainer.strategies.batchnorm import SYNC_BATCHNORM_DEVICES

__all__ = ["Settings", "apply_global_switches", "make_settings"]

_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_LIMITS = {"train": "limit_train_batches", "validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_epochs": partial(at_least, low=0, none=True, also=(-1,)),
    "min_epochs": partial(at_least, low=0, none=True),
    "max_steps": partial(at_least, low=0, also=(-1,)),
    "min_steps": partial(at_least, low=0, none=True),
    "check_val_every_n_epoch": partial(at_least, low=1, none=True),
    "num_sanity_val_steps": partial(at_least, low=0, also=(-1,)),
    "log_every_n_steps": partial(at_least, low=0),
    "gradient_clip_val": positive,
    "gradient_clip_algorithm": partial(one_of, choices=("norm", "value")),
    "deterministic": partial(one_of, choices=(True, False, "warn")),
    "uneven": partial(one_of, choices=("stop", "join")),
    "bad_loss": partial(one_of, choices=(None, "raise", "skip", "stop")),
    "reload_dataloaders_every_n_epochs": partial(at_least, low=0),
    "resume": checkpoint,
    "auto_requeue": partial(one_of, choices=(True, False)),
    "timeout": duration,
}
"""Arguments that become a setting of the same name, whatever the others are."""

_AS_GIVEN = ("barebones", "benchmark", "inference_mode", "use_distributed_sampler", "detect_anomaly")
_NOT_BARE = (
    "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "log_every_n_steps", "fast_dev_run",
    "detect_anomaly",
)  # fmt: skip
"""What a trainer without anything besides the loop cannot be asked for (and a profiler)."""
_DEFAULTS = {"num_sanity_val_steps": 2, "log_every_n_steps": 50, "gradient_clip_algorithm": "norm", "deterministic": False}
"""What None stands for."""


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
    compile: dict[str, Any] | None
    activation_checkpointing: Any
    detect_anomaly: bool
    bad_loss: str | None
    recover_oom: bool
    reload_dataloaders_every_n_epochs: int
    seed: int | None
    resume: str | None
    auto_requeue: bool
    timeout: timedelta | None
    barebones: bool


def make_settings(given: Mapping[str, Any], devices: Devices, num_nodes: int, strategy: Strategy) -> Settings:
    """Return what the arguments of `Trainer` come to, on these devices and with this strategy.

    Raises:
        MisconfigurationException: for an argument that cannot work, alone or with the others.
    """
    dev = given["fast_dev_run"]
    dev = at_least("fast_dev_run", int(dev) if isinstance(dev, bool) else dev, 0)
    limits = {stage: limit(name, given[name]) for stage, name in _LIMITS.items()}
    values = {**given, **{name: default for name, default in _DEFAULTS.items() if given[name] is None}}
    if dev:
        limits = dict.fromkeys(limits, dev)
        values.update(max_steps=dev, max_epochs=1, num_sanity_val_steps=0, log_every_n_steps=1, val_check_interval=1.0, check_val_every_n_epoch=1)
    if given["barebones"]:
        for name in _NOT_BARE:
            if given[name]:
                raise MisconfigurationException(f"barebones=True runs the loop alone, without {name}={given[name]!r}. Leave one of them out.")
        values.update(num_sanity_val_steps=0, log_every_n_steps=0)
    overfit = given["overfit_batches"]
    if overfit:
        overfit = limits["train"] = limits["validate"] = limit("overfit_batches", overfit) or 1.0
    unlimited = values["max_epochs"] is None and values["max_time"] is None
    if unlimited:
        values["max_epochs"] = 1000 if values["max_steps"] == -1 else -1
    return Settings(
        devices=devices,
        num_nodes=num_nodes,
        max_epochs_is_default=unlimited,
        max_time=time_limit(values["max_time"]),
        limits=limits,
        overfit_batches=overfit,
        fast_dev_run=dev,
        val_check_interval=val_interval(values["val_check_interval"], values["check_val_every_n_epoch"]),
        accumulate_grad_batches=accumulation(values["accumulate_grad_batches"], strategy, strategy.processes(devices.count) * num_nodes),
        default_root_dir=root_dir(values["default_root_dir"]),
        sync_batchnorm=sync_batchnorm(values["sync_batchnorm"], strategy, devices.type),
        compile=compile_options(values["compile"], strategy, devices.count),
        activation_checkpointing=activation_checkpointing(values["activation_checkpointing"]),
        recover_oom=recover_oom(values["recover_oom"], strategy, values["sync_batchnorm"]),
        seed=seed(values["seed"]),
        **{name: check(name, values[name]) for name, check in _CHECKS.items()},
        **{name: values[name] for name in _AS_GIVEN},
    )


def sync_batchnorm(wanted: bool, strategy: Strategy, device_type: str) -> bool:
    """Return whether BatchNorm layers are to take their statistics over all ranks: where there are several.

    Raises:
        MisconfigurationException: on a device that torch's SyncBatchNorm does not know; between the replicas of one process.
    """
    if wanted and isinstance(strategy, ModelParallelStrategy):
        raise MisconfigurationException(
            "sync_batchnorm=True would count the samples of a model group once for each of its ranks. Use layers that need no statistics of a batch "
            "(LayerNorm, GroupNorm) with ModelParallelStrategy."
        )
    if wanted and isinstance(strategy, DataParallelStrategy):
        raise MisconfigurationException("sync_batchnorm=True works between processes, not between the replicas of strategy='dp'. Use 'ddp'.")
    if wanted and strategy.distributed and device_type not in SYNC_BATCHNORM_DEVICES:
        raise MisconfigurationException(
            f"sync_batchnorm=True: torch's SyncBatchNorm works on {' and '.join(SYNC_BATCHNORM_DEVICES)} devices, not on {device_type}. "
            "Leave it out, or use layers that need no statistics of a batch (GroupNorm, LayerNorm)."
        )
    return bool(wanted) and strategy.distributed


def accumulation(value: Any, strategy: Strategy, processes: int) -> int:
    """Return the number of batches of an optimizer step.

    Raises:
        MisconfigurationException: for anything but a whole number >= 1; for more than 1 where torch's DDP reduces every batch.
    """
    if at_least("accumulate_grad_batches", value, 1) > 1 and processes > 1 and getattr(strategy, "ddp_kwargs", {}).get("static_graph"):
        raise MisconfigurationException(
            f"accumulate_grad_batches={value} with static_graph=True: torch's DDP cannot leave out the reduction of a batch of a static graph. "
            "Use accumulate_grad_batches=1, or DDPStrategy(static_graph=False)."
        )
    return value


def recover_oom(wanted: bool, strategy: Strategy, synced: bool) -> bool:
    """Return whether a step that ran out of memory is to be computed again in smaller parts.

    Raises:
        MisconfigurationException: where ranks wait for each other inside a forward or backward, which one of them may leave any time.
    """
    if wanted and (strategy.waits_inside or synced):
        what = "sync_batchnorm=True" if synced else f"strategy={strategy.name!r}"
        raise MisconfigurationException(
            f"recover_oom=True cannot work with {what}: ranks wait for each other inside forward and backward, also for one that ran out of "
            "memory there. Use a smaller batch_size and accumulate_grad_batches."
        )
    return bool(wanted)


def compile_options(value: Any, strategy: Strategy, devices: int) -> dict[str, Any] | None:
    """Return the keyword arguments of torch.compile; None where nothing is compiled.

    Raises:
        MisconfigurationException: for what is no such argument, with the nearest; for replicas in one process.
    """
    if value is None or value is False:
        return None
    if isinstance(value, str):
        value = {"mode": one_of("compile", value, _COMPILE_MODES)}
    elif value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise MisconfigurationException(f"compile={value!r} must be True, False, a dict of torch.compile's arguments, or a mode of it.")
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    for name in value:
        if name not in known:
            raise MisconfigurationException(f"compile={{{name!r}: ...}}: torch.compile has no such argument.{nearest(str(name), known)}")
    if value.get("mode") is not None:
        one_of("compile={'mode': ...}", value["mode"], _COMPILE_MODES)
    if isinstance(strategy, DataParallelStrategy) and len(strategy.device_ids or range(devices)) > 1:
        raise MisconfigurationException("compile=...: strategy='dp' makes replicas anew for each step, which cannot be compiled. Use 'ddp'.")
    return dict(value)


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
