"""BasePredictionWriter: the base of callbacks that write predictions to where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, nearest

__all__ = ["BasePredictionWriter", "WriteInterval"]


class WriteInterval(str, Enum):
    """When predictions are written. Equal to the strings."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """After each batch."""
        return "batch" in self.value

    @property
    def on_epoch(self) -> bool:
        """At the end."""
        return "epoch" in self.value


_INTERVALS = tuple(interval.value for interval in WriteInterval)


class BasePredictionWriter(Callback):
    """Override `write_on_batch_end`, `write_on_epoch_end` or both; `Trainer.predict(return_predictions=False)` then keeps nothing itself.

    Every rank writes what it predicted: name files by `trainer.global_rank`. Ranks that hold parts of one model predict the same,
    and one of them writes. The indices say which entries of the data set a batch holds, so whoever reads can put them in order.

    Args:
        write_interval: "batch", "epoch" or "batch_and_epoch". Only for the last two are predictions kept (on the CPU) until the end.

    Raises:
        MisconfigurationException: another interval; in `setup`, an interval whose method is not overridden.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise MisconfigurationException(
                f"write_interval={write_interval!r} must be one of {', '.join(_INTERVALS)}.{nearest(str(write_interval), _INTERVALS)}"
            )
        self.interval = WriteInterval(write_interval)
        self._predictions: list[list[Any]] = []  # by loader, then by batch
        self._indices: list[list[Any]] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, batch_indices: Sequence[Any] | None, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Write the prediction of one batch.

        Args:
            prediction: what `predict_step` returned, on its device.
            batch_indices: the entries of the data set in this batch; None where they are not known (iterables).
        """
        raise NotImplementedError(f"{type(self).__name__} has to define write_on_batch_end")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]) -> None:
        """Write all predictions of this rank.

        Args:
            predictions: a list over batches, or a list of such lists where there are several loaders; on the CPU.
            batch_indices: for every loader a list over batches of what `write_on_batch_end` gets.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define write_on_epoch_end")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage != "predict":
            return
        for part in ("batch", "epoch"):
            name = f"write_on_{part}_end"
            if part in self.interval.value and getattr(type(self), name) is getattr(BasePredictionWriter, name):
                raise MisconfigurationException(f"{type(self).__name__}(write_interval={self.interval.value!r}) has to define {name}.")

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._predictions, self._indices = [], []

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not trainer.records:
            return
        indices = trainer.batch_indices
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            for kept in (self._predictions, self._indices):
                kept.extend([] for _ in range(dataloader_idx + 1 - len(kept)))  # a loader may have no batch for this rank
            self._predictions[dataloader_idx].append(tree_map_only(torch.Tensor, _to_host, outputs))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
        if not self.interval.on_epoch or not trainer.records:
            return
        predictions, indices = self._predictions, self._indices
        loaders = max(len(trainer.num_predict_batches), 1)
        for kept in (predictions, indices):
            kept.extend([] for _ in range(loaders - len(kept)))
        self.write_on_epoch_end(trainer, module, predictions[0] if loaders == 1 else predictions, indices)
        self._predictions, self._indices = [], []


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy that may be used in training later, and holds no accelerator memory."""
    with torch.inference_mode(False):
        return tensor.detach().cpu().clone()
