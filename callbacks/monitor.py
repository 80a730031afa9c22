"""What ModelCheckpoint and EarlyStopping share: comparing scores where NaN is the worst, and naming a monitor nobody logs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from callbacks.errors import MisconfigurationException, nearest

MODES = ("min", "max")


def check_mode(owner: str, mode: str) -> None:
    """Refuse a mode that is neither "min" nor "max".

    Raises:
        MisconfigurationException: naming the argument and the choices.
    """
    if mode not in MODES:
        raise MisconfigurationException(f"{owner}(mode={mode!r}): expected 'min' or 'max'.{nearest(mode, MODES)}")


def rank_of(value: Any, mode: str) -> tuple[bool, float]:
    """Return a key that sorts scores from best to worst; NaN comes after everything, infinities included."""
    number = float(value)
    if math.isnan(number):
        return (True, 0.0)
    return (False, number if mode == "min" else -number)


def missing_monitor(owner: str, monitor: str, names: Iterable[str], hint: str = "") -> MisconfigurationException:
    """Return the error for a monitored metric that was not logged: the names there are, the nearest one, and a hint."""
    known = sorted(names)
    listed = ", ".join(map(repr, known)) if known else "nothing"
    return MisconfigurationException(
        f"{owner}(monitor={monitor!r}): no metric of that name was logged. Logged so far: {listed}.{nearest(monitor, known)}"
        + (f" {hint}" if hint else "")
    )
