"""Image classification with torchvision: a ResNet is fine-tuned, its head first, then all of it.

    python examples/images.py                                       # handwritten digits, written as PNG files first
    python examples/images.py --folder PHOTOS                       # PHOTOS/train/<class>/*.jpg and PHOTOS/val/<class>/*.jpg
    python examples/images.py --cifar10 FOLDER                      # CIFAR-10, as torchvision stores it
    python examples/images.py --weights resnet18.pth                # start from a file of pretrained weights
    python examples/images.py --devices 2 --strategy dp             # or ddp
    python examples/images.py --devices 2 --compare                 # pictures per second of one process, DP and DDP
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, models
from torchvision.transforms import v2

from callbacks import BackboneFinetuning, Callback
from trainer import Trainer, TrainModule, seed_everything

LOOK = v2.Compose([v2.ToImage(), v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
CHANGE = v2.Compose([v2.RandomAffine(10, translate=(0.1, 0.1)), LOOK])  # drawn anew from (seed, epoch, sample)


def digits_as_files(folder: Path) -> Path:
    """Write the digits as folder/{train,val}/<digit>/<number>.png, once."""
    if not folder.exists():
        for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
            place = folder.with_suffix(".part") / ("val" if number % 5 == 0 else "train") / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.reshape(8, 8) * 15.9).astype("uint8")).resize((32, 32)).save(place / f"{number}.png")
        folder.with_suffix(".part").rename(folder)
    return folder


class Classifier(TrainModule):
    """ResNet-18 without its last layer, and a new last layer."""

    def __init__(self, classes: int, weights: Path | None = None, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.backbone = models.resnet18()
        if weights is not None:
            self.backbone.load_state_dict(torch.load(weights, weights_only=True))
        self.backbone.fc = torch.nn.Identity()
        self.head = torch.nn.Linear(512, classes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self.head(self.backbone(batch[0])).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


class Speed(Callback):
    """Logs how many pictures all devices together saw a second in an epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.start, self.pictures = time.perf_counter(), 0

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: object, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.pictures += len(batch[0])

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        module.log("pictures_per_s", self.pictures / (time.perf_counter() - self.start), reduce_fx="sum")


def train(args: argparse.Namespace, parts: list[Dataset], strategy: str, devices: int) -> Trainer:
    seed_everything(0)
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=args.epochs, limit_train_batches=args.batches, seed=0,
        log_every_n_steps=5, callbacks=[thaw, Speed()], num_sanity_val_steps=0,
    )  # fmt: skip
    size = args.batch_size // (devices if strategy == "ddp" else 1)
    loaders = [DataLoader(part, size, shuffle=part is parts[0], num_workers=args.workers) for part in parts]
    trainer.fit(Classifier(len(parts[0].classes), args.weights), *loaders)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("folder", "cifar10", "weights"):
        parser.add_argument(f"--{name}", type=Path)
    for name, default in {"devices": 1, "epochs": 2, "batch-size": 64, "workers": 1, "batches": 1000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    if args.cifar10:
        parts = [datasets.CIFAR10(args.cifar10, train=train, transform=CHANGE if train else LOOK) for train in (True, False)]
    else:
        folder = args.folder or digits_as_files(Path("digit_files"))
        parts = [datasets.ImageFolder(folder / part, CHANGE if part == "train" else LOOK) for part in ("train", "val")]
    runs = [("auto", 1), ("dp", args.devices), ("ddp", args.devices)] if args.compare else [(args.strategy, args.devices)]
    for strategy, devices in runs:
        found = train(args, parts, strategy, devices).callback_metrics
        print(f"{strategy} on {devices}: val_acc {100 * found['val_acc']:.1f} %, {found['pictures_per_s']:.0f} pictures/s")


if __name__ == "__main__":
    main()
