"""Fetching with keyed randomness: what a data set draws is a function of the seed, the epoch and the sample.

A fetcher is the map-style "data set" that a rebuilt DataLoader sees. It is indexed with items that carry the keys, seeds the three
CPU generators (torch, numpy.random, random) from them, and returns the finished batch. In the main process it puts the
generators back, so fetching one batch earlier or later never shifts what the model draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate, default_convert, get_worker_info

from trainer.data.order import Order
from trainer.data.purity import never_draws
from trainer.data.shard import Cut
from trainer.data.workers import Reader, sheltered
from trainer.seed import derive, seed_rngs

__all__ = ["MapFetch", "guarded", "read", "rebuild", "straight", "tensor_batches"]

_CHUNK = 256  # batches cut from an order at once; bounds what a look ahead holds


@contextmanager
def guarded() -> Iterator[None]:
    """Put the CPU generators back, on leaving, to where they were: the raw states, quicker than `trainer.seed.isolate_rng`."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class MapFetch:
    """Fetch batches of a map-style data set; indexed with (prefix, first, step, indices).

    `prefix` names loader and epoch; entry k of `indices` stands at global place first + k * step of the epoch, which seeds it.
    With `batched` False (`batch_size=None`) there is one entry and no list around it.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool, seed: int) -> None:
        self.dataset, self.collate, self.batched, self.seed = dataset, collate, batched, seed
        self.plain_collate = collate in (default_collate, default_convert, identity)
        self.keyed = not never_draws(dataset)
        self.tensors = fast_tensors(dataset) if batched and collate is default_collate else None
        self.many = getattr(dataset, "__getitems__", None) if batched else None

    def __getitem__(self, item: tuple[str, int, int, Any]) -> Any:
        if self.tensors is not None:
            return self._rows(item[3])
        if not self.keyed and self.plain_collate:
            return self._plain(item[3])
        if get_worker_info() is not None:  # a worker's generators belong to nobody
            return self._fetch(*item)
        with guarded():
            return self._fetch(*item)

    def _rows(self, indices: list[int]) -> Any:
        # Stacking rows copies the very same numbers as one index_select; negative indices only work row by row.
        if min(indices) < 0:
            return self._plain(indices)
        where = torch.tensor(indices)
        return [t.index_select(0, where) for t in self.tensors]

    def _plain(self, indices: Any) -> Any:
        if not self.batched:
            return self.collate(self.dataset[indices])
        if self.many:
            return self.collate(self.many(indices))
        dataset = self.dataset
        return self.collate([dataset[i] for i in indices])

    def _fetch(self, prefix: str, first: int, step: int, indices: Any) -> Any:
        seed, dataset = self.seed, self.dataset
        if not self.batched or self.many:
            if self.keyed:
                seed_rngs(derive(seed, "sample", prefix, first))
            samples = self.many(indices) if self.batched else dataset[indices]
        elif self.keyed:
            samples = []
            for place, index in enumerate(indices):
                seed_rngs(derive(seed, "sample", prefix, first + place * step))
                samples.append(dataset[index])
        else:
            samples = [dataset[i] for i in indices]
        if not self.plain_collate:
            seed_rngs(derive(seed, "collate", prefix, first))
        return self.collate(samples)


def fast_tensors(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of exactly a TensorDataset whose batches may be cut as a whole, bit-identical to the default collate."""
    if type(dataset) is not TensorDataset:
        return None
    for tensor in dataset.tensors:
        plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
        if not plain or not tensor.is_contiguous() or tensor.is_quantized or tensor.requires_grad:
            return None
    return dataset.tensors


def tensor_batches(tensors: tuple[torch.Tensor, ...], order: Order, cut: Cut) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's training batches of a TensorDataset: one index_select a tensor and batch, no Python per sample."""
    if isinstance(order, range):
        order = torch.arange(order.start, order.stop)
    mine = order[cut.start : cut.end][cut.rank :: cut.world]
    block = cut.batch * _CHUNK
    if len(tensors) == 2:  # inputs and targets: by far the most common, spared a comprehension a batch
        first, second = tensors
        for at in range(0, len(mine), block):
            for where in mine[at : at + block].split(cut.batch):
                yield [first.index_select(0, where), second.index_select(0, where)]
    else:
        for at in range(0, len(mine), block):
            for where in mine[at : at + block].split(cut.batch):
                yield [t.index_select(0, where) for t in tensors]
    if cut.short and cut.local(cut.batches - 1) == 0:
        where = order[cut.start + (cut.batches - 1) * cut.round :][:1]
        yield [t.index_select(0, where) for t in tensors]


class Items:
    """The sampler of a rebuilt DataLoader: gives whatever iterator of keyed items was put in last."""

    def __init__(self) -> None:
        self.now: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.now


def identity(value: Any) -> Any:
    """Return `value`: the fetcher has collated already."""
    return value


def rebuild(loader: DataLoader, fetch: Any) -> DataLoader:
    """Return a DataLoader with `loader`'s workers and memory settings that reads keyed items through `fetch`.

    Its sampler is an `Items`. It has a generator of its own, so that making an iterator draws nothing from the global one.
    Batches come in order whatever `in_order` said: out of order, a position would not say which samples were used.
    """
    workers = loader.num_workers
    return DataLoader(
        fetch,
        batch_size=None,
        sampler=Items(),
        num_workers=workers,
        collate_fn=identity,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn if workers else None,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=loader.persistent_workers,
    )


def straight(loader: DataLoader) -> bool:
    """True when a DataLoader would fetch in this process and on pageable memory: it can then be gone around."""
    return loader.num_workers == 0 and not (loader.pin_memory and torch.accelerator.is_available())


def read(loader: DataLoader, items: Iterator[Any], seed: int) -> Iterator[Any]:
    """Return an iterator of what `loader` (from `rebuild`) fetches for `items`, without a DataLoader's detours where none is needed.

    `seed` becomes the base of what workers see as `get_worker_info().seed`.
    """
    if not straight(loader):
        loader.sampler.now = items
        loader.generator.manual_seed(seed)
        with sheltered(loader, keyed=True):
            return Reader(iter(loader))
    return map(loader.dataset.__getitem__, items)
