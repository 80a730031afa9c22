"""Reading what `configure_optimizers` returned, clipping, and the optimizer object that users step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainer import MisconfigurationException
from trainer.optim import LRSchedulerConfig, StepOptimizer, clip, grads_of, parse_optimizers


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)


A, B = sgd(), sgd()
SA, SB = StepLR(A, 1), StepLR(B, 1)


@pytest.mark.parametrize(
    ("returned", "optimizers", "schedulers"),
    [
        (A, [A], []),
        ([A, B], [A, B], []),
        ((A, B), [A, B], []),
        (([A], [SA]), [A], [LRSchedulerConfig(SA)]),
        (([A, B], [SA, {"scheduler": SB, "interval": "step", "frequency": 3, "name": "b"}]), [A, B],
         [LRSchedulerConfig(SA), LRSchedulerConfig(SB, "b", "step", 3)]),
        (([A], []), [A], []),
        ({"optimizer": A}, [A], []),
        ({"optimizer": A, "lr_scheduler": SA}, [A], [LRSchedulerConfig(SA)]),
        ({"optimizer": A, "lr_scheduler": None}, [A], []),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "interval": "step", "strict": False}}, [A],
         [LRSchedulerConfig(SA, interval="step", strict=False)]),
        (({"optimizer": A, "lr_scheduler": SA}, {"optimizer": B}), [A, B], [LRSchedulerConfig(SA)]),
        ([{"optimizer": A}, {"optimizer": B, "lr_scheduler": SB}], [A, B], [LRSchedulerConfig(SB)]),
        (None, [], []),
    ],
)  # fmt: skip
def test_every_form_of_configure_optimizers(returned: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
    found, configs = parse_optimizers(returned)
    assert [id(o) for o in found] == [id(o) for o in optimizers]
    assert configs == schedulers


@pytest.mark.parametrize("monitor_in", ["lr_scheduler", "optimizer"])
def test_reduce_on_plateau_is_recognised_with_its_monitor(monitor_in: str) -> None:
    plateau = ReduceLROnPlateau(A)
    if monitor_in == "optimizer":
        returned = {"optimizer": A, "lr_scheduler": plateau, "monitor": "val_loss"}
    else:
        returned = {"optimizer": A, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
    (config,) = parse_optimizers(returned)[1]
    assert (config.reduce_on_plateau, config.monitor, config.interval) == (True, "val_loss", "epoch")


class NoState:
    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "got int"),
        ("adam", "got str"),
        (SA, "got StepLR"),
        (torch.optim.SGD, "got type"),
        ([A, 3], "got int"),
        ({}, "a dict without an 'optimizer'"),
        ({"optimiser": A}, r"a dict without an 'optimizer' \(keys: optimiser\)"),
        ({"optimizer": A, "lr_schedular": SA}, r"unknown key 'lr_schedular'. Did you mean 'lr_scheduler'\?"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "intervall": "step"}}, r"'intervall'. Did you mean 'interval'\?"),
        ({"optimizer": A, "lr_scheduler": {"interval": "step"}}, "lacks 'scheduler'"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "interval": "batch"}}, "interval='batch' must be 'step' or 'epoch'"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "frequency": 0}}, "frequency=0 must be a whole number >= 1"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "frequency": 1.5}}, "frequency=1.5 must be"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": SA, "frequency": True}}, "frequency=True must be"),
        ({"optimizer": A, "lr_scheduler": NoState()}, "needs the methods step and state_dict; got NoState"),
        ({"optimizer": A, "lr_scheduler": ReduceLROnPlateau(A)}, "needs the name of the number it watches"),
        ({"optimizer": A, "lr_scheduler": SB}, "StepLR moves an optimizer that configure_optimizers did not return"),
        ({"optimizer": A, "lr_scheduler": {"scheduler": ReduceLROnPlateau(B), "monitor": "x"}}, "did not return"),
        (([A], [SB]), "did not return"),
    ],
)
def test_bad_forms_are_named(returned: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        parse_optimizers(returned)


@pytest.mark.parametrize(("algorithm", "expected"), [("norm", [0.6, -0.8]), (None, [0.6, -0.8]), ("value", [1.0, -1.0])])
def test_clipping_by_norm_and_by_value(algorithm: str | None, expected: list[float]) -> None:
    optimizer = sgd()
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.tensor([3.0, -4.0])
    clip(optimizer, 1.0, algorithm)
    torch.testing.assert_close(parameter.grad, torch.tensor(expected))


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_no_clip_value_leaves_gradients_alone(value: float | None) -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["params"][0].grad = torch.tensor([3.0, -4.0])
    clip(optimizer, value, "norm")
    assert grads_of(optimizer)[0].tolist() == [3.0, -4.0]


def test_parameters_without_a_gradient_are_passed_over() -> None:
    optimizer = sgd()
    clip(optimizer, 1.0, "norm")
    clip(optimizer, 1.0, "value")
    assert grads_of(optimizer) == []


def test_step_optimizer_is_its_optimizer_but_for_step() -> None:
    calls: list[tuple[Any, Any]] = []

    def take_step(optimizer: Any, closure: Callable[[], Any] | None) -> float:
        calls.append((optimizer, closure))
        return 7.0

    wrapped = StepOptimizer(A, take_step)
    assert wrapped.param_groups is A.param_groups
    assert wrapped.state is A.state
    assert repr(wrapped) == repr(A)
    assert wrapped.step() == 7.0
    closure = lambda: None  # noqa: E731
    wrapped.step(closure=closure)
    assert calls == [(A, None), (A, closure)]
    with pytest.raises(MisconfigurationException, match=r"self\.toggled_optimizer"):
        wrapped.toggle_model()
