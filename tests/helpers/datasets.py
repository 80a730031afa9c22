"""Data sets and small helpers for the tests of the data layer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer.data import Source, prepare


class Plain(Dataset):
    """Sample i is the number i; remembers which were read in this process."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Drawing(Dataset):
    """Sample i is i and a draw of each of the three generators, as float64."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [index, torch.rand(1, dtype=torch.float64).item(), numpy.random.rand(), random.random()]
        return torch.tensor(drawn, dtype=torch.float64)


class Numbers(IterableDataset):
    """Gives 0 .. size-1 and a draw for each."""

    def __init__(self, size: int, declared: int | None = None) -> None:
        self.size, self.epochs = size, []
        if declared is not None:
            self.__class__ = type("Declared", (Numbers,), {"__len__": lambda self: declared})

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.size):
            drawn = [index, torch.rand(1, dtype=torch.float64).item(), numpy.random.rand(), random.random()]
            yield torch.tensor(drawn, dtype=torch.float64)


def numbers(size: int) -> TensorDataset:
    """Return a TensorDataset of 0 .. size-1."""
    return TensorDataset(torch.arange(size))


def source(loader: Any, rank: int = 0, world: int = 1, train: bool = True, **more: Any) -> Source:
    """Return `prepare(loader, ...)` with a fixed seed."""
    more.setdefault("seed", 7)
    return prepare(loader, train=train, rank=rank, world_size=world, **more)


def plain(batch: Any) -> Any:
    """Return a batch as nested lists; the single tensor of a TensorDataset's batch without its list."""
    if isinstance(batch, list | tuple) and len(batch) == 1 and isinstance(batch[0], torch.Tensor):
        batch = batch[0]
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(part) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(part) for part in batch]
    return batch


def train(made: Source, epoch: int = 0, position: Any = None, accumulate: int = 1) -> list[Any]:
    """Return the batches of a training epoch, as lists; closes the source."""
    try:
        return [plain(b) for g in made.epoch(epoch, position).groups(accumulate) for b in g.batches]
    finally:
        made.close()


def evaluate(made: Source, epoch: int = 0) -> list[Any]:
    """Return the batches of an evaluation pass, as lists; closes the source."""
    try:
        return [plain(b) for b in made.epoch(epoch).batches()]
    finally:
        made.close()


def positions(made: Source, epoch: int = 0, accumulate: int = 1) -> list[Any]:
    """Return the position after every group; closes the source."""
    try:
        run = made.epoch(epoch)
        return [(list(g.batches), run.position)[1] for g in run.groups(accumulate)]
    finally:
        made.close()


def together(work: Callable[[int, Callable[[bool], bool]], Any], world: int = 2) -> list[Any]:
    """Run `work(rank, agree)` in one thread a rank, with an `agree` that joins them; a rank that waits in vain fails the test."""
    barrier, flags, results = threading.Barrier(world, timeout=20), [False] * world, [None] * world

    def run(rank: int) -> None:
        def agree(flag: bool) -> bool:
            flags[rank] = flag
            barrier.wait()
            answer = any(flags)
            barrier.wait()
            return answer

        try:
            results[rank] = work(rank, agree)
        except Exception as error:  # handed to the test, which looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
