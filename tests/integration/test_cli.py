"""The command line: what reaches the trainer from flags, files and variables, what a run leaves behind, and what a mistake is answered with."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ArgumentError = pytest.importorskip("jsonargparse").ArgumentError

from callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    TQDMProgressBar,
)
from tests.helpers.modules import Net, assert_same, loader, weights
from trainer import (
    DataModule,
    FSDPStrategy,
    MisconfigurationException,
    Trainer,
    TrainModule,
)
from trainer.checkpoint import io
from trainer.cli import (
    LRSchedulerCallable,
    OptimizerCallable,
    SaveConfigCallback,
    TrainerArgumentParser,
    TrainerCLI,
)

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 2}


class Model(TrainModule):
    """A regression on the rows of Net.

    Args:
        hidden: units of the hidden layer.
        bias: whether it has a bias.
        act: what comes after it.
    """

    def __init__(self, hidden: int = 4, bias: bool = True, act: torch.nn.Module = torch.nn.Tanh()) -> None:  # noqa: B008  (the parser reads it)
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, hidden, bias), act, torch.nn.Linear(hidden, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[:, :4]), batch[:, 4:])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[:, :4])


class Other(Net):
    def __init__(self, scale: float, hidden: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.hparams.scale * self.loss(batch))


class Twice(Net):
    pass


class Space:
    class Twice(Net):
        pass


class Rows(DataModule):
    def __init__(self, rows: int = 24, batch_size: int = 8) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> Any:
        return loader(Net.rows(self.rows), self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Seen(Callback):
    def __init__(self, note: str = "") -> None:
        self.note = note


def cli(*args: str, model: Any = Model, data: Any = Rows, cls: type[TrainerCLI] = TrainerCLI, **more: Any) -> TrainerCLI:
    defaults = {**QUIET, **more.pop("trainer_defaults", {})}
    return cls(model, data, args=list(args), trainer_defaults=defaults, **{"seed_everything_default": 3, **more})


def by_hand(hidden: int = 4, seed: int = 3, lr: float = 0.1, gamma: float = 1.0, epochs: int = 2, rows: int = 24) -> Model:
    """Plain SGD on the rows; the learning rate times gamma after each epoch."""
    torch.manual_seed(seed)
    module = Model(hidden)
    for epoch in range(epochs):
        for batch in Net.rows(rows).split(8):
            gradients = torch.autograd.grad(module.loss(batch), list(module.parameters()))
            with torch.no_grad():
                for p, gradient in zip(module.parameters(), gradients, strict=True):
                    p -= lr * gamma**epoch * gradient
    return module


SGD = ("--optimizer", "SGD", "--optimizer.lr", "0.1")


def test_a_fit_from_flags_is_the_loop_by_hand() -> None:
    made = cli("fit", "--model.hidden", "6", "--data.rows=16", *SGD, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5")
    assert_same(weights(made.model), weights(by_hand(6, gamma=0.5, rows=16)), atol=1e-7)
    assert (made.subcommand, made.trainer.global_step, made.config.fit.data.rows) == ("fit", 4, 16)
    assert made.trainer.datamodule is made.datamodule and made.trainer.model is made.model


def test_validate_test_and_predict() -> None:
    right = by_hand(epochs=0)
    loss = torch.stack([right.loss(batch) for batch in Net.rows(24).split(8)]).mean().item()
    for name, metric in (("validate", "val_loss"), ("test", "test_loss")):
        assert cli(name, "--verbose=false").trainer.callback_metrics[metric].item() == pytest.approx(loss, rel=1e-6)

    class Keeping(TrainerCLI):
        def predict(self, **given: Any) -> None:
            self.found = self.trainer.predict(**given)

    found = torch.cat(cli("predict", cls=Keeping).found)
    torch.testing.assert_close(found, right.layers(Net.rows(24)[:, :4]), rtol=0, atol=1e-7)
    assert cli("predict", "--return_predictions=false", cls=Keeping).found is None


def test_later_files_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text("seed_everything: 5\nmodel: {hidden: 2}\ndata: {rows: 8}\ntrainer: {max_epochs: 1, logger: false}\n")
    Path("b.yaml").write_text("model: {hidden: 3}\ndata: {rows: 16}\n")
    made = cli("fit", "--config", "a.yaml", "--config", "b.yaml", "--data.rows", "24", *SGD)
    assert (made.model.hparams.hidden, made.datamodule.rows, made.trainer.max_epochs) == (3, 24, 1)
    assert_same(weights(made.model), weights(by_hand(3, seed=5, epochs=1)), atol=1e-7)
    monkeypatch.setenv("TRAINER_FIT__MODEL__HIDDEN", "9")
    monkeypatch.setenv("TRAINER_FIT__DATA__ROWS", "8")
    assert cli("fit", "--trainer.fast_dev_run=1", *SGD).model.hparams.hidden == 4  # nobody asked for variables
    made = cli("fit", "--data.rows=16", "--trainer.fast_dev_run=1", *SGD, parser_kwargs={"default_env": True})
    assert (made.model.hparams.hidden, made.datamodule.rows) == (9, 16)


def test_a_dict_in_the_place_of_the_programs_arguments() -> None:
    config = {"model": {"hidden": 2}, "trainer": {"fast_dev_run": 1}, "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5}}}
    made = TrainerCLI(Model, Rows, args={"subcommand": "fit", "fit": config}, trainer_defaults=QUIET)
    assert made.model.hparams.hidden == 2 and made.trainer.global_step == 1
    assert TrainerCLI(Model, args={"seed_everything": False, "trainer": QUIET}, run=False).config.seed_everything is False
    optimizer = made.model.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam and optimizer.param_groups[0]["lr"] == 0.5


def test_a_printed_configuration_is_one_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli("fit", "--model.hidden=5", "--trainer.logger=false", *SGD, "--print_config")
    assert end.value.code == 0
    Path("c.yaml").write_text(capsys.readouterr().out)
    assert_same(weights(cli("fit", "--config=c.yaml").model), weights(by_hand(5)), atol=1e-7)


def test_help_tells_of_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in ((["--help"], ["{fit,validate,test,predict}", "Train `model`"]), (["fit", "--help"], ["units of the hidden layer", "--ckpt_path"])):
        with pytest.raises(SystemExit) as end:
            cli(*args)
        text = capsys.readouterr().out
        assert end.value.code == 0 and all(word in text for word in words)
    parser = TrainerArgumentParser()
    parser.add_component_args(Trainer, "trainer")
    assert [a.dest for a in parser._actions if a.dest.startswith("trainer.") and not a.help] == []


@pytest.mark.filterwarnings("ignore:.*is not empty; its files are kept")
def test_the_configuration_is_kept_beside_the_log_and_runs_again() -> None:
    first = cli("fit", "--model.hidden=3", "--trainer.logger=csv", "--seed_everything=true", *SGD)
    file = Path(first.trainer.log_dir, "config.yaml")
    again = cli("fit", f"--config={file}")
    assert_same(weights(again.model), weights(first.model), atol=0)
    assert again.trainer.log_dir != first.trainer.log_dir  # a version of its own

    same = ["fit", "--trainer.logger=CSVLogger", "--trainer.logger.version=here", *SGD]
    cli(*same)
    cli(*same)  # the same content
    with pytest.raises(MisconfigurationException, match=r"here.config.yaml holds the configuration of another run. Remove it"):
        cli(*same, "--model.hidden=7")
    cli(*same, "--model.hidden=7", save_config_kwargs={"overwrite": True})
    cli(*same, "--model.hidden=8", save_config_callback=None)
    cli(*same, "--ckpt_path=auto", "--trainer.max_epochs=3")  # goes on: this is the run's configuration now
    text = Path("csv_logs/here/config.yaml").read_text()
    assert "max_epochs: 3" in text and "hidden: 8" in text

    before = sorted(Path.cwd().rglob("config.yaml"))
    for args in (["--trainer.fast_dev_run=1"], ["--trainer.logger=false"]):
        cli("fit", *args, *SGD)
    assert sorted(Path.cwd().rglob("config.yaml")) == before


class Keeping(SaveConfigCallback):
    kept: Any = None

    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        type(self).kept = stage, self.parser.dump(self.config)


def test_the_configuration_may_be_kept_elsewhere() -> None:
    cli("test", "--model.hidden=3", "--trainer.logger=csv", save_config_callback=Keeping, save_config_kwargs={"save_to_log_dir": False})
    assert Keeping.kept[0] == "test" and "hidden: 3" in Keeping.kept[1] and not list(Path.cwd().rglob("config.yaml"))
    with pytest.raises(MisconfigurationException, match="save_to_log_dir=False"):
        SaveConfigCallback(None, None, save_to_log_dir=False)
    Path("model.yaml").write_text("hidden: 5\n")
    made = cli("test", "--model=model.yaml", "--trainer.logger=csv", save_config_kwargs={"multifile": True})
    folder = Path(made.trainer.log_dir)
    assert "model: model.yaml" in (folder / "config.yaml").read_text() and "hidden: 5" in (folder / "model.yaml").read_text()
    Path("blocked").mkdir()
    Path("blocked/config.yaml").mkdir()
    for kwargs in ({"overwrite": True}, {}):
        with pytest.raises(MisconfigurationException, match="Cannot write .*blocked.config.yaml"):
            logger = ["--trainer.logger=CSVLogger", "--trainer.logger.name=", "--trainer.logger.version=blocked"]
            cli("test", *logger, save_config_kwargs=kwargs)


def test_callbacks_loggers_and_strategies_by_class() -> None:
    Path("c.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: callbacks.EarlyStopping\n    init_args: {monitor: val_loss, patience: 7}\n"
        "  - class_path: ModelCheckpoint\n    init_args: {dirpath: here}\n"
    )
    flags = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=8"]
    flags += ["--trainer.logger+=CSVLogger", "--trainer.logger.name=x", "--trainer.logger+=CSVLogger", "--trainer.logger.name=y"]
    made = cli("--config=c.yaml", *flags, run=False, trainer_defaults={"callbacks": Seen("always")})
    found = made.trainer.callbacks
    assert [c.patience for c in found if isinstance(c, EarlyStopping)] == [7, 8]
    assert [c.dirpath for c in found if isinstance(c, ModelCheckpoint)] == [os.path.abspath("here")]
    assert [c.note for c in found if isinstance(c, Seen)] == ["always"]
    assert [(type(one), one.name) for one in made.trainer.loggers] == [(CSVLogger, "x"), (CSVLogger, "y")]
    made = cli("--trainer.strategy=FSDPStrategy", "--trainer.strategy.cpu_offload=true", "--trainer.devices=2", run=False)
    assert isinstance(made.trainer.strategy, FSDPStrategy) and made.trainer.num_devices == 2
    values = ["--trainer.max_time=00:00:01:00", "--trainer.precision=64", "--trainer.devices=[0]", "--trainer.limit_val_batches=0.5"]
    assert cli(*values, run=False).trainer.precision == "64-true"


class Linked(TrainerCLI):
    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.hidden")
        parser.add_component_args(Seen, "seen")
        parser.add_argument("--word", default="none")
        parser.set_defaults({"seen.note": "set"})

    def before_instantiate_classes(self) -> None:
        self.order = ["before_instantiate_classes", hasattr(self, "model")]

    def after_instantiate_classes(self) -> None:
        self.order.append(hasattr(self, "trainer"))

    def before_fit(self) -> None:
        self.order.append(self.trainer.global_step)

    def after_fit(self) -> None:
        self.order.append(self.trainer.global_step)


def test_a_subclass_adds_and_links_arguments_and_acts_in_between() -> None:
    made = cli("fit", "--data.batch_size=6", "--word=hello", *SGD, cls=Linked)
    assert (made.model.hparams.hidden, made.config.fit.word) == (6, "hello")
    assert [c.note for c in made.trainer.callbacks if isinstance(c, Seen)] == ["set"]
    assert made.order == ["before_instantiate_classes", False, True, 0, 8]


def make_model(width: int = 2) -> Model:
    return Model(hidden=2 * width)


def make_trainer(more: int = 0, **kwargs: Any) -> Trainer:
    return Trainer(max_epochs=1 + more, accelerator="cpu")


def test_functions_make_the_model_and_the_trainer() -> None:
    made = TrainerCLI(make_model, Rows, args=["--model.width=3", "--trainer.more=2"], run=False, trainer_class=make_trainer, save_config_callback=None)
    assert (made.model.hparams.hidden, made.trainer.max_epochs) == (6, 3)
    assert any(isinstance(c, TQDMProgressBar) for c in made.trainer.callbacks)


class Choosing(Model):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.SGD, scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR) -> None:
        super().__init__()
        self.make, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [self.make_scheduler(optimizer)]


class Handing(TrainerCLI):
    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.Adam, "optim", link_to="model.optimizer")


def test_optimizers_as_arguments_of_the_model() -> None:
    flags = ["--model.optimizer=Adam", "--model.optimizer.lr=0.5", "--model.scheduler=ExponentialLR", "--model.scheduler.gamma=0.5"]
    made = cli(*flags, model=Choosing, run=False)
    [optimizer], [scheduler] = made.model.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["lr"], scheduler.gamma) == (torch.optim.Adam, 0.5, 0.5)
    [optimizer], _ = cli("--optim.lr=0.25", model=Choosing, cls=Handing, run=False).model.configure_optimizers()
    assert (type(optimizer), optimizer.param_groups[0]["initial_lr"]) == (torch.optim.Adam, 0.25)


class Fixed(TrainerCLI):
    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.SGD)

    @staticmethod
    def configure_optimizers(module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


def test_the_way_an_optimizer_is_configured() -> None:
    made = cli("fit", "--optimizer.lr=0.1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3", "--lr_scheduler.gamma=0.5", cls=Fixed)
    assert_same(weights(made.model), weights(by_hand(gamma=0.5)), atol=1e-7)  # three steps are an epoch
    plateau = ["--lr_scheduler=trainer.cli.ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss", "--lr_scheduler.factor=0.5"]
    found = cli(*SGD, *plateau, run=False).model.configure_optimizers()["lr_scheduler"]
    assert found["monitor"] == "val_loss" and found["scheduler"].factor == 0.5
    torchs = cli(*SGD, "--lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau", run=False)
    with pytest.raises(MisconfigurationException, match="--lr_scheduler trainer.cli.ReduceLROnPlateau --lr_scheduler.monitor NAME"):
        torchs.model.configure_optimizers()
    with pytest.warns(UserWarning, match="The command line's optimizer is used, and not Choosing.configure_optimizers"):
        cli(*SGD, model=Choosing, run=False)

    class Two(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="one")
            parser.add_optimizer_args(nested_key="two")

    with pytest.raises(MisconfigurationException, match=r"Only one of \['one', 'two'\] can take the place of configure_optimizers"):
        cli(cls=Two, run=False)
    with pytest.raises(MisconfigurationException, match="has no arguments for a command line"):
        TrainerArgumentParser().add_component_args(torch.nn.Linear, "x")


def test_a_checkpoint_knows_the_arguments_of_its_model() -> None:
    made = cli("fit", "--model.hidden=6", "--model.act=torch.nn.ELU", "--model.act.alpha=0.5", *SGD)
    path = made.trainer.checkpoint_callback.best_model_path
    for where in (path, "best", "last"):  # of a program that knows nothing but this
        found = cli("test", f"--ckpt_path={where}", "--verbose=false").model
        assert_same(weights(found), weights(made.model), atol=0)
        assert type(found.layers[1]) is torch.nn.ELU and found.layers[1].alpha == 0.5
    for flags in (["--model.hidden=6", "--model.act=ReLU"], ["--config=c.yaml"]):
        Path("c.yaml").write_text("model: {act: {class_path: torch.nn.ReLU}}\n")
        assert type(cli("test", f"--ckpt_path={path}", "--verbose=false", *flags).model.layers[1]) is torch.nn.ReLU  # what is given wins
    loaded = Model.load_from_checkpoint(path)
    assert_same(weights(loaded), weights(made.model), atol=0)
    assert loaded.layers[1].alpha == 0.5 and loaded.hparams == made.model.hparams and loaded.hparams.act["class_path"] == "torch.nn.ELU"
    assert type(Model.load_from_checkpoint(path, act=torch.nn.Sigmoid()).layers[1]) is torch.nn.Sigmoid
    cli("fit", f"--ckpt_path={path}", "--trainer.max_epochs=3", *SGD)  # and a file is made of it again
    assert cli("fit", "--trainer.resume=auto", "--trainer.max_epochs=3", *SGD).model.hparams.hidden == 6
    lightnings = {"_instantiator": "pytorch_lightning.cli.instantiate_module", "hidden": 6, "act": {"class_path": "torch.nn.ReLU"}}
    io.save({"state_dict": made.model.state_dict(), "hyper_parameters": lightnings}, "theirs.ckpt")
    assert type(Model.load_from_checkpoint("theirs.ckpt").layers[1]) is torch.nn.ReLU
    assert type(cli(run=False, load_from_checkpoint_support=False).model.hparams.act) is torch.nn.Tanh


def test_a_checkpoint_names_the_class_of_its_model() -> None:
    made = cli("fit", f"--model={__name__}.Other", "--model.scale=0.5", "--model.hidden=3", *SGD, model=None)
    path = made.trainer.checkpoint_callback.best_model_path
    found = cli("validate", f"--ckpt_path={path}", "--verbose=false", model=None).model
    assert type(found) is Other and found.hparams.scale == 0.5
    assert_same(weights(found), weights(made.model), atol=0)
    assert type(cli("validate", f"--model={__name__}.Other", "--model.scale=1", model=Net, subclass_mode_model=True).model) is Other
    assert cli("test", f"--model={__name__}.Model", f"--data={__name__}.Rows", "--data.rows=8", model=None, data=None).datamodule.rows == 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("fit --trainer.max_epoch 3", "--trainer.max_epoch is unknown. Did you mean '--trainer.max_epochs'?"),
        ("fit --max_epochs=3", "--max_epochs is unknown. Did you mean '--trainer.max_epochs'?"),
        ("fit --config bad.yaml", "--model.hiden is unknown. Did you mean '--model.hidden'?"),
        ("fit --trainer.max_epochs three", "--trainer.max_epochs: expected int or null, got 'three'."),
        ("fit --model.hidden 2.5", "--model.hidden: expected int, got '2.5'."),
        ("fit --trainer.gpus 2", "Trainer has no argument 'gpus' (earlier versions of Lightning had): use accelerator='gpu', devices=..."),
        ("fit --trainer.callbacks+=EarlyStoppin", "callbacks='EarlyStoppin' is unknown. Did you mean 'EarlyStopping'?"),
        (
            "fit --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr=x",
            "--trainer.callbacks: callbacks.EarlyStopping has no argument 'monitr'. Did you mean 'monitor'?",
        ),
        (
            "fit --trainer.callbacks+=EarlyStopping --trainer.callbacks.patience=x",
            "--trainer.callbacks: callbacks.EarlyStopping: --patience: expected int, got 'x'.",
        ),
        ("fit --trainer.callbacks+=EarlyStopping", "--trainer.callbacks: callbacks.EarlyStopping: the following arguments are required: monitor"),
        ("fit --trainer.callbacks=callbacks.EarlyStop", "callbacks='callbacks.EarlyStop' is unknown. Did you mean 'EarlyStopping'?"),
        ("fit --trainer.strategy FSDPStrateg", "strategy='FSDPStrateg' is unknown. Did you mean 'FSDPStrategy'?"),
        ("fit --optimizer Adm", "--optimizer: 'Adm' is no class that is known here. Did you mean 'Adam'?"),
        ("fit --optimizer Adam --optimizer.lr x", "--optimizer: torch.optim.Adam: --lr: expected float, got 'x'."),
        ("fit --model Twice", "--model: Multiple subclasses with name Twice. Give the full class path to avoid ambiguity: "),
        ("fit --lr_scheduler ExponentialLR --lr_scheduler.gamma 0.5", "--lr_scheduler is given without --optimizer"),
        ("fit --ckpt_path nowhere.ckpt", "ckpt_path='nowhere.ckpt' does not exist."),
        ("test --ckpt_path best", "ckpt_path='best': no ModelCheckpoint of this trainer has a best file"),
        ("fit --trainer.precision 17", "precision=17 is unknown."),
        ("fit --trainer.strategy ddp", "--model is required: a class, by its name"),
        ("fti", "argument subcommand: invalid choice: 'fti'"),
        ("", 'expected "subcommand" to be one of {fit,validate,test,predict}'),
    ],
)
def test_a_mistake_ends_with_one_line(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text("model:\n  hiden: 3\n")
    with pytest.raises(SystemExit) as end:
        cli(*args.split(), model=None if "--model" in message and "hid" not in message else Model)
    text = capsys.readouterr().err
    assert end.value.code == 2 and text.startswith("error: ") and text.count("\n") == 1
    assert message in text and text.endswith("--help)\n")


def test_a_mistake_of_a_program_that_goes_on() -> None:
    with pytest.raises(ArgumentError, match="^--model.hidden: expected int, got 'x'.$"):
        cli("fit", "--model.hidden=x", parser_kwargs={"exit_on_error": False})


def test_without_jsonargparse(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cli("fit", *SGD).trainer.checkpoint_callback.best_model_path
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "trainer.cli")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "torch-trainer-kit\[cli\]"'):
        importlib.import_module("trainer.cli")
    with pytest.raises(MisconfigurationException, match=r'making objects of them needs jsonargparse: pip install "torch-trainer-kit\[cli\]"'):
        Model.load_from_checkpoint(path)


SCRIPT = """
from tests.integration.test_cli import QUIET, Model, Rows
from trainer.cli import TrainerCLI

class Mine(Model):  # of this script, which no rank imports
    pass

print("begin")
made = TrainerCLI(Mine, Rows, trainer_defaults={**QUIET, "logger": "csv"}, seed_everything_default=3)
print("end", made.trainer.global_step, made.trainer.world_size)
"""


def test_ranks_of_a_script_without_a_guard() -> None:
    Path("script.py").write_text(SCRIPT)
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=4"]  # two ranks' batches of 4 are those of 8
    step = ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py", "fit", *ranks, *SGD, *step], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("begin") == 1 and "end 6 1" in lines or "end 6 2" in lines, done.stdout
    [file] = Path("csv_logs/version_0/checkpoints").glob("*.ckpt")
    assert_same(weights(Model.load_from_checkpoint(file)), weights(by_hand(gamma=0.5)), atol=1e-6)
    assert "devices: 2" in Path("csv_logs/version_0/config.yaml").read_text()
