"""A small GAN on digits: two optimizers, stepped by hand."""

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transcript import Transcript


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.BatchNorm1d(32), nn.Linear(32, width), nn.Sigmoid())

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, img):
        return self.model(img)


class GAN(pl.LightningModule):
    def __init__(self, latent_dim: int = 8, lr: float = 0.002, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        width = int(np.prod((8, 8)))
        self.generator = Generator(latent_dim, width)
        self.discriminator = Discriminator(width)
        self.history = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy(y_hat, y)

    def training_step(self, batch, batch_idx):
        (imgs,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), torch.ones(imgs.size(0), 1).type_as(imgs))
        self.log("g_loss", g_loss, prog_bar=True, on_step=True, on_epoch=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        with optimizer_d.toggle_model():
            real_loss = self.adversarial_loss(self.discriminator(imgs), torch.ones(imgs.size(0), 1).type_as(imgs))
            fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), torch.zeros(imgs.size(0), 1).type_as(imgs))
            d_loss = (real_loss + fake_loss) / 2
            self.log("d_loss", d_loss, prog_bar=True)
            self.manual_backward(d_loss)
            self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer_d.step()
            optimizer_d.zero_grad()
        self.history.append([g_loss.item(), d_loss.item()])

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        return [opt_g, opt_d], [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (opt_g, opt_d)]


def main(root):
    pl.seed_everything(3)
    images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    model, transcript = GAN(), Transcript()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=3, precision="64-true", callbacks=[transcript], default_root_dir=root, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    # With a generator of its own the loader draws no number from the stream that the noise comes from.
    trainer.fit(model, DataLoader(TensorDataset(images[:960]), batch_size=64, generator=torch.Generator()))
    return transcript.read(model, history=model.history, step=trainer.global_step)
