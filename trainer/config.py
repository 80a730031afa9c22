"""The only place where strings become objects: strategies, launchers, devices, precision and plug-ins of `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer import launchers
from trainer import plugins as entry_points
from trainer.accelerators import Accelerator
from trainer.checkpoint.background import AsyncCheckpointIO
from trainer.checkpoint.files import TorchCheckpointIO
from trainer.checkpoint.plugin import CheckpointIO
from trainer.devices import NAMES as ACCELERATORS
from trainer.devices import Devices, resolve
from trainer.errors import MisconfigurationException, nearest
from trainer.launchers.base import Launcher
from trainer.launchers.environment import inside_rank
from trainer.precision import MixedPrecision, Precision, TruePrecision
from trainer.precision.plugins import canonical
from trainer.removed import REMOVED_STRATEGIES
from trainer.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from trainer.strategies import (
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelDDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from trainer.world import World

__all__ = ["checkpoint_io", "find_devices", "make_launcher", "make_precision", "make_profiler", "make_strategy", "one_launcher", "one_precision", "plugins"]

_STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "ddp_spawn": DDPStrategy,
    "ddp_fork": lambda: _started(DDPStrategy(), "fork"),
    "ddp_notebook": lambda: _started(DDPStrategy(), "notebook"),
    "ddp_find_unused_parameters_false": DDPStrategy,
    "ddp_find_unused_parameters_true": lambda: DDPStrategy(find_unused_parameters=True),
    "dp": DataParallelStrategy,
    "fsdp": FSDPStrategy,
    "model_parallel": ModelParallelDDPStrategy,
    "model_parallel_ddp": lambda: ModelParallelDDPStrategy(devices_per_replica=2),
}


_PROFILERS: dict[str, Callable[[], Profiler]] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def _started(strategy: Strategy, start_method: str) -> Strategy:
    strategy.start_method = start_method
    return strategy


def make_strategy(strategy: str | Strategy, devices: int) -> Strategy:
    """Return the strategy object of a name; "auto" is one device, or DDP where there are several.

    Raises:
        MisconfigurationException: for a name that is neither built in nor a plug-in's, with the nearest, or with what one of Lightning's is here.
    """
    if strategy == "auto":
        strategy = "ddp" if devices > 1 else "single_device"
    if isinstance(strategy, str):
        if strategy in _STRATEGIES:
            return _STRATEGIES[strategy]()
        return entry_points.make("strategies", "strategy", strategy, Strategy, ("auto", *_STRATEGIES), REMOVED_STRATEGIES)
    if not isinstance(strategy, Strategy):
        got = f"the class {strategy.__name__}: write {strategy.__name__}()" if isinstance(strategy, type) else type(strategy).__name__
        raise MisconfigurationException(f"strategy must be a name or a Strategy, got {got}.")
    return strategy


def make_launcher(strategy: Strategy, processes: int) -> Launcher:
    """Return what makes the processes of a run on this machine."""
    method = strategy.start_method
    forks = method == "fork" or (method == "notebook" and not launchers.unforkable())
    return launchers.ForkLauncher(processes) if forks else launchers.LocalLauncher(processes)


def find_devices(accelerator: Any, devices: Any, strategy: Strategy | None, world: World | None) -> Devices:
    """Return the devices that are asked for; "auto" counts the processes of this node where they exist already (`world`).

    GPUs that others use are passed over by the process that starts a run, not by ranks: each would see what the others have taken.

    Args:
        strategy: None where it follows from the number of devices.

    Raises:
        MisconfigurationException: for an accelerator or devices that do not exist.
    """
    if isinstance(accelerator, str) and (accelerator in _STRATEGIES or accelerator in REMOVED_STRATEGIES):
        raise MisconfigurationException(f"accelerator={accelerator!r} names a strategy: use strategy={accelerator!r}.")
    if isinstance(accelerator, str) and accelerator not in ACCELERATORS:
        accelerator = entry_points.make("accelerators", "accelerator", accelerator, Accelerator, ACCELERATORS)
    if world is not None and devices == "auto":
        processes = world.local_world_size
        devices = processes if strategy is None else strategy.devices_for(processes)
        try:
            return resolve(accelerator, devices)
        except MisconfigurationException as error:
            raise MisconfigurationException(f"{processes} process(es) of this node take {devices} device(s) with devices='auto'. {error}") from None
    return resolve(accelerator, devices, idle_first=not inside_rank())


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


def make_profiler(profiler: Any, barebones: bool) -> Profiler:
    """Return the profiler of a name, or the object itself; None measures nothing.

    Raises:
        MisconfigurationException: for what is no profiler, with the nearest name; together with barebones.
    """
    if profiler is None:
        return PassThroughProfiler()
    if barebones:
        raise MisconfigurationException(f"barebones=True runs the loop alone, without profiler={profiler!r}. Leave one of them out.")
    if isinstance(profiler, str) and profiler in _PROFILERS:
        return _PROFILERS[profiler]()
    if not isinstance(profiler, Profiler):
        hint = nearest(profiler, _PROFILERS) if isinstance(profiler, str) else ""
        raise MisconfigurationException(f"profiler={profiler!r} must be None, {', '.join(map(repr, _PROFILERS))} or a Profiler object.{hint}")
    return profiler


def plugins(given: Any) -> list[Any]:
    """Return the plug-ins: Precision objects, launchers and checkpoint I/O, the latter also by the name of a plug-in.

    Raises:
        MisconfigurationException: for an object that is none of these, or an unknown name.
    """
    found = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    found = [entry_points.make("checkpoint_io", "plugins", one, CheckpointIO) if isinstance(one, str) else one for one in found]
    for one in found:
        if isinstance(one, type) or not isinstance(one, (Precision, CheckpointIO, Launcher)):
            raise MisconfigurationException(
                "plugins must be Precision objects, Launchers or objects with save_checkpoint(table, path) and load_checkpoint(path, weights_only); "
                f"got {f'the class {one.__name__}' if isinstance(one, type) else type(one).__name__}."
            )
    return found


def one_launcher(launcher: Any, plugins: list[Any]) -> Any:
    """Return the launcher that is asked for, as an argument or among the plug-ins.

    Raises:
        MisconfigurationException: for both.
    """
    found = [one for one in plugins if isinstance(one, Launcher)]
    if found and (launcher is not None or len(found) > 1):
        raise MisconfigurationException(f"launcher={launcher!r} and plugins= name {len(found) + (launcher is not None)} launchers; give one.")
    return found[0] if found else launcher


def one_precision(precision: Any, plugins: list[Any]) -> Any:
    """Return the precision that is asked for, as an argument or among the plug-ins.

    Raises:
        MisconfigurationException: for both.
    """
    found = [one for one in plugins if isinstance(one, Precision)]
    if found and (len(found) > 1 or precision not in (None, "32-true")):
        raise MisconfigurationException(f"precision={precision!r} and plugins= name several precisions; give one.")
    return found[0] if found else precision


def checkpoint_io(plugins: list[Any], strategy: Strategy) -> Any:
    """Return the plug-in that writes checkpoints, or the default.

    Raises:
        MisconfigurationException: for one that cannot write the parts of a strategy that shards them.
    """
    found = next((one for one in plugins if not isinstance(one, (Precision, Launcher))), None) or TorchCheckpointIO()
    inner = found.checkpoint_io if isinstance(found, AsyncCheckpointIO) else found
    if getattr(strategy, "state_dict_type", "full") == "sharded" and not hasattr(inner, "save_sharded"):
        raise MisconfigurationException(
            f"{type(inner).__name__} writes whole checkpoints, but the strategy is to save sharded ones. Use state_dict_type='full', or give the "
            "plug-in a method save_sharded(table, path, dist), as TorchCheckpointIO has it."
        )
    return found
