"""Arguments, properties and methods of Trainer with Lightning's meaning, where no other test looks at them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint
from tests.helpers.modules import Net, Scalar, loader, quiet
from trainer import (
    CheckpointError,
    DataModule,
    MisconfigurationException,
    Precision,
    RunningStage,
    Trainer,
    TrainerFn,
    TrainerStatus,
)
from trainer.launchers import InProcessLauncher
from trainer.removed import REMOVED_ATTRIBUTES, REMOVED_STRATEGIES


class Validated(Scalar):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("v", batch.mean() + self.w.abs())

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("t", self.w)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return batch + self.w


# -- what a trainer says in a run ----------------------------------------------------------------------------------------------


class Asking(Callback):
    """Writes down what the trainer says at the first batch of each stage."""

    def __init__(self, *names: str) -> None:
        self.names, self.said = names, {}

    def ask(self, trainer: Trainer) -> None:
        self.said.setdefault(trainer.state.stage, [getattr(trainer, name) for name in self.names])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer)

    def on_test_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer)

    def on_predict_batch_start(self, trainer: Any, *_: Any) -> None:
        self.ask(trainer)


def test_the_state_names_function_stage_and_status() -> None:
    asking = Asking("state", "training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
    trainer, module, data = quiet(max_epochs=1, num_sanity_val_steps=-1, callbacks=asking), Validated(), loader([1, 2])
    trainer.fit(module, data, data)
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (TrainerFn.FITTING, None, TrainerStatus.FINISHED)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    functions = {stage: said[0].fn for stage, said in asking.said.items()}
    assert functions == {"sanity_check": "fit", "train": "fit", "validate": "fit", "test": "test", "predict": "predict"}
    assert all(said[0].status is TrainerStatus.RUNNING and not said[0].finished for said in asking.said.values())
    assert {stage for stage, said in asking.said.items() if said[6]} == {stage for stage in RunningStage if stage.evaluating}
    flags = {stage: said[1:] for stage, said in asking.said.items()}
    assert flags[RunningStage.TRAINING] == [True, False, False, False, False, False]
    assert flags[RunningStage.VALIDATING] == [False, True, False, False, False, True]
    assert flags[RunningStage.TESTING] == [False, False, True, False, False, True]
    assert flags[RunningStage.PREDICTING] == [False, False, False, True, False, False]
    assert flags[RunningStage.SANITY_CHECKING] == [False, False, False, False, True, True]
    assert f"{trainer.state.fn} {TrainerStatus.FINISHED}" == "predict finished"


def test_loaders_and_their_lengths() -> None:
    names = "num_training_batches num_val_batches num_test_batches num_predict_batches num_sanity_val_batches enable_validation".split()
    asking = Asking(*names, "train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
    limits = {"limit_train_batches": 0.5, "limit_val_batches": 3, "limit_test_batches": 0.25, "limit_predict_batches": 1.0}
    trainer, module = quiet(max_epochs=1, num_sanity_val_steps=5, callbacks=asking, **limits), Validated()
    train, several = loader(range(9)), [loader(range(4)), loader(range(2))]
    trainer.fit(module, train, several)
    assert asking.said["train"] == [4, [3, 2], [], [], [3, 2], True, train, several, None, None]
    trainer.test(module, train, verbose=False)
    assert asking.said["test"] == [0, [], [2], [], [], False, None, None, train, None]
    trainer.predict(module, train)
    assert asking.said["predict"] == [0, [], [], [9], [], False, None, None, None, train]


def test_all_validation_batches_may_be_tried_ahead_of_step_1() -> None:
    seen: list[str] = []

    class Counted(Validated):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            seen.append(self.trainer.state.stage)

    trainer = quiet(max_epochs=1, num_sanity_val_steps=-1, limit_val_batches=3)
    assert trainer.num_sanity_val_steps == float("inf")
    trainer.fit(Counted(), loader([1]), loader(range(5)))
    assert seen == ["sanity_check"] * 3 + ["validate"] * 3


def test_the_last_batch_and_the_optimizers_of_a_fit_that_has_ended() -> None:
    last: list[bool] = []

    class Ends(Scalar):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            last.append(self.trainer.is_last_batch)
            assert isinstance(self.optimizers(), torch.optim.SGD)
            assert self.optimizers(use_pl_optimizer=False) is self.trainer.optimizers[0] is self.optimizers().optimizer

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    trainer = quiet(max_epochs=2)
    trainer.fit(Ends(), loader([1, 2, 3]))
    assert last == [False, False, True] * 2
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.25]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_inference_mode_or_no_grad(wanted: bool) -> None:
    seen = []

    class Looks(Validated):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        test_step = validation_step

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.validation_step(batch, batch_idx)

    trainer, data = quiet(inference_mode=wanted, max_epochs=1), loader([1])
    trainer.fit(Looks(), data, data)
    trainer.test(Looks(), data, verbose=False)
    trainer.predict(Looks(), data)
    assert seen == [(wanted, False)] * 3


# -- what may be set, and what is gone --------------------------------------------------------------------------------------------


def test_a_checkpoint_path_may_be_set(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Validated(), loader([1, 2]))
    trainer.save_checkpoint(filepath=tmp_path / "a.ckpt", weights_only=None)
    other = quiet(max_epochs=2)
    other.ckpt_path = tmp_path / "a.ckpt"
    assert other.ckpt_path == tmp_path / "a.ckpt"
    module = Validated()
    other.fit(module, loader([1, 2]))
    assert (other.current_epoch, other.global_step, module.w.item(), str(other.ckpt_path)) == (2, 4, -6.0, str(tmp_path / "a.ckpt"))
    assert other.test(Validated(), loader([0]), verbose=False) == [{"t": -3.0}]
    other.ckpt_path = None
    assert other.test(Validated(), loader([0]), verbose=False) == [{"t": 0.0}]
    with pytest.raises(MisconfigurationException, match="needs a path"):
        trainer.save_checkpoint()


def test_a_logger_may_be_set(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.logger = CSVLogger(tmp_path, name="set")
    trainer.fit(Validated(), loader([1]), loader([2]))
    assert "v" in (tmp_path / "set" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    trainer.logger = None
    assert (trainer.loggers, trainer.logger) == ([], None)


def test_what_lightning_has_or_had_and_what_is_misspelt() -> None:
    trainer = quiet()
    for name, instead in REMOVED_ATTRIBUTES.items():
        assert not hasattr(trainer, name)
        with pytest.raises(AttributeError) as caught:
            getattr(trainer, name)
        assert str(caught.value) == f"Trainer has no {name!r}: use {instead}."
    with pytest.raises(AttributeError, match=r"Trainer has no 'fit_loop': use trainer.max_epochs, trainer.max_steps \(both may be set\)"):
        trainer.fit_loop.max_epochs = 3
    with pytest.raises(MisconfigurationException, match=r"use Tuner\(trainer\).lr_find\(module\)"):
        trainer.tune(Scalar())
    with pytest.raises(AttributeError, match=r"Trainer has no 'callback_metric'. Did you mean 'callback_metrics'\?"):
        _ = trainer.callback_metric
    trainer.loggers = [SimpleNamespace()]
    with pytest.raises(AttributeError, match="'types.SimpleNamespace' object has no attribute 'log_dir'"):
        _ = trainer.log_dir


def test_lightnings_words_for_a_checkpoint_that_are_none_here() -> None:
    with pytest.raises(MisconfigurationException, match="ckpt_path='hpc': use 'auto'"):
        quiet().fit(Scalar(), loader([1]), ckpt_path="hpc")


def test_strategies_that_lightning_had_and_their_names_in_the_wrong_place() -> None:
    for name, instead in REMOVED_STRATEGIES.items():
        with pytest.raises(MisconfigurationException) as caught:
            quiet(strategy=name)
        assert str(caught.value) == f"strategy={name!r} is not here: use {instead}."
    for name in ("ddp", "ddp_cpu"):
        with pytest.raises(MisconfigurationException, match=f"accelerator='{name}' names a strategy: use strategy='{name}'"):
            quiet(accelerator=name)


# -- arguments ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"logger": True}, {"enable_checkpointing": True}, {"enable_progress_bar": True}, {"enable_model_summary": True}, {"num_sanity_val_steps": 1},
        {"log_every_n_steps": 5}, {"fast_dev_run": True}, {"detect_anomaly": True}, {"profiler": "simple"},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_barebones_goes_with_nothing_besides_the_loop(other: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=f"barebones=True runs the loop alone, without {next(iter(other))}="):
        Trainer(accelerator="cpu", barebones=True, **other)


def test_barebones_logs_nothing_and_says_so() -> None:
    trainer, module = Trainer(accelerator="cpu", barebones=True, max_epochs=1), Validated()
    with pytest.warns(UserWarning, match=r"self.log does nothing with Trainer\(barebones=True\)") as caught:
        trainer.fit(module, loader([1, 2]), loader([1, 2]))
    assert len([one for one in caught if "barebones" in str(one.message)]) == 1
    assert (module.w.item(), trainer.callback_metrics, trainer.loggers, trainer.callbacks, trainer.barebones) == (-3.0, {}, [], [], True)


def test_a_launcher_and_a_precision_among_the_plugins() -> None:
    launcher, precision = InProcessLauncher(), Precision()
    trainer = quiet(plugins=[launcher, precision], max_epochs=1)
    trainer.fit(module := Scalar(), loader([1]))
    assert (trainer._launcher is launcher, trainer.precision_plugin is precision, module.w.item()) == (True, True, -1.0)
    with pytest.raises(MisconfigurationException, match=r"launcher='local' and plugins= name 2 launchers; give one"):
        quiet(plugins=launcher, launcher="local")
    with pytest.raises(MisconfigurationException, match=r"precision='bf16-mixed' and plugins= name several precisions; give one"):
        quiet(plugins=precision, precision="bf16-mixed")


def test_a_module_is_made_in_its_format_and_without_weights_that_are_going_to_be_loaded() -> None:
    trainer = quiet(precision="64-true", accelerator="cpu")
    torch.manual_seed(1)
    with trainer.init_module(empty_init=True):
        empty = torch.nn.Linear(3, 3)
        torch.nn.init.uniform_(tensor=empty.bias)
    undrawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), undrawn)
    with trainer.init_module():
        full = torch.nn.Linear(3, 3)
    assert empty.weight.dtype == full.weight.dtype == torch.float64
    assert not torch.equal(torch.rand(1), undrawn)


def test_weights_only_none_is_the_safe_default(tmp_path: Path) -> None:
    quiet(max_epochs=1).fit(Scalar(), loader([1]))
    torch.save({"state_dict": {"w": torch.ones(())}, "odd": SimpleNamespace(x=1)}, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError):
        quiet().test(Validated(), loader([1]), ckpt_path=tmp_path / "odd.ckpt", weights_only=None)
    with pytest.raises(CheckpointError):
        Scalar.load_from_checkpoint(tmp_path / "odd.ckpt", weights_only=None)
    assert Scalar.load_from_checkpoint(tmp_path / "odd.ckpt", weights_only=False).w.item() == 1.0


# -- callbacks of the module ---------------------------------------------------------------------------------------------------------


class Own(Net):
    """Returns a checkpoint callback of its own, and an early stopping that takes the place of the trainer's."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("v", float(self.current_epoch == 0))

    def configure_callbacks(self) -> Any:
        class Later(EarlyStopping):
            pass

        return [ModelCheckpoint(dirpath=self.folder, monitor="v"), Later("v", patience=5)]


@pytest.mark.parametrize("strategy", ["auto", "ddp_fork"])
def test_callbacks_of_the_module_are_the_trainers_also_afterwards(strategy: str, tmp_path: Path) -> None:
    given, asking = EarlyStopping("v", patience=1), Asking("callbacks")
    ranks = {"strategy": strategy, "devices": 1 if strategy == "auto" else 2, "accelerator": "cpu"}
    trainer = quiet(max_epochs=3, callbacks=[given, asking], **ranks)
    rows = loader(Net.rows(8), batch_size=2)
    trainer.fit(Own(str(tmp_path)), rows, rows)
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["Asking", "Later", "ModelCheckpoint"]
    assert [type(callback).__name__ for callback in asking.said["train"][0]] == ["Asking", "Later", "ModelCheckpoint"]
    assert (trainer.callbacks[0] is asking, trainer.early_stopping_callback.wait_count) == (True, 1)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert (best.parent, best.exists(), best.name.startswith("epoch=1-")) == (tmp_path, True, True)


def test_hyperparameters_of_two_owners_that_differ(tmp_path: Path) -> None:
    class Sized(Scalar):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Data(DataModule):
        def __init__(self, size: int) -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader([1])

    trainer = quiet(max_epochs=1, logger=CSVLogger(tmp_path))
    with pytest.raises(MisconfigurationException, match="The hyper-parameter 'size' of the module and of the data module differ"):
        trainer.fit(Sized(1), datamodule=Data(2))
    trainer.fit(Sized(2), datamodule=Data(2))
    quiet(max_epochs=1).fit(Sized(1), datamodule=Data(2))
