"""Loaders that are read as they are: generators, a user's class, a DataLoader with an `__iter__` of its own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.datasets import Drawing, evaluate, numbers, positions, source, together, train
from trainer.errors import DataError


class Loader:
    """A user's loader: batches in an order it draws, each with a draw."""

    def __init__(self, size: int) -> None:
        self.size, self.started = size, 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        for index in torch.randperm(self.size).tolist():
            yield index, torch.rand(1).item(), random.random()


class Kept(Loader):
    """Keeps its own position."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = self.made = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            self.at += 1
            self.made += 1
            yield self.at - 1, random.random()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Own(DataLoader):
    """A DataLoader that overrides `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 10


def test_order_and_draws_are_functions_of_seed_and_epoch() -> None:
    before = torch.get_rng_state().tolist(), random.getstate()
    runs = [train(source(Loader(6)), epoch) for epoch in (0, 1, 0)]
    assert runs[0] == runs[2] != runs[1]
    assert sorted(b[0] for b in runs[0]) == list(range(6))
    assert len({b[1] for b in runs[0] + runs[1]}) == len({b[2] for b in runs[0] + runs[1]}) == 12
    assert (torch.get_rng_state().tolist(), random.getstate()) == before
    assert train(source(Loader(6), shuffle=False), 0) == train(source(Loader(6), shuffle=False), 1)


def test_batches_go_round_the_ranks() -> None:
    one = train(source(Loader(5)))
    assert [train(source(Loader(5), r, 2)) for r in range(2)] == [one[0::2], [one[1], one[3], one[4]]]
    assert [evaluate(source(Loader(5), r, 2, train=False)) for r in range(2)] == [
        evaluate(source(Loader(5), train=False))[r::2] for r in range(2)
    ]
    groups = [list(source(Loader(5), r, 2).epoch(0).groups(3))[-1] for r in range(2)]
    assert [(g.size, g.weights, g.counts) for g in groups] == [(3, [0.4, 0.4, 0.4], None), (3, [0.4, 0.4, 0.0], [None, None, 0])]


def test_resume_drains_with_the_draws_of_the_whole_run() -> None:
    whole = train(source(Loader(6)), 1)
    assert positions(source(Loader(6)), 1, accumulate=4) == [{"batches": 4}, {"batches": 6}]
    seen = []
    assert train(source(Loader(6), drain_progress=lambda *at: seen.append(at)), 1, {"batches": 4}) == whole[4:]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert train(source(Loader(6), 1, 2), 1, {"batches": 2}) == whole[3::2]
    assert train(source(Loader(6), limit=5), 1, {"batches": 4}) == whole[4:5]


def test_a_loader_with_a_state_is_not_drained() -> None:
    whole = train(source(Kept(7)))
    places = positions(source(Kept(7)), accumulate=2)
    assert places[1] == {"loader": {"at": 4}, "batches": 4}  # taken before the look-ahead
    kept = Kept(7)
    assert train(source(kept), 0, places[1]) == whole[4:]
    assert kept.made == 3
    assert train(source(Kept(7)), 0, {"batches": 4}) == whole[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_with_its_own_iteration(workers: int) -> None:
    loader = Own(numbers(6).tensors[0], batch_size=2, num_workers=workers, shuffle=True)
    torch.manual_seed(0)
    before = torch.get_rng_state().tolist()
    made = source(loader)
    assert (made.num_batches, made.hint) == (None, 3)
    first = train(made)
    assert torch.get_rng_state().tolist() == before
    torch.manual_seed(1)
    assert train(source(loader)) == first
    assert sorted(sum(first, [])) == [0, 10, 20, 30, 40, 50]
    assert train(source(Own(Drawing(6), batch_size=2))) == train(source(Own(Drawing(6), batch_size=2)))


def test_a_generator_can_be_used_once() -> None:
    made = source(x for x in (1, 2, 3))
    assert train(made) == [1, 2, 3]
    with pytest.raises(DataError, match="generator is not iterated a second time"):
        train(made, 1)


def test_ranks_with_different_ends_stop_together() -> None:
    def work(rank: int, agree: Any) -> Any:
        return train(source(range((3, 5)[rank]), rank, 2, shard=False, agree=agree))

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert together(work) == [[0, 1, 2], [0, 1, 2]]


def test_a_wrong_length_is_said_once() -> None:
    class Long(Loader):
        def __len__(self) -> int:
            return 9

    made = source(Long(6))
    with pytest.warns(UserWarning, match="declares a length of 9 batches and gave 6"):
        assert len(train(made)) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(train(made, 1)) == 6


def test_a_position_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="counts 'batches'"):
        source(Loader(8)).epoch(0, {"samples": 1})
