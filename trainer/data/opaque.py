"""Any other iterable of batches: generators, a user's own loader class, a DataLoader that overrides `__iter__`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from trainer.data.epoch import Epoch
from trainer.data.fetch import guarded
from trainer.data.iterable import is_stateful
from trainer.data.open_epoch import Fetched, OpenEpoch, Stream, rest
from trainer.data.selfsharding import shards_itself
from trainer.data.source import DeclaredSource, Spec, declared_length
from trainer.data.workers import Reader, end_kept_workers, end_workers, sheltered
from trainer.seed import derive, seed_rngs

__all__ = ["OpaqueSource"]

_OUT: Any = object()


class OpaqueStream(Stream):
    """One pass over a loader that is read as it is; batch j of it goes to rank j % world.

    Each batch is fetched under generators seeded by its number, and the caller's are put back.
    """

    sized = False

    def __init__(self, source: OpaqueSource, epoch: int, prefix: str, position: dict[str, Any]) -> None:
        self._source, self._epoch, self._prefix = source, epoch, prefix + source.suffix
        self._state, self._number = position.get("loader"), int(position.get("batches", 0))
        self._iterator: Iterator[Any] | None = None
        self._begun = False

    def _start(self) -> None:
        source, loader = self._source, self._source.loader
        parts = (loader, *(getattr(loader, n, None) for n in ("sampler", "batch_sampler", "dataset")))
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self._epoch)
        drain, self._number = (0, self._number) if self._state is not None else (self._number, 0)
        with guarded(), self._starting():
            if self._state is not None:
                loader.load_state_dict(copy.deepcopy(self._state))
            seed_rngs(derive(source.spec.seed, "iter", self._prefix))
            self._iterator = Reader(iter(loader))
        for number in range(drain):
            if self._pull() is _OUT:
                return
            if source.spec.drain_progress is not None:
                source.spec.drain_progress(number + 1, drain)

    def _pull(self) -> Any:
        number, self._number = self._number, self._number + 1
        with guarded(), self._starting():
            self._begun = True
            seed_rngs(derive(self._source.spec.seed, "batch", self._prefix, number))
            return next(self._iterator, _OUT)

    def _starting(self) -> AbstractContextManager[None]:
        """Around what may start workers: making the iterator, and its first batch where a user's `__iter__` is a generator."""
        loader = self._source.loader
        return sheltered(loader) if isinstance(loader, DataLoader) and not self._begun else nullcontext()

    def __next__(self) -> Fetched:
        if self._iterator is None:
            self._start()
        rank, world = self._source.place
        first = mine = _OUT
        count = 0
        for place in range(world):
            batch = self._pull()
            if batch is _OUT:
                self._number -= 1
                break
            count += 1
            first = batch if place == 0 else first
            mine = batch if place == rank else mine
        if count == 0 or (mine is _OUT and not self._source.spec.train):
            raise StopIteration
        known = world == self._source.spec.world
        local = int(mine is not _OUT)
        return Fetched(mine if local else first, local, count if known else None)

    def place(self) -> dict[str, Any]:
        if self._source.stateful and self._iterator is not None:
            return {"loader": copy.deepcopy(self._source.loader.state_dict()), "batches": self._number}
        if self._state is not None:
            return {"loader": self._state, "batches": self._number}
        return {"batches": self._number}

    def close(self) -> None:
        iterator, self._iterator = self._iterator, iter(())
        if not getattr(self._source.loader, "persistent_workers", False):
            end_workers(iterator)


class OpaqueSource(DeclaredSource):
    """An iterable of finished batches."""

    def __init__(self, loader: Any, spec: Spec, name: str) -> None:
        super().__init__(spec, name)
        self.loader, self.stateful = loader, is_stateful(loader)
        by_rank = not spec.shard or shards_itself(loader)[0] or shards_itself(getattr(loader, "dataset", None))[0]
        self.place = (0, 1) if by_rank else (spec.rank, spec.world)
        self.suffix = f"/rank{spec.rank}" if by_rank and spec.world > 1 else ""
        declared = declared_length(loader)
        self._declare(None if declared is None else -(-declared // self.place[1]))

    def _epoch(self, epoch: int, position: dict[str, Any], prefix: str) -> Epoch:
        self._expect(position, "batches")
        if "loader" in position and not self.stateful:
            position = {"batches": position["batches"]}
        return OpenEpoch(
            OpaqueStream(self, epoch, prefix, position),
            world=self.spec.world,
            limit=rest(self._limit, -(-int(position.get("batches", 0)) // self.place[1])),
            agree=self.spec.agree,
            **self._joining(position),
            resumed=bool(position),
            ended=None if position else self._ended,
            name=self.name,
        )

    def close(self) -> None:
        super().close()
        end_kept_workers(self.loader)
