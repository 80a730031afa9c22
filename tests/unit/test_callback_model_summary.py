"""ModelSummary: the numbers in the table."""

from __future__ import annotations

import pytest
import torch
from callbacks import ModelSummary
from callbacks.errors import MisconfigurationException
from callbacks.model_summary import summarize
from tests.helpers.fake_trainer import FakeTrainer
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2).double()
        self.scale = nn.Parameter(torch.ones(5))
        self.head.requires_grad_(False)
        self.body[1].eval()


def test_layers_and_totals() -> None:
    summary = summarize(Net())
    assert summary.layers == {
        "body": ("Sequential", 24, "train"),
        "head": ("Linear", 10, "train"),
        "other params": ("n/a", 5, "n/a"),
    }
    assert (summary.total_parameters, summary.trainable_parameters) == (39, 29)
    assert summary.model_size == pytest.approx((29 * 4 + 10 * 8) / 1e6)
    assert (summary.train_modules, summary.eval_modules) == (3, 1)


def test_depth() -> None:
    assert list(summarize(Net(), max_depth=2).layers) == list(summarize(Net(), max_depth=-1).layers)
    assert list(summarize(Net(), max_depth=2).layers) == ["body", "body.0", "body.1", "head", "other params"]
    assert summarize(Net(), max_depth=0).layers == {}
    with pytest.raises(MisconfigurationException, match="max_depth=-2"):
        summarize(Net(), max_depth=-2)


def test_shared_parameters_count_once_and_lazy_ones_not_yet() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert summarize(net).total_parameters == 8
    lazy = summarize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)))
    assert lazy.layers["0"][1] is None
    assert lazy.total_parameters == 4
    assert "?" in str(lazy) and "lazy layers not counted" in str(lazy)


def test_text() -> None:
    lines = str(summarize(nn.Sequential(nn.Linear(100, 100), nn.ReLU()))).splitlines()
    assert lines[0].split(" | ") == [" ", "Name", "Type  ", "Params", "Mode"]
    assert [cell.strip() for cell in lines[2].split("|")] == ["0", "0", "Linear", "10.1 K", "train"]
    assert [line.split(maxsplit=1)[1] for line in lines[5:7]] == ["K    Trainable params", "Non-trainable params"]
    assert any(line.startswith("0.040 ") and "MB" in line for line in lines)


def test_it_prints_on_rank_0_at_fit_start() -> None:
    for changes, count in (({}, 1), ({"is_global_zero": False}, 0)):
        trainer = FakeTrainer("", [ModelSummary()], lightning_module=Net(), **changes).start()
        assert len(trainer.printed) == count
    assert FakeTrainer("", [ModelSummary(0)], lightning_module=Net()).start().printed == []
    with pytest.raises(MisconfigurationException, match="max_depth=-3"):
        FakeTrainer("", [ModelSummary(-3)], lightning_module=Net()).start()
