"""Writes the files beside it, with pytorch-lightning (which the tests do not need): checkpoints, and how Lightning trained on.

Run once, with pytorch-lightning 2.6 installed: `python tests/data/make_lightning_checkpoints.py`. For each scenario there are checkpoints
`<scenario>-<when>.ckpt`, and in `lightning.json` the loss of every batch and the learning rate of every step of the run that was never
stopped, the losses and the last weights of Lightning's own resume from each file.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.helpers.lightning_model import BATCH, EPOCHS, model_of, rows  # noqa: E402

Model = model_of(pl.LightningModule)


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
    torch.manual_seed(1)
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
    torch.manual_seed(1)
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
