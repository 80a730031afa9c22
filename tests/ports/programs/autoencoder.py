"""An autoencoder of digits in 32-bit, with clipped gradients; afterwards its embeddings are predicted."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import STEP_OUTPUT
from sklearn.datasets import load_digits
from torch import nn, optim, utils
from transcript import Transcript


class LitAutoEncoder(pl.LightningModule):
    def __init__(self, encoder: nn.Module, decoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx: int) -> STEP_OUTPUT:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "seen": batch[0].size(0)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        return self.encoder(x)

    def _loss(self, batch):
        x, _ = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        optimizer = optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class CountSamples(pl.callbacks.Callback):
    """Uses what the training step returns besides the loss."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: STEP_OUTPUT, batch, batch_idx: int
    ) -> None:
        self.seen += outputs["seen"]


def main(root):
    pl.seed_everything(7)
    images, labels = load_digits(return_X_y=True)
    dataset = utils.data.TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    train_loader = utils.data.DataLoader(utils.data.Subset(dataset, range(1000)), batch_size=50)
    val_loader = utils.data.DataLoader(utils.data.Subset(dataset, range(1000, 1300)), batch_size=100)
    encoder = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 3))
    decoder = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 64))
    autoencoder = LitAutoEncoder(encoder, decoder)
    transcript, counter = Transcript(), CountSamples()
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=root,
        max_epochs=5,
        limit_train_batches=15,
        gradient_clip_val=0.05,
        callbacks=[transcript, counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(autoencoder, train_loader, val_loader)
    embeddings = torch.cat(trainer.predict(autoencoder, val_loader))
    return transcript.read(autoencoder, seen=counter.seen, embeddings=embeddings[:4].tolist(), step=trainer.global_step)
