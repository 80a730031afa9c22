"""A callback that keeps what a program for PyTorch Lightning did: the loss of every batch, and the numbers of every epoch."""

import pytorch_lightning as pl


def checksum(module):
    """Two numbers that change when any weight does."""
    weights = [p.detach().double().flatten() for p in module.parameters()]
    return [sum(float(w.sum()) for w in weights), sum(float((w * w).sum()) for w in weights)]


def numbers(metrics):
    return {name: float(value) for name, value in sorted(metrics.items())}


class Transcript(pl.Callback):
    def __init__(self):
        self.losses, self.rates, self.train, self.validation = [], [], [], []

    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs, batch, batch_idx):
        if outputs is not None and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_epoch_end(self, trainer, pl_module):
        self.train.append(numbers(trainer.callback_metrics))

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validation.append(numbers(trainer.callback_metrics))

    def read(self, module, **more):
        return {
            "losses": self.losses,
            "rates": self.rates,
            "train": self.train,
            "validation": self.validation,
            "weights": checksum(module),
            **more,
        }
