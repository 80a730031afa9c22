"""What a checkpoint file holds, which files ModelCheckpoint keeps, and what cannot be saved."""

from __future__ import annotations

import enum
from pathlib import Path

import numpy
import pytest
import torch

from callbacks import Callback, ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from tests.helpers.resume import EveryStep, noisy_loader, train
from trainer import DataModule
from trainer.errors import CheckpointError


class Validated(Scalar):
    """The n-th validation logs the n-th value; w falls by 1 a step (samples are 1)."""

    def __init__(self, *values, name="val"):
        super().__init__()
        self.values, self.name = list(values), name

    def validation_step(self, batch, batch_idx):
        self.log(self.name, self.values[0])

    def on_validation_end(self):
        self.values.pop(0)


def read(path):
    table = torch.load(path, weights_only=True)
    return table["state_dict"]["w"].item(), table["global_step"], table["epoch"]


def test_c07_last_is_the_newest_and_best_the_best(tmp_path):
    keeper = ModelCheckpoint(tmp_path, monitor="val", mode="min", save_top_k=1, save_last=True)
    quiet(max_epochs=4, callbacks=[keeper]).fit(Validated(1.0, 2.0, 3.0, 4.0), loader([1, 1, 1]), loader([0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert read(keeper.last_model_path) == (-12.0, 12, 3)
    assert read(keeper.best_model_path) == (-3.0, 3, 0) and keeper.best_model_score.item() == 1.0


@pytest.mark.parametrize("link", [True, "link"])
def test_c07_last_as_a_link(tmp_path, link):
    keeper = ModelCheckpoint(tmp_path, monitor="val", save_last=link)
    quiet(max_epochs=3, callbacks=[keeper]).fit(Validated(1.0, 2.0, 3.0), loader([1, 1]), loader([0]))
    assert Path(keeper.last_model_path).is_symlink() == (link == "link")
    assert read(keeper.last_model_path) == (-6.0, 6, 2) and read(keeper.best_model_path) == (-2.0, 2, 0)


def test_c08_a_step_ranks_by_its_own_validation(tmp_path):
    keeper = ModelCheckpoint(tmp_path, monitor="val", every_n_train_steps=2, save_top_k=1)
    trainer = quiet(max_epochs=1, val_check_interval=2, callbacks=[keeper])
    trainer.fit(Validated(5.0, 1.0, 5.0, 5.0), loader([1] * 8), loader([0]))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=4.ckpt"]
    assert read(keeper.best_model_path) == (-4.0, 4, 0) and keeper.best_model_score.item() == 1.0


def test_c08_at_the_end_of_an_epoch(tmp_path):
    keeper = ModelCheckpoint(tmp_path, "{step}", monitor="val", every_n_train_steps=2, save_top_k=-1)
    quiet(max_epochs=3, callbacks=[keeper]).fit(Validated(5.0, 1.0, 4.0), loader([1] * 2), loader([0]))
    assert {Path(path).name: score.item() for path, score in keeper.best_k_models.items()} == {
        "step=2.ckpt": 5.0, "step=4.ckpt": 1.0, "step=6.ckpt": 4.0
    }  # fmt: skip
    assert read(keeper.best_model_path) == (-4.0, 4, 1)


def test_c09_a_metric_name_makes_no_folder_and_last_is_the_newest_run(tmp_path):
    for values, steps in (((3.0, 1.0), 2), ((4.0, 5.0), 1)):
        keeper = ModelCheckpoint(tmp_path, "{epoch}-{val/loss:.1f}", monitor="val/loss", save_last=True)
        module = Validated(*values, name="val/loss")
        quiet(max_epochs=2, callbacks=[keeper]).fit(module, loader([1] * steps), loader([0]))
    names = ["epoch=0-val_loss=4.0.ckpt", "epoch=1-val_loss=1.0.ckpt", "last.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert read(tmp_path / "last.ckpt") == (-2.0, 2, 1)


# -- what is in a file ---------------------------------------------------------------------------------------------------


def test_top_keys_and_plain_values(tmp_path):
    train(noisy_loader(), tmp_path, max_steps=3)
    table = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    lightning = {"state_dict", "epoch", "global_step", "callbacks", "lr_schedulers", "optimizer_states", "hyper_parameters"}
    ours = {"format", "datamodule_hyper_parameters", "progress", "precision", "data", "ranks", "seed", "metrics", "metric_steps"}
    assert set(table) == lightning | ours
    assert (table["epoch"], table["global_step"], table["format"], table["seed"]) == (0, 3, 1, 11)
    assert table["progress"] == {"step": 3, "epoch": 0, "step_in_epoch": 3, "batch": 3, "epoch_ended": False, "validation_owed": 0}
    assert table["data"] == {"samples": 12} and len(table["ranks"]) == 1
    assert [len(table[name]) for name in ("optimizer_states", "lr_schedulers")] == [1, 1]
    assert set(table["metrics"]) == {"loss", "loss_step", "now"}
    assert list(table["state_dict"])[:2] == ["layers.0.weight", "layers.0.bias"]


def test_the_end_of_an_epoch_is_told_from_its_last_step(tmp_path):
    train(noisy_loader(), tmp_path)
    table = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert table["progress"] == {"step": 4, "epoch": 0, "step_in_epoch": 4, "batch": 4, "epoch_ended": True, "validation_owed": 0}
    assert table["data"] is None and set(table["metrics"]) >= {"loss_epoch", "draw", "peak"}


def test_weights_only_files_hold_no_state_of_training(tmp_path):
    keeper = ModelCheckpoint(tmp_path, save_weights_only=True)
    quiet(max_epochs=1, callbacks=[keeper]).fit(Scalar(), loader([1]))
    table = torch.load(keeper.best_model_path, weights_only=True)
    assert set(table) == {"state_dict", "epoch", "global_step", "format", "hyper_parameters", "datamodule_hyper_parameters"}


# -- hyper-parameters that cannot be plain -------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Configured(Scalar):
    def __init__(self, value, other=1, keep=True):
        super().__init__()
        self.save_hyperparameters(ignore=None if keep else ["value"])


@pytest.mark.parametrize("value", [Path("/data"), Colour.RED, torch.nn.Linear(1, 1), object(), {"deep": [1, Path("x")]}, Colour])
def test_c11_what_is_not_plain_is_refused_by_name_before_step_one(tmp_path, value):
    module = Configured(value)
    with pytest.raises(CheckpointError, match=r"hyper_parameters\.value.*save_hyperparameters\(ignore=\['value'\]\)"):
        quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(module, loader([1]))
    assert module.w.item() == 0.0 and list(tmp_path.iterdir()) == []
    module = Configured(value, keep=False)
    quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(module, loader([1]))
    table = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert table["hyper_parameters"] == {"other": 1, "keep": False}


def test_c11_a_data_module_is_looked_at_as_well(tmp_path):
    class Data(DataModule):
        def __init__(self, folder):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader([1])

    module = Scalar()
    with pytest.raises(CheckpointError, match=r"datamodule_hyper_parameters\.folder.*ignore=\['folder'\]"):
        quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(module, datamodule=Data(tmp_path))
    assert module.w.item() == 0.0


def test_c11_without_checkpoints_nothing_is_refused():
    module = Configured(Path("/data"))
    quiet(max_epochs=1).fit(module, loader([1]))
    assert module.w.item() == -1.0


def test_c11_numbers_of_numpy_and_nested_dicts_are_made_plain(tmp_path):
    value = {"a": numpy.float64(0.5), "b": [numpy.int64(3)], "c": numpy.arange(2), "d": None, "e": (1, 2)}
    quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(Configured(value), loader([1]))
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["hyper_parameters"]["value"]
    assert saved["c"].tolist() == [0, 1]
    assert {k: v for k, v in saved.items() if k != "c"} == {"a": 0.5, "b": [3], "d": None, "e": (1, 2)}
    assert type(saved["a"]) is float and type(saved["b"][0]) is int


def test_c11_what_hooks_and_callbacks_add_is_named_too(tmp_path):
    class Adding(Scalar):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"where": Path("/tmp")}

    class Keeping(Callback):
        def state_dict(self):
            return {"colour": Colour.RED}

    with pytest.raises(CheckpointError, match=r"mine\.where: it is a pathlib"):
        quiet(max_epochs=1, callbacks=[EveryStep(tmp_path)]).fit(Adding(), loader([1]))
    with pytest.raises(CheckpointError, match=r"callbacks\..*Keeping\.colour: it is a"):
        quiet(max_epochs=1, callbacks=[Keeping(), EveryStep(tmp_path)]).fit(Scalar(), loader([1]))
    assert list(tmp_path.iterdir()) == []


def test_c12_a_compiled_layer_leaves_no_trace_in_the_keys(tmp_path):
    class Plain(Scalar):
        def __init__(self, compiled=False):
            super().__init__()
            layer = torch.nn.Linear(1, 1)
            self.net = torch.compile(layer, backend="eager") if compiled else layer

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.net(batch[:, None]).mean()

    compiled, plain = Plain(compiled=True), Plain()
    trainer = quiet(max_steps=1)
    trainer.fit(compiled, loader([1, 1]))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    table = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert sorted(table["state_dict"]) == ["net.bias", "net.weight", "w"]
    for module in (plain, Plain(compiled=True)):
        quiet(max_steps=2).fit(module, loader([1, 1]), ckpt_path=tmp_path / "a.ckpt")
        assert module.w.item() == -2.0
