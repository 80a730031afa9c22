"""A `forward` for one module object, in place of its class's, for the time of a run: keys, class and hooks of the module stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["OwnForward", "put_on"]


class OwnForward:
    """Base of what stands in a module's `forward`. It holds the module, not a bound method, so that a deep copy runs the copy."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.before = vars(module).get("forward")  # the user's own, or another of these

    def plain(self) -> Callable[..., Any]:
        """Return the `forward` that this one stands in for, also where the module's class has changed since."""
        return type(self.module).forward.__get__(self.module) if self.before is None else self.before

    def rebound(self, module: torch.nn.Module) -> OwnForward:
        """Return the same for a shallow copy of the module."""
        found = copy.copy(self)
        found.module = module
        if isinstance(self.before, OwnForward):
            found.before = self.before.rebound(module)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain()(*args, **kwargs)


def put_on(forwards: Iterable[OwnForward]) -> Callable[[], None]:
    """Give each module its forward; return what takes them off."""
    forwards = list(forwards)
    for forward in forwards:
        forward.module.forward = forward  # type: ignore[method-assign]

    def take_off() -> None:
        for forward in reversed(forwards):
            if forward.before is None:
                forward.module.__dict__.pop("forward", None)
            else:
                forward.module.forward = forward.before  # type: ignore[method-assign]

    return take_off
