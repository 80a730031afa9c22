"""CSVLogger and what all loggers share: folders, names, files read back."""

from __future__ import annotations

import csv
import io
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from callbacks import CSVLogger, Logger
from callbacks.errors import MisconfigurationException
from callbacks.loggers.base import DummyExperiment
from callbacks.loggers.plain import flatten, to_yaml
from tests.helpers.fake_trainer import FakeTrainer


def rows(path: Any) -> list[dict[str, str]]:
    """The rows without their empty cells."""
    with open(path, newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def started(root: Path, logger: CSVLogger, **changes: Any) -> CSVLogger:
    trainer = FakeTrainer(root, [logger], **changes)
    logger.resolve(trainer)
    trainer.hook("on_fit_start")
    return logger


def test_rows_and_columns_that_come_later(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(flush_logs_every_n_steps=1))
    path = tmp_path / "csv_logs" / "version_0" / "metrics.csv"
    logger.publish({"loss": 0.1, "epoch": 0.0}, 1, "train")
    logger.publish({"loss": torch.tensor(0.25), "epoch": 0.0}, 2, "train")
    assert path.read_text() == "step,epoch,loss\n1,0,0.1\n2,0,0.25\n"
    logger.publish({"val_loss": 1e-7, "epoch": 0.0}, 2, "validate")
    logger.publish({"loss": 0.5, "epoch": 1.0}, 3, "train")
    assert path.read_text() == "step,epoch,loss,val_loss\n1,0,0.1,\n2,0,0.25,\n2,0,,1e-07\n3,1,0.5,\n"
    assert sorted(os.listdir(path.parent)) == ["metrics.csv"]


def test_flushing(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(flush_logs_every_n_steps=100))
    path = tmp_path / "csv_logs" / "version_0" / "metrics.csv"
    for step in (50, 100):
        logger.publish({"loss": 1.0}, step, "train")
    assert not path.exists()
    logger.publish({"loss": 1.0}, 150, "train")
    assert len(rows(path)) == 3
    logger.publish({"loss": 1.0}, 151, "train")
    assert len(rows(path)) == 3
    logger.after_save_checkpoint(None)  # a run resumed from there finds all
    assert len(rows(path)) == 4
    logger.publish({"loss": 1.0}, 152, "train")
    logger.finalize("success")
    assert len(rows(path)) == 5


def test_a_resumed_run_goes_on_without_doubling(tmp_path: Path) -> None:
    first = started(tmp_path, CSVLogger(tmp_path, version="a"))
    for step in range(1, 9):
        first.publish({"loss": float(step)}, step, "train")
    first.publish({"val": 5.0}, 5, "validate")
    first.finalize("failed")
    second = started(tmp_path, CSVLogger(tmp_path, version="a"), global_step=5)  # its checkpoint is of step 5
    for step in range(6, 11):
        second.publish({"loss": 10.0 * step, "more": 1.0}, step, "train")
    second.finalize("success")
    found = [(int(r["step"]), float(r.get("loss", 0))) for r in rows(tmp_path / "csv_logs" / "a" / "metrics.csv")]
    assert found == [*[(s, float(s)) for s in range(1, 6)], (5, 0.0), *[(s, 10.0 * s) for s in range(6, 11)]]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path, version=0))
    path = tmp_path / "csv_logs" / "version_0" / "metrics.csv"
    path.write_text("step,epoch,loss\n1,0,0.5\n2,0")
    logger.publish({"loss": 1.0}, 3, "train")
    logger.save()
    assert rows(path) == [{"step": "1", "epoch": "0", "loss": "0.5"}, {"step": "3", "loss": "1.0"}]


def test_c36_a_name_of_training_and_validation(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path))
    logger.publish({"loss": 1.0, "epoch": 0.0}, 1, "train")
    logger.publish({"acc": 0.5, "loss": 2.0, "epoch": 0.0}, 1, "validate")  # training's "acc" of the epoch is yet to come
    logger.publish({"acc": 0.75, "epoch": 0.0}, 1, "train")
    logger.on_train_epoch_end(None, None)
    logger.publish({"acc": 0.25, "epoch": 1.0}, 2, "validate")
    logger.publish({"acc": 0.125, "other": 1.0}, 2, "test")
    logger.finalize("success")
    found = rows(tmp_path / "csv_logs" / "version_0" / "metrics.csv")
    merged = [{n: v for n, v in row.items() if n not in ("epoch", "step")} for row in found]
    assert merged == [
        {"loss": "1.0"}, {"acc": "0.75"}, {"val_acc": "0.5", "val_loss": "2.0"}, {"val_acc": "0.25"}, {"test_acc": "0.125", "other": "1.0"},
    ]  # fmt: skip


def test_settle_ends_the_waiting(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path, flush_logs_every_n_steps=1))
    logger.settle(["loss"])
    logger.publish({"loss": 2.0}, 1, "validate")
    assert rows(tmp_path / "csv_logs" / "version_0" / "metrics.csv") == [{"step": "1", "val_loss": "2.0"}]


def test_prefix_and_nested_metrics(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path, prefix="p"))
    logger.log_metrics({"a": {"b": 1.0, "c": 2.0}}, 7)
    logger.log_metrics({"d": 3.0})
    logger.save()
    assert rows(tmp_path / "csv_logs" / "version_0" / "metrics.csv") == [
        {"step": "7", "p-a/b": "1.0", "p-a/c": "2.0"}, {"step": "7", "p-d": "3.0"}
    ]  # fmt: skip


def test_hyper_parameters(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path))
    logger.log_hyperparams({})
    assert os.listdir(tmp_path / "csv_logs" / "version_0") == []
    opt = {"name": 'sgd: "fast"', "nesterov": True, "none": None}
    params = {"lr": 1e-5, "layers": [1, 2.5, "x"], "opt": opt, "yes": "no", "n": -3}
    logger.log_hyperparams(params)
    logger.log_hyperparams(Namespace(more=float("inf"), emoji="\U0001f600\n"))
    path = tmp_path / "csv_logs" / "version_0" / "hparams.yaml"
    assert yaml.safe_load(path.read_text()) == {**params, "more": float("inf"), "emoji": "\U0001f600\n"}
    assert logger.experiment.hparams["lr"] == 1e-5


def test_yaml_reads_back() -> None:
    params = {
        "1e5": 1e22, "a b": 1.5, "on": "on", "empty": {}, "deep": {"er": {"list": [[1], {"k": [None, False]}]}}, "nan": "nan", "tuple": (1, 2),
        "minus": -1e-9, "path": Path("/x"), "-": "- x", "number": "12", "big": 10**20,
    }  # fmt: skip
    assert yaml.safe_load(to_yaml(params)) == {**params, "tuple": [1, 2], "path": "/x"}
    assert yaml.safe_load(to_yaml({"x": float("nan"), "y": -float("inf")}))["y"] == -float("inf")


def test_flatten() -> None:
    params = {"lr": 0.1, "opt": {"name": "sgd", "deep": {"x": True}}, "ns": Namespace(y=2), "list": [1, 2], "t": torch.tensor(3), "no": None}
    assert flatten(params) == {"lr": 0.1, "opt/name": "sgd", "opt/deep/x": True, "ns/y": 2, "list": "[1, 2]", "t": "3", "no": "None"}
    assert flatten(None) == {}


# -- folders -------------------------------------------------------------------------------------------------------------


def test_the_version_is_the_next_free_one_and_stays(tmp_path: Path) -> None:
    (tmp_path / "csv_logs" / "version_4").mkdir(parents=True)
    logger = CSVLogger()
    assert (logger.version, logger.log_dir, logger.save_dir) == (None, None, None)
    started(tmp_path, logger)
    assert (logger.version, logger.name, logger.save_dir) == (5, "csv_logs", str(tmp_path))
    assert logger.log_dir == str(tmp_path / "csv_logs" / "version_5") and os.path.isdir(str(logger.log_dir))
    started(tmp_path, logger)
    assert logger.version == 5
    assert started(tmp_path, CSVLogger()).version == 6


def test_names_of_versions(tmp_path: Path) -> None:
    assert CSVLogger(tmp_path, name="x", version=3).log_dir == str(tmp_path / "x" / "version_3")
    assert CSVLogger(tmp_path, name="x", version="mine").log_dir == str(tmp_path / "x" / "mine")
    assert CSVLogger(tmp_path, name="").log_dir == str(tmp_path / "version_0")
    assert CSVLogger(tmp_path, name=None, version="").log_dir == str(tmp_path)


def test_a_run_that_is_faster_takes_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, taken = os.mkdir, []

    def race(path: str, *args: Any) -> None:
        if path.endswith("version_0") and not taken:
            taken.append(path)
            make(path)
        make(path, *args)

    monkeypatch.setattr(os, "mkdir", race)
    assert started(tmp_path, CSVLogger()).version == 1


def test_other_ranks_take_rank_0s_answer_and_write_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "x")
    trainer = FakeTrainer(tmp_path, [logger], is_global_zero=False)
    trainer.broadcast = lambda obj, src=0: (str(tmp_path / "x"), 7, "")
    logger.resolve(trainer)
    trainer.hook("on_fit_start")
    assert (logger.version, isinstance(logger.experiment, DummyExperiment)) == (7, True)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_hyperparams({"a": 1})
    logger.experiment.anything(1).goes.here()
    logger.finalize("success")
    assert os.listdir(tmp_path) == []


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/logs")):
        with pytest.raises(MisconfigurationException, match=f"CSVLogger: cannot write to '{folder}"):
            CSVLogger(folder).resolve(FakeTrainer(tmp_path))


def test_it_travels(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger())
    logger.publish({"loss": 1.0}, 1, "train")
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    assert len(rows(tmp_path / "csv_logs" / "version_0" / "metrics.csv")) == 1
    copy.publish({"loss": 2.0}, 2, "train")
    copy.finalize("success")
    assert [r["loss"] for r in rows(tmp_path / "csv_logs" / "version_0" / "metrics.csv")] == ["1.0", "2.0"]


def test_a_logger_of_ones_own_needs_three_things() -> None:
    class Mine(Logger):
        def __init__(self) -> None:
            self.got: list[Any] = []

        name = property(lambda self: "mine")
        version = property(lambda self: 1)

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.got.append((step, metrics))

    logger = Mine()
    logger.resolve(None)
    logger.publish({"loss": 1.0}, 1, "train")
    logger.publish({"loss": 2.0, "acc": 3.0}, 1, "validate")
    logger.save(), logger.finalize("success"), logger.log_hyperparams({}), logger.log_graph(None), logger.after_save_checkpoint(None)
    assert logger.got == [(1, {"loss": 1.0}), (1, {"val_loss": 2.0, "acc": 3.0})]
    assert (logger.experiment, logger.save_dir, logger.root_dir, logger.log_dir) == (None, None, None, None)
    with pytest.raises(NotImplementedError, match="log_metrics"):
        Logger().log_metrics({}, 1)


def test_csv_is_read_as_written(tmp_path: Path) -> None:
    logger = started(tmp_path, CSVLogger(tmp_path))
    logger.publish({"a,b": 1 / 3, "q\"": float("nan")}, 1, "train")
    logger.finalize("success")
    text = (tmp_path / "csv_logs" / "version_0" / "metrics.csv").read_text()
    (row,) = csv.DictReader(io.StringIO(text))
    assert (float(row["a,b"]), row['q"']) == (1 / 3, "nan")
