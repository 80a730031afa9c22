"""Who overrides which hook: worked out once when a run starts, so that an unused hook costs nothing per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from callbacks.callback import HOOKS as CALLBACK_HOOKS
from callbacks.callback import Callback, check_hook_names
from trainer.datamodule import DataModule
from trainer.hook_arguments import check_step, fitting, refuse_removed
from trainer.module import TrainModule
from trainer.module_hooks import MODULE_HOOKS

__all__ = ["HookTable", "check_callback", "check_datamodule", "check_module", "overrides"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_TAKEN_OVER = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "lr_scheduler_step")
DATA_HOOKS = frozenset(n for n in vars(DataModule) if n.startswith("on_")) | {"prepare_data", "setup", "teardown", "transfer_batch_to_device"}
"""What is called of a data module, besides its loaders and its state."""

LATE = "on_train_epoch_end/monitors"
"""The second half of `on_train_epoch_end`: callbacks that read the numbers of the epoch."""


def overrides(owner: Any, base: type, name: str) -> bool:
    """True when `owner` has its own version of the method `name` of `base`."""
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name, None)


def check_module(module: TrainModule) -> None:
    """Refuse a module with a method `on_...` that is no hook, or with a method that cannot be called as the loop does.

    Raises:
        MisconfigurationException: naming the method and the nearest hook, or what it is called with.
    """
    _check(module, TrainModule, MODULE_HOOKS, _TAKEN_OVER)
    for name in _STEPS:
        if overrides(module, TrainModule, name):
            check_step(module, TrainModule, name)


def check_callback(callback: Callback) -> None:
    """Refuse a callback for the same reasons; see `check_module`."""
    _check(callback, Callback, CALLBACK_HOOKS)


def check_datamodule(data: DataModule) -> None:
    """Refuse a data module for the same reasons; see `check_module`."""
    _check(data, DataModule, DATA_HOOKS)


def _check(owner: Any, base: type, known: frozenset[str], others: tuple[str, ...] = ()) -> None:
    refuse_removed(type(owner))
    check_hook_names(type(owner), known)
    for name in (*sorted(known), *others):
        if overrides(owner, base, name):
            fitting(owner, base, name)


class HookTable:
    """For every hook the functions to call: callbacks in their order, then the module's own.

    `current` is the name of the hook (or step function) that is running: the defaults of `self.log` follow from it.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Callback], module: TrainModule, data: DataModule | None) -> None:
        check_module(module)
        for callback in callbacks:
            check_callback(callback)
        self.current = ""
        self.functions: dict[str, tuple[Callable[..., Any], ...]] = {}
        for name in sorted(CALLBACK_HOOKS | MODULE_HOOKS):
            found = [
                partial(fitting(callback, Callback, name), trainer, module)
                for callback in callbacks
                if name in CALLBACK_HOOKS and overrides(callback, Callback, name)
            ]
            does_something = name.endswith(("_model_eval", "_model_zero_grad"))
            if name in MODULE_HOOKS and (does_something or overrides(module, TrainModule, name)):
                found.append(fitting(module, TrainModule, name))
            if name == "on_exception" and data is not None and overrides(data, DataModule, name):
                found.append(data.on_exception)
            self.functions[name] = tuple(found)
        self._split_epoch_end(trainer, callbacks, module)

    def _split_epoch_end(self, trainer: Any, callbacks: Sequence[Callback], module: TrainModule) -> None:
        name = "on_train_epoch_end"
        mine = [c for c in callbacks if overrides(c, Callback, name)]
        early = [partial(c.on_train_epoch_end, trainer, module) for c in mine if not c.monitors]
        if overrides(module, TrainModule, name):
            early.append(module.on_train_epoch_end)
        self.functions[name] = tuple(early)
        self.functions[LATE] = tuple(partial(c.on_train_epoch_end, trainer, module) for c in mine if c.monitors)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the hook `name`; return the last answer that is not None."""
        functions = self.functions[name]
        answer = None
        if functions:
            before, self.current = self.current, name.partition("/")[0]
            for function in functions:
                result = function(*args, **kwargs)
                answer = answer if result is None else result
            self.current = before
        return answer

    def within(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the module as the hook that it is, so that `self.log` in it follows the rules of that hook."""
        before, self.current = self.current, name
        result = function(*args)
        self.current = before
        return result

    def foreign(self, name: str) -> bool:
        """True when the user's code overrides the hook: the module, or a callback that is not of this package."""
        owners = (getattr(getattr(f, "func", f), "__self__", None) for f in self.functions[name])
        return any(not type(owner).__module__.startswith("callbacks.") for owner in owners)

    def used(self, *names: str) -> bool:
        """True when anybody overrides one of these hooks."""
        return any(self.functions[name] for name in names)
