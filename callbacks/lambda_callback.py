"""LambdaCallback: hooks given as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callbacks.callback import HOOKS, Callback
from callbacks.errors import MisconfigurationException, nearest

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """A callback made of functions: `LambdaCallback(on_train_start=lambda trainer, module: ...)`.

    Each function receives what the hook of its name receives: the trainer, the module and the hook's own arguments (`setup` and
    `teardown` get `stage` by keyword). Hooks without a function cost nothing.

    Args:
        hooks: functions by the name of a hook; None for none.

    Raises:
        MisconfigurationException: a name that is no hook, with the nearest one; a value that cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise MisconfigurationException(f"LambdaCallback({name}=...): there is no such hook.{nearest(name, HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise MisconfigurationException(f"LambdaCallback({name}={function!r}): expected a function of (trainer, module, ...).")
            setattr(self, name, function)
