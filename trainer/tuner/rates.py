"""The learning rate range test: one optimizer step with each rate, and what the losses say."""

from __future__ import annotations

import math
from typing import Any

import torch

from callbacks.tuning import LRSearch
from trainer.defaults import Callback
from trainer.errors import MisconfigurationException
from trainer.loops.fit import train_step
from trainer.loops.window import Window
from trainer.tuner.attribute import check_attribute
from trainer.tuner.curve import LRCurve
from trainer.tuner.probe import all_of, probing

__all__ = ["check_rate", "find_rate"]

_SMOOTHING = 0.98
_NAMES = ("lr", "learning_rate")


def check_rate(search: LRSearch, module: Any, datamodule: Any) -> str | None:
    """Return the attribute that the suggestion goes to; None where it goes nowhere.

    Raises:
        MisconfigurationException: there is no such attribute.
    """
    if not search.update_attr:
        return None
    names = (search.attr_name,) if search.attr_name else _NAMES
    advice = "Set it in __init__ and use it in configure_optimizers, name it with attr_name=, or only look at the curve with update_attr=False."
    return check_attribute(names, module, datamodule, advice)


def find_rate(run: Any, search: LRSearch) -> LRCurve:
    """Take a step with each learning rate and put everything back; return the curve, the same on all ranks. Collective.

    Raises:
        MisconfigurationException: when there is not exactly one optimizer; for `limit_train_batches=0`.
    """
    if len(run.optimizers) != 1:
        raise MisconfigurationException(
            f"lr_find tries learning rates on one optimizer; configure_optimizers returned {len(run.optimizers)}. Use one with several parameter "
            "groups, or look for the rates with an optimizer at a time."
        )
    if run.settings.limits["train"] == 0:
        raise MisconfigurationException("lr_find takes training steps, and limit_train_batches=0 allows none.")
    kept, test = all_of(run), _RangeTest(search)
    run.trainer.print(f"Learning rate range test: {search.num_training} steps, from {search.min_lr:g} to {search.max_lr:g}.")
    try:
        with probing(run, test) as probe:
            test.around(probe)
            probe.train()
    finally:
        kept.restore()
    taken = len(test.curve.results["lr"])
    if taken < search.num_training:
        run.trainer.print(f"The learning rate range test ended after {taken} of {search.num_training} steps: {test.reason}.")
    return run.dist.broadcast(test.curve)


class _RangeTest(Callback):
    """Takes the steps of a probe, each with the next learning rate, and notes the loss that the step descended."""

    def __init__(self, search: LRSearch) -> None:
        self.search = search
        self.curve = LRCurve(search.mode, search.min_lr, search.max_lr, search.num_training)
        self.outputs: list[Any] = []
        self.average, self.count, self.best = 0.0, 0, math.inf
        self.reason = "the data gave no more steps"

    def around(self, probe: Any) -> None:
        """Put this test around the steps that `probe` takes."""
        self.inner, probe.other_step = probe.other_step, self.step

    def step(self, run: Any, group: Any) -> None:
        """Take one optimizer step. Collective."""
        results, self.outputs = self.curve.results, []
        rate = self._rate(len(results["lr"]))
        for part in run.optimizers[0].param_groups:
            if isinstance(part["lr"], torch.Tensor):
                part["lr"].fill_(rate)
            else:
                part["lr"] = rate
        run.other_step = self.inner
        train_step(run, group)
        run.other_step = self.step
        if run.skip_epoch:
            return
        loss, stops = self._loss(run, group)
        results["lr"].append(rate)
        results["loss"].append(self._smooth(loss))
        if self._diverged(loss, results["loss"][-1]):
            stops, self.reason = True, f"the loss was {loss:.4g}"
        elif stops:
            self.reason = "it was asked to stop"
        run.done = stops or len(results["lr"]) == self.search.num_training

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)

    def _rate(self, number: int) -> float:
        """The rate of a step: the first is min_lr, the last max_lr, with equal factors or equal differences between."""
        search, share = self.search, number / (self.search.num_training - 1)
        if search.mode == "exponential":
            return search.min_lr * (search.max_lr / search.min_lr) ** share
        return search.min_lr + (search.max_lr - search.min_lr) * share

    def _loss(self, run: Any, group: Any) -> tuple[float | None, bool]:
        """Return the mean loss over the samples of the step on all ranks (None where every batch was skipped), and a wish to stop. Collective."""
        window, total, weights = Window(group), 0.0, 0.0
        for i, output in enumerate(self.outputs):
            loss, count = (output.get("loss"), output.get("count")) if isinstance(output, dict) else (None, None)
            weight = 0.0 if window.samples(i) == 0 else float(window.weight(i, count))
            if loss is not None and weight:
                total += float(loss) * weight
                weights += weight
        numbers = torch.tensor([total, weights, run.wants_to_stop()], dtype=torch.float64)
        total, weights, stops = numbers.tolist() if run.dist.alone else run.dist.sum(numbers).tolist()
        return (total / weights if weights else None), stops > 0

    def _smooth(self, loss: float | None) -> float:
        """The exponential moving average a_k = b a_(k-1) + (1 - b) loss_k, without its bias to the a_0 = 0 it begins with: a_k / (1 - b^k)."""
        if loss is None or not math.isfinite(loss):
            return math.nan
        self.count += 1
        self.average = _SMOOTHING * self.average + (1 - _SMOOTHING) * loss
        return self.average / (1 - _SMOOTHING**self.count)

    def _diverged(self, loss: float | None, smoothed: float) -> bool:
        threshold = self.search.early_stop_threshold
        if threshold is None or loss is None:
            return False
        # threshold * best for a best loss above 0, and as far above it for one below
        too_large = self.count > 1 and smoothed > self.best + (threshold - 1) * abs(self.best)
        self.best = min(self.best, smoothed)
        return too_large or not math.isfinite(loss)
