"""Toy modules whose results can be worked out by hand, and a trainer that writes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer import TrainModule, Trainer

__all__ = ["Net", "Scalar", "assert_same", "loader", "quiet", "weights"]


def quiet(**settings: Any) -> Trainer:
    """Return a Trainer without loggers, checkpoints, bar, summary and sanity check, but for what `settings` say."""
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = settings.get("callbacks") or []
    if any(hasattr(callback, "best_model_path") for callback in (given if isinstance(given, list) else [given])):
        del off["enable_checkpointing"]
    return Trainer(**{"num_sanity_val_steps": 0, **off, **settings})


def loader(samples: Any, batch_size: int = 1, **more: Any) -> DataLoader:
    """Return a DataLoader over numbers (as float32 samples) or a tensor."""
    data = samples if isinstance(samples, torch.Tensor) else torch.tensor(list(samples), dtype=torch.float32)
    return DataLoader(data, batch_size=batch_size, **more)


class Scalar(TrainModule):
    """One weight w, start 0, loss (w * x).mean(), SGD with lr 1: w falls by the mean of the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Net(TrainModule):
    """A small regression on rows (4 inputs, 1 target), SGD with momentum; equal weights for every instance."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[:, :4]), batch[:, 4:])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @staticmethod
    def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `count` rows of data, the same on every call."""
        return torch.randn(count, 5, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a module's parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-12) -> None:
    """Compare what `weights` returned, name by name."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)
