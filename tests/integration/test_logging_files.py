"""What TensorBoard shows after a run: charts, the x axis, the HParams tab, the number of event files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from callbacks import CSVLogger, ModelCheckpoint, TensorBoardLogger
from tests.helpers.modules import Scalar, loader, quiet
from trainer.errors import SIGTERMException


def read(folder: Path) -> EventAccumulator:
    """Return the events of the one event file in `folder`."""
    (file,) = folder.glob("events.out.tfevents*")
    return EventAccumulator(str(file)).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def hparams_of(folder: Path) -> dict[str, float]:
    content = read(folder).SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    return {name: v.number_value for name, v in plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams.items()}


class Both(Scalar):
    """Logs "loss" in training (-1 a step) and in validation."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", (self.w * batch).mean())


def test_c35_the_event_file_holds_one_point_a_step(own_directory: Path) -> None:
    trainer = quiet(max_epochs=1, logger=True, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(Both(), loader([1] * 8))
    folder = own_directory / "runs" / "version_0"
    assert Path(trainer.log_dir) == folder
    assert points(folder, "loss") == [(1, 0.0), (2, -1.0)]


def test_c36_training_and_validation_of_a_name_share_a_chart_and_the_unit(own_directory: Path) -> None:
    quiet(max_epochs=2, logger=True, accumulate_grad_batches=2, log_every_n_steps=1).fit(Both(), loader([1] * 4), loader([1]))
    folder = own_directory / "runs" / "version_0"
    assert points(folder, "loss") == [(1, 0.0), (2, -1.0), (3, -2.0), (4, -3.0)]
    assert points(folder / "val", "loss") == [(2, -2.0), (4, -4.0)]
    assert [step for step, _ in points(folder, "epoch")] == [1, 2, 3, 4]


def test_c36_in_a_csv_file_the_names_are_told_apart(own_directory: Path) -> None:
    quiet(max_epochs=1, logger=CSVLogger(), log_every_n_steps=1).fit(Both(), loader([1, 1]), loader([1]))
    lines = (own_directory / "csv_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,epoch,loss,val_loss"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "2"]


def session(folder: Path) -> tuple[dict[str, Any], set[str], EventAccumulator]:
    """Return the hyper-parameters of a run, its scalar tags and all its events."""
    events = read(folder)
    data = events.SummaryMetadata
    started = data(metadata.SESSION_START_INFO_TAG).plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(started).session_start_info
    params = {name: value.number_value or value.string_value for name, value in info.hparams.items()}
    return params, set(events.Tags()["scalars"]), events


def test_c38_hyperparameters_of_two_runs_with_their_real_results(own_directory: Path) -> None:
    last, best = {}, {}
    for version, lr in enumerate((0.1, 0.01)):
        keeper = ModelCheckpoint(monitor="val", mode="max")

        class Validating(Both):
            def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
                self.log("val", -(self.w + 0.2).abs())

        trainer = quiet(max_epochs=3, logger=TensorBoardLogger(), callbacks=[keeper], log_every_n_steps=1)
        trainer.fit(Validating(lr), loader([1]), loader([1]))
        folder = own_directory / "runs" / f"version_{version}"
        params, tags, events = session(folder)
        assert params == {"lr": lr}
        assert "hp_metric" not in tags
        assert not [event for tag in tags for event in events.Scalars(tag) if event.value == -1]
        last[lr], best[lr] = events.Scalars("val")[-1].value, events.Scalars("best/val")[-1].value
        assert len(list(folder.rglob("events.out.tfevents*"))) == 1
    assert last == pytest.approx({0.1: -0.1, 0.01: -0.17})
    assert best == pytest.approx({0.1: 0.0, 0.01: -0.17}, abs=1e-6)


@pytest.mark.filterwarnings("ignore:Nothing to do")
def test_a_fit_that_resumes_at_its_end_leaves_the_files_as_they_were(own_directory: Path) -> None:
    """Loss is logged in training and validation: its best one belongs to the sub-run val."""

    class Validating(Both):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("loss", (self.w + 0.2).abs())

    found = []
    for _ in range(2):
        quiet(max_epochs=3, logger=TensorBoardLogger(), callbacks=[ModelCheckpoint("saved", save_last=True)], log_every_n_steps=1).fit(
            Validating(0.1), loader([1]), loader([1]), ckpt_path="auto"
        )
        events = [read(own_directory / "runs" / "version_0" / place) for place in ("", "val")]
        found.append([{tag: [(e.step, e.value) for e in one.Scalars(tag)] for tag in one.Tags()["scalars"]} for one in events])
        ended = events[0].SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
        assert plugin_data_pb2.HParamsPluginData.FromString(ended).session_end_info.status == api_pb2.Status.Value("STATUS_SUCCESS")
    assert found[0] == found[1]
    assert found[0][1]["best/loss"] == [(3, pytest.approx(0.0, abs=1e-6))] and "best/loss" not in found[0][0]


def test_hyperparameters_of_module_and_data_module_unless_told_not_to(own_directory: Path) -> None:
    from trainer import DataModule

    class Data(DataModule):
        def __init__(self, size: int = 3) -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(range(self.hparams.size))

    class Hidden(Both):
        def __init__(self, secret: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    quiet(max_epochs=1, logger=CSVLogger()).fit(Both(), datamodule=Data())
    assert (own_directory / "csv_logs" / "version_0" / "hparams.yaml").read_text().split() == ["size:", "3", "lr:", "1.0"]
    quiet(max_epochs=1, logger=CSVLogger()).fit(Hidden(), datamodule=Data())
    assert (own_directory / "csv_logs" / "version_1" / "hparams.yaml").read_text().split() == ["size:", "3"]


def test_a_second_fit_of_a_trainer_writes_on_and_several_loggers_get_the_same(own_directory: Path) -> None:
    trainer = quiet(max_epochs=1, logger=[TensorBoardLogger(name="a"), CSVLogger(name="b")], log_every_n_steps=1)
    module = Both()
    trainer.fit(module, loader([1, 1]))
    trainer.max_epochs = 2
    trainer.fit(module, loader([1, 1]))
    assert sorted(p.name for p in own_directory.iterdir()) == ["a", "b"]
    assert points(own_directory / "a" / "version_0", "loss") == [(1, 0.0), (2, -1.0), (3, -2.0), (4, -3.0)]
    rows = (own_directory / "b" / "version_0" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[2] for row in rows[1:]] == ["0.0", "-1.0", "-2.0", "-3.0"]


@pytest.mark.parametrize("kept_in", [None, "kept"])
@pytest.mark.parametrize("name", ["runs", "csv_logs"])
def test_a_run_that_goes_on_does_so_in_the_folder_of_each_logger(own_directory: Path, name: str, kept_in: str | None) -> None:
    def trainer(steps: int) -> Any:
        loggers = [TensorBoardLogger(), CSVLogger(name=name, flush_logs_every_n_steps=1)]
        saves = ModelCheckpoint(kept_in, every_n_train_steps=2)
        return quiet(max_steps=steps, max_epochs=-1, logger=loggers, callbacks=saves, log_every_n_steps=1)

    quiet(max_steps=9, max_epochs=-1, logger=CSVLogger(), log_every_n_steps=1).fit(Both(), loader([1]))  # another run, with a number of its own
    first, second = trainer(3), trainer(5)
    first.fit(Both(0.5), loader([1]))
    second.fit(Both(0.25), loader([1]), ckpt_path="last")
    assert second.ckpt_path.endswith("step=2.ckpt")
    assert [logger.log_dir for logger in second.loggers] == [logger.log_dir for logger in first.loggers]
    expected = [0.0, -0.5, -1.0, -1.5, -2.0]  # the optimizer keeps the learning rate of its checkpoint
    folder = own_directory / "runs" / "version_0"
    assert points(folder, "loss") == list(enumerate(expected, 1))
    rows = Path(second.loggers[1].log_dir, "metrics.csv").read_text().splitlines()
    assert [float(row.split(",")[2]) for row in rows[1:]] == expected
    assert len((own_directory / "csv_logs" / "version_0" / "metrics.csv").read_text().splitlines()) == 10
    assert hparams_of(folder) == {"lr": 0.25}
    alone = trainer(5)
    alone.validate(Both(), loader([1]), ckpt_path="last")  # its numbers are none of a training's
    assert not {logger.log_dir for logger in alone.loggers} & {logger.log_dir for logger in first.loggers}


class Ends(Both):
    """Ends in its fourth batch: by SIGTERM, as where a machine is taken away, or by an error."""

    error: Exception | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3 and self.error is not None:
            raise self.error
        if self.global_step == 3:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("error", [None, ValueError("of a hook")])
def test_a_run_that_ended_ahead_of_its_first_save_goes_on_in_its_folder(own_directory: Path, error: Exception | None) -> None:
    def trainer() -> Any:
        saves = ModelCheckpoint("kept", save_on_exception=True)
        return quiet(max_steps=5, max_epochs=-1, logger=TensorBoardLogger(), callbacks=saves, log_every_n_steps=1)

    module = Ends(0.5)
    module.error = error
    with pytest.raises(SIGTERMException if error is None else ValueError):
        trainer().fit(module, loader([1] * 9))
    second = trainer()
    second.fit(Both(0.5), loader([1] * 9), ckpt_path="last")
    assert Path(second.log_dir) == own_directory / "runs" / "version_0"
    assert [step for step, _ in points(own_directory / "runs" / "version_0", "loss")] == [1, 2, 3, 4, 5]


def test_the_folder_is_fixed_when_the_trainer_is_made(own_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet(max_epochs=1, logger=CSVLogger(), log_every_n_steps=1)
    (own_directory / "elsewhere").mkdir()
    monkeypatch.chdir(own_directory / "elsewhere")
    trainer.fit(Both(), loader([1]))
    assert (own_directory / "csv_logs" / "version_0" / "metrics.csv").exists()
    assert list((own_directory / "elsewhere").iterdir()) == []


def test_the_graph_is_recorded_without_moving_the_module(tmp_path):
    class Graphed(Scalar):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
            self.example_input_array = torch.randn(4, 3)

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * sum(p.sum() for p in self.layers.parameters())

    module, logger = Graphed(), TensorBoardLogger(tmp_path, log_graph=True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    quiet(max_steps=1, logger=logger).fit(module, loader([1.0]))
    assert torch.equal(torch.get_rng_state(), before)
    assert module.layers[1].num_batches_tracked == 0 and module.training
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert any("Linear" in node.name for node in events.Graph().node)


def test_validation_numbers_are_on_the_disk_before_a_checkpoint_that_is_past_them(tmp_path):
    class Validated(Scalar):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("acc", 0.5)
            self.log("loss", 2.0)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 4:
                rows = (tmp_path / "csv_logs" / "version_0" / "metrics.csv").read_text()
                found.append(("acc" in rows, "val_loss" in rows, len(list(tmp_path.glob("*.ckpt")))))

    found = []
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    quiet(max_steps=4, val_check_interval=2, log_every_n_steps=1, logger=CSVLogger(tmp_path), callbacks=[checkpoint]).fit(
        Validated(), loader([1] * 10), loader([1])
    )
    assert found == [(True, True, 1)]
