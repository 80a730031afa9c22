"""Wrong use gets a clear message before step 1: what is wrong, what was expected, the nearest name, and nothing is lost."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint, TensorBoardLogger
from tests.helpers.modules import Scalar, loader, quiet
from trainer import CheckpointError, DataError, DataModule, MisconfigurationException, Trainer, TrainerError, TrainModule
from trainer.removed import REMOVED
from trainer.strategies import SingleDeviceStrategy


def fails(message: str, module: Any = None, train: Any = None, val: Any = None, error: type = MisconfigurationException, **settings: Any) -> Any:
    """Fit must fail so, and leave w at 0; return the module."""
    module = Scalar() if module is None else module
    trainer = quiet(**{"max_epochs": 1, **settings})
    with pytest.raises(error, match=message):
        trainer.fit(module, loader([1, 2]) if train is None else train, val)
    if isinstance(module, Scalar):
        assert (module.w.item(), trainer.global_step) == (0.0, 0)
    return trainer


# -- the constructor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ddpp"}, r"strategy='ddpp' is unknown. Did you mean 'ddp'\?"),
        ({"strategy": 3}, "strategy must be a name or a Strategy, got int"),
        ({"strategy": SingleDeviceStrategy(), "devices": 2}, r"uses one device, but 2 are asked for. Use strategy='ddp', or devices=1"),
        ({"precision": "bf16-mixe"}, r"Did you mean 'bf16-mixed'\?"),
        ({"accelerator": "cpuu"}, "Did you mean 'cpu'"),
        ({"accelerator": "cpu", "devices": 0}, "devices"),
        ({"accelerator": "cpu", "devices": -3}, "devices"),
        ({"num_nodes": 2}, r"num_nodes=2: start the program on every node with torchrun \(--nnodes=2\) or srun"),
        ({"num_nodes": 0}, "num_nodes=0 must be a whole number >= 1"),
        ({"max_epochs": -2}, "max_epochs=-2 must be a whole number >= 0 or -1 or None"),
        ({"max_epochs": 1.5}, "max_epochs=1.5 must be a whole number"),
        ({"max_epochs": True}, "max_epochs=True must be a whole number"),
        ({"max_steps": "10"}, "max_steps='10' must be a whole number >= 0 or -1"),
        ({"min_epochs": -1}, "min_epochs=-1"),
        ({"min_steps": -1}, "min_steps=-1"),
        ({"max_time": "1 hour"}, "max_time='1 hour' must be a timedelta, a dict of its arguments, or 'DD:HH:MM:SS'"),
        ({"max_time": {"hour": 1}}, "max_time={'hour': 1} must be a timedelta"),
        ({"limit_train_batches": 1.5}, "limit_train_batches=1.5 must be a whole number >= 0 or a fraction between 0.0 and 1.0"),
        ({"limit_val_batches": -1}, "limit_val_batches=-1"),
        ({"limit_test_batches": "half"}, "limit_test_batches='half'"),
        ({"limit_predict_batches": True}, "limit_predict_batches=True"),
        ({"overfit_batches": -0.5}, "overfit_batches=-0.5"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1"),
        ({"fast_dev_run": "yes"}, "fast_dev_run='yes'"),
        ({"fast_dev_run": 1.5}, "fast_dev_run=1.5"),
        ({"val_check_interval": 0}, "val_check_interval=0 must be a whole number of optimizer steps or a fraction"),
        ({"val_check_interval": 1.5}, "val_check_interval=1.5"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "check_val_every_n_epoch=None needs a whole number of steps"),
        ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch=None needs a whole number of steps"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0"),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2"),
        ({"log_every_n_steps": -1}, "log_every_n_steps=-1"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0 must be a whole number >= 1"),
        ({"accumulate_grad_batches": {0: 2}}, "accumulate_grad_batches={0: 2} must be a whole number"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0 must be a number >= 0 or None"),
        ({"gradient_clip_algorithm": "norms"}, r"must be one of 'norm', 'value'. Did you mean 'norm'\?"),
        ({"deterministic": "warning"}, "deterministic='warning' must be one of True, False, 'warn'"),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1"),
        ({"seed": -1}, "seed=-1 must be a whole number >= 0 or None"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"logger": "tensorbord"}, r"logger='tensorbord' is unknown. Did you mean 'tensorboard'\?"),
        ({"logger": [CSVLogger(), 3]}, "got builtins.int"),
        ({"callbacks": ModelCheckpoint}, "callbacks must be Callback objects; got the class callbacks.checkpoint.ModelCheckpoint"),
        ({"callbacks": [print]}, "callbacks must be Callback objects"),
        ({"callbacks": ModelCheckpoint(), "enable_checkpointing": False}, "enable_checkpointing=False, but callbacks= holds a ModelCheckpoint"),
        ({"plugins": 3}, "plugins"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"default_root_dir": 3}, "default_root_dir=3"),
    ],
)  # fmt: skip
def test_trainer_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        Trainer(**arguments)


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    for wrong, right in (("max_epoch", "max_epochs"), ("accumulate_grad_batch", "accumulate_grad_batches"), ("callback", "callbacks")):
        with pytest.raises(TypeError, match=rf"Trainer has no argument {wrong!r}. Did you mean {right!r}\?"):
            Trainer(**{wrong: 1})
    for gone, now in (("gpus", "accelerator='gpu', devices="), ("resume_from_checkpoint", "ckpt_path="), ("replace_sampler_ddp", "use_distributed_sampler")):
        with pytest.raises(TypeError, match=f"Trainer has no argument {gone!r} .*: use .*{now}"):
            Trainer(**{gone: 1})
    assert not set(REMOVED) & set(inspect.signature(Trainer.__init__).parameters)
    with pytest.raises(TypeError, match="Trainer has no argument 'qqqq'"):
        Trainer(qqqq=1)
    with pytest.raises(TypeError):
        Trainer("cpu")


def test_devices_that_do_not_exist() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MisconfigurationException, match=r"cuda|gpu"):
        Trainer(accelerator="gpu", devices=1)


# -- the module ------------------------------------------------------------------------------------------------------------------


class NoStep(TrainModule):
    def configure_optimizers(self) -> Any: ...


class NoOptimizers(TrainModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


class Misspelt(Scalar):
    def on_train_epoch_ends(self) -> None: ...


class MisspeltCallback(Callback):
    def on_train_batch_ended(self, trainer: Any, module: Any) -> None: ...


def test_what_a_module_lacks() -> None:
    fails(r"trainer.fit needs NoStep.training_step\(self, batch, batch_idx\); define it", NoStep())
    fails(r"needs NoOptimizers.configure_optimizers\(self\); return an optimizer", NoOptimizers())
    fails("val_dataloaders= is given, but Scalar has no validation_step", val=loader([1]))
    for fn, step in (("validate", "validation_step"), ("test", "test_step")):
        with pytest.raises(MisconfigurationException, match=rf"trainer.{fn} needs Scalar.{step}\(self"):
            getattr(quiet(), fn)(Scalar(), loader([1]))


def test_misspelt_hooks() -> None:
    fails(r"Misspelt.on_train_epoch_ends is not a hook, so it would never be called. Did you mean 'on_train_epoch_end'\?", Misspelt())
    with pytest.raises(MisconfigurationException, match=r"MisspeltCallback.on_train_batch_ended .*'on_train_batch_end'\?"):
        quiet(callbacks=MisspeltCallback())
    fails("MisspeltCallback.on_train_batch_ended", type("M", (Scalar,), {"configure_callbacks": lambda self: MisspeltCallback()})())


def test_models_and_data_modules_of_the_wrong_kind() -> None:
    fails("trainer.fit takes a TrainModule; got torch.nn.modules.linear.Linear", torch.nn.Linear(1, 1))
    with pytest.raises(MisconfigurationException, match=r"trainer.fit takes the module first, then the data: trainer.fit\(module, loader\)"):
        quiet().fit(loader([1]), Scalar())
    fails(r"trainer.fit takes a TrainModule; got the class Scalar, not an object of it: write Scalar\(...\)", Scalar)
    with pytest.raises(MisconfigurationException, match=r"datamodule must be a DataModule; got the class DataModule, not an object of it"):
        quiet().fit(Scalar(), datamodule=DataModule)
    with pytest.raises(MisconfigurationException, match=r"trainer.predict needs Scalar.predict_step\(self, batch, batch_idx\), or Scalar.forward"):
        quiet().predict(Scalar(), loader([1]))
    with pytest.raises(MisconfigurationException, match="datamodule must be a DataModule; got builtins.int"):
        quiet().fit(Scalar(), datamodule=3)
    for fn in ("validate", "test", "predict"):
        with pytest.raises(MisconfigurationException, match=rf"trainer.{fn}\(\) without a model works after a run only; pass the model"):
            getattr(quiet(), fn)()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"los": 1.0}, "training_step returned a dict with the keys 'los'"),
        ({}, "a dict with the keys none"),
        ({"loss": 1.0}, "training_step returned a dict with the keys 'loss'"),
        (3, "training_step returned int"),
        ("loss", "training_step returned str"),
        (torch.zeros(1), r"detached from the weights \(requires_grad is False\)"),
        ({"loss": torch.zeros(())}, "detached from the weights"),
        ("w2", r"a loss of shape \(2,\); it must be one number"),
    ],
)
def test_c51_what_a_training_step_returned(returned: Any, message: str) -> None:
    class Returns(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self.w.expand(2) if returned == "w2" else returned

    fails(f"{message}.*Expected: a scalar tensor, a dict with such a tensor under 'loss'", Returns())


def test_c51_a_count_that_is_no_number() -> None:
    class Returns(Scalar):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).mean(), "count": "3"}

    fails("training_step gave 'count' as str; it must be the number of samples or tokens", Returns())


# -- data --------------------------------------------------------------------------------------------------------------------------


def test_loaders_that_are_missing_or_empty() -> None:
    with pytest.raises(MisconfigurationException, match=r"There is no train loader: define train_dataloader in Scalar or in a DataModule"):
        quiet().fit(Scalar())
    with pytest.raises(MisconfigurationException, match=r"pass train_dataloaders="):
        quiet().fit(Scalar(), datamodule=DataModule())
    with pytest.raises(MisconfigurationException, match=r"There is no predict loader: .* pass dataloaders="):
        quiet().predict(type("Predicts", (Scalar,), {"predict_step": lambda self, batch, batch_idx: batch})())
    fails("empty|no batch|no sample", train=[], error=TrainerError)
    fails("empty|no batch|no sample", train=loader([]), error=TrainerError)
    fails("no batch", train=(x for x in ()), error=DataError)
    fails("not iterable", train=3, error=TrainerError)
    fails("is a data set, not a loader", train=torch.utils.data.TensorDataset(torch.ones(1)), error=TrainerError)


class Validating(Scalar):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("train_loss", 1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", 1.0)


def test_c52_a_validation_loader_that_raises_is_found_before_step_1() -> None:
    class Broken(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such column")

    fails("no such column", Validating(), val=torch.utils.data.DataLoader(Broken()), num_sanity_val_steps=2, error=KeyError)


# -- monitors and folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [EarlyStopping, ModelCheckpoint])
def test_c52_a_misspelt_monitor_names_what_exists_and_the_nearest(owner: Any, own_directory: Path) -> None:
    watch = owner(monitor="val_los")
    fails(
        rf"{owner.__name__}\(monitor='val_los'\): .*Did you mean 'val_loss'\?.*(train_loss, val_loss)?",
        Validating(), val=loader([1]), callbacks=[watch], num_sanity_val_steps=2,
    )  # fmt: skip
    assert not list(own_directory.rglob("*.ckpt"))


def test_c52_a_misspelt_training_monitor_is_found_before_the_first_update() -> None:
    fails(r"EarlyStopping\(monitor='train_los'\).*Did you mean 'train_loss'\? Logged are: .*train_loss", Validating(),
          callbacks=[EarlyStopping("train_los")], enable_checkpointing=False)  # fmt: skip


@pytest.mark.parametrize("name", ["train_loss", "val_loss", "x_epoch", "x_step", "x", "late", "early", "stepped", "clipped"])
def test_c52_a_monitor_that_is_logged_is_never_refused(name: str) -> None:
    class Late(Validating):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("x", 1.0, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_start(self) -> None:
            self.log("early", 1.0)

        def on_train_epoch_end(self) -> None:
            self.log("late", 1.0)

    class ByStep(Late):
        on_train_epoch_end = Validating.on_train_epoch_end

        def optimizer_step(self, *args: Any) -> None:
            super().optimizer_step(*args)
            self.log("stepped", 1.0)

    class Clips(Late):
        on_train_epoch_end = Validating.on_train_epoch_end

        def configure_gradient_clipping(self, *args: Any) -> None:
            self.log("clipped", 1.0)

    for sanity in (0, 2):
        module = {"stepped": ByStep, "clipped": Clips}.get(name, Late)()
        quiet(max_epochs=1, callbacks=[EarlyStopping(name)], enable_checkpointing=False, num_sanity_val_steps=sanity).fit(
            module, loader([1, 2]), loader([1])
        )
        assert module.w.item() == -3.0


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "checkpoint", "root"])
def test_c52_a_folder_that_cannot_be_written(kind: str, own_directory: Path) -> None:
    (own_directory / "file").write_text("in the way")
    bad = own_directory / "file" / "runs"
    settings: dict[str, Any] = {
        "csv": {"logger": CSVLogger(bad)},
        "tensorboard": {"logger": TensorBoardLogger(bad)},
        "checkpoint": {"callbacks": [ModelCheckpoint(bad)]},
        "root": {"default_root_dir": bad, "enable_checkpointing": True},
    }[kind]
    fails("file/runs", error=TrainerError, **settings)


# -- at the wrong time ---------------------------------------------------------------------------------------------------------------


def test_calls_at_the_wrong_time() -> None:
    trainer = quiet(max_epochs=1)
    for call, message in (
        (lambda: trainer.save_checkpoint("x.ckpt"), "there is no model yet; fit, validate, test or predict first"),
        (lambda: trainer.at_boundary(print), "trainer.at_boundary works inside a run only"),
        (lambda: trainer.log_metrics({"a": 1.0}), "trainer.log_metrics works inside a run only"),
        (lambda: trainer.seed_everything(1), "trainer.seed_everything works inside a run only"),
        (lambda: trainer.estimated_stepping_batches, "estimated_stepping_batches is known inside a fit only"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            call()

    class Estimates(Validating):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            _ = self.trainer.estimated_stepping_batches

    with pytest.raises(MisconfigurationException, match="known inside a fit only"):
        trainer.validate(Estimates(), loader([1]))


def test_groups_of_ranks_are_refused_not_ignored() -> None:
    with pytest.raises(MisconfigurationException, match=r"self.log\('x', sync_dist_group=...\).* leave it out"):
        Scalar().log("x", 1.0, sync_dist_group=object())
    with pytest.raises(MisconfigurationException, match=r"self.all_gather\(group=...\)"):
        Scalar().all_gather(torch.ones(1), group=object())


def test_a_run_inside_a_run_of_the_same_trainer() -> None:
    class Inside(Scalar):
        def on_train_start(self) -> None:
            self.trainer.validate(Validating(), loader([1]))

    trainer = fails("trainer.validate was called inside a run of the same Trainer; make another Trainer for it", Inside())
    trainer.fit(Scalar(), loader([1]))  # and the trainer works again
    assert trainer.global_step == 1


def test_hyperparameters_that_no_checkpoint_can_hold_are_found_before_step_1() -> None:
    class Holds(Scalar):
        def __init__(self, path: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    fails(r"path.*save_hyperparameters\(ignore=", Holds(Path("x")), error=CheckpointError, enable_checkpointing=True)


def test_an_error_in_a_hook_reaches_the_caller_as_it_is_and_the_trainer_works_again() -> None:
    class Fails(Scalar):
        def on_train_start(self) -> None:
            raise ZeroDivisionError("mine")

        def on_exception(self, exception: BaseException) -> None:
            raise RuntimeError("second")

    module, trainer = Fails(), quiet(max_epochs=1)
    with pytest.warns(UserWarning, match="on_exception failed as well: RuntimeError"), pytest.raises(ZeroDivisionError, match="mine"):
        trainer.fit(module, loader([1]))
    assert (trainer.state.status, trainer.state.finished) == ("failed", False)
    trainer.fit(Scalar(), loader([1]))
    assert (trainer.state.status, trainer.global_step) == ("finished", 1)


def test_a_monitor_that_is_logged_only_later_is_no_mistake(tmp_path):
    class Late(Scalar):
        def training_step(self, batch, batch_idx):
            if self.global_step >= 2:
                self.log("late", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(tmp_path, monitor="late")
    quiet(max_epochs=1, callbacks=[checkpoint]).fit(Late(), loader(torch.ones(4)))
    assert float(checkpoint.best_model_score) == 1.0


def test_mistakes_that_would_pass_without_a_word():
    class NoReturn(Scalar):
        def training_step(self, batch, batch_idx):
            if batch > 5:
                return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="training_step returned None, so the batch is skipped"):
        quiet(max_epochs=1).fit(NoReturn(), loader([1, 2]))

    class NoLoader(Scalar):
        def validation_step(self, batch, batch_idx): ...

    with pytest.warns(UserWarning, match="a validation_step but no validation loader"):
        quiet(max_epochs=1).fit(NoLoader(), loader([1]))

    class OldHook(Scalar):
        def validation_epoch_end(self, outputs): ...

    with pytest.raises(MisconfigurationException, match=r"Use on_validation_epoch_end\(self\)"):
        quiet(max_epochs=1).fit(OldHook(), loader([1]))

    class Manual(Scalar):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="gradient_clip_val works in automatic optimization only"):
        quiet(max_epochs=1, gradient_clip_val=1.0).fit(Manual(), loader([1]))


def test_a_monitor_of_a_validation_that_never_runs_is_found_before_step_1():
    class Validated(Scalar):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    module = Validated()
    with pytest.raises(MisconfigurationException, match="nothing logs that name"), pytest.warns(UserWarning):
        quiet(max_epochs=1, callbacks=[EarlyStopping("val_loss")]).fit(module, loader([1, 1]))
    assert module.w.item() == 0.0


class Forgets(Scalar):
    def training_step(self, batch, batch_idx):
        (self.w * batch).mean()


class Fails(Scalar):
    def training_step(self, batch, batch_idx):
        raise ArithmeticError("mine")


def test_a_forgotten_return_is_found_before_anything_runs():
    fails("Forgets.training_step returns nothing, .* Return the loss", Forgets())
    fails("mine", Fails(), error=ArithmeticError)  # it never comes to its end, which is another matter
    only_runs = type("OnlyRuns", (Forgets,), {"configure_optimizers": lambda self: None})
    with pytest.warns(UserWarning, match="configure_optimizers returned None"):
        quiet(max_epochs=1).fit(only_runs(), loader([1]))


def test_an_object_of_lightnings_is_recognised():
    theirs = type("LightningModule", (torch.nn.Module,), {"__module__": "lightning.pytorch.core.module"})
    with pytest.raises(MisconfigurationException, match=r"It is Lightning's LightningModule: import from trainer and callbacks instead"):
        quiet().fit(type("Mine", (theirs,), {})(), loader([1]))


def test_arguments_in_the_wrong_places():
    with pytest.raises(MisconfigurationException, match="the order is monitor"):
        EarlyStopping(3, "loss")
    with pytest.raises(MisconfigurationException, match="resume=True must be 'auto', 'last' or the path"):
        Trainer(resume=True)
    fails("does not exist. Did you mean 'auto'", error=CheckpointError, resume="atuo")


def test_a_strategy_answers_barrier_and_broadcast():
    class Asks(Scalar):
        def setup(self, stage):
            self.trainer.strategy.barrier("here")
            self.answer = self.trainer.strategy.broadcast(7)

    module = Asks()
    quiet(max_epochs=1).fit(module, loader([1]))
    assert module.answer == 7
    strategy = SingleDeviceStrategy()
    strategy.barrier()
    assert strategy.broadcast(8) == 8
