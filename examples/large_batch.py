"""A large batch on small memory: accumulation adds up the gradients of parts, activation checkpointing computes activations twice.

Three runs of the same steps of 256 samples; it prints the last loss of each, which is the same, and what was kept for backward at most.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from callbacks import Callback
from trainer import Trainer, TrainModule


class Rows(TrainModule):
    """Reads a digit as a sequence of 8 rows with a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.place = nn.Linear(8, 64), nn.Parameter(torch.zeros(8, 64))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.inside(batch[0]) + self.place
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x.mean(1)), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Kept(Callback):
    """Adds up the bytes that autograd keeps from forward to backward."""

    peak = now = 0

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_idx: int) -> None:
        self.now, self.seen = 0, set()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)
        self.hooks.__enter__()

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen and not isinstance(tensor, nn.Parameter):
            self.seen.add(storage.data_ptr())
            self.now += storage.nbytes()
        return tensor

    def on_before_backward(self, trainer: object, module: object, loss: object) -> None:
        self.hooks.__exit__(None, None, None)
        self.peak = max(self.peak, self.now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels))
    forms = {"all at once": (256, {}), "in 8 parts": (32, {"accumulate_grad_batches": 8})}
    forms["in 8 parts, checkpointed"] = (32, {"accumulate_grad_batches": 8, "activation_checkpointing": nn.TransformerEncoderLayer})
    for name, (batch_size, settings) in forms.items():
        kept = Kept()
        trainer = Trainer(
            accelerator="cpu", max_steps=args.steps, seed=0, callbacks=[kept], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **settings,
        )  # fmt: skip
        trainer.fit(Rows(), DataLoader(data, batch_size, shuffle=True))
        print(f"{name:26} loss {trainer.callback_metrics['loss']:.5f}   kept for backward: {kept.peak / 2**20:6.1f} MB")


if __name__ == "__main__":
    main()
