"""Map-style loaders: order, shards, positions, keyed draws, workers."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from tests.helpers.datasets import Drawing, Plain, evaluate, numbers, positions, source, together, train
from trainer.data.fetch import MapFetch, fast_tensors
from trainer.errors import DataError, MisconfigurationException


def flat(batches: list[list[Any]]) -> list[Any]:
    return [x for batch in batches for x in batch]


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in numpy.random.get_state()]]


class Ordered(Sampler):
    """A user's sampler: the order it was given."""

    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


class Shuffled(Ordered):
    """A user's sampler that draws from the global generator."""

    def __iter__(self) -> Any:
        return iter([self.order[i] for i in torch.randperm(len(self.order)).tolist()])


# -- order ------------------------------------------------------------------------------------------------------------


def test_shuffling_is_a_function_of_seed_and_epoch() -> None:
    loader = DataLoader(numbers(20), batch_size=4, shuffle=True)
    first, again = source(loader), source(loader)
    torch.manual_seed(1)
    a = train(first, 0)
    torch.manual_seed(2)
    assert train(again, 0) == a
    b = train(source(loader), 1)
    c = train(source(loader, seed=8), 0)
    assert sorted(flat(a)) == sorted(flat(b)) == list(range(20))
    assert len({str(a), str(b), str(c)}) == 3
    assert train(source(loader, index=1), 0) != a


@pytest.mark.parametrize(
    "sampler",
    [
        lambda d: SubsetRandomSampler(range(5, 15)),
        lambda d: WeightedRandomSampler([1.0] * 20, 12),
        lambda d: RandomSampler(d, replacement=True, num_samples=9),
        lambda d: RandomSampler(d, num_samples=33),
        lambda d: Shuffled(list(range(20))),
    ],
)
def test_any_samplers_order_is_pure_and_draws_nothing_outside(sampler: Any) -> None:
    data = numbers(20)
    made = sampler(data)
    before = states()
    runs = [train(source(DataLoader(data, batch_size=3, sampler=made)), epoch) for epoch in (0, 1, 0)]
    assert states() == before
    assert runs[0] == runs[2] != runs[1]
    assert len(flat(runs[0])) == len(made)


def test_a_samplers_own_generator_decides_and_stays() -> None:
    data = numbers(12)
    orders = {}
    for seed in (1, 2, 1):
        generator = torch.Generator().manual_seed(seed)
        torch.randperm(5, generator=generator)  # already used: only its seed counts
        state = generator.get_state()
        loader = DataLoader(data, batch_size=3, shuffle=True, generator=generator)
        made = source(loader)
        order = train(made, 3)
        assert torch.equal(generator.get_state(), state)
        assert orders.setdefault(seed, order) == order
    assert orders[1] != orders[2]
    generator = torch.Generator().manual_seed(1)
    subset = SubsetRandomSampler(range(12), generator=generator)
    state = generator.get_state()
    made = source(DataLoader(data, batch_size=3, sampler=subset))
    assert train(made, 0) != train(made, 1)
    assert torch.equal(generator.get_state(), state)


def test_set_epoch_reaches_samplers() -> None:
    seen = []

    class Counting(Ordered):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)

    data = numbers(4)
    train(source(DataLoader(data, batch_size=2, sampler=Counting([0, 1, 2, 3]))), 5)
    train(source(DataLoader(data, batch_sampler=BatchSampler(Counting([0, 1, 2, 3]), 2, False))), 6)
    assert seen == [5, 6]


def test_an_endless_sampler_ends_at_its_length() -> None:
    class Endless(Ordered):
        def __iter__(self) -> Any:
            while True:
                yield from self.order

    assert train(source(DataLoader(numbers(4), batch_size=2, sampler=Endless([3, 1, 0, 2])))) == [[3, 1], [0, 2]]


def test_shuffle_false_takes_the_order_of_the_data() -> None:
    data = numbers(6)
    assert train(source(DataLoader(data, batch_size=2, shuffle=True), shuffle=False)) == [[0, 1], [2, 3], [4, 5]]
    subset = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([5, 1, 3]))
    assert train(source(subset, shuffle=False)) == [[5, 1], [3]]
    mine = DataLoader(data, batch_size=2, sampler=Ordered([5, 4, 0]))
    assert train(source(mine, shuffle=False)) == [[5, 4], [0]]
    distributed = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0))
    assert train(source(distributed, shuffle=False)) == [[0, 1], [2, 3], [4, 5]]


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_c20_a_users_order_alternates_between_ranks(workers: int) -> None:
    loader = DataLoader(Plain(8), batch_size=1, sampler=Ordered([7, 6, 5, 4, 3, 2, 1, 0]), num_workers=workers)
    assert flat(train(source(loader, 0, 2))) == [7, 5, 3, 1]
    assert flat(train(source(loader, 1, 2))) == [6, 4, 2, 0]


@pytest.mark.parametrize("make", [numbers, Plain])
@pytest.mark.parametrize("size", [8, 9, 11, 13])
def test_two_ranks_make_the_large_batches_of_one(make: Any, size: int) -> None:
    one = train(source(DataLoader(make(size), batch_size=4, shuffle=True)), 2)
    groups = [list(source(DataLoader(make(size), batch_size=2, shuffle=True), r, 2).epoch(2).groups(1)) for r in range(2)]
    assert len(groups[0]) == len(groups[1]) == len(one)
    ranks = [train(source(DataLoader(make(size), batch_size=2, shuffle=True), r, 2), 2) for r in range(2)]
    for j, batch in enumerate(one):
        own = [ranks[r][j][: groups[r][j].counts[0]] for r in range(2)]
        assert own[0] == batch[0::2] and own[1] == batch[1::2]
    weights = [g[-1].weights for g in groups]
    tail = size % 4
    if tail:
        split = [(tail + 1) // 2, tail // 2]
        assert weights == ([[n * 2 / tail] for n in split] if split[0] != split[1] else [None, None])
    else:
        assert weights == [None, None]


def test_a_rank_without_a_sample_repeats_one_with_weight_zero() -> None:
    loader = DataLoader(numbers(5), batch_size=2)
    group = list(source(loader, 1, 2).epoch(0).groups(1))[-1]
    assert (group.weights, group.counts, group.last) == ([0.0], [0], True)
    assert train(source(loader, 1, 2)) == [[1, 3], [4]]
    assert train(source(DataLoader(Plain(5), batch_size=2), 1, 2)) == [[1, 3], [4]]


def test_groups_say_size_weights_counts_and_last() -> None:
    made = source(DataLoader(numbers(9), batch_size=2))
    assert made.num_batches == 5
    run = made.epoch(0)
    assert run.remaining == 5
    seen = [(g.size, g.weights, g.last, g.counts, len(list(g.batches))) for g in run.groups(2)]
    assert seen == [(2, None, False, [2, 2], 2), (2, None, False, [2, 2], 2), (1, None, True, [1], 1)]
    last = list(source(DataLoader(numbers(7), batch_size=2)).epoch(0).groups(4))[0]
    assert last.weights == pytest.approx([2 / 7, 2 / 7, 2 / 7, 1 / 7])


def test_a_group_left_early_does_not_shift_the_next() -> None:
    starts = [next(iter(g.batches))[0].item() for g in source(DataLoader(numbers(6), batch_size=1)).epoch(0).groups(3)]
    assert starts == [0, 3]


@pytest.mark.parametrize("size, batch, world", [(5, 2, 2), (1, 2, 2), (7, 1, 2), (10, 3, 3), (4, 2, 4)])
@pytest.mark.parametrize("make", [numbers, Plain])
def test_c15_c26_evaluation_sees_every_sample_once_in_order(make: Any, size: int, batch: int, world: int) -> None:
    one = evaluate(source(DataLoader(make(size), batch_size=batch), train=False))
    ranks = [evaluate(source(DataLoader(make(size), batch_size=batch), r, world, train=False)) for r in range(world)]
    assert [ranks[j % world][j // world] for j in range(len(one))] == one
    assert sorted(flat(flat(ranks))) == list(range(size))
    made = [source(DataLoader(make(size), batch_size=batch), r, world, train=False).num_batches for r in range(world)]
    assert made == [len(r) for r in ranks]


def test_drop_last_drops_an_incomplete_global_batch() -> None:
    loader = DataLoader(numbers(11), batch_size=2, drop_last=True)
    assert flat(flat([train(source(loader, r, 2)) for r in range(2)])) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert source(loader, 0, 2).num_batches == 2
    assert [source(loader, r, 2, train=False).num_batches for r in range(2)] == [3, 2]
    with pytest.raises(MisconfigurationException, match=r"11 samples, fewer than one batch of all ranks \(12\).*drop_last=False"):
        source(DataLoader(numbers(11), batch_size=6, drop_last=True), 0, 2)


def test_a_distributed_sampler_and_shard_false_are_taken_as_they_are() -> None:
    data = Plain(8)
    for rank in range(2):
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        made = source(loader, rank, 2)
        assert made.num_batches == 2
        assert positions(made) == [{"samples": 4}, {"samples": 8}]
        assert train(source(loader, rank, 2)) == [[rank, rank + 2], [rank + 4, rank + 6]]
        assert train(source(loader, rank, 2), 0, {"samples": 4}) == [[rank + 4, rank + 6]]
        assert train(source(DataLoader(data, batch_size=4), rank, 2, shard=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_sampler_that_asks_for_its_rank_is_taken_as_it_is() -> None:
    class Alike(Ordered):
        rank, num_replicas = 1, 2

    class Asking(Ordered):
        def __iter__(self) -> Any:
            return iter(self.order if not torch.distributed.is_initialized() else self.order[torch.distributed.get_rank() :: 2])

    for kind in (Alike, Asking):
        loader = DataLoader(Plain(8), batch_size=2, sampler=kind([1, 3, 5, 7]))
        assert train(source(loader, 1, 2)) == [[1, 3], [5, 7]]
        batched = DataLoader(Plain(8), batch_sampler=BatchSampler(kind([1, 3, 5]), 2, False))
        assert train(source(batched, 1, 2)) == [[1, 3], [5]]


def test_ranks_with_orders_of_their_own_keep_to_the_shortest() -> None:
    def work(rank: int, agree: Any) -> Any:
        loader = DataLoader(numbers(9), batch_size=1, sampler=Ordered(list(range((3, 5)[rank]))))
        made = source(loader, rank, 2, shard=False, agree=agree)
        return made.num_batches, train(made)

    assert together(work) == [(3, [[0], [1], [2]]), (3, [[0], [1], [2]])]


def test_a_users_batch_sampler_is_cut_by_batches() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9]]
    loader = DataLoader(Plain(10), batch_sampler=Ordered(batches))
    assert train(source(loader)) == batches
    assert train(source(loader, 0, 2)) == [[0, 1, 2], [4, 5], [9]]
    assert train(source(loader, 1, 2)) == [[3], [6, 7, 8], [9]]
    groups = [list(source(loader, r, 2).epoch(0).groups(2)) for r in range(2)]
    assert [(g.size, g.weights, g.counts) for g in groups[0]] == [(2, None, None), (1, [2.0], None)]
    assert [(g.size, g.weights, g.counts) for g in groups[1]] == [(2, None, None), (1, [0.0], [0])]
    assert [evaluate(source(loader, r, 2, train=False)) for r in range(2)] == [[[0, 1, 2], [4, 5], [9]], [[3], [6, 7, 8]]]
    assert positions(source(loader, 0, 2)) == [{"batches": 2}, {"batches": 4}, {"batches": 5}]
    assert train(source(loader), 0, {"batches": 2}) == batches[2:]
    own = DataLoader(Plain(6), batch_sampler=BatchSampler(SequentialSampler(range(6)), 2, False))
    assert train(source(own, 1, 2)) == [[1, 3], [5]]  # torch's own BatchSampler says no more than sampler and batch_size


def test_without_batching_an_entry_is_an_item() -> None:
    loader = DataLoader(Plain(5), batch_size=None)
    assert train(source(loader)) == [0, 1, 2, 3, 4]
    assert train(source(loader, 1, 2)) == [1, 3, 4]
    group = list(source(loader, 1, 2).epoch(0).groups(1))[-1]
    assert (group.weights, group.counts) == ([0.0], [0])
    assert evaluate(source(loader, 1, 2, train=False)) == [1, 3]

    class Many(Plain):
        def __getitem__(self, index: list[int]) -> list[int]:
            return [i * 10 for i in index]

    data = Many(4)
    assert train(source(DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 2, False)))) == [[0, 10], [20, 30]]


def test_a_list_of_batches_is_cut_by_batches() -> None:
    batches = [torch.tensor([i]) for i in range(5)]
    assert train(source(batches)) == [[0], [1], [2], [3], [4]]
    assert train(source(batches, 1, 2)) == [[1], [3], [4]]
    assert evaluate(source(tuple(batches), 1, 2, train=False)) == [[1], [3]]
    assert source(batches, 1, 2, train=False).num_batches == 2
    assert train(source(batches), 0, {"batches": 3}) == [[3], [4]]


# -- position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [numbers, Drawing])
def test_c01_c02_resume_at_every_position(make: Any, workers: int) -> None:
    loader = DataLoader(make(10), batch_size=1, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    whole = train(source(loader), 1, accumulate=3)
    places = positions(source(loader), 1, accumulate=3)
    assert places == [{"samples": 3}, {"samples": 6}, {"samples": 9}, {"samples": 10}]
    for place in [{"samples": 0}, *places]:
        assert train(source(loader), 1, place) == whole[place["samples"] :]


@pytest.mark.parametrize("make", [numbers, Drawing])
def test_resume_at_another_world_size(make: Any) -> None:
    loader = DataLoader(make(24), batch_size=2, shuffle=True)
    order = flat(train(source(loader), 1))
    for place in positions(source(loader, 0, 2), 1):
        for world in (1, 2, 3):
            ranks = [train(source(loader, r, world), 1, place) for r in range(world)]
            weights = [list(source(loader, r, world).epoch(1, place).groups(1)) for r in range(world)]
            rest = []
            for j in range(len(ranks[0])):
                parts = [ranks[r][j][: weights[r][j].counts[0]] for r in range(world)]
                size = sum(map(len, parts))
                rest += [parts[i % world][i // world] for i in range(size)]
            assert rest == order[place["samples"] :]


def test_c13_no_skipped_sample_is_loaded() -> None:
    data = Plain(10_000)
    assert flat(train(source(DataLoader(data, batch_size=4)), 0, {"samples": 9_000})) == list(range(9_000, 10_000))
    assert data.read == list(range(9_000, 10_000))


def test_position_counts_groups_handed_out_not_batches_prefetched() -> None:
    made = source(DataLoader(numbers(8), batch_size=1, num_workers=2))
    run = made.epoch(0)
    assert run.position == {"samples": 0}
    groups = run.groups(2)
    next(groups)
    assert run.position == {"samples": 2}
    next(groups)
    assert run.position == {"samples": 4}
    made.close()


def test_a_position_at_the_end_gives_nothing() -> None:
    made = source(DataLoader(numbers(8), batch_size=3))
    run = made.epoch(0, {"samples": 8})
    assert run.remaining == 0
    assert list(run.groups(2)) == []


def test_a_position_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="counts 'samples'"):
        source(DataLoader(numbers(8), batch_size=3)).epoch(0, {"batches": 1})


def test_a_limit_is_kept_on_resume() -> None:
    loader = DataLoader(numbers(20), batch_size=2)
    assert source(loader, limit=3).num_batches == 3
    assert train(source(loader, limit=3)) == [[0, 1], [2, 3], [4, 5]]
    assert train(source(loader, limit=3), 0, {"samples": 4}) == [[4, 5]]
    assert train(source(loader, 1, 2, limit=2)) == [[1, 3], [5, 7]]
    assert source(loader, limit=0.25).num_batches == 2
    assert source(loader, limit=1.0).num_batches == source(loader, limit=99).num_batches == 10
    assert train(source(loader, limit=0)) == []
    assert [source(loader, r, 3, train=False, limit=2).num_batches for r in range(3)] == [2, 2, 2]


# -- draws ------------------------------------------------------------------------------------------------------------


def test_c03_draws_do_not_depend_on_workers_or_resume() -> None:
    runs = []
    for workers in (0, 1, 2):
        loader = DataLoader(Drawing(11), batch_size=3, shuffle=True, num_workers=workers)
        whole = train(source(loader), 1)
        runs.append(whole)
        assert train(source(loader), 1, {"samples": 6}) == whole[2:]
    assert runs[0] == runs[1] == runs[2]


def test_draws_of_two_ranks_are_those_of_one() -> None:
    one = flat(train(source(DataLoader(Drawing(12), batch_size=4, shuffle=True)), 1))
    ranks = [flat(train(source(DataLoader(Drawing(12), batch_size=2, shuffle=True), r, 2), 1)) for r in range(2)]
    assert [ranks[i % 2][i // 2] for i in range(12)] == one


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("own", [False, True])
def test_c19_no_stream_repeats(workers: int, own: bool) -> None:
    seen = []
    for rank in range(2):
        data = Drawing(8)
        sampler = DistributedSampler(data, 2, rank) if own else None
        made = source(DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers), rank, 2)
        for epoch in range(3):
            seen += [sample[1:] for sample in flat([b for g in made.epoch(epoch).groups(1) for b in g.batches])]
        made.close()
    values = torch.stack(seen)
    assert values.shape == (24, 3)
    for column in values.T:
        assert len(column.unique()) == 24


def test_training_and_evaluation_draw_apart() -> None:
    loader = DataLoader(Drawing(4), batch_size=1)
    assert train(source(loader)) != evaluate(source(loader, train=False))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_generators_are_untouched(workers: int) -> None:
    made = source(DataLoader(Drawing(6), batch_size=2, shuffle=True, num_workers=workers))
    run = made.epoch(0)
    torch.manual_seed(3)
    numpy.random.seed(3)
    random.seed(3)
    numpy.random.randn()  # leaves a cached second normal
    before = states()
    for group in run.groups(1):
        assert states() == before
        list(group.batches)
        assert states() == before
    made.close()
    assert states() == before


def test_a_collate_that_draws_is_keyed() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor([*map(float, samples), random.random(), numpy.random.rand(), torch.rand(1).item()])

    runs = [train(source(DataLoader(numbers(6).tensors[0], batch_size=2, collate_fn=collate, num_workers=w)), 1) for w in (0, 2)]
    assert runs[0] == runs[1]
    assert train(source(DataLoader(range(6), batch_size=2, collate_fn=collate)), 1, {"samples": 2}) == runs[0][1:]
    assert len({b[-1] for b in runs[0]}) == 3


def test_getitems_is_used_and_keyed_by_the_batch() -> None:
    class Many(Drawing):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            noise = torch.rand(len(indices), dtype=torch.float64)
            return [torch.tensor([i, n], dtype=torch.float64) for i, n in zip(indices, noise.tolist(), strict=True)]

    runs = [train(source(DataLoader(Many(6), batch_size=2, num_workers=w))) for w in (0, 1)]
    assert runs[0] == runs[1] and [row[0] for row in flat(runs[0])] == list(range(6))
    assert train(source(DataLoader(Many(6), batch_size=2)), 0, {"samples": 4}) == runs[0][2:]


# -- workers and fetching ---------------------------------------------------------------------------------------------


class Told(Dataset):
    """Sample i is an attribute that worker_init_fn sets, and the worker's seed."""

    told = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.told, get_worker_info().seed


def tell(worker: int) -> None:
    get_worker_info().dataset.told = 10 + worker


def test_worker_init_fn_sees_the_users_data_set() -> None:
    loader = DataLoader(Told(), batch_size=1, num_workers=2, worker_init_fn=tell)
    seeds = set()
    for rank in range(2):
        made = source(loader, rank, 2)
        for epoch in range(2):
            batches = [b for g in made.epoch(epoch).groups(1) for b in g.batches]
            assert [b[0].item() for b in batches] == [10, 11]
            seeds |= {b[1].item() for b in batches}
        made.close()
    assert len(seeds) == 8  # no two of ranks, workers and epochs share a base seed


def test_persistent_workers_survive_epochs_and_an_abandoned_one() -> None:
    class Pid(Plain):
        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, get_worker_info().id

    made = source(DataLoader(Pid(8), batch_size=2, num_workers=2, persistent_workers=True))
    first = made.epoch(0).groups(1)
    list(next(first).batches)
    pids = [w.pid for w in made._loader._iterator._workers]
    first.close()
    for epoch in range(2):
        batches = [b for g in made.epoch(epoch).groups(1) for b in g.batches]
        assert [b[0].tolist() for b in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [w.pid for w in made._loader._iterator._workers] == pids
    made.close()
    made.close()


def test_a_workers_error_reaches_the_caller() -> None:
    class Broken(Plain):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise KeyError("sample 3 is damaged")
            return index

    for workers in (0, 1):
        made = source(DataLoader(Broken(6), batch_size=2, num_workers=workers))
        with pytest.raises(KeyError, match="sample 3 is damaged"):
            for group in made.epoch(0).groups(1):
                list(group.batches)
        made.close()


class Subclassed(DataLoader):
    """A DataLoader whose iteration is torch's own."""


def test_a_subclass_that_iterates_as_torch_does_is_sharded() -> None:
    assert train(source(Subclassed(Plain(6), batch_size=1), 1, 2)) == [[1], [3], [5]]


def test_tensor_batches_equal_the_default_collate_to_the_bit() -> None:
    data = TensorDataset(torch.randn(11, 3, 2), torch.arange(11), torch.rand(11) > 0.5)
    loader = DataLoader(data, batch_size=4)
    expected = list(loader)
    for workers in (0, 1):
        for flag in (True, False):
            made = source(DataLoader(data, batch_size=4, num_workers=workers), train=flag)
            got = list(made.epoch(0).batches())
            made.close()
            assert all(type(b) is list and len(b) == 3 for b in got)
            for ours, theirs in zip(got, expected, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    first = next(iter(source(loader).epoch(0).batches()))
    first[0].zero_()
    assert data.tensors[0][:4].abs().sum() > 0  # a batch is a copy, not a view


def test_only_a_plain_tensor_data_set_is_cut_as_a_whole() -> None:
    class Noisy(TensorDataset):
        pass

    whole = torch.zeros(4, 2)
    assert fast_tensors(TensorDataset(whole)) == (whole,)
    assert fast_tensors(Noisy(whole)) is None
    assert fast_tensors(TensorDataset(whole.T)) is None
    assert fast_tensors(TensorDataset(whole.clone().requires_grad_())) is None
    negative = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, sampler=Ordered([-1, 0]))
    assert train(source(negative)) == [[3, 0]]


class Indexing(Dataset):
    def __init__(self, x: Any) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index


class Calling(Indexing):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1)


class Property(Indexing):
    def __init__(self) -> None:
        pass

    @property
    def x(self) -> Any:
        return torch.rand(4)


@pytest.mark.parametrize(
    "data, keyed",
    [
        (numbers(4), False),
        (Subset(numbers(4), [0, 1]), False),
        (ConcatDataset([numbers(2), numbers(2)]), False),
        ([1, 2], False),
        (Indexing(torch.zeros(4)), False),
        (Indexing(numpy.zeros(4)), False),
        (Indexing([1, "a"]), False),
        (Subset(Calling(torch.zeros(4)), [0]), True),
        (ConcatDataset([numbers(2), Calling(torch.zeros(4))]), True),
        (Indexing([Calling(torch.zeros(4))]), True),
        (Indexing(Drawing(4)), True),
        (Calling(torch.zeros(4)), True),
        (Property(), True),
        (Drawing(4), True),
        ([Drawing(3)], True),
    ],
)
def test_seeding_is_left_out_only_where_nothing_can_draw(data: Any, keyed: bool) -> None:
    assert MapFetch(data, list, True, 0).keyed is keyed


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_empty_loader_is_named() -> None:
    for empty in (DataLoader(numbers(0), batch_size=2), []):
        with pytest.raises(DataError, match=r"training loader 0 .* is empty"):
            source(empty)


def test_a_sampler_without_a_length_is_named() -> None:
    class Bare(Sampler):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(MisconfigurationException, match="Bare has no __len__"):
        source(DataLoader(numbers(3), batch_size=2, sampler=Bare()))
