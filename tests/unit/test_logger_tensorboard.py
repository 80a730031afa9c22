"""TensorBoardLogger: what TensorBoard's own reader finds in the files."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from callbacks import TensorBoardLogger
from callbacks.errors import MisconfigurationException
from callbacks.loggers import tb_files
from callbacks.loggers.base import DummyExperiment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tests.helpers.fake_trainer import FakeTrainer


def scalars(folder: Any, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def tags(folder: Any) -> list[str]:
    return sorted(EventAccumulator(str(folder)).Reload().Tags()["scalars"])


def hparams(folder: Any) -> dict[str, Any]:
    content = EventAccumulator(str(folder)).Reload().SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def end_status(folder: Any) -> int:
    content = EventAccumulator(str(folder)).Reload().SummaryMetadata("_hparams_/session_end_info").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content).session_end_info.status


def event_files(folder: Any) -> list[str]:
    return sorted(str(p.relative_to(folder).parent) for p in Path(folder).rglob("events.out.tfevents*"))


def started(root: Path, logger: TensorBoardLogger, callbacks: Any = (), **changes: Any) -> TensorBoardLogger:
    trainer = FakeTrainer(root, [logger, *callbacks], **changes)
    logger.resolve(trainer)
    logger.on_fit_start(trainer, None)
    return logger


def test_scalars_read_back(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger())
    for step in (1, 2):
        logger.publish({"loss": 1.0 / step, "epoch": 0.0}, step, "train")
    logger.publish({"val_loss": torch.tensor(0.25), "epoch": 0.0}, 2, "validate")
    logger.finalize("success")
    folder = tmp_path / "runs" / "version_0"
    assert scalars(folder, "loss") == [(1, 1.0), (2, 0.5)]
    assert scalars(folder, "val_loss") == [(2, 0.25)]
    assert [step for step, _ in scalars(folder, "epoch")] == [1, 2]
    assert event_files(tmp_path) == ["runs/version_0"]


def test_c36_both_lines_share_a_chart(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger())
    logger.publish({"loss": 3.0, "epoch": 0.0}, 1, "train")
    logger.publish({"loss": 2.0, "acc": 0.5, "epoch": 0.0}, 1, "validate")
    logger.publish({"acc": 0.75, "epoch": 0.0}, 1, "train")  # the epoch's mean, published after validation
    logger.on_train_epoch_end(None, None)
    logger.finalize("success")
    folder = tmp_path / "runs" / "version_0"
    assert scalars(folder, "loss") == [(1, 3.0)] and scalars(folder / "val", "loss") == [(1, 2.0)]
    assert scalars(folder, "acc") == [(1, 0.75)] and scalars(folder / "val", "acc") == [(1, 0.5)]
    assert tags(folder / "val") == ["acc", "best/loss", "loss"]  # a loss is best where it is least; of acc nobody said
    assert event_files(tmp_path) == ["runs/version_0", "runs/version_0/val"]


@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_c38_hyper_parameters_with_real_results_in_the_one_file(tmp_path: Path, lr: float) -> None:
    monitor = SimpleNamespace(monitor="val_loss", mode="min")
    logger = started(tmp_path, TensorBoardLogger(), [monitor])
    logger.log_hyperparams({"lr": lr, "opt": {"name": "sgd"}, "on": True, "no": None})
    for step, value in enumerate([math.nan, 3.0, 1.0, 2.0], 1):
        logger.publish({"loss": value, "epoch": 0.0}, step, "train")
        logger.publish({"val_loss": value, "epoch": 0.0}, step, "validate")
    logger.finalize("success")
    folder = tmp_path / "runs" / "version_0"
    assert hparams(folder) == {"lr": lr, "opt/name": "sgd", "on": True, "no": "None"}
    assert scalars(folder, "val_loss")[-1] == (4, 2.0)
    assert scalars(folder, "best/val_loss") == [(4, 1.0)]
    assert tags(folder) == ["best/val_loss", "epoch", "loss", "val_loss"]  # no hp_metric, no -1
    assert event_files(tmp_path) == ["runs/version_0"]
    assert end_status(folder) == 1  # STATUS_SUCCESS
    assert yaml.safe_load((folder / "hparams.yaml").read_text()) == {"lr": lr, "opt": {"name": "sgd"}, "on": True, "no": None}


def test_a_failed_run_says_so(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger())
    logger.log_hyperparams({"lr": 0.1}, {"hp_metric": 0.5})
    logger.publish({"loss": 1.0}, 1, "train")
    logger.finalize("failed")
    folder = tmp_path / "runs" / "version_0"
    assert end_status(folder) == 2  # STATUS_FAILURE
    assert scalars(folder, "hp_metric") == [(0, 0.5)]


def test_best_of_max_and_after_a_resume(tmp_path: Path) -> None:
    monitor = SimpleNamespace(monitor="acc", mode="max")
    first = started(tmp_path, TensorBoardLogger(), [monitor])
    first.publish({"acc": 0.9}, 1, "train")
    second = started(tmp_path, TensorBoardLogger(), [monitor])
    assert second.state_key == TensorBoardLogger(tmp_path / "moved").state_key
    second.load_state_dict(first.state_dict())
    second.publish({"acc": 0.5}, 2, "train")
    second.publish({"acc": 1.0}, 2, "test")  # the test set does not count
    second.finalize("success")
    assert scalars(tmp_path / "runs" / "version_1", "best/acc") == [(2, pytest.approx(0.9))]
    first.finalize("success")


def test_fit_then_test_is_still_one_file(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger())
    logger.publish({"loss": 1.0}, 1, "train")
    logger.publish({"loss": 2.0}, 1, "validate")
    logger.on_train_epoch_end(None, None)
    logger.finalize("success")
    logger = pickle.loads(pickle.dumps(logger))  # back from the ranks
    logger.resolve(FakeTrainer(tmp_path))
    logger.publish({"test_loss": 3.0, "epoch": 0.0}, 1, "test")
    logger.finalize("success")
    folder = tmp_path / "runs" / "version_0"
    assert event_files(tmp_path) == ["runs/version_0", "runs/version_0/val"]
    assert (scalars(folder, "loss"), scalars(folder, "test_loss")) == ([(1, 1.0)], [(1, 3.0)])


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path: Path) -> None:
    first = started(tmp_path, TensorBoardLogger(version="a"))
    for step in range(1, 9):
        first.publish({"loss": float(step)}, step, "train")
    first.finalize("failed")
    second = started(tmp_path, TensorBoardLogger(version="a"), global_step=5)
    for step in range(6, 11):
        second.publish({"loss": 10.0 * step}, step, "train")
    second.finalize("success")
    assert scalars(tmp_path / "runs" / "a", "loss") == [*[(s, float(s)) for s in range(1, 6)], *[(s, 10.0 * s) for s in range(6, 11)]]


def test_files_are_joined_in_the_order_in_which_they_were_begun(tmp_path: Path) -> None:
    names = [f"events.out.tfevents.{name}" for name in ("98.pc.7.0", "99.pc.7.9", "99.pc.7.10", "100.pc.7.8")]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [os.path.basename(path) for path in tb_files.event_files(str(tmp_path))] == names


def test_the_writer_underneath(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger(name="x", prefix="p", sub_dir="s"))
    logger.experiment.add_histogram("weights", torch.arange(4.0), 3)
    logger.log_metrics({"a": {"b": 1.0}}, 2)
    logger.log_metrics({"c": 2.0})
    logger.save()
    folder = tmp_path / "x" / "version_0" / "s"
    events = EventAccumulator(str(folder)).Reload()
    assert events.Tags()["histograms"] == ["weights"]
    assert (scalars(folder, "p-a/b"), scalars(folder, "p-c")) == ([(2, 1.0)], [(2, 2.0)])
    logger.finalize("success")


def test_graph(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 1)
    logger = started(tmp_path, TensorBoardLogger(log_graph=True))
    with pytest.warns(UserWarning, match="example_input_array"):
        logger.log_graph(model)
    model.example_input_array = torch.zeros(1, 2)
    logger.log_graph(model)
    logger.finalize("success")
    assert EventAccumulator(str(logger.log_dir)).Reload().Tags()["graph"]
    silent = started(tmp_path, TensorBoardLogger())
    silent.log_graph(model)
    assert event_files(silent.log_dir) == []


class Summed(torch.nn.Module):
    """Named arguments in, a dict out; fails on the wrong type of number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.example_input_array: Any = {"b": torch.ones(1, 2), "a": torch.zeros(1, 2)}

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": self.layer(a + b)}


def test_the_graph_of_named_inputs_in_the_precision_of_the_run(tmp_path: Path) -> None:
    model: Any = Summed()
    precision = SimpleNamespace(convert_input=lambda example: {name: value.double() for name, value in example.items()})
    trainer = FakeTrainer(tmp_path, precision_plugin=precision)
    logger = TensorBoardLogger(log_graph=True)
    logger.resolve(trainer)
    logger.log_graph(model)
    logger.finalize("success")
    assert any("Linear" in node.name for node in EventAccumulator(str(logger.log_dir)).Reload().Graph().node)


def test_a_forward_that_fails_costs_the_graph_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = started(tmp_path, TensorBoardLogger(log_graph=True))
    with pytest.warns(UserWarning, match="shows no graph: RuntimeError"):
        logger.log_graph(Summed())  # in 32 bits
    lazy: Any = torch.nn.LazyLinear(3)
    lazy.example_input_array = torch.zeros(1, 2)
    with pytest.warns(UserWarning, match="lazy layers"):
        logger.log_graph(lazy)
    logger.finalize("success")
    assert capsys.readouterr().out == ""


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    trainer = FakeTrainer(tmp_path, [logger], is_global_zero=False)
    trainer.broadcast = lambda obj, src=0: (str(tmp_path), 0, "")
    logger.resolve(trainer)
    trainer.hook("on_fit_start")
    logger.experiment.add_image("x", None)
    assert isinstance(logger.experiment, DummyExperiment)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_hyperparams({"a": 1})
    logger.log_graph(None)
    logger.log_image("i", "no image at all")
    logger.log_text("t", "x")
    logger.log_histogram("h", "no numbers")
    logger.log_figure("f", None)
    trainer.hook("on_train_start")
    logger.finalize("success")
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_before_there_is_something(tmp_path: Path) -> None:
    logger = started(tmp_path, TensorBoardLogger())
    logger.log_hyperparams({})
    logger.finalize("success")
    assert event_files(tmp_path) == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MisconfigurationException, match="pip install tensorboard"):
        TensorBoardLogger()
