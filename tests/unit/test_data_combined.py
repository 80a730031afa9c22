"""CombinedLoader alone and as the source of a run."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.datasets import Drawing, Numbers, evaluate, numbers, positions, source, train
from trainer.data import CombinedLoader, loaders_of
from trainer.errors import DataError, MisconfigurationException

Pair = namedtuple("Pair", "a b")


def three_two(workers: int = 0) -> dict[str, Any]:
    return {"a": DataLoader(numbers(6), batch_size=2, num_workers=workers), "b": DataLoader(numbers(4), batch_size=2)}


# -- alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("min_size", [({"a": 1, "b": 8}, 0, 0), ({"a": 2, "b": 9}, 1, 0)]),
        ("max_size", [({"a": 1, "b": 8}, 0, 0), ({"a": 2, "b": 9}, 1, 0), ({"a": 3, "b": None}, 2, 0)]),
        ("max_size_cycle", [({"a": 1, "b": 8}, 0, 0), ({"a": 2, "b": 9}, 1, 0), ({"a": 3, "b": 8}, 2, 0)]),
        ("sequential", [(1, 0, 0), (2, 1, 0), (3, 2, 0), (8, 0, 1), (9, 1, 1)]),
    ],
)
def test_modes(mode: str, expected: list[Any]) -> None:
    combined = CombinedLoader({"a": [1, 2, 3], "b": [8, 9]}, mode)
    assert list(combined) == expected
    assert list(combined) == expected
    assert len(combined) == len(expected)
    assert pickle.loads(pickle.dumps(combined)).mode == mode


def test_shapes_limits_and_flattened() -> None:
    assert list(CombinedLoader(Pair([1, 2], range(5, 9)))) == [(Pair(1, 5), 0, 0), (Pair(2, 6), 1, 0)]
    nested = CombinedLoader([range(2), {"x": (range(3), range(4))}], "max_size")
    assert [b for b, *_ in nested][1:] == [[1, {"x": (1, 1)}], [None, {"x": (2, 2)}], [None, {"x": (None, 3)}]]
    assert nested.flattened == [range(2), range(3), range(4)]
    nested.flattened = [range(1), range(1), range(1)]
    assert nested.iterables == [range(1), {"x": (range(1), range(1))}]
    assert [b for b, *_ in nested] == [[0, {"x": (0, 0)}]]
    limited = CombinedLoader([range(5), range(4)], "sequential")
    limited.limits = [1, 0.5]
    assert [b for b, *_ in limited] == [0, 0, 1] and len(limited) == 3
    limited.limits = 2
    assert limited.limits == [2, 2] and len(limited) == 4
    tensors = CombinedLoader([[torch.tensor(1)], [torch.tensor(2)]])
    assert next(tensors) == ([torch.tensor(1), torch.tensor(2)], 0, 0)
    tensors.reset()
    assert next(tensors) == ([torch.tensor(1), torch.tensor(2)], 0, 0)


def test_misuse_is_named() -> None:
    with pytest.raises(MisconfigurationException, match="no mode 'max_sise'.*Did you mean 'max_size'"):
        CombinedLoader([[1]], "max_sise")
    with pytest.raises(MisconfigurationException, match="at least one iterable"):
        CombinedLoader([])
    with pytest.raises(TypeError, match="no length"):
        len(CombinedLoader([iter([1]), [1]]))
    combined = CombinedLoader([range(2), range(3)])
    with pytest.raises(MisconfigurationException, match="2 iterables, but 3 limits"):
        combined.limits = [1, 1, 1]
    with pytest.raises(MisconfigurationException, match="2 iterables, so 1 cannot"):
        combined.flattened = [range(1)]
    once = CombinedLoader([range(3), iter([1])], "max_size_cycle")
    with pytest.raises(DataError, match="iterated only once"):
        list(once)


# -- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_training_cycles_the_shorter(workers: int) -> None:
    made = source(three_two(workers))
    assert made.num_batches == 3
    run = made.epoch(0)
    assert run.remaining == 3
    groups = list(run.groups(2))
    made.close()
    assert [(g.size, g.last, g.weights, g.counts) for g in groups] == [(2, False, None, None), (1, True, None, None)]
    batches = [{k: v[0].tolist() for k, v in b.items()} for g in groups for b in g.batches]
    assert batches == [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": [4, 5], "b": [0, 1]}]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("stream", [False, True])
def test_resume_in_every_mode(mode: str, stream: bool) -> None:
    def made(**more: Any) -> Any:
        long = DataLoader(Numbers(11), batch_size=2) if stream else DataLoader(Drawing(11), batch_size=2, shuffle=True)
        return source(CombinedLoader([long, DataLoader(Drawing(5), batch_size=2, shuffle=True)], mode), **more)

    whole = train(made(), 1)
    assert len(whole) == (3 if mode == "min_size" else 6)
    assert made().num_batches == (None if stream else len(whole))
    for done, place in enumerate(positions(made(), 1), start=1):
        assert train(made(), 1, place) == whole[done:]
    limited = train(made(limit=2), 1)
    assert limited == whole[:2]
    assert train(made(limit=3), 1, positions(made(), 1)[0]) == whole[1:3]
    if mode == "max_size_cycle":
        second = [b[1] for b in whole]
        assert second[3:6] != second[0:3]  # begun anew in another order, with other draws
        assert sorted(x[0] for b in second[3:6] for x in b) == [0, 1, 2, 3, 4]


def test_ranks_share_each_loader() -> None:
    ranks = [train(source(three_two(), r, 2)) for r in range(2)]
    assert [b["a"] for b in ranks[0]] == [[0, 2], [4]] and [b["a"] for b in ranks[1]] == [[1, 3], [5]]
    assert [b["b"] for b in ranks[0]] == [[0, 2], [0, 2]] and [b["b"] for b in ranks[1]] == [[1, 3], [1, 3]]


def test_loaders_of_one_run_draw_apart() -> None:
    pairs = train(source([DataLoader(Drawing(4), batch_size=1), DataLoader(Drawing(4), batch_size=1)]))
    assert all(a[0][0] == b[0][0] and a[0][1] != b[0][1] for a, b in pairs)


def test_evaluation_takes_them_in_step_or_one_by_one() -> None:
    step = source(CombinedLoader(three_two(), "min_size"), train=False)
    assert [b["b"] for b in evaluate(step)] == [[0, 1], [2, 3]]
    with pytest.raises(MisconfigurationException, match="one by one"):
        source(three_two(), train=False)
    with pytest.raises(MisconfigurationException, match="sequential"):
        source(CombinedLoader(three_two(), "sequential"), train=False)
    loaders = three_two()
    assert loaders_of(loaders) == list(loaders.values())
    assert loaders_of(CombinedLoader(loaders, "sequential")) == list(loaders.values())
    assert loaders_of([1, 2]) == [[1, 2]]
    assert loaders_of(loaders["a"]) == [loaders["a"]]


def test_a_position_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="with 2 loaders"):
        source(three_two()).epoch(0, {"samples": 1})
