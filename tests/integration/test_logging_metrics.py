"""Metric objects (torchmetrics' or of the same interface) in `self.log`, and what `self.log` refuses."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torchmetrics import Metric
from torchmetrics.aggregation import MeanMetric, SumMetric

from tests.helpers.modules import Scalar, loader, quiet
from trainer import MisconfigurationException


class Metrics(Scalar):
    """Updates a metric with every batch and logs the object."""

    def __init__(self, metric: Any, call: bool = True, **options: Any) -> None:
        super().__init__()
        self.metric, self.call, self.options, self.history = metric, call, options, []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.metric(batch) if self.call else self.metric.update(batch)
        self.log("m", self.metric, **self.options)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(self.trainer.callback_metrics.get("m_step", self.trainer.callback_metrics.get("m")))


def fit(module: Any, data: Any = (1, 1, 1, 1, 6), epochs: int = 2, **settings: Any) -> dict[str, float]:
    trainer = quiet(max_epochs=epochs, log_every_n_steps=1, **settings)
    trainer.fit(module, loader(data, 4))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("call", [True, False])
def test_a_metric_over_the_epoch_is_computed_and_reset_once(call: bool) -> None:
    module = Metrics(SumMetric(), call, on_step=False, on_epoch=True)
    assert fit(module) == {"m": 10.0}
    assert module.metric.sum_value.item() == 0.0


def test_a_metric_per_step_is_the_value_of_the_batch() -> None:
    assert fit(Metrics(MeanMetric())) == {"m": 6.0}
    assert fit(Metrics(MeanMetric(), on_step=True, on_epoch=True)) == {"m": 2.0, "m_step": 6.0, "m_epoch": 2.0}
    joined = fit(Metrics(MeanMetric(), on_step=True, on_epoch=True), accumulate_grad_batches=2)
    assert joined == {"m": 2.0, "m_step": 2.0, "m_epoch": 2.0}


class Plain:
    """Only the interface."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, batch: torch.Tensor) -> None:
        self.total += batch.sum().item()

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


def test_any_object_of_the_interface_is_a_metric() -> None:
    module = Metrics(Plain(), call=False, on_step=False, on_epoch=True)
    assert fit(module) == {"m": 10.0}
    assert module.metric.total == 0.0


def test_a_metric_of_validation_and_test_starts_anew_in_every_pass_and_after_the_sanity_check() -> None:
    class Validating(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.total = SumMetric()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.total.update(batch)
            self.log("total", self.total)

        test_step = validation_step

    module, trainer = Validating(), quiet(max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(module, loader([1]), loader([1, 2, 3], 2))
    assert trainer.callback_metrics["total"].item() == 6.0
    assert trainer.validate(module, loader([1, 2, 3], 2), verbose=False) == [{"total": 6.0}]
    assert trainer.test(module, loader([5]), verbose=False) == [{"total": 5.0}]


def test_a_metric_that_computes_several_numbers_is_refused() -> None:
    class Pair(Metric):
        def update(self, batch: torch.Tensor) -> None: ...

        def compute(self) -> torch.Tensor:
            return torch.tensor([1.0, 2.0])

    with pytest.raises(MisconfigurationException, match="'m' was logged as a metric object that computes more than one number"):
        fit(Metrics(Pair(), call=False, on_step=False, on_epoch=True))
    with pytest.raises(MisconfigurationException, match=r"given a MeanMetric that has no value for this batch.*metric\(...\)"):
        fit(Metrics(MeanMetric(), call=False))


# -- what self.log refuses -------------------------------------------------------------------------------------------------------


def logging(*args: Any, hook: str = "training_step", **kwargs: Any) -> Scalar:
    """Return a module that logs so in `hook`."""

    class Logs(Scalar):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    module = Logs()
    original = getattr(module, hook)

    def method(*a: Any, **k: Any) -> Any:
        module.log(*args, **kwargs)
        return original(*a, **k)

    setattr(module, hook, method)
    return module


def refused(module: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        quiet(max_epochs=1).fit(module, loader([1]), loader([1]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), r"takes one number; got a tensor of shape \(2,\). Reduce it first"),
        (numpy.zeros(2), "takes one number, a tensor of one element or a metric; got ndarray"),
        ("0.5", "got str"),
        (None, "got NoneType"),
        ({"a": 1}, "got dict"),
        ([1.0], "got list"),
    ],
)
def test_values_that_are_no_number(value: Any, message: str) -> None:
    refused(logging("x", value), message)


@pytest.mark.parametrize(
    "hook",
    ["setup", "configure_optimizers", "on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "teardown", "configure_callbacks",
     "on_validation_model_train", "on_before_batch_transfer"],
)  # fmt: skip
def test_places_where_nothing_can_be_logged(hook: str) -> None:
    refused(logging("x", 1.0, hook=hook), r"self.log\('x'\) does nothing in .*log in a step or in a hook of an epoch or batch")


def test_logging_in_prediction_is_refused() -> None:
    module = logging("x", 1.0, hook="predict_step")
    with pytest.raises(MisconfigurationException, match=r"self.log\('x'\) does nothing in 'predict_step'"):
        quiet().predict(module, loader([1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_step": False, "on_epoch": False}, r"on_step=False, on_epoch=False\) would log nothing; set one of them"),
        ({"on_step": True, "hook": "on_train_epoch_start"}, "on_step=True.* in on_train_epoch_start: there is no step here; use on_epoch=True"),
        ({"on_step": True, "hook": "on_validation_epoch_end"}, "there is no step here"),
        ({"reduce_fx": "median"}, "reduce_fx='median'.* must be 'mean', 'sum', 'min' or 'max'"),
        ({"reduce_fx": torch.median}, "must be 'mean', 'sum', 'min' or 'max'"),
        ({"reduce_fx": ["mean"]}, "must be 'mean', 'sum', 'min' or 'max'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    refused(logging("x", 1.0, **options), message)


def test_one_name_is_logged_in_one_way() -> None:
    class Twice(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

        second: dict[str, Any] = {}

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("x", 1.0)
            self.log("x", 2.0, **self.second)
            return super().training_step(batch, batch_idx)

    for second in ({"on_epoch": True}, {"reduce_fx": "sum"}):
        module = Twice()
        module.second = second
        refused(module, r"self.log\('x'\) was called with other on_step, on_epoch or reduce_fx before")

    class Mixed(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("x", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log("x", 2.0)

    refused(Mixed(), r"self.log\('x'\) was called for batches and once more for the whole epoch \(in on_validation_epoch_end\)")


def test_logging_outside_a_run() -> None:
    with pytest.warns(UserWarning, match=r"self.log\('x'\) outside of fit, validate, test and predict does nothing"):
        Scalar().log("x", 1.0)
    with pytest.raises(RuntimeError, match="only inside fit, validate, test or predict"):
        _ = Scalar().trainer
    module = Scalar()
    quiet(max_epochs=1).fit(module, loader([1]))
    with pytest.warns(UserWarning, match="does nothing"):
        module.log_dict({"x": 1.0})
    with pytest.raises(RuntimeError, match="Scalar is not attached"):
        module.optimizers()
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank, module.logger, module.loggers) == (0, 0, 0, 0, None, [])
