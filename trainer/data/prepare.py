"""From whatever a user passes as a loader to a `Source`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe

from trainer.data.combined import CombinedLoader, CombinedSource, flatten
from trainer.data.iterable import StreamSource, is_stateful
from trainer.data.opaque import OpaqueSource
from trainer.data.source import MapSource, Source, Spec
from trainer.errors import MisconfigurationException

__all__ = ["loaders_of", "prepare"]


def prepare(
    loader: Any,
    *,
    train: bool,
    seed: int,
    rank: int,
    world_size: int,
    shard: bool = True,
    limit: int | float | None = None,
    shuffle: bool | None = None,
    agree: Callable[[bool], bool] | None = None,
    index: int | str = 0,
    drain_progress: Callable[[int, int], None] | None = None,
    join: Callable[[list[int]], list[int]] | None = None,
) -> Source:
    """Return the source of this rank's batches of `loader`.

    Collective: with `shard=False` in training, where the ranks agree on the shortest length.

    Args:
        loader: a DataLoader, any iterable of batches, a CombinedLoader, or (training) a list, tuple or dict of loaders, read as a
            CombinedLoader in mode "max_size_cycle".
        train: even shards in step (True), or whole batches in turn, each sample exactly once (False).
        seed: the order and all that the data draw follow from it; equal on all ranks.
        rank, world_size: this process among those that share the data.
        shard: False takes the loader's own order on every rank, as with a DistributedSampler.
        limit: batches a rank and epoch: a number, a fraction, or None for all.
        shuffle: False puts sequential order in the place of a random sampler; None keeps the loader's.
        agree: collective "does any rank say True"; needed in training on several ranks for data of unknown length.
        index: the loader's number among those of the run, so that no two share an order.
        join: collective sum of a list of numbers over the ranks. Given, training on data of unknown length goes on until the last rank has
            none; else it stops with the first.
        drain_progress: called with (done, total) while an iterable is drained on resume.

    Raises:
        MisconfigurationException: not a loader, a limit that makes no sense, drop_last that drops everything, a sampler without length.
        DataError: when the loader is empty.
    """
    key = f"{'train' if train else 'eval'}{index}"  # a training and a validation loader share no random stream either
    together = agree if train and world_size > 1 else None
    join = join if train and world_size > 1 else None
    spec = Spec(train, seed, rank, world_size, shard, limit, shuffle, together, key, drain_progress, join)
    return build(loader, spec)


def build(loader: Any, spec: Spec) -> Source:
    """Choose the kind of source for `loader`."""
    kind = type(loader).__name__
    number = spec.key.removeprefix("train").removeprefix("eval")
    name = f"The {'training' if spec.train else 'evaluation'} loader {number} ({kind})"
    if isinstance(loader, CombinedLoader):
        return combine(loader, spec, name)
    if is_collection(loader):
        if not spec.train:
            raise MisconfigurationException(f"{name} is a collection of loaders; prepare those of loaders_of(...) one by one.")
        return combine(CombinedLoader(loader, "max_size_cycle"), spec, name)
    if isinstance(loader, DataLoader) and rebuildable(loader):
        streams = isinstance(loader.dataset, IterableDataset)
        return StreamSource(loader, spec, name) if streams else MapSource(loader, spec, name)
    if isinstance(loader, list | tuple):
        return MapSource(loader, spec, name)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise MisconfigurationException(f"{name} is a data set, not a loader: pass DataLoader({kind.lower()}, batch_size=...).")
    if isinstance(loader, str | bytes) or not hasattr(type(loader), "__iter__"):
        raise MisconfigurationException(
            f"{name} is not iterable: expected a DataLoader, an iterable of batches, or a list or dict of them, got {kind}."
        )
    return OpaqueSource(loader, spec, name)


def combine(loader: CombinedLoader, spec: Spec, name: str) -> CombinedSource:
    """Return the source of a CombinedLoader, each of its iterables with a key and limit of its own."""
    limits = loader.limits or [None] * len(loader.flattened)
    pairs = enumerate(zip(loader.flattened, limits, strict=True))
    parts = [build(part, replace(spec, key=f"{spec.key}.{i}", limit=limit)) for i, (part, limit) in pairs]
    return CombinedSource(loader, spec, name, parts)


def rebuildable(loader: DataLoader) -> bool:
    """True for a DataLoader that iterates as torch's own: then ours may take its place."""
    kind = type(loader)
    stock = kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator
    return stock and not is_stateful(loader) and not isinstance(loader.dataset, IterDataPipe | MapDataPipe)


def is_collection(value: Any) -> bool:
    """True for a dict, and for a list or tuple that holds loaders; other lists are lists of batches."""
    if isinstance(value, dict):
        return True
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(leaf, DataLoader | CombinedLoader | IterableDataset | Iterator) for leaf in flatten(value))


def loaders_of(loaders: Any) -> list[Any]:
    """Return the loaders to evaluate one after the other: those of a list, dict or sequential CombinedLoader, or the one given."""
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return list(loaders.flattened)
    return flatten(loaders) if is_collection(loaders) else [loaders]
