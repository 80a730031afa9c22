"""One pass over a loader: batches in groups, one group an optimizer step, and the position a resume continues from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from trainer.data.shard import Cut, window_weights
from trainer.data.workers import end_workers

__all__ = ["Epoch", "ExactEpoch", "Group"]


class Group:
    """The batches of one optimizer step.

    Attributes:
        size: number of batches.
        weights: what each batch's mean loss is multiplied by before the ranks average, or None for 1/size each.
        last: True for the last group of the epoch, on all ranks alike.
        batches: the batches in order; to be iterated once.
        counts: this rank's number of samples in each batch, 0 for a batch that only keeps step with the other ranks, None where
            unknown; or None when nothing is known.
    """

    __slots__ = ("batches", "counts", "last", "size", "weights")

    def __init__(
        self, size: int, weights: list[float] | None, last: bool, batches: Iterable[Any], counts: list[int | None] | None
    ) -> None:
        self.size, self.weights, self.last, self.batches, self.counts = size, weights, last, batches, counts


class Epoch:
    """One pass of one rank, from a position to the end. Made by `Source.epoch`.

    Attributes:
        remaining: how many batches this rank gets in the pass, known before the first; None when only the data can tell.
        takes_ahead: whether the pass looks at `ahead`.
    """

    remaining: int | None
    ahead: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    """Set before the pass to put the batches through an iterator of yours (one that copies the next batch to a device)."""
    takes_ahead = False

    @property
    def position(self) -> dict[str, Any]:
        """Where a run that stops after the last group (or batch) handed out goes on: plain containers and numbers."""
        raise NotImplementedError

    def entries(self, back: int) -> list[Any] | None:
        """Return the entries of the data set in this rank's batch `back` places before the end of what was handed out (1: the last).

        None where they are not known: iterables, batches without a sampler, combined loaders.
        """
        return None

    def groups(self, accumulate: int) -> Iterator[Group]:
        """Yield the groups of `accumulate` batches each (the last may be shorter).

        Collective: in training with several ranks, where the number of batches is not known before (iterables), the ranks agree once a
        group on whether all have another one.

        Raises:
            DataError: when the loader gives no batch at all.
        """
        raise NotImplementedError

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches one by one; the ranks need not keep step."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the pass holds open: iterators and, unless they are persistent, their worker processes."""


class ExactEpoch(Epoch):
    """A pass whose batches, and their sizes on every rank, follow from an order and a `Cut`. No look-ahead, no collective."""

    takes_ahead = True
    look_up: Callable[[int], list[Any]] | None = None
    """Set by the source: the entries of the n-th batch of the pass on this rank."""

    def __init__(
        self, cut: Cut, open_: Callable[[], Iterator[Any]], key: str, scale: int, sized: bool, keep_workers: bool
    ) -> None:
        self.cut, self.remaining = cut, cut.batches
        self._open, self._key, self._scale, self._sized, self._keep = open_, key, scale, sized, keep_workers
        self._done = 0
        self._iterator: Iterator[Any] | None = None

    @property
    def position(self) -> dict[str, Any]:
        return {self._key: self.cut.used(self._done) * self._scale}

    def entries(self, back: int) -> list[Any] | None:
        return None if self.look_up is None else self.look_up(self._done - back)

    def groups(self, accumulate: int) -> Iterator[Group]:
        total, cut = self.remaining, self.cut
        full = [cut.batch] * accumulate if self._sized else None
        iterator = self._start()
        try:
            while self._done < total:
                size = min(accumulate, total - self._done)
                self._done += size
                last = self._done == total
                batches = islice(iterator, size)
                if last:
                    yield self._last(size, batches)
                else:
                    yield Group(size, None, False, batches, full)
                for _ in batches:  # a loop that left a group early still gets the next one whole
                    pass
        finally:
            self.close()

    def _start(self) -> Iterator[Any]:
        self._iterator = self._open()
        return self._iterator if self.ahead is None else self.ahead(self._iterator)

    def _last(self, size: int, batches: Iterator[Any]) -> Group:
        indices = range(self.remaining - size, self.remaining)
        counts: list[int | None] = [self.cut.local(i) for i in indices]
        weights = window_weights(counts, [self.cut.total(i) for i in indices], self.cut.world)
        if not self._sized:
            counts = [None if n else 0 for n in counts]
        return Group(size, weights, True, batches, counts if self._sized or 0 in counts else None)

    def batches(self) -> Iterator[Any]:
        iterator = self._start()
        try:
            for batch in iterator:
                self._done += 1
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if not self._keep:
            end_workers(iterator)
