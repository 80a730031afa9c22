"""LearningRateMonitor: which rates at which steps under which names."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callbacks import LearningRateMonitor
from callbacks.errors import MisconfigurationException
from tests.helpers.fake_trainer import FakeTrainer


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def config(optimizer: Any, interval: str = "epoch", name: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), interval=interval, name=name)


def fit(
    monitor: LearningRateMonitor, optimizers: list[Any], configs: list[Any], epochs: int = 2, steps: int = 3, **changes: Any
) -> FakeTrainer:
    trainer = FakeTrainer("", [monitor], loggers=[object()], optimizers=optimizers, lr_scheduler_configs=configs, **changes).start()
    for optimizer in optimizers:
        optimizer.step()  # (schedulers warn otherwise; without gradients nothing moves)
    for _ in range(epochs):
        for i in range(steps):
            for half in range(2):  # two batches a step
                trainer.is_last_batch = i == steps - 1
                trainer.hook("on_train_batch_start", None, 2 * i + half)
            trainer.global_step += 1
            for c in configs:
                if c.interval == "step":
                    c.scheduler.step()
        for c in configs:
            if c.interval == "epoch":
                c.scheduler.step()
    trainer.hook("on_train_end")
    return trainer


def test_steps_show_the_rate_they_were_made_with() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    monitor = LearningRateMonitor()
    trainer = fit(monitor, [sgd], [config(sgd, "step")])
    assert trainer.logged == [(s, {"lr-SGD": 0.5 ** (s - 1)}) for s in range(1, 7)]
    assert monitor.lrs == {"lr-SGD": [0.5**s for s in range(6)]}


def test_every_n_steps_and_the_last_of_an_epoch() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    trainer = fit(LearningRateMonitor("step"), [sgd], [config(sgd, "step")], log_every_n_steps=2)
    assert [step for step, _ in trainer.logged] == [2, 3, 4, 6]


def test_epochs() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    trainer = fit(LearningRateMonitor(), [sgd], [config(sgd, "epoch")])
    assert trainer.logged == [(1, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.5})]
    sgd = torch.optim.SGD([weight()], lr=1.0)
    trainer = fit(LearningRateMonitor("epoch"), [sgd], [config(sgd, "step")])
    assert trainer.logged == [(1, {"lr-SGD": 1.0}), (4, {"lr-SGD": 0.125})]


def test_an_epoch_that_is_resumed_in_its_middle_has_one_rate() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    trainer = FakeTrainer("", [LearningRateMonitor()], loggers=[object()], optimizers=[sgd], lr_scheduler_configs=[config(sgd)]).start()
    trainer.hook("on_train_epoch_start")
    trainer.hook("on_train_batch_start", None, 4)
    assert trainer.logged == []


def test_names() -> None:
    plain, second = torch.optim.SGD([weight()], lr=1.0), torch.optim.SGD([weight()], lr=2.0)
    groups = torch.optim.Adam([{"params": [weight()], "lr": 3.0}, {"params": [weight()], "lr": 4.0, "name": "head"}])
    free = torch.optim.AdamW([{"params": [weight()], "lr": 5.0}, {"params": [weight()], "lr": 6.0}])
    configs = [config(plain), config(second), config(groups, name="mine")]
    trainer = fit(LearningRateMonitor("epoch"), [free, plain, second, groups], configs, epochs=1)
    ((_, rates),) = trainer.logged
    assert rates == {"lr-SGD": 1.0, "lr-SGD-1": 2.0, "mine/pg1": 3.0, "mine/head": 4.0, "lr-AdamW/pg1": 5.0, "lr-AdamW/pg2": 6.0}


def test_momentum_and_weight_decay() -> None:
    sgd, adam = torch.optim.SGD([weight()], lr=1.0, momentum=0.9, weight_decay=0.1), torch.optim.Adam([weight()], lr=2.0, betas=(0.8, 0.9))
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    trainer = fit(monitor, [sgd, adam], [config(sgd)], epochs=1)
    assert trainer.logged[0][1] == {
        "lr-SGD": 1.0, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.1,
        "lr-Adam": 2.0, "lr-Adam-momentum": 0.8, "lr-Adam-weight_decay": 0.0,
    }  # fmt: skip
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.9, "lr-Adam-momentum": 0.8}


def test_groups_that_come_during_the_fit_are_logged_from_then_on() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    monitor = LearningRateMonitor("epoch")
    trainer = FakeTrainer("", [monitor], loggers=[object()], optimizers=[sgd], lr_scheduler_configs=[config(sgd)]).start()
    trainer.hook("on_train_batch_start", None, 0)
    sgd.add_param_group({"params": [weight()], "lr": 0.25})
    trainer.hook("on_train_batch_start", None, 0)
    assert monitor.lrs == {"lr-SGD/pg1": [1.0, 1.0], "lr-SGD/pg2": [0.25]}
    assert [values for _, values in trainer.logged] == [{"lr-SGD": 1.0}, {"lr-SGD/pg1": 1.0, "lr-SGD/pg2": 0.25}]


def test_without_scheduler_it_warns_and_logs_both_ways() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    with pytest.warns(UserWarning, match="constant"):
        trainer = fit(LearningRateMonitor("step"), [sgd], [], epochs=1)
    assert [step for step, _ in trainer.logged] == [1, 2, 3]


def test_errors() -> None:
    with pytest.raises(MisconfigurationException, match="Did you mean 'step'"):
        LearningRateMonitor("steps")
    with pytest.raises(MisconfigurationException, match="has no logger"):
        FakeTrainer("", [LearningRateMonitor()]).start()
    twins = torch.optim.SGD([{"params": [weight()], "name": "a"}, {"params": [weight()], "name": "a"}], lr=1.0)
    with pytest.raises(MisconfigurationException, match="share a name"):
        fit(LearningRateMonitor(), [twins], [config(twins)])


def test_optimizers_do_not_travel() -> None:
    sgd = torch.optim.SGD([weight()], lr=1.0)
    monitor = LearningRateMonitor()
    FakeTrainer("", [monitor], loggers=[object()], optimizers=[sgd], lr_scheduler_configs=[config(sgd)]).start()
    assert pickle.loads(pickle.dumps(monitor))._groups == []
