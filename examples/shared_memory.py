"""One copy of the data for all ranks and their workers: digits and labels in one mapped file, which every process reads in place.

Small data need none of this: tensors handed to `fit` reach the ranks of one machine by a mapped file anyway. It serves where data are
made once, and then read in many runs, or where there are several machines (each maps its own).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from trainer import DataModule, Trainer, TrainModule, seed_everything


class Mapped(Dataset):
    """Rows of a .npy file, opened in the process that reads them: what travels to ranks and workers is the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = None

    def _open(self) -> np.ndarray:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")  # pages are read when touched, once for all processes
        return self.rows

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "rows": None}

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = torch.from_numpy(self._open()[index].copy())
        return row[:64], int(row[64])


class Digits(DataModule):
    def __init__(self, path: Path, batch_size: int) -> None:
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def prepare_data(self) -> None:
        """Runs in one process of each machine, while the others wait."""
        if not self.path.exists():
            pixels, labels = load_digits(return_X_y=True)
            part = self.path.with_suffix(".part.npy")
            np.save(part, np.column_stack([pixels / 16, labels]).astype(np.float32))
            part.rename(self.path)  # under its name there is only ever a whole file

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Mapped(self.path), batch_size=self.batch_size, shuffle=True, num_workers=1)


class Classifier(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("digits.npy"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(accelerator="cpu", devices=args.devices, strategy="auto", max_epochs=args.epochs, seed=0)
    trainer.fit(Classifier(), datamodule=Digits(args.file.absolute(), 64 // args.devices))
    print(f"loss {trainer.callback_metrics['loss']:.4f}; {args.devices} processes and their workers read {args.file} in place")


if __name__ == "__main__":
    main()
