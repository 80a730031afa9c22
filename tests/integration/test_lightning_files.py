"""Files of others: checkpoints that Lightning 2.6 wrote (`tests/data/make_lightning_checkpoints.py`), bare state dicts, hostile pickles.

The numbers in `tests/data/lightning.json` are Lightning's: of the run that was never stopped, and of its own resume from each file.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from tests.helpers.lightning_model import BATCH, BATCHES, EPOCHS, model_of, rows
from tests.helpers.modules import quiet
from trainer import CheckpointError, MixedPrecision, TrainModule

DATA = Path(__file__).parents[1] / "data"
NUMBERS = json.loads((DATA / "lightning.json").read_text())

Model = model_of(TrainModule)
"""The script's model, over this trainer; its first weights are others."""


def loaders(dtype: torch.dtype = torch.float64) -> tuple[DataLoader, DataLoader]:
    return DataLoader(TensorDataset(rows(dtype)), BATCH), DataLoader(TensorDataset(rows(dtype)), BATCH)


def resume(file: str, **settings: Any) -> tuple[Model, Any]:
    name = file.partition("-")[0]
    module = Model(name if name in ("onecycle", "plateau", "manual") else "none")
    trainer = quiet(accelerator="cpu", precision="64-true", max_epochs=EPOCHS, **settings)
    trainer.fit(module, *loaders(), ckpt_path=DATA / file)
    return module, trainer


def check(found: Model, expected: dict[str, Any], atol: float = 1e-11, of_weights: float | None = None) -> None:
    """Compare the loss of every batch, the learning rates and the weights at the end with Lightning's."""
    count = len(found.losses)
    assert found.losses == pytest.approx(expected["losses"][-count:], abs=atol)
    assert found.rates == pytest.approx(expected["rates"][-count:], abs=1e-12)
    assert torch.cat([p.detach().flatten() for p in found.parameters()]).tolist() == pytest.approx(expected["weights"], abs=of_weights or atol)


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
@pytest.mark.parametrize(
    ("name", "settings", "left"),
    [
        ("onecycle-inside", {"accumulate_grad_batches": 2}, 16),
        ("onecycle-end", {"accumulate_grad_batches": 2}, 12),
        ("plateau-inside", {}, 9),
        ("manual-inside", {}, 16),  # of two optimizers: Lightning counts two steps a batch
    ],
)
def test_training_goes_on_as_if_lightning_had_never_stopped(name: str, settings: dict[str, Any], left: int) -> None:
    """Inside an epoch Lightning itself begins the data anew; the measure is its run that was not stopped."""
    module, trainer = resume(f"{name}.ckpt", **settings)
    assert len(module.losses) == left
    check(module, NUMBERS[name.partition("-")[0]])
    assert trainer.global_step == EPOCHS * BATCHES // settings.get("accumulate_grad_batches", 1)
    assert trainer.current_epoch == EPOCHS


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
def test_a_plateau_schedule_at_the_end_of_an_epoch_goes_on_as_in_lightning() -> None:
    """Lightning saves ahead of the schedule's step, which its resume leaves out; so does ours. It loads weights through 32 bits."""
    module, _ = resume("plateau-end.ckpt")
    check(module, NUMBERS["plateau"]["end"], atol=1e-7)


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
def test_the_loss_scale_is_taken() -> None:
    scales: list[float] = []

    class Shows(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            scales.append(plugin.scaler.get_scale())

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=5))
    module = Shows("none")
    quiet(accelerator="cpu", max_epochs=EPOCHS, plugins=[plugin]).fit(module, *loaders(torch.float32), ckpt_path=DATA / "scaled-end.ckpt")
    check(module, NUMBERS["scaled"], atol=1e-6)
    assert scales == [4096.0] * 3 + [8192.0] * 5 + [16384.0] * 4  # 12 steps were done, it grows after every fifth


def test_states_of_callbacks_are_taken_where_they_fit(tmp_path: Path) -> None:
    best, stop = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1), EarlyStopping("val_loss", patience=9)
    with pytest.warns(UserWarning, match="states of callbacks that this trainer does not have, .*every_n_train_steps': 1"):
        resume("onecycle-end.ckpt", accumulate_grad_batches=2, callbacks=[best, stop])
    assert best.best_model_path == "run/epoch=1.ckpt"  # it was the best, and still is: the later epochs are worse
    assert {Path(path).name for path in best.best_k_models} == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt"}
    assert stop.wait_count == 2 and float(stop.best_score) == pytest.approx(float(best.best_model_score))


def test_load_from_checkpoint_takes_weights_and_hyper_parameters() -> None:
    table = torch.load(DATA / "onecycle-end.ckpt", weights_only=True)
    module = Model.load_from_checkpoint(DATA / "onecycle-end.ckpt")
    assert module.hparams == {"schedule": "onecycle", "width": 3}
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor.double(), table["state_dict"][name], rtol=1e-6, atol=0)
    value = quiet(accelerator="cpu").validate(module, loaders(torch.float32)[1], ckpt_path=DATA / "onecycle-end.ckpt", verbose=False)
    assert value[0]["val_loss"] == pytest.approx(float(table["callbacks"][_monitoring(table)]["current_score"]), rel=1e-5)


def _monitoring(table: dict[str, Any]) -> str:
    return next(key for key in table["callbacks"] if key.startswith("ModelCheckpoint{'monitor': 'val_loss'"))


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks")
def test_averaging_goes_on() -> None:
    module, _ = resume("ema-end.ckpt", callbacks=[EMAWeightAveraging(decay=0.5)])
    check(module, NUMBERS["ema"], atol=1e-7, of_weights=1e-6)  # Lightning's 64-bit weights pass through 32-bit averages at each validation


def test_averaged_weights_are_what_evaluation_sees() -> None:
    table = torch.load(DATA / "ema-end.ckpt", weights_only=True)
    module = Model.load_from_checkpoint(DATA / "ema-end.ckpt")
    assert not torch.equal(table["state_dict"]["net.0.weight"], table["current_model_state"]["net.0.weight"])
    torch.testing.assert_close(module.net[0].weight.detach(), table["state_dict"]["net.0.weight"], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:The checkpoint holds states of callbacks", "ignore:There is a validation_step")
def test_a_stream_begins_anew_and_says_so() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(TensorDataset(rows(torch.float64)))

    module = Model("onecycle")
    with pytest.warns(UserWarning, match="made after 2 batches of an epoch by another program, and .* cannot be positioned there"):
        quiet(accelerator="cpu", precision="64-true", max_epochs=2, accumulate_grad_batches=2).fit(
            module, DataLoader(Stream(), BATCH), ckpt_path=DATA / "onecycle-inside.ckpt"
        )
    assert len(module.losses) == BATCHES


# -- weights alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "model.module.", "module._orig_mod."])
def test_bare_state_dicts_load_whatever_they_were_wrapped_in(prefix: str, tmp_path: Path) -> None:
    donor = Model("none")
    torch.save({prefix + name: tensor for name, tensor in donor.state_dict().items()}, tmp_path / "weights.pt")
    module = Model.load_from_checkpoint(tmp_path / "weights.pt", schedule="none")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), donor.parameters(), strict=True))
    value = quiet(accelerator="cpu").validate(Model("none"), loaders(torch.float32)[1], ckpt_path=tmp_path / "weights.pt", verbose=False)
    expected = quiet(accelerator="cpu").validate(donor, loaders(torch.float32)[1], verbose=False)
    assert value == expected
    with pytest.raises(CheckpointError, match="holds weights alone, so training cannot be resumed"):
        quiet(accelerator="cpu", max_epochs=1).fit(Model("none"), *loaders(torch.float32), ckpt_path=tmp_path / "weights.pt")


def test_the_prefixed_file_of_lightnings_module_loads() -> None:
    module = Model.load_from_checkpoint(DATA / "plain-prefixed.pt", schedule="none")
    weights = torch.load(DATA / "plain-prefixed.pt", weights_only=True)
    torch.testing.assert_close(module.net[2].bias.detach().double(), weights["model.net.2.bias"], rtol=1e-6, atol=0)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other.pt holds no 'state_dict' \(keys: epoch, optimizer\)"):
        Model.load_from_checkpoint(tmp_path / "other.pt", schedule="none")


def test_arguments_in_one_dict_come_back_in_it(tmp_path: Path) -> None:
    class Configured(TrainModule):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(config["width"], 1)

    table = torch.load(DATA / "onecycle-end.ckpt", weights_only=True)
    table |= {"hparams_name": "config", "hyper_parameters": {"width": 2}, "state_dict": Configured({"width": 2}).state_dict()}
    torch.save(table, tmp_path / "config.ckpt")
    assert Configured.load_from_checkpoint(tmp_path / "config.ckpt").layer.in_features == 2


# -- hostile files -----------------------------------------------------------------------------------------------------------


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"echo ran > '{self.marker}'",)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_hostile_pickles_do_not_run(form: str, tmp_path: Path) -> None:
    file, marker = tmp_path / "hostile.ckpt", tmp_path / "ran.txt"
    table = {"state_dict": Model("none").state_dict(), "callbacks": {"x": Payload(marker)}}
    if form == "pickle":
        file.write_bytes(pickle.dumps({"callbacks": {"x": Payload(marker)}}, protocol=2))
    else:
        torch.save(table, file, _use_new_zipfile_serialization=form == "zip")
    trainer = quiet(accelerator="cpu", max_epochs=1)
    for load in (
        lambda: Model.load_from_checkpoint(file, schedule="none"),
        lambda: trainer.fit(Model("none"), *loaders(), ckpt_path=file),
        lambda: trainer.validate(Model("none"), loaders()[1], ckpt_path=file),
    ):
        with pytest.raises(CheckpointError, match=r"objects that could run code while loading \(posix.system\)"):
            load()
        assert not marker.exists()
    if form == "zip":  # the documented way out, for files one trusts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Model.load_from_checkpoint(file, schedule="none", weights_only=False)
        assert marker.read_text() == "ran\n"
