"""The module of the equivalence matrix, whole and cut over ranks, and what records its numbers."""

from __future__ import annotations

from typing import Any

import torch

from callbacks import Callback
from tests.helpers.modules import Net

__all__ = ["Curve", "Cut", "Layers"]


class Layers(Net):
    """A stack with LayerNorm, in 64-bit, which validates and predicts."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            parts = [torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
            self.layers = torch.nn.Sequential(*parts)
        self.to(dtype)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return {"sample": batch[:, 0], "output": self.layers(batch[:, :4])}


class Cut(Layers):
    """Two layers that the ranks of a mesh compute together."""

    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # slow to load

        plan = {"3": ColwiseParallel(), "5": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


class Curve(Callback):
    """The published loss and validation number of every step."""

    def __init__(self) -> None:
        self.loss: dict[int, float] = {}
        self.val: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if "loss" in trainer.callback_metrics:
            self.loss[trainer.global_step] = float(trainer.callback_metrics["loss"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_start(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.val[trainer.global_step] = float(trainer.callback_metrics["val"])
