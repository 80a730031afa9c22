"""The model whose Lightning checkpoints lie in `tests/data`: one text, over Lightning's module in the script that writes them and over ours."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BATCH", "BATCHES", "EPOCHS", "model_of", "rows"]

EPOCHS, BATCHES, BATCH = 4, 6, 2


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Return 12 rows of (x1, x2, y), from a formula."""
    n = torch.arange(BATCHES * BATCH, dtype=torch.float64)
    return torch.stack([torch.sin(n), torch.cos(3 * n), torch.sin(2 * n + 1)], dim=1).to(dtype)


def model_of(base: type) -> Any:
    """Return the model as a subclass of `base`, a LightningModule or a TrainModule."""

    class Model(base):
        """Two layers; `schedule` names the learning-rate schedule."""

        def __init__(self, schedule: str, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
            self.automatic_optimization = schedule != "manual"
            self.losses: list[float] = []
            self.rates: list[float] = []

        def loss(self, batch: Any) -> torch.Tensor:
            return (self.net(batch[0][:, :2]) - batch[0][:, 2:]).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            optimizers = self.optimizers()
            if self.automatic_optimization:
                self.rates.append(optimizers.param_groups[0]["lr"])
                return loss
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # Rises after the second epoch, so that the plateau schedule acts and the best file is not the last.
            self.log("val_loss", self.loss(batch) + max(0, self.current_epoch - 1))

        def configure_optimizers(self) -> Any:
            if self.hparams.schedule == "onecycle":
                optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES // 2)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            if self.hparams.schedule == "manual":
                return [torch.optim.SGD(self.net[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if self.hparams.schedule == "plateau":
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            return optimizer

    return Model
