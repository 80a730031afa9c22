"""EarlyStopping: at which check it stops, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks import EarlyStopping
from callbacks.early_stopping import EarlyStoppingReason
from callbacks.errors import MisconfigurationException
from tests.helpers.fake_trainer import FakeTrainer


def stopped_at(values: list[float], **arguments: Any) -> tuple[int | None, EarlyStopping]:
    """Feed one value an epoch; return the epoch (from 0) in which it asked to stop."""
    stopping = EarlyStopping("val_loss", **arguments)
    trainer = FakeTrainer("", [stopping]).start()
    for epoch, value in enumerate(values):
        trainer.epoch(val_loss=value)
        if trainer.should_stop:
            return epoch, stopping
    return None, stopping


@pytest.mark.parametrize(
    ("values", "arguments", "epoch", "reason"),
    [
        ([3, 2, 2, 2, 2], {"patience": 2}, 3, "PATIENCE_EXHAUSTED"),
        ([3, 2, 1, 0], {"patience": 1}, None, "NOT_STOPPED"),
        ([3, 2.5, 2.2, 1.0], {"patience": 2, "min_delta": 1.0}, 2, "PATIENCE_EXHAUSTED"),
        ([3, 2.5, 1.9, 1.9], {"patience": 2, "min_delta": -1.0}, None, "NOT_STOPPED"),
        ([1, 2, 3, 3], {"patience": 1, "mode": "max"}, 3, "PATIENCE_EXHAUSTED"),
        ([1, 2.5, 3.5, 3.4], {"patience": 2, "mode": "max", "min_delta": 1.0}, 3, "PATIENCE_EXHAUSTED"),
        ([3, math.nan], {}, 1, "NON_FINITE_METRIC"),
        ([3, -math.inf], {}, 1, "NON_FINITE_METRIC"),
        ([3, math.nan, math.nan, 1], {"check_finite": False, "patience": 3}, None, "NOT_STOPPED"),
        ([3, math.nan, math.nan], {"check_finite": False, "patience": 2}, 2, "PATIENCE_EXHAUSTED"),
        ([3, 0.4], {"stopping_threshold": 0.5}, 1, "STOPPING_THRESHOLD"),
        ([3, 0.5], {"stopping_threshold": 0.5}, None, "NOT_STOPPED"),
        ([3, 9.5], {"divergence_threshold": 9.0}, 1, "DIVERGENCE_THRESHOLD"),
        ([3, 0.5], {"mode": "max", "divergence_threshold": 1.0}, 1, "DIVERGENCE_THRESHOLD"),
    ],
)
def test_when_and_why_it_stops(values: list[float], arguments: dict[str, Any], epoch: int | None, reason: str) -> None:
    at, stopping = stopped_at(values, **arguments)
    assert at == epoch
    assert stopping.stopping_reason is EarlyStoppingReason[reason]
    assert stopping.stopped_epoch == (epoch or 0)
    assert (stopping.stopping_reason_message is None) == (epoch is None)


def test_best_score_and_wait_count() -> None:
    _, stopping = stopped_at([3, 2, 2.5])
    assert (stopping.best_score.item(), stopping.wait_count) == (2.0, 1)


@pytest.mark.parametrize(
    ("settings", "choice", "hook"),
    [
        ({}, None, "on_train_epoch_end"),
        ({"val_check_interval": 0.5}, None, "on_validation_end"),
        ({"check_val_every_n_epoch": 2}, None, "on_validation_end"),
        ({"check_val_every_n_epoch": 2, "enable_validation": False}, None, "on_train_epoch_end"),
        ({"val_check_interval": 0.5}, True, "on_train_epoch_end"),
        ({}, False, "on_validation_end"),
    ],
)
def test_where_it_checks(settings: dict[str, Any], choice: bool | None, hook: str) -> None:
    checked = []
    for name in ("on_validation_end", "on_train_epoch_end"):
        stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=choice)
        trainer = FakeTrainer("", [stopping], **settings).start()
        trainer.set(val_loss=1.0)
        trainer.hook(name)
        checked += [name] * (stopping.best_score.item() == 1.0)
    assert checked == [hook]


def test_not_in_sanity_check_validate_or_fast_dev_run() -> None:
    for changes in ({"sanity_checking": True}, {"fast_dev_run": 1}):
        stopping = EarlyStopping("nothing", check_on_train_epoch_end=False)
        FakeTrainer("", [stopping], **changes).start().hook("on_validation_end")
    trainer = FakeTrainer("", [EarlyStopping("nothing", check_on_train_epoch_end=False)]).start()
    trainer.state.fn = "validate"
    trainer.hook("on_validation_end")
    FakeTrainer("", [EarlyStopping("nothing")], fast_dev_run=1).start().hook("on_train_epoch_end")


def test_a_metric_that_nobody_logs() -> None:
    with pytest.raises(MisconfigurationException, match=r"'val_los'.*'val_loss'\. Did you mean 'val_loss'\?.*training epoch"):
        FakeTrainer("", [EarlyStopping("val_los")]).start().epoch(val_loss=1.0)
    with pytest.warns(UserWarning, match="'val_los'"):
        FakeTrainer("", [EarlyStopping("val_los", strict=False)]).start().epoch(val_loss=1.0)


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(MisconfigurationException, match="Did you mean 'max'"):
        EarlyStopping("val_loss", mode="maxx")


def test_verbose_says_what_happens() -> None:
    trainer = FakeTrainer("", [EarlyStopping("val_loss", patience=1, verbose=True)]).start()
    trainer.epoch(val_loss=1.0)
    trainer.epoch(val_loss=2.0)
    assert ["improved to 1.000" in trainer.printed[0], "not improved in the last 1 checks" in trainer.printed[1]] == [True, True]


def test_state_goes_on_counting_and_patience_is_the_new_ones(tmp_path: Path) -> None:
    _, first = stopped_at([1, 2, 3], patience=3)
    torch.save(first.state_dict(), tmp_path / "s.pt")
    second = EarlyStopping("val_loss", patience=5)
    second.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    assert (second.wait_count, second.best_score.item(), second.patience) == (2, 1.0, 5)
    assert second.state_key == first.state_key
    trainer = FakeTrainer("", [second], current_epoch=3).start()
    for _ in range(3):
        trainer.epoch(val_loss=4.0)
    assert (trainer.should_stop, second.stopped_epoch) == (True, 5)
