"""What is taken as a loader, what is refused, and limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.datasets import Numbers, numbers, source, together, train
from trainer.data import CombinedLoader, DevicePrefetcher
from trainer.data.combined import CombinedSource
from trainer.data.iterable import StreamSource
from trainer.data.opaque import OpaqueSource
from trainer.data.source import MapSource, agreed_minimum
from trainer.errors import MisconfigurationException


@pytest.mark.parametrize(
    "loader, kind",
    [
        (DataLoader(numbers(3)), MapSource),
        (DataLoader(Numbers(3)), StreamSource),
        ([torch.zeros(1)], MapSource),
        ([[torch.zeros(1), torch.zeros(1)]], MapSource),
        (Numbers(3), OpaqueSource),
        (range(3), OpaqueSource),
        (CombinedLoader([range(3)]), CombinedSource),
        ([DataLoader(numbers(3))], CombinedSource),
        ({"a": [1, 2]}, CombinedSource),
        ((DataLoader(numbers(3)), {"b": DataLoader(numbers(3))}), CombinedSource),
    ],
)
def test_kinds(loader: Any, kind: type) -> None:
    assert type(source(loader)) is kind


@pytest.mark.parametrize(
    "loader, message",
    [
        (numbers(3), "is a data set, not a loader"),
        (3, "is not iterable"),
        (None, "is not iterable"),
        ("train", "is not iterable"),
    ],
)
def test_what_is_no_loader(loader: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        source(loader)


@pytest.mark.parametrize(
    "limit, message",
    [
        (-1, "whole number >= 0 or a fraction"),
        (1.5, "whole number >= 0 or a fraction"),
        (True, "whole number >= 0 or a fraction"),
        (0.1, r"no batch at all; use at least 0.2"),
    ],
)
def test_limits_that_make_no_sense(limit: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        source(DataLoader(numbers(5)), limit=limit)


def test_a_limit_of_zero_gives_nothing() -> None:
    for loader in (DataLoader(numbers(5)), DataLoader(Numbers(5)), range(5)):
        for limit in (0, 0.0):
            assert train(source(loader, limit=limit)) == []


@pytest.mark.parametrize("pair", [(0, 0), (0, 3), (1, 1), (5, 2), (1000, 999), (64, 63), (64, 128)])
def test_agreed_minimum(pair: tuple[int, int]) -> None:
    assert together(lambda rank, agree: agreed_minimum(pair[rank], agree)) == [min(pair)] * 2


def test_prefetching_off_cuda_is_a_plain_map() -> None:
    moved = DevicePrefetcher([1, 2, 3], lambda b: b * 2, torch.device("cpu"))
    assert list(moved) == [2, 4, 6]
    assert list(moved) == [2, 4, 6]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetching_on_cuda_gives_the_same_batches() -> None:
    batches = [{"x": torch.full((1000,), float(i)).pin_memory(), "y": [torch.tensor(i)]} for i in range(20)]

    def move(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"].to("cuda", non_blocking=True), "y": [batch["y"][0].to("cuda", non_blocking=True)]}

    sums = [(b["x"] * 2).sum() + b["y"][0] for b in DevicePrefetcher(batches, move, torch.device("cuda"))]
    assert [s.item() for s in sums] == [i * 2000 + i for i in range(20)]
