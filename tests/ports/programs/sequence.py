"""A recurrent network that learns to spell: one learning-rate cycle over all steps, two batches to a step."""

import importlib.util
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transcript import Transcript


class Characters(Dataset):
    """Windows of a text; the text is the source of a module of Python that has not changed for decades."""

    def __init__(self, length: int = 24):
        text = Path(importlib.util.find_spec("this").origin).read_text()
        self.letters = sorted(set(text))
        self.codes = torch.tensor([self.letters.index(letter) for letter in text[:800]])
        self.length = length

    def __len__(self):
        return 96

    def __getitem__(self, index):
        window = self.codes[index * 8 : index * 8 + self.length + 1]
        return window[:-1], window[1:]


class Shuffled(Sampler):
    """Another order in every epoch; both trainers say which epoch it is."""

    def __init__(self, size: int):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class SequenceModel(pl.LightningModule):
    def __init__(self, letters: int, max_lr: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(letters, 12)
        self.rnn = nn.GRU(12, 24, batch_first=True)
        self.out = nn.Linear(24, letters)
        self.norms = []

    def forward(self, x):
        hidden, _ = self.rnn(self.embedding(x))
        return self.out(hidden)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=x.size(0))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(grad_norm(self, norm_type=2)["grad_2.0_norm_total"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


def main(root):
    pl.seed_everything(1234)
    dataset, transcript = Characters(), Transcript()
    model = SequenceModel(len(dataset.letters))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="64-true",
        callbacks=[transcript, callbacks.ModelCheckpoint(dirpath=root, every_n_train_steps=5, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=8, sampler=Shuffled(len(dataset))))
    files = sorted(path.name for path in Path(root).glob("*.ckpt"))
    return transcript.read(model, norms=model.norms, step=trainer.global_step, files=files)
