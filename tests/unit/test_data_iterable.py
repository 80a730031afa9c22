"""Iterable data sets: shards by rank and worker, unknown lengths, positions, keyed draws, agreement."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.helpers.datasets import Numbers, evaluate, positions, source, together, train
from trainer.data.selfsharding import shards_itself
from trainer.errors import DataError, MisconfigurationException


def firsts(batches: list[Any]) -> list[list[float]]:
    """Return the numbers of the samples alone, without their draws."""
    return [[row[0] for row in batch] for batch in batches]


class Ranked(IterableDataset):
    """Looks at the rank itself, as many do; `rank` stands in for a process group."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        self.sizes, self.rank = sizes, rank

    def __iter__(self) -> Iterator[int]:
        rank = dist.get_rank() if dist.is_initialized() else self.rank
        yield from range(self.sizes[rank])


class Split(IterableDataset):
    """Shards by worker itself."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, self.size, 1 if info is None else info.num_workers)


class Stateful(Numbers):
    """Keeps its own position and remembers how many items it has made."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at, self.made = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.size:
            self.at += 1
            self.made += 1
            yield torch.tensor([self.at - 1, torch.rand(1, dtype=torch.float64).item()], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "history": [self.at]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("size", [1, 7, 8, 9])
@pytest.mark.parametrize("flag", [True, False])
def test_batches_and_draws_do_not_depend_on_workers(size: int, flag: bool) -> None:
    read = train if flag else evaluate
    runs = [read(source(DataLoader(Numbers(size), batch_size=2, num_workers=w), train=flag)) for w in (0, 1, 2)]
    assert runs[0] == runs[1] == runs[2]
    assert sum(firsts(runs[0]), []) == list(range(size))
    draws = torch.tensor(sum(runs[0], []))[:, 1:]
    assert all(len(column.unique()) == size for column in draws.T)


@pytest.mark.parametrize("size", [1, 6, 7, 8, 9, 13])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_ranks_share_the_stream_as_one_large_batch(size: int, workers: int) -> None:
    one = train(source(DataLoader(Numbers(size), batch_size=4)))
    ranks, counts, weights = [], [], []
    for rank in range(2):
        made = source(DataLoader(Numbers(size), batch_size=2, num_workers=workers), rank, 2)
        groups = list(made.epoch(0).groups(1))
        made.close()
        ranks.append([b.tolist() for g in groups for b in g.batches])
        counts.append([g.counts[0] for g in groups])
        weights.append([g.weights for g in groups])
        assert [g.last for g in groups] == [False] * (len(groups) - 1) + [True]
    assert len(ranks[0]) == len(ranks[1]) == len(one)
    for j, batch in enumerate(one):
        assert [ranks[r][j][: counts[r][j]] for r in range(2)] == [batch[0::2], batch[1::2]]
        expected = [c[j] * 2 / len(batch) for c in counts]
        assert [w[j] or [1.0] for w in weights] == [[e] for e in expected]


@pytest.mark.parametrize("size, world", [(7, 2), (8, 2), (5, 3), (1, 2)])
@pytest.mark.parametrize("workers", [0, 2])
def test_c15_evaluation_sees_every_item_once_by_whole_batches(size: int, world: int, workers: int) -> None:
    one = evaluate(source(DataLoader(Numbers(size), batch_size=2), train=False))
    ranks = [
        evaluate(source(DataLoader(Numbers(size), batch_size=2, num_workers=workers), r, world, train=False)) for r in range(world)
    ]
    assert [ranks[j % world][j // world] for j in range(len(one))] == one
    assert sum(map(len, ranks)) == len(one)


def test_drop_last_and_no_batching() -> None:
    assert firsts(train(source(DataLoader(Numbers(7), batch_size=2, drop_last=True)))) == [[0, 1], [2, 3], [4, 5]]
    assert firsts(train(source(DataLoader(Numbers(7), batch_size=2, drop_last=True), 1, 2))) == [[1, 3]]
    assert firsts(evaluate(source(DataLoader(Numbers(7), batch_size=2, drop_last=True), 1, 2, train=False))) == [[2, 3]]
    assert [row[0] for row in train(source(DataLoader(Numbers(5), batch_size=None), 1, 2))] == [1, 3, 4]
    group = list(source(DataLoader(Numbers(5), batch_size=None), 1, 2).epoch(0).groups(1))[-1]
    assert (group.weights, group.counts) == ([0.0], [0])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_at_every_position_gives_the_tail_with_its_draws(workers: int) -> None:
    loader = DataLoader(Numbers(11), batch_size=2, num_workers=workers)
    whole = train(source(loader), 1)
    places = positions(source(loader), 1, accumulate=2)
    assert places == [{"samples": 4}, {"samples": 8}, {"samples": 11}]
    for n, place in zip((2, 4, 6), places, strict=True):
        assert train(source(loader), 1, place) == whole[n:]
    assert [train(source(loader, r, 2), 1, {"samples": 4}) for r in range(2)] == [
        [sum(whole[2:4], [])[0::2], sum(whole[4:], [])[0::2]],
        [sum(whole[2:4], [])[1::2], sum(whole[4:], [])[1::2]],
    ]


def test_draining_is_shown() -> None:
    seen = []
    made = source(DataLoader(Numbers(6), batch_size=2), drain_progress=lambda done, total: seen.append((done, total)))
    train(made, 0, {"samples": 4})
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_data_set_keeps_its_own_position(workers: int) -> None:
    whole = train(source(DataLoader(Stateful(9), batch_size=2, num_workers=workers)))
    places = positions(source(DataLoader(Stateful(9), batch_size=2, num_workers=workers)), accumulate=2)
    assert places[0] == {"loader": {"at": 4, "history": [4]}, "samples": 4}
    data = Stateful(9)
    assert train(source(DataLoader(data, batch_size=2, num_workers=workers)), 0, places[0]) == whole[2:]
    if workers == 0:
        assert data.made == 5  # nothing drained
    assert train(source(DataLoader(Stateful(9), batch_size=2, num_workers=workers)), 0, {"samples": 4}) == whole[2:]


def test_a_data_set_that_splits_itself_by_worker_is_not_split_again() -> None:
    made = DataLoader(Split(10), batch_size=2, num_workers=2)
    whole = train(source(made))
    assert whole == [[0, 2], [1, 3], [4, 6], [5, 7], [8], [9]]
    assert positions(source(made)) == [{"batches": n} for n in range(1, 7)]
    seen = []
    assert train(source(made, drain_progress=lambda *at: seen.append(at)), 0, {"batches": 3}) == whole[3:]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    ranks = [train(source(made, r, 2)) for r in range(2)]
    assert ranks == [[[0, 4], [1, 5], [8], [9]], [[2, 6], [3, 7], [8], [9]]]
    assert train(source(DataLoader(Split(3), batch_size=1))) == [[0], [1], [2]]


def test_a_worker_init_fn_that_splits_counts_as_splitting() -> None:
    class Range(IterableDataset):
        start, stop = 0, 6

        def __iter__(self) -> Iterator[int]:
            yield from range(self.start, self.stop)

    def split(worker: int) -> None:
        data = get_worker_info().dataset
        data.start, data.stop = worker * 3, worker * 3 + 3

    assert sorted(sum(train(source(DataLoader(Range(), batch_size=2, num_workers=2, worker_init_fn=split))), [])) == list(range(6))


def test_who_shards() -> None:
    class Inner(Split):
        pass

    class Outer(IterableDataset):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[int]:
            yield from self.inner

    class Variable(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield int(__import__("os").environ["RANK"])

    class Helped(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield my_rank()

    assert shards_itself(Numbers(3)) == (False, False)
    assert shards_itself(Split(3)) == shards_itself(Outer(Inner(3))) == (False, True)
    assert shards_itself(Ranked((1,), 0)) == shards_itself(Variable()) == shards_itself(Helped()) == (True, False)


def my_rank() -> int:
    return dist.get_rank()


def test_c14_the_ranks_stop_together_with_the_first() -> None:
    def work(rank: int, agree: Any) -> Any:
        made = source(DataLoader(Ranked((3, 5), rank), batch_size=1), rank, 2, agree=agree)
        run = made.epoch(0)
        return [(g.last, [b.tolist() for b in g.batches], g.weights, run.position) for g in run.groups(1)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = together(work)
    expected = [(n == 2, [[n]], None, {"batches": n + 1}) for n in range(3)]
    assert first == second == expected
    assert len(caught) == 1 and "another rank ran out of data first" in str(caught[0].message)


def test_ranks_stop_together_in_the_middle_of_a_window() -> None:
    def work(rank: int, agree: Any) -> Any:
        made = source(DataLoader(Ranked((5, 9), rank), batch_size=1), rank, 2, agree=agree)
        return [(g.size, g.last) for g in made.epoch(0).groups(3)]

    with pytest.warns(UserWarning, match="another rank"):
        assert together(work) == [[(3, False), (2, True)], [(3, False), (3, True)]]


def test_a_rank_without_any_batch_is_an_error_on_all() -> None:
    def work(rank: int, agree: Any) -> Any:
        return train(source(DataLoader(Ranked((0, 5), rank), batch_size=1), rank, 2, agree=agree))

    with pytest.warns(UserWarning, match="another rank"):
        errors = together(work)
    assert all(isinstance(e, DataError) and "gave no batch" in str(e) for e in errors)


def test_shard_false_reads_all_on_every_rank() -> None:
    assert firsts(train(source(DataLoader(Numbers(4), batch_size=2), 1, 2, shard=False))) == [[0, 1], [2, 3]]


def test_c42_a_declared_length_is_a_hint() -> None:
    made = source(DataLoader(Numbers(6, declared=8), batch_size=1))
    assert (made.num_batches, made.hint) == (None, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            groups = list(made.epoch(epoch).groups(1))
            assert len(groups) == 6 and [g.last for g in groups] == [False] * 5 + [True]
    assert [str(w.message) for w in caught] == [
        "The training loader 0 (DataLoader) declares a length of 8 batches and gave 6. The epoch has 6; correct the data set's __len__."
    ]


def test_c42_a_data_set_longer_than_declared_is_read_to_its_end() -> None:
    with pytest.warns(UserWarning, match="declares a length of 2 batches and gave 3"):
        assert len(train(source(DataLoader(Numbers(6, declared=4), batch_size=2)))) == 3


def test_limits_of_a_stream() -> None:
    loader = DataLoader(Numbers(9, declared=9), batch_size=2)
    assert len(train(source(loader, limit=2))) == 2
    assert len(train(source(loader, limit=0.6))) == 3
    assert len(train(source(loader, limit=3), 0, {"samples": 4})) == 1
    assert len(train(source(DataLoader(Numbers(99), batch_size=2, num_workers=2), limit=3))) == 3
    groups = list(source(loader, limit=3).epoch(0).groups(2))
    assert [(g.size, g.last) for g in groups] == [(2, False), (1, True)]
    with pytest.raises(MisconfigurationException, match="no known length"):
        source(DataLoader(Numbers(9), batch_size=2), limit=0.5)


def test_epochs_and_set_epoch_reach_workers() -> None:
    class Epochs(IterableDataset):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            yield from [self.epoch] * 4

    for workers, persistent in ((0, False), (2, False), (2, True)):
        made = source(DataLoader(Epochs(), batch_size=2, num_workers=workers, persistent_workers=persistent))
        for epoch in (0, 3):
            assert [b.tolist() for g in made.epoch(epoch).groups(1) for b in g.batches] == [[epoch] * 2] * 2
        made.close()


def test_an_abandoned_pass_does_not_reach_the_next() -> None:
    made = source(DataLoader(Numbers(20), batch_size=2, num_workers=2, persistent_workers=True))
    first = made.epoch(0).groups(1)
    next(first)
    first.close()
    again = [b.tolist() for g in made.epoch(0).groups(1) for b in g.batches]
    made.close()
    assert again == train(source(DataLoader(Numbers(20), batch_size=2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_generators_are_untouched(workers: int) -> None:
    made = source(DataLoader(Numbers(6), batch_size=2, num_workers=workers))
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    before = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    for _ in made.epoch(0).groups(2):
        assert (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())) == before
    made.close()


def test_an_empty_stream_is_an_error() -> None:
    for workers in (0, 1):
        made = source(DataLoader(Numbers(0), batch_size=2, num_workers=workers))
        with pytest.raises(DataError, match="gave no batch"):
            train(made)
        with pytest.raises(DataError, match="gave no batch"):
            evaluate(source(DataLoader(Numbers(0), batch_size=2), train=False))


def test_a_workers_error_reaches_the_caller() -> None:
    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise KeyError("line 2 is damaged")

    for workers in (0, 2):
        made = source(DataLoader(Broken(), batch_size=1, num_workers=workers))
        with pytest.raises(KeyError, match="line 2 is damaged"):
            train(made)


def test_a_position_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="counts 'samples'"):
        source(DataLoader(Numbers(8), batch_size=3)).epoch(0, {"batches": 1})
    with pytest.raises(DataError, match="counts 'samples'"):
        source(DataLoader(Numbers(8), batch_size=3)).epoch(0, {"loader": {"at": 3}})
