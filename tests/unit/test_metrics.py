"""The collector of logged numbers, alone and over ranks (threads stand for ranks here)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.datasets import together
from trainer import MisconfigurationException
from trainer.entries import merge_states
from trainer.metrics import Collector, Published, batch_size_of, is_metric


class ThreadDist:
    """The collectives of `trainer.dist.Dist` between two threads."""

    alone = False
    box: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=20)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, obj: Any) -> list[Any]:
        self.box[self.rank] = obj
        self.barrier.wait()
        found = list(self.box)
        self.barrier.wait()
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return sum(self.gather(tensor))

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.maximum(*self.gather(tensor))

    def agree(self, flag: bool) -> bool:
        return any(self.gather(flag))


class Alone:
    alone = True

    def gather(self, obj: Any) -> list[Any]:
        return [obj]

    def agree(self, flag: bool) -> bool:
        return flag


def log(collector: Collector, name: str, value: float, weight: float = 1, step: int = 1, reduce: str = "mean", **flags: bool) -> None:
    flags = {"on_step": False, "on_epoch": True, "bar": False, "logger": True, **flags}
    collector.entry(name, None, reduce, **flags).add(torch.tensor(float(value)), weight, step)


def on_two_ranks(work: Callable[[Collector, int], Any]) -> list[Any]:
    return together(lambda rank, _: work(Collector(ThreadDist(rank)), rank))


def test_an_epoch_mean_is_weighted_and_forgotten_afterwards() -> None:
    collector = Collector(Alone())
    for value, weight in ((1, 4), (6, 1)):
        log(collector, "x", value, weight)
    assert collector.publish_epoch().callback == {"x": 2.0}
    assert collector.publish_epoch() == Published()


def test_sums_are_kept_in_double_precision() -> None:
    collector = Collector(Alone())
    for value in [1e8] + [1.0] * 100:
        log(collector, "x", value, reduce="sum")
    assert collector.publish_epoch().callback["x"] == 1e8 + 100


def test_a_mean_without_weight_is_nan_and_not_an_error() -> None:
    collector = Collector(Alone())
    log(collector, "x", 3.0, weight=0)
    assert math.isnan(collector.publish_epoch().callback["x"])


def test_only_numbers_of_the_step_asked_for_are_published() -> None:
    collector = Collector(Alone())
    log(collector, "old", 1.0, step=1, on_step=True, on_epoch=False)
    log(collector, "new", 2.0, step=2, on_step=True, on_epoch=False)
    assert collector.publish_step(2).callback == {"new": 2.0}
    assert collector.publish_step().callback == {"old": 1.0, "new": 2.0}
    assert collector.publish_step(3).callback == {}


def test_flags_and_reductions_of_a_name_are_fixed_by_its_first_use() -> None:
    collector = Collector(Alone())
    log(collector, "x", 1.0)
    for other in ({"on_step": True}, {"reduce": "sum"}):
        with pytest.raises(MisconfigurationException, match=r"self.log\('x'\) was called with other"):
            log(collector, "x", 1.0, **other)
    with pytest.raises(MisconfigurationException, match="reduce_fx='median'"):
        log(collector, "y", 1.0, reduce="median")


def test_ranks_that_log_in_another_order_or_other_names() -> None:
    def work(collector: Collector, rank: int) -> dict[str, float]:
        names = [("a", 1.0, 1), ("b", 100.0, 3)]
        for name, value, weight in names if rank else reversed(names):
            log(collector, name, value + rank, weight)
        log(collector, f"only{rank}", rank, 5)
        log(collector, "low", rank, reduce="min")
        log(collector, "high", rank, reduce="max")
        log(collector, "sum", rank + 1, reduce="sum")
        return collector.publish_epoch().callback

    expected = {"a": 1.5, "b": 100.5, "only0": 0.0, "only1": 1.0, "low": 0.0, "high": 1.0, "sum": 3.0}
    assert on_two_ranks(work) == [expected, expected]


def test_ranks_with_other_reductions_of_a_name_all_get_the_error() -> None:
    def work(collector: Collector, rank: int) -> None:
        log(collector, "x", 1.0, reduce="sum" if rank else "mean")
        collector.publish_epoch()

    for found in on_two_ranks(work):
        assert isinstance(found, MisconfigurationException)
        assert "'x' was logged with reduce_fx='mean' on one rank and 'sum' on another" in str(found)


class Total:
    def __init__(self) -> None:
        self.total = 2.0

    def update(self) -> None: ...

    def reset(self) -> None:
        self.total = 0.0

    def compute(self) -> float:
        return self.total


def test_a_metric_that_one_rank_had_no_batch_for_is_computed_there_too() -> None:
    def work(collector: Collector, rank: int) -> Any:
        metric = Total()
        collector.find_metric = {"mine": metric}.__getitem__
        if rank == 1:
            entry = collector.entry("m", None, "mean", False, True, False, True)
            entry.metric, entry.path = metric, "mine"
        return collector.publish_epoch().callback, metric.total

    assert on_two_ranks(work) == [({"m": 2.0}, 0.0)] * 2


def test_a_metric_that_the_other_rank_cannot_find() -> None:
    def work(collector: Collector, rank: int) -> Any:
        if rank == 1:
            collector.entry("m", None, "mean", False, True, False, True).metric = Total()
        return collector.publish_epoch().callback

    error, _ = on_two_ranks(work)
    assert isinstance(error, MisconfigurationException)
    assert "'m' was logged as a metric object on another rank" in str(error)
    assert "metric_attribute=" in str(error)


def test_state_of_a_mid_epoch_resume_and_of_another_number_of_ranks() -> None:
    states = []
    for value, weight in ((1, 4), (6, 1)):
        collector = Collector(Alone())
        log(collector, "mean", value, weight)
        log(collector, "low", value, reduce="min")
        log(collector, "high", value, reduce="max")
        log(collector, "step_only", value, on_step=True, on_epoch=False)
        states.append(collector.state_dict())
    states.append({})
    resumed = Collector(Alone())
    resumed.load_state_dict(merge_states(states), torch.device("cpu"))
    log(resumed, "mean", 8, 1)
    assert resumed.publish_epoch().callback == {"mean": 3.0, "low": 1.0, "high": 6.0}


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        ([torch.zeros(4), torch.zeros(2)], 4),
        ({"id": "abc", "x": torch.zeros(5)}, 5),
        (("text", {"y": [torch.zeros(6)]}), 6),
        ("text", 1),
        (7, 1),
        ([], 1),
        ({}, 1),
    ],
)
def test_the_size_of_a_batch_is_that_of_its_first_tensor(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size


def test_what_a_metric_is() -> None:
    assert is_metric(Total())
    assert not is_metric(torch.zeros(()))
    assert not is_metric({"a": 1})


def test_joined_numbers_of_two_publications() -> None:
    first, second = Published({"a": 1.0, "b": 1.0}, {"a": 1.0}), Published({"b": 2.0}, {}, {"b": 2.0}, {"b": None})
    assert first.join(second) == Published({"a": 1.0, "b": 2.0}, {"a": 1.0}, {"b": 2.0}, {"b": None})
