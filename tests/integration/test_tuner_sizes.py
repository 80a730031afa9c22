"""Tuner.scale_batch_size: modules that run out of memory above some size, in any step, on any rank."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.modules import Net, assert_same, loader, weights
from tests.helpers.tuned import ROWS, Manual, Tuned, exact
from trainer import DataModule, Tuner


@pytest.fixture(autouse=True)
def quick_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole collection takes longer here than a trial of these sizes; `test_nothing_of_a_trial_is_left_in_the_next` has whole ones."""
    monkeypatch.setattr(gc, "collect", partial(gc.collect, 1))


@pytest.mark.parametrize(
    ("most", "options", "size", "tried"),
    [
        (20, {}, 16, [2, 4, 8, 16, 32]),
        (20, {"mode": "BINSEARCH", "margin": 0}, 20, [2, 4, 8, 16, 32, 24, 20, 22, 21]),
        (20, {"mode": "binsearch", "margin": 0.1}, 18, None),
        (20, {"init_val": 50}, 12, [50, 25, 12]),
        (20, {"init_val": 50, "mode": "binsearch", "margin": 0.0}, 20, [50, 25, 12, 18, 21, 19, 20]),
        (999, {}, 64, [2, 4, 8, 16, 32, 64]),
        (999, {"init_val": 500, "mode": "binsearch"}, 64, [64]),
        (999, {"max_trials": 3}, 8, [2, 4, 8]),
        (999, {"max_val": 11}, 11, [2, 4, 8, 11]),
        (1, {}, 1, [2, 1]),
    ],
)
def test_sizes(most: int, options: dict[str, Any], size: int, tried: list[int] | None, capsys: pytest.CaptureFixture[str]) -> None:
    module = Tuned(most=most)
    assert Tuner(exact()).scale_batch_size(module, steps_per_trial=2, **options) == module.hparams.batch_size == size
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "fit" in line]
    assert tried is None or [int(words[2]) for words in lines] == tried
    assert [words[3] == "fits." for words in lines] == [int(words[2]) <= most for words in lines]


class Data(DataModule):
    """Holds the batch size itself, and makes its rows in `setup`."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def setup(self, stage: str) -> None:
        self.rows = ROWS

    def train_dataloader(self) -> Any:
        return loader(self.rows, self.batch_size, drop_last=True)


class Closures(Tuned):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Tuned, Manual, Closures])
def test_every_way_of_stepping_can_run_out(kind: type[Tuned]) -> None:
    assert Tuner(exact()).scale_batch_size(kind(most=20)) == 16


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_evaluations_run_out_too(method: str) -> None:
    module = Tuned(most=20, where="validate" if method == "fit" else method)
    before = weights(module)
    assert Tuner(exact(limit_test_batches=0.1)).scale_batch_size(module, method=method) == 16
    assert_same(weights(module), before, 0)


def test_a_data_module_can_hold_the_size() -> None:
    data, module = Data(), Net()
    assert Tuner(exact()).scale_batch_size(module, data) == data.batch_size == 64
    assert not hasattr(data, "rows") and not hasattr(module, "batch_size")


def test_what_is_not_about_memory_goes_through() -> None:
    class Broken(Tuned):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        Tuner(exact()).scale_batch_size(Broken())
    with pytest.raises(torch.OutOfMemoryError, match="No batch size that was tried fits into memory; the smallest was 1"):
        Tuner(exact()).scale_batch_size(module := Tuned(most=0))
    assert module.hparams.batch_size == 4 and module.sizes == []


class Cyclic(Tuned):
    """Makes garbage that only the collector finds."""

    def __init__(self) -> None:
        super().__init__(most=20)
        self.garbage: Any = weakref.WeakSet()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        assert all(size == len(batch) for size in (len(one.batch) for one in self.garbage)), "of an earlier trial"
        one = Garbage()
        one.itself, one.batch = one, batch
        self.garbage.add(one)
        return super().training_step(batch, batch_idx)


class Garbage:
    itself: Any
    batch: Any


def test_nothing_of_a_trial_is_left_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", gc.collect.func)
    assert Tuner(exact()).scale_batch_size(Cyclic(), steps_per_trial=2, init_val=16) == 16
