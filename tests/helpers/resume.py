"""A run in which everything is random and everything is recorded, to compare an uninterrupted run with resumed ones."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from callbacks import Callback, ModelCheckpoint
from tests.helpers.datasets import Drawing
from tests.helpers.modules import quiet
from trainer import TrainModule

__all__ = ["Epochs", "EveryStep", "Noisy", "SaveAt", "Stop", "assert_continues", "noisy_loader", "train"]


class Stop(Exception):
    """The interruption of a run."""


class Noisy(TrainModule):
    """Learns from rows of `Drawing` (number, three draws) with BatchNorm, dropout, draws in the step, Adam and a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
            )
        self.steps: list[dict[str, Any]] = []  # one entry a batch
        self.epochs: dict[int, dict[str, float]] = {}  # the numbers at the end of each epoch
        self.optimizer_state: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        draws = [torch.rand(()).item(), float(numpy.random.rand()), random.random()]
        loss = (self.layers(batch[:, 1:].float()) - batch[:, :1].float() / 10).square().mean()
        entry = {"step": self.global_step, "idx": batch_idx, "samples": batch[:, 0].tolist(), "data": batch[:, 1:].tolist()}
        self.steps.append({**entry, "draws": draws, "loss": loss.item(), "lr": self.optimizers().param_groups[0]["lr"]})
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("draw", draws[0], on_step=False, on_epoch=True)
        self.log("peak", draws[1], on_step=False, on_epoch=True, reduce_fx="max")
        self.log("now", draws[2])
        return loss

    def on_train_end(self) -> None:
        self.optimizer_state = copy.deepcopy(self.optimizers().optimizer.state_dict())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Epochs(Callback):
    """Keeps in the module what monitors see at the end of each epoch."""

    monitors = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.epochs[trainer.current_epoch] = {name: value.item() for name, value in trainer.callback_metrics.items()}


class EveryStep(ModelCheckpoint):
    """Saves after every optimizer step, as step=<n>.ckpt."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, "{step}", every_n_train_steps=1, save_top_k=-1)


class SaveAt(Callback):
    """Saves to `path` in step `step`."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def noisy_loader(size: int = 14, batch_size: int = 4, **more: Any) -> DataLoader:
    return DataLoader(Drawing(size), batch_size=batch_size, shuffle=True, **more)


def train(loader: Any, save_to: Path | None = None, resume_from: Any = None, val: Any = None, **settings: Any) -> Noisy:
    """Fit a new module with new objects around it and return it; `callback_metrics` at the end are kept as `module.metrics`."""
    callbacks = [*settings.pop("callbacks", []), Epochs(), *([EveryStep(save_to)] if save_to else [])]
    module = settings.pop("module", None) or Noisy()
    trainer = quiet(**{"max_epochs": 2, "seed": 11, "log_every_n_steps": 1, **settings, "callbacks": callbacks})
    trainer.fit(module, loader, val, ckpt_path=resume_from)
    module.metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return module


def assert_continues(resumed: Noisy, whole: Noisy, step: int) -> None:
    """`resumed` started after `step` optimizer steps and must be equal to `whole` from there on, to the bit."""
    assert resumed.steps == [entry for entry in whole.steps if entry["step"] >= step]
    assert resumed.epochs == {epoch: whole.epochs[epoch] for epoch in resumed.epochs}
    assert max(resumed.epochs) == max(whole.epochs)
    assert resumed.metrics == whole.metrics
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    assert_equal(resumed.optimizer_state, whole.optimizer_state)


def assert_equal(left: Any, right: Any) -> None:
    """Nested containers with tensors hold the same."""
    if isinstance(right, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in right:
            assert_equal(left[key], right[key])
    elif isinstance(right, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_equal(one, other)
    else:
        assert left == right
