"""The arithmetic of cutting an order: unions, equality with one rank, weights in closed form."""

from __future__ import annotations

import itertools

import pytest

from trainer.data.shard import Cut, window_weights

SIZES = list(itertools.product((1, 2, 5, 7, 8, 12, 13), (1, 2, 3), (1, 2, 3, 4)))


@pytest.mark.parametrize("entries, batch, world", SIZES)
def test_training_ranks_make_the_batches_of_one_rank(entries: int, batch: int, world: int) -> None:
    whole = [set(range(*span)) for span in Cut(0, entries, batch * world, 0, 1, True).spans()]
    ranks = [Cut(0, entries, batch, rank, world, True) for rank in range(world)]
    assert {cut.batches for cut in ranks} == {len(whole)}
    for j, expected in enumerate(whole):
        parts = [list(range(*list(cut.spans())[j])) for cut in ranks]
        own = [part[: cut.local(j)] for part, cut in zip(parts, ranks, strict=True)]
        assert sorted(sum(own, [])) == sorted(expected)
        assert all(len(part) == max(cut.local(j), 1) for part, cut in zip(parts, ranks, strict=True))
        assert {cut.total(j) for cut in ranks} == {len(expected)}


@pytest.mark.parametrize("entries, batch, world", SIZES)
def test_evaluation_is_whole_batches_each_once(entries: int, batch: int, world: int) -> None:
    one = list(Cut(0, entries, batch, 0, 1, False).spans())
    ranks = [list(Cut(0, entries, batch, rank, world, False).spans()) for rank in range(world)]
    assert [one[j] for j in range(len(one))] == [ranks[j % world][j // world] for j in range(len(one))]
    assert sum(map(len, ranks)) == len(one)
    assert [Cut(0, entries, batch, rank, world, False).batches for rank in range(world)] == list(map(len, ranks))


@pytest.mark.parametrize("entries, batch, world", SIZES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_give_the_mean_over_the_real_samples(entries: int, batch: int, world: int, size: int) -> None:
    cuts = [Cut(0, entries, batch, rank, world, True) for rank in range(world)]
    count = cuts[0].batches
    window = range(count - min(size, count), count)
    update, samples = 0.0, []
    for cut in cuts:
        spans = list(cut.spans())
        locals_ = [cut.local(j) for j in window]
        weights = window_weights(locals_, [cut.total(j) for j in window], world) or [1 / len(window)] * len(window)
        for j, weight, local in zip(window, weights, locals_, strict=True):
            part = list(range(*spans[j]))
            update += weight * sum(i * i for i in part) / len(part) / world
            samples += part[:local]
    assert update == pytest.approx(sum(i * i for i in samples) / len(samples), rel=1e-12)
    assert len(set(samples)) == len(samples)


def test_equal_batches_need_no_weights() -> None:
    assert window_weights([2, 2], [4, 4], 2) is None
    assert window_weights([1], [1], 1) is None
    assert window_weights([2, 1], [2, 1], 1) == [2 / 3, 1 / 3]
    assert window_weights([2, 0], [4, 1], 2) == [4 / 5, 0]
    assert window_weights([0], [0], 1) is None


def test_a_pass_may_start_anywhere_at_any_size() -> None:
    cut = Cut(10**9 - 5, 10**9, 2, 1, 2, True)
    assert list(cut.spans()) == [(10**9 - 4, 10**9 - 1, 2), (10**9 - 1, 10**9, 1)]
    assert [cut.local(0), cut.local(1)] == [2, 0]
    assert [cut.used(0), cut.used(1), cut.used(2)] == [10**9 - 5, 10**9 - 1, 10**9]
    assert Cut(4, 4, 2, 0, 1, True).batches == 0
    assert Cut(5, 4, 2, 0, 1, False).batches == 0
