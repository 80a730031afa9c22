"""Handwritten digits (1797 pictures, from scikit-learn) on two CPU processes; writes event files and checkpoints to runs/."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from callbacks import LearningRateMonitor, ModelCheckpoint
from trainer import DataModule, Trainer, TrainModule, seed_everything


class Digits(DataModule):
    """Pictures as float tensors of 1 x 8 x 8 in [0, 1] with their labels, split 70 / 10 / 20 % by a fixed seed."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size  # of each process

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        pictures = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        dataset = TensorDataset(pictures, torch.tensor(labels))
        self.train, self.val, self.test = random_split(dataset, [0.7, 0.1, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=180)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=180)


class DigitNet(TrainModule):
    """Two convolutions and a linear layer: 29 thousand weights."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.score(batch, "acc")

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.score(batch, "val_acc")

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.score(batch, "test_acc")

    def score(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
        pictures, labels = batch
        scores = self.net(pictures)
        loss = F.cross_entropy(scores, labels)
        self.log("loss", loss, prog_bar=True)
        self.log(name, (scores.argmax(1) == labels).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--epochs", type=int, default=15, help="train until this many epochs are done (default: 15)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()
    seed_everything(0)
    checkpoint = ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)
    trainer = Trainer(
        accelerator="cpu", strategy="ddp" if args.devices > 1 else "auto", devices=args.devices, max_epochs=args.epochs,
        seed=0, log_every_n_steps=5, callbacks=[checkpoint, LearningRateMonitor()],
    )  # fmt: skip
    data = Digits(batch_size=64 // args.devices)  # ranks x batch_size is one large batch: the result is that of one process
    trainer.fit(DigitNet(), datamodule=data, ckpt_path="last" if args.resume else None)
    results = trainer.test(datamodule=data, ckpt_path="best")

    if not trainer.is_global_zero:  # under torchrun and srun every rank runs all of this
        return
    here = os.path.relpath(os.path.dirname(sys.executable))
    print(f"\nTest accuracy: {100 * results[0]['test_acc']:.1f} %   (best checkpoint: {os.path.relpath(checkpoint.best_model_path)})")
    print(f"Dashboard:     {here}/tensorboard --logdir runs")
    print(f"Train on:      {here}/python {os.path.relpath(__file__)} --resume --epochs {args.epochs + 5}")


if __name__ == "__main__":
    main()
