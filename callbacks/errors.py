"""The exceptions of the project, as one tree, with the nearest-name hint their messages use.

They live here because `trainer` depends on `callbacks` and never the reverse; `trainer.errors` gives them their public home.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DataError",
    "MisconfigurationException",
    "TrainerError",
    "nearest",
]


class TrainerError(Exception):
    """Root of every exception the project raises on its own account."""


class MisconfigurationException(TrainerError, ValueError):
    """An argument, a hook or a combination of them cannot work; the message says what to change."""


class CheckpointError(TrainerError, RuntimeError):
    """A checkpoint could not be written or read; the message names the path or the key."""


class DataError(TrainerError, RuntimeError):
    """A loader or data set did something that no policy covers; the message names it."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the choice closest to `name`, or an empty string when none is close."""
    match = difflib.get_close_matches(str(name), [str(c) for c in choices], n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""
