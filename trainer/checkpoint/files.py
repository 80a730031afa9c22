"""The default checkpoint I/O of a trainer: files, or folders of parts where the strategy shards."""

from __future__ import annotations

import os
from typing import Any

from trainer.checkpoint import io
from trainer.checkpoint.temporary import clean
from trainer.dist import Dist

__all__ = ["TorchCheckpointIO", "damage", "load"]


class TorchCheckpointIO:
    """The default CheckpointIO: one file that `torch.load(weights_only=True)` reads, whole or not there, with a checksum."""

    def __init__(self) -> None:
        self._cleaned: set[str] = set()

    def save_checkpoint(self, table: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write the file. The first one into a folder also removes what writers that were killed left there.

        Raises:
            CheckpointError: it cannot be written, or holds what is not plain; the message names the path or the key.
        """
        io.save(table, path)
        self._clean(path)

    def save_sharded(self, table: dict[str, Any], path: str | os.PathLike[str], dist: Dist) -> None:
        """Write a table with sharded tensors as a folder, each rank its part. Collective.

        Raises:
            CheckpointError: on every rank, when any could not write; the message names the path.
        """
        _sharded().save(table, path, dist)
        if dist.world.is_global_zero:
            self._clean(path)

    def _clean(self, path: str | os.PathLike[str]) -> None:
        folder = os.path.dirname(os.path.abspath(path))
        if folder not in self._cleaned:
            self._cleaned.add(folder)
            clean(folder)

    def load_checkpoint(self, path: str | os.PathLike[str], weights_only: bool) -> dict[str, Any]:
        """Read a file or folder, tensors to the CPU.

        Raises:
            CheckpointError: it is not there, damaged, or could run code; the message names the path.
        """
        return load(path, weights_only=weights_only)

    def damage(self, path: str | os.PathLike[str]) -> str | None:
        """Return what is wrong with a checkpoint, for "last" and "auto" to pass it over; None where nothing is, or can be known."""
        return damage(path)


def load(path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool = True) -> dict[str, Any]:
    """Return the table of a checkpoint file, or of a folder of parts with its tensors put together.

    Raises:
        CheckpointError: see `io.load`.
    """
    if os.path.isdir(path):
        return _sharded().load(path, map_location, weights_only)
    return io.load(path, map_location, weights_only)


def damage(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with the bytes of a checkpoint, or None where nothing is, or nothing can be known (files of others)."""
    return _sharded().damage(path) if os.path.isdir(path) else io.damage(path)


def _sharded() -> Any:
    """The file that works with torch.distributed.checkpoint, which takes half a second to load: only sharded checkpoints do."""
    from trainer.checkpoint import sharded

    return sharded
