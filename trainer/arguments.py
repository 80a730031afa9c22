"""Checks and readings of single arguments of `Trainer`, which need nothing but their value."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, ParamSpec

import torch

from trainer.errors import MisconfigurationException, nearest
from trainer.removed import REMOVED

__all__ = [
    "activation_checkpointing", "at_least", "checkpoint", "duration", "known_arguments", "limit", "one_of", "positive", "root_dir", "seed", "time_limit",
    "val_interval",
]  # fmt: skip

P = ParamSpec("P")


def known_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Answer an unknown keyword argument of `init` with the nearest name, or with what took the place of one that Lightning once had.

    Raises:
        TypeError: naming both.
    """
    known = [name for name, p in inspect.signature(init).parameters.items() if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known and name in REMOVED:
                raise TypeError(f"Trainer has no argument {name!r} (earlier versions of Lightning had): use {REMOVED[name]}.")
            if name not in known:
                raise TypeError(f"Trainer has no argument {name!r}.{nearest(name, known)}")
        return init(*args, **kwargs)

    return checked


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


def checkpoint(name: str, value: Any) -> Any:
    """Return a path, a word ("auto", "last"), or None.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise MisconfigurationException(f"{name}={value!r} must be 'auto', 'last' or the path of a checkpoint.")
    return value


def activation_checkpointing(choice: Any) -> Any:
    """Return a choice of layers: a tuple of module classes and name patterns, or a function of name and layer; None for none.

    Raises:
        MisconfigurationException: for anything else.
    """
    if choice is None or (callable(choice) and not isinstance(choice, type)):
        return choice
    found = tuple(choice) if isinstance(choice, (list, tuple, set, frozenset)) else (choice,)
    for one in found:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, torch.nn.Module)):
            raise MisconfigurationException(
                f"activation_checkpointing={choice!r} must be module classes, names of layers ('layers.*'), a function of name and layer, or None."
            )
    return found or None
