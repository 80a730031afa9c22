"""A module whose learning rate and batch size can be looked for, which runs out of memory as it is told, and the range test by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.helpers.modules import Net, loader, quiet

__all__ = ["OPTIONS", "ROWS", "Manual", "Tuned", "exact", "range_test"]

ROWS = Net.rows(64, torch.float64)
OPTIONS = {"min_lr": 1e-4, "max_lr": 1.0}


class Tuned(Net):
    """Rows in batches of `batch_size`, two parameter groups, the second at a tenth of `lr`; runs out of memory above `most` samples."""

    def __init__(self, lr: float = 0.1, batch_size: int = 4, most: int = 10**9, where: str = "train", rank: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("batch_size")
        self.lr, self.most, self.where, self.rank = lr, most, where, rank
        self.sizes: list[int] = []

    def need(self, batch: torch.Tensor, where: str) -> None:
        self.sizes.append(len(batch))
        if where == self.where and len(batch) > self.most and self.rank in (None, self.global_rank):
            if len(batch) % 3:
                raise torch.OutOfMemoryError("CUDA out of memory (a test).")
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes.")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        self.need(batch, "train")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.need(batch, "validate")

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.need(batch, "test")
        self.log("size", float(len(batch)), reduce_fx="max")

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.need(batch, "predict")
        return batch[:, 0]

    def configure_optimizers(self) -> Any:
        first, last = self.layers[0].parameters(), self.layers[2].parameters()
        return torch.optim.SGD([{"params": first}, {"params": last, "lr": self.lr / 10}], lr=self.lr, momentum=0.9)

    def rows(self) -> Any:
        return loader(ROWS, self.hparams.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = rows


def exact(**settings: Any) -> Any:
    return quiet(**{"accelerator": "cpu", "precision": "64-true", "max_epochs": 2, **settings})


class Manual(Tuned):
    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss := super().training_step(batch, batch_idx))
        optimizer.step()
        return loss


def range_test(
    rates: list[float], batches: list[torch.Tensor], accumulate: int = 1, threshold: float | None = 4.0
) -> tuple[list[float], list[float]]:
    """The test by hand: one rate for both groups, the loss of each step, smoothed."""
    module, losses, average, best = Tuned().double(), [], 0.0, math.inf
    optimizer = module.configure_optimizers()
    for k, rate in enumerate(rates, 1):
        window = [batches[(accumulate * (k - 1) + i) % len(batches)] for i in range(accumulate)]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = sum(module.loss(batch) for batch in window) / accumulate
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * loss.item()
        losses.append(average / (1 - 0.98**k))
        if threshold is not None and k > 1 and losses[-1] > threshold * best:
            break
        best = min(best, losses[-1])
    return rates[: len(losses)], losses
