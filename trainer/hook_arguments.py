"""Whether a hook, or another method that the loop calls, exists and takes the arguments that it is going to be called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from trainer.errors import MisconfigurationException
from trainer.removed import REMOVED_ARGUMENTS, REMOVED_HOOKS

__all__ = ["check_step", "fitting", "refuse_removed"]

_PER_LOADER = tuple(f"on_{stage}_batch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end"))
"""Hooks whose last argument, the index of the loader, may be left out."""


def refuse_removed(cls: type) -> None:
    """Refuse a class with a method that Lightning once called.

    Raises:
        MisconfigurationException: naming what took its place.
    """
    for name in REMOVED_HOOKS:
        if callable(getattr(cls, name, None)):
            raise MisconfigurationException(f"{cls.__qualname__}.{name} is never called. Use {REMOVED_HOOKS[name]}.")


def fitting(owner: Any, base: type, name: str) -> Callable[..., Any]:
    """Return the method `name` of `owner` in a form that takes the arguments of the method of `base`.

    Raises:
        MisconfigurationException: it cannot be called so; with what became of an argument that Lightning once had.
    """
    method, names = getattr(owner, name), _arguments(base, name)
    signature = _signature(method)
    if signature is None or _takes(signature, names):
        return method
    if name in _PER_LOADER and _takes(signature, names[:-1]):
        return _without_last(owner, method)
    raise _misfit(owner, name, signature, names)


def _without_last(owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any) -> Any:
        return method(*args[:-1])

    call.__self__ = owner  # as the method has it: whose hook it is decides what it may do, and is shown
    return call


def check_step(owner: Any, base: type, name: str) -> None:
    """Refuse a step function that takes neither a batch alone nor more of what the loop has for it.

    Raises:
        MisconfigurationException: with what it is called with.
    """
    names, signature = _arguments(base, name), _signature(getattr(owner, name))
    if signature is None:
        return
    if "dataloader_iter" in signature.parameters or not any(_takes(signature, names[:n]) for n in range(1, len(names) + 1)):
        raise _misfit(owner, name, signature, names)


def _misfit(owner: Any, name: str, signature: inspect.Signature, names: tuple[str, ...]) -> MisconfigurationException:
    hint = "".join(f" {old}: {new}." for old, new in REMOVED_ARGUMENTS.items() if old in signature.parameters)
    return MisconfigurationException(f"{type(owner).__qualname__}.{name}{signature} is called with ({', '.join(names)}): take these.{hint}")


def _signature(method: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):  # a function that does not tell
        return None


@cache
def _arguments(base: type, name: str) -> tuple[str, ...]:
    parameters = inspect.signature(getattr(base, name)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _takes(signature: inspect.Signature, names: tuple[str, ...]) -> bool:
    by_keyword = {"stage"} & set(names)
    try:
        signature.bind(*(name for name in names if name not in by_keyword), **dict.fromkeys(by_keyword))
    except TypeError:
        return False
    return True
