"""One pass over a loader: batches in groups, one group an optimizer step, and the position a resume continues from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainer.data.fetch import end_workers
from trainer.data.shard import Cut, window_weights
from trainer.errors import DataError

__all__ = ["Epoch", "ExactEpoch", "Fetched", "Group", "OpenEpoch", "Stream"]


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


class Fetched(NamedTuple):
    """One batch of a stream: `local` samples of this rank's (None: unknown, 0: a repeated one), `total` on all ranks (None: unknown)."""

    batch: Any
    local: int | None
    total: int | None


class Stream:
    """What an `OpenEpoch` reads: an iterator of `Fetched` that can say where it stands.

    `sized` is False where `local` and `total` count whole batches, not samples.
    """

    sized = True

    def __iter__(self) -> Iterator[Fetched]:
        return self

    def __next__(self) -> Fetched:
        raise NotImplementedError

    def place(self) -> dict[str, Any]:
        """Return the position after what was fetched so far."""
        raise NotImplementedError

    def close(self) -> None:
        """End iterators and workers."""


def rest(limit: int | None, done: int) -> int | None:
    """Return what is left of a limit after `done` batches of the epoch."""
    return None if limit is None else max(limit - done, 0)


class OpenEpoch(Epoch):
    """A pass whose end only the data knows: fetched one group ahead, and the ranks agree before each group.

    Policy (training on several ranks): the epoch ends for all ranks together with the first that runs out of data; batches that
    others had fetched by then are left out, with one warning. With `join` it ends with the last: a rank that has run out repeats its last
    batch with weight 0, and a step is the mean over the samples that the others still have.

    Args:
        join: collective, the sum of a list of numbers over the ranks; given for the second policy.
        again: the position is one of a rank that has run out; it stands before the batch that is repeated.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        world: int,
        limit: int | None = None,
        remaining: int | None = None,
        agree: Callable[[bool], bool] | None = None,
        join: Callable[[list[int]], list[int]] | None = None,
        again: bool = False,
        resumed: bool = False,
        ended: Callable[[int], None] | None = None,
        name: str = "loader",
    ) -> None:
        self.remaining = remaining
        self._stream, self._world, self._limit, self._agree = stream, world, limit, agree
        self._join, self._again = join, again
        self._resumed, self._ended, self._name = resumed, ended, name
        self._fetched = 0
        self._position = stream.place()

    @property
    def position(self) -> dict[str, Any]:
        return self._position

    def _fetch(self, size: int) -> list[Fetched]:
        if self._limit is not None:
            size = min(size, self._limit - self._fetched)
        group = list(islice(self._stream, size))
        self._fetched += len(group)
        return group

    def _out(self, group: list[Fetched]) -> bool:
        return not group if self._agree is None else self._agree(not group)

    def groups(self, accumulate: int) -> Iterator[Group]:
        if self._join is not None:
            yield from self._joined(accumulate)
            return
        try:
            group = self._fetch(accumulate)
            if self._out(group):
                self._left_over(group)
                if not self._resumed:
                    self._nothing(bool(group))
                return
            last = False
            while not last:
                place = self._stream.place()
                ahead = self._fetch(accumulate)
                last = self._out(ahead)
                if last:
                    self._left_over(ahead)
                    self._over(len(ahead))
                self._position = place
                yield self._group(group, last)
                group = ahead
        finally:
            self.close()

    def _joined(self, accumulate: int) -> Iterator[Group]:
        """The groups of all ranks together: each as long as the longest rank's, filled up with repeated batches of weight 0."""
        last: Fetched | None = None  # the batch to repeat
        before = self._stream.place()  # where it can be fetched from once more

        def fetch() -> tuple[list[Fetched], list[int], Any]:
            nonlocal last, before
            mine: list[Fetched] = []
            while len(mine) < accumulate and not self._again:
                place = self._stream.place()
                one = self._fetch(1)
                if not one:
                    break
                mine, last, before = mine + one, one[0], place
            counts = [1 if f.local is None else f.local for f in mine] + [0] * (accumulate - len(mine))
            *totals, without = self._join([*counts, int(last is None)])
            totals = totals[: totals.index(0)] if 0 in totals else totals
            if without and totals:
                raise DataError(
                    f"{self._name}: {without} ranks have no batch at all, so they have none to repeat while the others go on "
                    "(uneven='join'). Give every rank data, or use uneven='stop'."
                )
            if last is not None:
                mine += [last._replace(local=0)] * (len(totals) - len(mine))
            return mine, counts, totals

        try:
            if self._again:
                (last,) = self._fetch(1)
            group, counts, totals = fetch()
            if not totals and not self._resumed:
                self._nothing(False)
            while totals:
                place, ran_out = self._stream.place(), before
                ahead, *more = fetch()
                out = not any(more[0])
                self._position = {**ran_out, "again": self._world} if out and last is not None else place
                if not more[1]:
                    self._over(0)
                size = len(totals)
                weights = window_weights(counts[:size], totals, self._world)
                shown: list[int | None] = list(counts[:size])
                if not self._stream.sized:
                    shown = [None if n else 0 for n in shown]
                yield Group(size, weights, not more[1], [f.batch for f in group], None if all(n is None for n in shown) else shown)
                group, (counts, totals) = ahead, more
        finally:
            self.close()

    def _group(self, group: list[Fetched], last: bool) -> Group:
        counts = [f.local for f in group]
        totals = [f.total for f in group]
        known = None not in totals
        weights = window_weights(counts, totals, self._world) if known else None
        shown = counts if self._stream.sized else [0 if n == 0 else None for n in counts]
        shown = None if all(n is None for n in shown) else shown
        return Group(len(group), weights, last, [f.batch for f in group], shown)

    def batches(self) -> Iterator[Any]:
        try:
            while group := self._fetch(1):
                self._position = self._stream.place()
                yield group[0].batch
            if self._fetched == 0 and self._world == 1 and not self._resumed:
                self._nothing(False)
            self._over(0)
        finally:
            self.close()

    def _left_over(self, group: list[Fetched]) -> None:
        if group:
            warnings.warn(
                f"{self._name}: another rank ran out of data first; the epoch ends on all ranks together, and {len(group)} batches "
                "fetched here are left out.",
                stacklevel=3,
            )

    def _over(self, left: int) -> None:
        if self._ended is not None:
            self._ended(self._fetched - left)

    def _nothing(self, here: bool) -> None:
        if self._limit == 0:
            return
        where = "another rank" if here else "it"
        raise DataError(
            f"{self._name} gave no batch: {where} ended at once. Check that the data are not empty, that a batch is not larger than the "
            "data with drop_last=True, and that a generator is not iterated a second time (pass a list, or a class with __iter__)."
        )

    def close(self) -> None:
        self._stream.close()
