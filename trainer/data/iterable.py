"""Iterable data: who shards it, how it falls into batches, and how it is read under keyed randomness.

All ranks and workers read the same stream and keep their part, unless the class's own code asks which rank or worker it
runs in. Training: a round is world * batch items, of which rank r takes every world-th from the r-th; evaluation: a round is one
whole batch a rank. Worker w fetches every num_workers-th round. So batches, and what is drawn for them, are those of
one process without workers, cut over the ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, default_collate, default_convert, get_worker_info

from trainer.data.epoch import Epoch
from trainer.data.fetch import guarded, read, rebuild
from trainer.data.open_epoch import Fetched, OpenEpoch, Stream, rest
from trainer.data.selfsharding import shards_itself
from trainer.data.source import DeclaredSource, Spec, declared_length
from trainer.data.workers import end_kept_workers, end_workers
from trainer.seed import derive, seed_rngs

__all__ = ["StreamSource", "is_stateful"]

_OUT: Any = object()


def is_stateful(thing: Any) -> bool:
    """True when `thing` keeps its own position: it has state_dict and load_state_dict."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


class StreamFetch:
    """Reads an IterableDataset; indexed with (token, epoch, prefix, items to skip, state of the data set or None).

    A new token starts a new pass. Returns (batch, local, total, items used so far, state) or None when the pass is over.
    """

    def __init__(self, loader: DataLoader, spec: Spec, by_rank: bool, by_worker: bool, stateful: bool) -> None:
        self.dataset, self.collate, self.size = loader.dataset, loader.collate_fn, loader.batch_size
        self.drop, self.train, self.seed = loader.drop_last, spec.train, spec.seed
        self.plain_collate = self.collate in (default_collate, default_convert)
        self.rank, self.world = (0, 1) if by_rank else (spec.rank, spec.world)
        self.suffix = f"/rank{spec.rank}" if by_rank and spec.world > 1 else ""
        self.by_worker, self.stateful = by_worker, stateful
        self.known = not by_rank or spec.world == 1  # this rank sees every rank's items, so it can count them
        self.progress = spec.drain_progress if loader.num_workers == 0 else None
        self._token: Any = None
        self._reader: Iterator[Any] = iter(())

    def __getitem__(self, item: tuple[int, int, str, int, Any]) -> Any:
        if get_worker_info() is not None:
            return self._next(item)
        with guarded():
            return self._next(item)

    def _next(self, item: tuple[int, int, str, int, Any]) -> Any:
        if item[0] != self._token:
            self._token, self._reader = item[0], self._rounds(*item[1:])
        return next(self._reader, None)

    def _pulls(self, epoch: int, prefix: str, skip: int, state: Any) -> Iterator[Any]:
        """Yield the items from number `skip` on, each pulled under the generators its number seeds."""
        dataset, seed = self.dataset, self.seed
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        if state is not None:
            dataset.load_state_dict(copy.deepcopy(state))
        seed_rngs(derive(seed, "iter", prefix))
        iterator = iter(dataset)
        for number in itertools.count(skip if state is not None else 0):
            seed_rngs(derive(seed, "item", prefix, number))
            item = next(iterator, _OUT)
            if item is _OUT:
                return
            if number >= skip:
                yield item
            elif self.progress is not None:
                self.progress(number + 1, skip)

    def _rounds(self, epoch: int, prefix: str, skip: int, state: Any) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        prefix += self.suffix
        if self.by_worker and workers > 1:
            prefix, worker, workers = f"{prefix}/worker{worker}", 0, 1
        size = self.size or 1
        items = self._pulls(epoch, prefix, skip, state)
        used = skip
        for number in itertools.count():
            mine, first, count = [], _OUT, 0
            for place, item in enumerate(itertools.islice(items, size * self.world)):
                first = item if place == 0 else first
                count += 1
                if (place % self.world if self.train else place // size) == self.rank:
                    mine.append(item)
            used += count
            short = count < size * self.world if self.train else len(mine) < size
            if count == 0 or (short and self.drop) or not (mine or self.train):
                return
            if number % workers == worker:
                local = len(mine)
                if not self.plain_collate:
                    seed_rngs(derive(self.seed, "collate", prefix, used, self.rank))
                batch = self.collate((mine or [first]) if self.size else (mine or [first])[0])
                kept = copy.deepcopy(self.dataset.state_dict()) if self.stateful else None
                yield batch, local, count if self.known else None, used, kept


class LoaderStream(Stream):
    """One pass over an IterableDataset through the rebuilt DataLoader, all workers in turn."""

    def __init__(self, source: StreamSource, token: int, epoch: int, prefix: str, position: dict[str, Any]) -> None:
        self._source, self._workers = source, max(source.loader.num_workers, 1)
        self.sized = source.fetch.size is not None
        self._used, self._state, self._drawn = int(position.get("samples", 0)), position.get("loader"), 0
        self._item = (token, epoch, prefix, self._used, self._state)
        self._skip = int(position.get("batches", 0)) if source.counts == "batches" else 0
        self._iterator: Iterator[Any] | None = None
        self._ended: set[int] = set()
        self._turn = 0

    def __next__(self) -> Fetched:
        unseen = self._iterator is None and self._drains_in_workers()
        if self._iterator is None:
            source, (token, _, prefix, *_) = self._source, self._item
            # Every worker needs to be told once where to begin; a data set's state may be large.
            items = itertools.chain([self._item] * self._workers, itertools.repeat((token,)))
            self._iterator = read(source.loader, items, derive(source.spec.seed, "workers", prefix + source.fetch.suffix))
            for number in range(self._skip):
                self._pull()
                if self._source.spec.drain_progress is not None:
                    self._source.spec.drain_progress(number + 1, self._skip)
        if unseen:
            self._source.spec.drain_progress(0, self._used)
        got = self._pull()
        if unseen:
            self._source.spec.drain_progress(self._used, self._used)
        if got is None:
            raise StopIteration
        self._drawn += 1
        batch, local, total, self._used, self._state = got
        return Fetched(batch, local, total)

    def _drains_in_workers(self) -> bool:
        """True where workers pass over items out of sight: all one sees of it is how long the first batch takes."""
        source = self._source
        within = source.loader.num_workers > 0 and self._state is None and source.counts == "samples"
        return within and self._used > 0 and source.spec.drain_progress is not None

    def _pull(self) -> Any:
        while len(self._ended) < self._workers:
            worker = self._turn % self._workers
            self._turn += 1
            got = next(self._iterator)
            if got is not None:
                return got
            self._ended.add(worker)
        return None

    def place(self) -> dict[str, Any]:
        if self._source.counts == "batches":
            return {"batches": self._skip + self._drawn}
        if self._source.counts == "loader" and self._state is not None:
            return {"loader": self._state, "samples": self._used}
        return {"samples": self._used}

    def close(self) -> None:
        iterator, self._iterator = self._iterator, iter(())
        self._ended = set(range(self._workers))
        if not self._source.loader.persistent_workers:
            end_workers(iterator)


class StreamSource(DeclaredSource):
    """A DataLoader over an IterableDataset. `counts` names how a position is kept: "samples", "batches" or "loader"."""

    whose = "the data set's"

    def __init__(self, loader: DataLoader, spec: Spec, name: str) -> None:
        super().__init__(spec, name)
        dataset = loader.dataset
        by_rank, by_worker = shards_itself(dataset, loader.worker_init_fn)
        by_rank = by_rank or not spec.shard
        split = (by_rank and spec.world > 1) or (by_worker and loader.num_workers > 1)
        stateful = is_stateful(dataset) and not (by_worker and loader.num_workers > 1)
        self.counts = "loader" if stateful else "batches" if split else "samples"
        self.fetch = StreamFetch(loader, spec, by_rank, by_worker, stateful)
        self.loader = rebuild(loader, self.fetch)
        self._tokens = itertools.count()
        declared = declared_length(dataset)
        if declared is not None:
            size = (loader.batch_size or 1) * self.fetch.world
            declared = declared // size if loader.drop_last else -(-declared // size)
        self._declare(declared)

    def _epoch(self, epoch: int, position: dict[str, Any], prefix: str) -> Epoch:
        if position and "loader" not in position:
            self._expect(position, "samples" if self.counts == "loader" else self.counts)
        elif position and self.counts != "loader":
            self._expect(position, self.counts)
        stream = LoaderStream(self, next(self._tokens), epoch, prefix, position)
        return OpenEpoch(
            stream,
            world=self.spec.world,
            limit=rest(self._limit, self._done(position)),
            agree=self.spec.agree,
            **self._joining(position),
            resumed=bool(position),
            ended=None if position else self._ended,
            name=self.name,
        )

    def _done(self, position: dict[str, Any]) -> int:
        """Return how many batches of this rank `position` stands for."""
        if self.counts == "batches":
            return int(position.get("batches", 0))
        return -(-int(position.get("samples", 0)) // ((self.fetch.size or 1) * self.fetch.world))

    def close(self) -> None:
        super().close()
        end_kept_workers(self.loader)
