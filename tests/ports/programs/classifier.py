"""A classifier of handwritten digits: a data module, metrics of torchmetrics, the best checkpoint tested at the end."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning import (
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy
from transcript import Transcript, numbers


class DigitsDataModule(LightningDataModule):
    def __init__(self, batch_size: int = 60):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()

    def setup(self, stage: str):
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
        parts = {"fit": range(1200), "validate": range(1200, 1500), "test": range(1500, 1797)}
        self.parts = {name: torch.utils.data.Subset(data, list(rows)) for name, rows in parts.items()}

    def train_dataloader(self):
        return DataLoader(self.parts["fit"], batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.parts["validate"], batch_size=100)

    def test_dataloader(self):
        return DataLoader(self.parts["test"], batch_size=100)


class LitClassifier(LightningModule):
    def __init__(self, hidden_dim: int = 32, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 10))
        self.train_acc = Accuracy(task="multiclass", num_classes=10)
        self.val_acc = Accuracy(task="multiclass", num_classes=10)
        self.test_acc = Accuracy(task="multiclass", num_classes=10, average="macro")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.val_acc}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_acc(logits, y)
        self.log("test_loss", F.cross_entropy(logits, y))
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


def main(root):
    seed_everything(42, workers=True)
    transcript = Transcript()
    checkpoint = ModelCheckpoint(dirpath=f"{root}/best", filename="{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        precision="64-true",
        callbacks=[transcript, checkpoint, LearningRateMonitor(logging_interval="epoch")],
        logger=CSVLogger(root, name="classifier"),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
    )
    model, datamodule = LitClassifier(), DigitsDataModule()
    trainer.fit(model, datamodule=datamodule)
    last = transcript.read(model)
    tested = trainer.test(ckpt_path="best", datamodule=datamodule, verbose=False)
    again = LitClassifier.load_from_checkpoint(checkpoint.best_model_path)
    assert isinstance(again, pl.LightningModule)
    name = checkpoint.best_model_path.rsplit("/", 1)[1]
    return {**last, "test": numbers(tested[0]), "best": name, "lr": again.hparams.lr}
