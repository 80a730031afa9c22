"""Which file a resume starts from, and going on without a file: a further fit of the same Trainer."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from callbacks import ModelCheckpoint
from tests.helpers.modules import Scalar, loader, quiet
from trainer import Trainer
from trainer.errors import CheckpointError, MisconfigurationException


class Seeing(Scalar):
    """Logs val = [5, 1, 3, 4, ...] by epoch and records (epoch, sample)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch.item()))
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", [5.0, 1.0, 3.0, 4.0][self.current_epoch])


def fit(resume_from=None, trainer=None, module=None, keep=True, **settings):
    """Train on samples 1, 2; ModelCheckpoint keeps the best and last in the default folder."""
    module = module or Seeing()
    keeper = [ModelCheckpoint(filename="{epoch}", monitor="val", save_last=True)] if keep else []
    trainer = trainer or quiet(**{"max_epochs": 3, "callbacks": keeper, **settings})
    trainer.fit(module, loader([1, 2]), loader([0]), ckpt_path=resume_from)
    return trainer, module


def test_ckpt_path_best_last_and_a_path(own_directory):
    trainer, module = fit()
    folder = own_directory / "checkpoints"
    assert sorted(os.listdir(folder)) == ["epoch=1.ckpt", "last.ckpt"]
    assert trainer.checkpoint_callback.best_model_path == str(folder / "epoch=1.ckpt")
    weight = {}
    for name in ("best", "last", str(folder / "epoch=1.ckpt"), folder / "last.ckpt"):
        trainer.validate(module, loader([0]), ckpt_path=name, verbose=False)
        weight[str(name)] = module.w.item()
    assert list(weight.values()) == [-6.0, -9.0, -6.0, -9.0]  # 3 an epoch
    trainer, module = fit("last", max_epochs=4)  # new objects
    assert module.seen == [(3, 1.0), (3, 2.0)] and trainer.global_step == 8 and module.w.item() == -12.0
    assert trainer.ckpt_path == str(folder / "last.ckpt")
    trainer.fit(module, loader([1, 2]), loader([0]), ckpt_path="best")  # epoch 1's: goes on with epoch 2
    assert module.seen[2:] == [(2, 1.0), (2, 2.0), (3, 1.0), (3, 2.0)] and module.w.item() == -12.0


def test_ckpt_path_auto_starts_afresh_where_there_is_nothing(own_directory):
    _, module = fit("auto", max_steps=3)
    assert module.seen == [(0, 1.0), (0, 2.0), (1, 1.0)]
    _, module = fit("auto")
    assert module.seen == [(1, 2.0), (2, 1.0), (2, 2.0)]


def test_resume_is_the_default_of_ckpt_path(own_directory):
    _, module = fit(resume="auto", max_steps=3)
    _, module = fit(resume="auto")
    assert module.seen == [(1, 2.0), (2, 1.0), (2, 2.0)]
    fit(resume="auto", resume_from=own_directory / "checkpoints" / "epoch=1.ckpt")


def test_last_is_looked_for_in_the_folders_of_earlier_runs_and_loggers(own_directory):
    def log(resume_from=None, epochs=1):
        module = Seeing()
        trainer = Trainer(max_epochs=epochs, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
        trainer.fit(module, loader([1, 2]), ckpt_path=resume_from)
        return trainer, module

    first, _ = log()
    assert first.checkpoint_callback.best_model_path == str(own_directory / "runs/version_0/checkpoints/epoch=0-step=2.ckpt")
    second, module = log("last", 2)
    assert module.seen == [(1, 1.0), (1, 2.0)]
    assert second.checkpoint_callback.best_model_path == str(own_directory / "runs/version_0/checkpoints/epoch=1-step=4.ckpt")
    assert log("auto", 3)[1].seen == [(2, 1.0), (2, 2.0)]
    assert os.listdir("runs") == ["version_0"]  # one run, one set of curves
    path = own_directory / "runs/version_0/checkpoints/epoch=2-step=6.ckpt"
    third, _ = log(path, 4)  # a file that is named may be the start of something else
    assert third.checkpoint_callback.best_model_path.startswith(str(own_directory / "runs/version_1")) and path.exists()


def test_what_cannot_be_found_is_said_before_anything_runs(own_directory):
    with pytest.raises(CheckpointError, match="ckpt_path='last': there is no checkpoint in .*checkpoints"):
        fit("last")
    with pytest.raises(MisconfigurationException, match="ckpt_path='best': no ModelCheckpoint of this trainer has a best file"):
        fit("best")
    with pytest.raises(CheckpointError, match="ckpt_path='nowhere.ckpt' does not exist"):
        fit("nowhere.ckpt")
    assert os.listdir(own_directory) == []


def test_files_that_cannot_be_resumed_from(own_directory):
    trainer, module = fit()
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="holds weights alone, so training cannot be resumed from it exactly"):
        fit("weights.ckpt", max_epochs=4)
    table = torch.load("checkpoints/last.ckpt", weights_only=True)
    torch.save({**table, "format": 99}, "newer.ckpt")
    with pytest.raises(CheckpointError, match="newer.ckpt has format 99; this version reads formats up to"):
        fit("newer.ckpt", max_epochs=4)
    torch.save({**table, "optimizer_states": []}, "none.ckpt")
    with pytest.raises(CheckpointError, match=r"made 1 optimizer\(s\), but the checkpoint holds 0"):
        fit("none.ckpt", max_epochs=4)
    torch.save({"model": {}}, "foreign.ckpt")
    with pytest.raises(CheckpointError, match=r"foreign.ckpt holds no 'state_dict' \(keys: model\)"):
        fit("foreign.ckpt", max_epochs=4)


# -- a further fit of the same Trainer -----------------------------------------------------------------------------------


def test_c50_a_raised_epoch_limit_goes_on_with_the_next_epochs():
    trainer, module = fit(max_epochs=2, keep=False)
    with pytest.warns(UserWarning, match="Nothing to do: max_epochs=2 is already reached. Raise it"):
        fit(trainer=trainer, module=module)
    assert trainer.current_epoch == 2 and trainer.global_step == 4 and len(module.seen) == 4
    trainer.max_epochs = 4
    fit(trainer=trainer, module=module)
    assert [epoch for epoch, _ in module.seen] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trainer.current_epoch == 4 and trainer.global_step == 8 and module.w.item() == -12.0


def test_c50_a_raised_step_limit_goes_on_in_the_middle_of_the_epoch():
    trainer, module = quiet(max_steps=4), Seeing()
    for limit in (4, 5, 11, 12):
        trainer.max_steps = limit
        trainer.fit(module, loader(range(1, 6), shuffle=True), loader([0]))
        with pytest.warns(UserWarning, match=f"Nothing to do: max_steps={limit} is already reached"):
            trainer.fit(module, loader(range(1, 6)), loader([0]))
        assert trainer.global_step == limit and len(module.seen) == limit
    assert [epoch for epoch, _ in module.seen] == [0] * 5 + [1] * 5 + [2] * 2
    for epoch in (0, 1):
        assert sorted(sample for e, sample in module.seen if e == epoch) == [1, 2, 3, 4, 5]


def test_c50_epoch_numbers_count_the_batches_of_both_fits():
    def ends(limits):
        trainer, module = quiet(max_steps=limits[0]), Seeing()
        for limit in limits:
            trainer.max_steps = limit
            trainer.fit(module, loader(range(1, 6)), loader([0]))
        return trainer.callback_metrics["mean"].item()

    assert ends([5]) == ends([2, 5]) == ends([1, 2, 3, 4, 5]) == ends([7, 10]) == 3.0


def test_no_warning_in_a_plain_resume(own_directory):
    fit(max_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("last")


def test_auto_looks_only_where_this_trainer_saves(own_directory, capsys):
    fit(max_epochs=1)  # another experiment, in the default folder
    trainer, _ = fit("auto", keep=False, max_epochs=1, callbacks=[ModelCheckpoint("mine")])
    assert trainer.ckpt_path is None and "Going on" not in capsys.readouterr().out
    trainer, _ = fit("auto", keep=False, max_epochs=2, callbacks=[ModelCheckpoint("mine")])
    assert trainer.ckpt_path == str(own_directory / "mine" / "epoch=0-step=2.ckpt")
    assert f"Going on from {trainer.ckpt_path}: epoch 0, step 2." in capsys.readouterr().out


def test_a_file_of_another_module_is_named(own_directory):
    class Wider(Seeing):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

    fit(max_epochs=1)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not of this module.*\n.*more\.weight"):
        fit("last", module=Wider(), max_epochs=2)


def test_an_optimizer_of_other_parameters_is_named(own_directory):
    class Wider(Seeing):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Linear(1, 1)
            self.strict_loading = False

    fit(max_epochs=1)
    with pytest.raises(CheckpointError, match="optimizer 0 is not the one that configure_optimizers made: .*load_from_checkpoint"):
        fit("last", module=Wider(), max_epochs=2)


@pytest.mark.parametrize("name", ["{epoch}/{step}", "[a]/b-{val:.1f}"])
def test_auto_finds_files_in_the_sub_folders_of_a_file_name(own_directory, name):
    def run(epochs):
        module = Seeing()
        quiet(max_epochs=epochs, callbacks=[ModelCheckpoint("kept", name)]).fit(module, loader([1, 2]), loader([0]), ckpt_path="auto")
        return module.seen

    os.makedirs("kept/other/deep")
    torch.save({"state_dict": {}}, "kept/other/deep/newer.ckpt")  # not of this name's depth
    assert run(1) == [(0, 1.0), (0, 2.0)]
    assert run(2) == [(1, 1.0), (1, 2.0)]


def test_a_best_file_that_was_never_ranked_is_explained(own_directory):
    class Validated(Seeing):
        def validation_step(self, batch, batch_idx):
            self.log("val", batch.mean())

    saves = ModelCheckpoint("saved", monitor="val", every_n_train_steps=2, save_last=True)
    trainer = Trainer(max_epochs=1, callbacks=[saves], logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    with pytest.warns(UserWarning, match="there is no 'val' yet"):
        trainer.fit(Validated(), loader([1, 2, 3]), loader([1]))
    with pytest.raises(MisconfigurationException, match="'val' was not measured at any step that saved, so nothing was ranked"):
        trainer.validate(ckpt_path="best", dataloaders=loader([1]))
