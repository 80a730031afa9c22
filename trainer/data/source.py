"""Where batches come from: the `Source` of one loader on one rank, and the one for map-style data sets."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainer.data.epoch import Epoch, ExactEpoch
from trainer.data.fetch import MapFetch, identity, read, rebuild, straight, tensor_batches
from trainer.data.order import Order, is_random, make_order, own_generator, sampler_length, sequential, unwrap_batches
from trainer.data.selfsharding import ranked_sampler
from trainer.data.shard import Cut
from trainer.data.workers import end_kept_workers
from trainer.errors import DataError, MisconfigurationException
from trainer.seed import derive

__all__ = ["DeclaredSource", "MapSource", "Source", "Spec", "agreed_minimum", "declared_length", "resolve_limit"]


@dataclass(frozen=True)
class Spec:
    """What `prepare` was told, apart from the loader. `key` names the loader among those of the run."""

    train: bool
    seed: int
    rank: int
    world: int
    shard: bool = True
    limit: int | float | None = None
    shuffle: bool | None = None
    agree: Callable[[bool], bool] | None = None
    key: str = "0"
    drain_progress: Callable[[int, int], None] | None = None
    join: Callable[[list[int]], list[int]] | None = None


class Source:
    """The batches of one loader for one rank, epoch by epoch.

    Attributes:
        num_batches: this rank's batches in a whole epoch, after the limit; None when only the data can tell.
        hint: the number of batches the loader declares, which may be wrong; equal to num_batches where that is known.
        name: how messages call the loader.
    """

    num_batches: int | None = None
    hint: int | None = None
    ordered = False  # True where `spec.shuffle` is met by choosing the order

    def __init__(self, spec: Spec, name: str) -> None:
        self.spec, self.name = spec, name
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()

    def epoch(self, epoch: int, position: dict[str, Any] | None = None, cycle: int = 0) -> Epoch:
        """Return the pass of epoch number `epoch`, from `position` (as `Epoch.position` gave it) or from the start.

        Collective: with `shard=False` in training, where the ranks agree on the shortest length.

        Args:
            epoch: counted from 0; the order and all draws of the data follow from it and the seed.
            position: a saved position; the number of ranks and workers may have changed since.
            cycle: how often the loader has been used up in this epoch (CombinedLoader's max_size_cycle).

        Raises:
            DataError: when `position` belongs to another kind of loader.
        """
        if position and "rank_batches" in position:
            position = self._after(position["rank_batches"])
        epoch, prefix = self._named(epoch, cycle)
        made = self._epoch(epoch, position or {}, prefix)
        self._live.add(made)
        return made

    def _epoch(self, epoch: int, position: dict[str, Any], prefix: str) -> Epoch:
        raise NotImplementedError

    def _named(self, epoch: int, cycle: int) -> tuple[int, str]:
        """Return the epoch and the name of its random streams. A loader that orders itself is made to repeat by its first epoch's."""
        if self.spec.shuffle is False and not self.ordered:
            epoch, cycle = 0, 0
        return epoch, f"{self.spec.key}/{epoch}" + (f"+{cycle}" if cycle else "")

    def close(self) -> None:
        """End every pass and all worker processes, persistent ones too. May be called twice."""
        for epoch in list(self._live):
            epoch.close()

    def _after(self, batches: int) -> dict[str, Any]:
        """Return the position after so many batches of every rank, which is all that files of others tell."""
        warnings.warn(
            f"The checkpoint was made after {batches} batches of an epoch by another program, and {self.name} cannot be positioned there: its "
            "data begin anew.",
            stacklevel=2,
        )
        return {}

    def _joining(self, position: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an `OpenEpoch` that make ranks go on until the last has no data; none where they stop together."""
        join = self.spec.join
        return {} if join is None else {"join": join, "again": position.get("again") == self.spec.world}

    def _expect(self, position: dict[str, Any], key: str) -> int:
        """Return the number `position` keeps under `key` (0 when it is empty)."""
        if position and key not in position:
            raise DataError(
                f"The saved data position {position!r} is not one of {self.name}, which counts {key!r}. Resume with the kind of loader "
                "the run was saved with, or start the epoch anew."
            )
        return int(position.get(key, 0))


class DeclaredSource(Source):
    """A source whose loader declares a length that only its data can confirm."""

    whose = "its"  # length, in the warning: the loader's or the data set's

    def _declare(self, batches: int | None) -> None:
        """Take the number of batches that this rank gets by the declared length, None where there is none, and settle the limit."""
        self._declared, self._warned = batches, False
        self._limit = resolve_limit(self.spec.limit, batches, self.name)
        self.hint = batches if self._limit is None or batches is None else min(batches, self._limit)

    def _ended(self, batches: int) -> None:
        wrong = self._declared is not None and batches != self._declared and batches != self._limit
        if wrong and self.spec.train and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} declares a length of {self._declared} batches and gave {batches}. The epoch has {batches}; correct "
                f"{self.whose} __len__.",
                stacklevel=2,
            )


def declared_length(thing: Any) -> int | None:
    """Return what `len(thing)` says, or None when it does not say."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def resolve_limit(limit: int | float | None, batches: int | None, name: str) -> int | None:
    """Return the limit as a number of batches a rank, or None for no limit.

    Raises:
        MisconfigurationException: a negative limit, a fraction over 1, a fraction of an unknown length or one that leaves nothing.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if isinstance(limit, bool) or limit < 0 or (isinstance(limit, float) and limit > 1):
        raise MisconfigurationException(
            f"A limit on batches is None, a whole number >= 0 or a fraction between 0.0 and 1.0, got {limit!r}."
        )
    if isinstance(limit, int):
        return limit
    if limit == 0.0:
        return 0
    if batches is None:
        raise MisconfigurationException(f"{name} has no known length, so it has no fraction {limit}; limit it by a number of batches.")
    if int(batches * limit) == 0:
        raise MisconfigurationException(
            f"The fraction {limit} of {name}'s {batches} batches is no batch at all; use at least {1 / batches:.3g} or a whole number."
        )
    return int(batches * limit)


def agreed_minimum(number: int, agree: Callable[[bool], bool]) -> int:
    """Return the smallest `number` of all ranks, found with the one question "does any rank say yes". Collective."""
    high = 1
    while not agree(number < high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if agree(number < middle):
            high = middle
        else:
            low = middle
    return low


class MapSource(Source):
    """A map-style data set behind a DataLoader, or a list of batches: the order is known, so everything is exact."""

    ordered = True

    def __init__(self, loader: DataLoader | list | tuple, spec: Spec, name: str) -> None:
        super().__init__(spec, name)
        self._loader: DataLoader | None = None
        self._batch, self._drop, self._entry = 1, False, "one"  # an entry of the order: "sample", "indices" of a batch, "one" item
        if isinstance(loader, DataLoader):
            self._from_loader(loader)
        else:
            self._sampler: Any = range(len(loader))
            self._fetch = MapFetch(loader, identity, False, spec.seed)
            self._fetch.keyed = False
        self._key = "samples" if isinstance(loader, DataLoader) and self._entry != "indices" else "batches"
        self._own = spec.world > 1 and (not spec.shard or ranked_sampler(self._sampler))
        generator = own_generator(self._sampler)
        self._initial = {} if generator is None else {id(generator): generator.initial_seed()}
        self._check(length := len(self._sampler) if isinstance(self._sampler, list | range) else sampler_length(self._sampler))
        self._limit: int | None = None
        whole = self._cut(self._shared(length), 0).batches
        self._limit = resolve_limit(spec.limit, whole, name)
        self.num_batches = self.hint = whole if self._limit is None else self._cut(self._shared(length), 0).batches

    def _from_loader(self, loader: DataLoader) -> None:
        sampler, shuffle = loader.sampler, self.spec.shuffle
        if loader.batch_size is not None:
            self._batch, self._drop, self._entry = loader.batch_size, loader.drop_last, "sample"
        elif loader.batch_sampler is not None:
            parts = unwrap_batches(loader.batch_sampler)
            if parts is not None:
                sampler, self._batch, self._drop = parts
                self._entry = "sample"
            else:
                sampler, self._entry = loader.batch_sampler, "indices"
        if shuffle is False and self._entry != "indices" and is_random(sampler):
            sampler = sequential(sampler, loader.dataset)
        self._sampler = sampler
        self._fetch = MapFetch(loader.dataset, loader.collate_fn, self._entry != "one", self.spec.seed)
        self._loader = rebuild(loader, self._fetch)

    def _check(self, entries: int) -> None:
        if entries == 0:
            raise DataError(f"{self.name} is empty: its sampler or data set has length 0.")
        size = self._batch * (self.spec.world if self.spec.train and not self._own else 1)
        if self._drop and entries < size:
            raise MisconfigurationException(
                f"{self.name} has {entries} samples, fewer than one batch of all ranks ({size}), and drop_last=True drops incomplete "
                "batches: nothing would be left. Use drop_last=False or a smaller batch_size."
            )

    def _shared(self, entries: int) -> int:
        """Return the length all ranks keep to. A DistributedSampler has the same one everywhere; other orders of a rank's own may not."""
        spec = self.spec
        if spec.train and self._own and spec.agree is not None and not isinstance(self._sampler, DistributedSampler):
            return agreed_minimum(entries, spec.agree)
        return entries

    def _after(self, batches: int) -> dict[str, Any]:
        return {self._key: batches * self._batch * self.spec.world}

    def _cut(self, entries: int, start: int) -> Cut:
        spec = self.spec
        rank, world = (0, 1) if self._own else (spec.rank, spec.world)
        unit = self._batch * (world if spec.train else 1)
        end = start + max(entries - start, 0) // unit * unit if self._drop else entries
        if self._limit is not None:
            end = min(end, self._limit * self._batch * world)
        return Cut(start, max(end, start), self._batch, rank, world, spec.train)

    def _epoch(self, epoch: int, position: dict[str, Any], prefix: str) -> Epoch:
        scale = self.spec.world if self._own else 1
        start = self._expect(position, self._key) // scale
        if isinstance(self._sampler, list | range):
            order: Order = self._sampler
        else:
            order = make_order(self._sampler, self.spec.seed, prefix, epoch, self._initial)
        cut = self._cut(self._shared(len(order)), start)
        keep = self._loader is not None and self._loader.persistent_workers
        made = ExactEpoch(cut, lambda: self._open(order, cut, prefix), self._key, scale, self._entry == "sample", keep)
        made.look_up = lambda number: self._entries(order, cut, number)
        return made

    def _entries(self, order: Order, cut: Cut, number: int) -> list[Any]:
        """Return the entries of batch `number` of a pass, as the sampler gives them."""
        part = order[slice(*next(replace(cut, start=cut.start + number * cut.round).spans()))]
        found = part.tolist() if isinstance(part, torch.Tensor) else list(part)
        return list(found[0]) if self._entry == "indices" else found

    def _open(self, order: Order, cut: Cut, prefix: str) -> Iterator[Any]:
        loader, tensors = self._loader, self._fetch.tensors
        if loader is None:
            return map(self._fetch.__getitem__, self._items(order, cut, prefix))
        if straight(loader) and tensors is not None and not isinstance(order, list) and (cut.train or cut.world == 1):
            return tensor_batches(tensors, order, cut)
        return read(loader, self._items(order, cut, prefix), derive(self.spec.seed, "workers", prefix, self.spec.rank))

    def _items(self, order: Order, cut: Cut, prefix: str) -> Iterator[tuple[str, int, int, Any]]:
        """Yield what `MapFetch` is indexed with, batch by batch; places count over all ranks."""
        scale, offset = (self.spec.world, self.spec.rank) if self._own else (1, 0)
        entry = self._entry
        for first, stop, step in cut.spans():
            place = first * scale + offset
            if entry == "sample":
                part = order[first:stop:step]
                indices = part.tolist() if isinstance(part, torch.Tensor) else list(part)
                yield prefix, place, step * scale, indices
            elif entry == "indices":
                yield f"{prefix}/{place}", 0, 1, order[first]
            else:
                one = order[first]
                yield prefix, place, 1, int(one) if isinstance(one, torch.Tensor) else one

    def close(self) -> None:
        super().close()
        end_kept_workers(self._loader)
