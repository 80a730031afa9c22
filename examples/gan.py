"""A GAN that draws handwritten digits: two optimizers, stepped by hand. Its pictures are in TensorBoard (Images)."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.utils import make_grid

from trainer import Trainer, TrainModule, seed_everything


class GAN(TrainModule):
    """A generator from 16 random numbers to a picture of 8 x 8, and a discriminator that tells its pictures from real ones."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # training_step runs backward and steps the optimizers itself
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def judged(self, pictures: torch.Tensor, real: bool) -> torch.Tensor:
        scores = self.discriminator(pictures)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, 0.9 if real else 0.0))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(batch), 16, device=self.device)

        with self.toggled_optimizer(for_generator):  # the other's weights need no gradients meanwhile
            g_loss = self.judged(self(noise), real=True)
            for_generator.zero_grad()
            self.manual_backward(g_loss)
            for_generator.step()

        with self.toggled_optimizer(for_discriminator):
            d_loss = (self.judged(batch, real=True) + self.judged(self(noise).detach(), real=False)) / 2
            for_discriminator.zero_grad()
            self.manual_backward(d_loss)
            for_discriminator.step()

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        noise = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))  # the same 32 places each time
        with torch.no_grad():
            pictures = self(noise.to(self.device)).view(-1, 1, 8, 8)
        if self.trainer.is_global_zero:
            self.logger.experiment.add_image("drawn", make_grid(pictures), self.global_step)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999)) for part in (self.generator, self.discriminator)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    seed_everything(0)
    pictures = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    module = GAN()
    trainer = Trainer(accelerator="cpu", strategy="auto", devices=args.devices, max_epochs=args.epochs, seed=0, log_every_n_steps=10)
    trainer.fit(module, DataLoader(pictures, batch_size=64 // args.devices, shuffle=True, drop_last=True))
    with torch.no_grad():
        drawn = module(torch.randn(256, 16))
    gap = (drawn.mean(0) - pictures.mean(0)).abs().mean()
    print(f"mean picture of 256 drawn digits: {gap:.3f} a pixel off that of the real ones (a black page: {pictures.mean():.3f})")


if __name__ == "__main__":
    main()
