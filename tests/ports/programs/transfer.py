"""Transfer learning: a backbone that knows the digits 0 to 4 learns all ten, its layers unfrozen one after the other."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import BackboneFinetuning, BaseFinetuning
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset
from transcript import Transcript


def loader(digits, rows):
    images, labels = load_digits(return_X_y=True)
    chosen = (labels < digits).nonzero()[0][rows]
    images, labels = torch.tensor(images[chosen] / 16.0, dtype=torch.float32), torch.tensor(labels[chosen])
    return DataLoader(TensorDataset(images, labels), batch_size=40)


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones: tuple = (1, 3), train_bn: bool = False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: LightningModule):
        self.freeze(modules=pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: "LightningModule", epoch: int, optimizer: torch.optim.Optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(modules=pl_module.backbone[-3:], optimizer=optimizer, train_bn=self.train_bn)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(modules=pl_module.backbone[:-3], optimizer=optimizer, train_bn=self.train_bn)


class TransferModel(LightningModule):
    def __init__(self, num_classes: int, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(-1) == y).double().mean(), prog_bar=True)

    def configure_optimizers(self):
        trainable = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trainable, lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5)]


def fit(root, model, digits, epochs, *callbacks):
    transcript = Transcript()
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, precision="64-true", callbacks=[transcript, *callbacks], default_root_dir=root, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader(digits, slice(0, 400)), loader(digits, slice(400, 600)))
    return transcript.read(model, trainable=[p.requires_grad for p in model.parameters()])


def main(root):
    seed_everything(11)
    source, target, other = TransferModel(5), TransferModel(10), TransferModel(10)
    before = fit(root, source, 5, 2)
    target.backbone.load_state_dict(source.backbone.state_dict())
    staged = fit(root, target, 10, 5, MilestonesFinetuning())
    other.backbone.load_state_dict(target.backbone.state_dict())
    schedule = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.1, verbose=False)
    whole = fit(root, other, 10, 4, schedule)
    return {"before": before, "staged": staged, "whole": whole}
