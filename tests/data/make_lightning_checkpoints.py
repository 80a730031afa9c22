"""Writes the files beside it, with pytorch-lightning (which the tests do not need): checkpoints, and how Lightning trained on.

Run once, with pytorch-lightning 2.6 installed: `python tests/data/make_lightning_checkpoints.py`. For each scenario there are checkpoints
`<scenario>-<when>.ckpt`, and in `lightning.json` the loss of every batch and the learning rate of every step of the run that was never
stopped, the losses and the last weights of Lightning's own resume from each file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent
EPOCHS, BATCHES, BATCH = 4, 6, 2


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Return 12 rows of (x1, x2, y), from a formula: the test makes the same."""
    n = torch.arange(BATCHES * BATCH, dtype=torch.float64)
    return torch.stack([torch.sin(n), torch.cos(3 * n), torch.sin(2 * n + 1)], dim=1).to(dtype)


class Model(pl.LightningModule):
    """Two layers; `schedule` names the learning-rate schedule."""

    def __init__(self, schedule: str, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
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


def fit(schedule: str, folder: str, settings: dict[str, Any], ckpt_path: Path | None = None) -> Model:
    """Train with Lightning; files go to `folder`."""
    settings = dict(settings)
    dtype = torch.float32 if "plugins" in settings else torch.float64
    extra, every = settings.pop("extra", []), settings.pop("every", 0)
    callbacks = [*(make() for make in extra), ModelCheckpoint(folder, "epoch={epoch}", "val_loss", save_top_k=-1, auto_insert_metric_name=False)]
    if every:
        callbacks.append(ModelCheckpoint(folder, "step={step}", every_n_train_steps=every, save_top_k=-1, auto_insert_metric_name=False))
    if dtype is torch.float64:
        settings["precision"] = "64-true"
    else:
        settings["plugins"] = [make() for make in settings["plugins"]]
    data = DataLoader(TensorDataset(rows(dtype)), batch_size=BATCH)
    model = Model(schedule)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    trainer.fit(model, data, data, ckpt_path=ckpt_path, **({} if ckpt_path is None else {"weights_only": True}))
    return model


SCENARIOS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    # name: (schedule, settings, {file that Lightning wrote: name here})
    "onecycle": (
        "onecycle",
        {"accumulate_grad_batches": 2, "every": 1, "extra": [lambda: EarlyStopping("val_loss", patience=5)]},
        {"step=4.ckpt": "inside", "epoch=1.ckpt": "end"},
    ),
    "plateau": ("plateau", {"every": 1}, {"step=15.ckpt": "inside", "epoch=2.ckpt": "end"}),
    "ema": ("none", {"extra": [lambda: EMAWeightAveraging(decay=0.5)]}, {"epoch=1.ckpt": "end"}),
    "manual": ("manual", {"every": 1}, {"step=16.ckpt": "inside"}),  # two optimizers: Lightning counts two steps a batch
    "scaled": (
        "none",
        {"plugins": [lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5))]},
        {"epoch=1.ckpt": "end"},
    ),
}  # fmt: skip


def main() -> None:
    """Write all files."""
    warnings.filterwarnings("ignore")
    numbers: dict[str, Any] = {"lightning": pl.__version__}
    for name, (schedule, settings, files) in SCENARIOS.items():
        with tempfile.TemporaryDirectory() as folder:
            whole = fit(schedule, folder, settings)
            numbers[name] = {"losses": whole.losses, "rates": whole.rates, "weights": _weights(whole)}
            for source, when in files.items():
                target = HERE / f"{name}-{when}.ckpt"
                _write(Path(folder, source), target)
                with tempfile.TemporaryDirectory() as other:
                    resumed = fit(schedule, other, settings, target)
                numbers[name][when] = {"losses": resumed.losses, "rates": resumed.rates, "weights": _weights(resumed)}
    (HERE / "lightning.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plain = {f"model.{key}": value for key, value in Model("none").double().state_dict().items()}
    torch.save(plain, HERE / "plain-prefixed.pt")


def _weights(model: Model) -> list[float]:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]).tolist()


def _write(source: Path, target: Path) -> None:
    """Copy a file, without the folder of this machine in it."""
    table = torch.load(source, weights_only=True)
    text = str(source.parent)

    def neutral(value: Any) -> Any:
        if isinstance(value, dict):
            return {neutral(k): neutral(v) for k, v in value.items()}
        return value.replace(text, "run") if isinstance(value, str) else value

    table["callbacks"] = neutral(table["callbacks"])
    torch.save(table, target)
    shutil.copystat(source, target)


if __name__ == "__main__":
    main()
