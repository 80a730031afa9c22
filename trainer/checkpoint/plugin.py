"""What a checkpoint I/O plug-in has to have."""

from __future__ import annotations

import os
from typing import Any, Protocol, runtime_checkable

__all__ = ["CheckpointIO"]


@runtime_checkable
class CheckpointIO(Protocol):
    """Where checkpoints go: `Trainer(plugins=...)` takes any object with these two methods.

    Two more are used where they are there: `damage(path)` returns what is wrong with a checkpoint (None: nothing), for "last" and "auto" to
    pass it over; `save_sharded(table, path, dist)` writes on every rank what a strategy keeps in parts. An object is pickled with the
    Trainer on its way to new processes, so it opens what it needs when it is called.
    """

    def save_checkpoint(self, table: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Keep `table` (plain values and CPU tensors, nested) under `path`, whole or not at all; makes its folder. Rank 0 only."""

    def load_checkpoint(self, path: str | os.PathLike[str], weights_only: bool) -> dict[str, Any]:
        """Return the table kept under `path`; `weights_only` forbids running code that it might hold. Every rank."""
