"""Two validation sets, early stopping on one of them, and a second trainer that resumes where the first one ended."""

import os

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint, Timer
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transcript import Transcript


class Regression(LightningModule):
    """Which digit is it, as a number."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.save_hyperparameters()
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16.0), torch.tensor(labels / 10.0)
        self.net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))
        self.log(f"val_abs_{dataloader_idx}", (self(x) - y).abs().mean(), add_dataloader_idx=False)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)}

    def _rows(self, first, last, batch_size):
        return DataLoader(TensorDataset(self.images[first:last], self.labels[first:last]), batch_size=batch_size)

    def train_dataloader(self):
        return self._rows(0, 300, 30)

    def val_dataloader(self):
        return [self._rows(300, 400, 30), self._rows(400, 450, 50)]


def make_trainer(root, max_epochs):
    transcript = Transcript()
    quiet = {"mode": "min", "verbose": False}
    stopping = EarlyStopping("val_loss/dataloader_idx_1", patience=2, min_delta=0.001, check_on_train_epoch_end=True, **quiet)
    checkpoint = ModelCheckpoint(
        root, monitor="val_loss/dataloader_idx_0", save_top_k=2, save_last=True, save_on_train_epoch_end=True, **quiet
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=max_epochs, precision="64-true", callbacks=[transcript, stopping, checkpoint, Timer()], logger=False,
        val_check_interval=0.5, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer, transcript, stopping, checkpoint


def main(root):
    seed_everything(21)
    trainer, first, stopping, checkpoint = make_trainer(root, max_epochs=2)
    model = Regression()
    trainer.fit(model)
    begun = first.read(model, waited=stopping.wait_count, best=float(checkpoint.best_model_score))
    trainer, second, stopping, checkpoint = make_trainer(root, max_epochs=30)
    model = Regression()
    trainer.fit(model, ckpt_path=os.path.join(root, "last.ckpt"))
    score, kept = float(checkpoint.best_model_score), sorted(os.path.basename(path) for path in checkpoint.best_k_models)
    where = {"epoch": trainer.current_epoch, "step": trainer.global_step, "stopped": stopping.stopped_epoch}
    return {"begun": begun, "resumed": second.read(model, best=score, kept=kept, **where)}
