"""A pass over a stream, whose end only the data know: one group is fetched ahead, and the ranks agree on whether it is the last."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainer.data.epoch import Epoch, Group
from trainer.data.shard import window_weights
from trainer.errors import DataError

__all__ = ["Fetched", "OpenEpoch", "Stream", "rest"]


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


class _Joined(NamedTuple):
    """This rank's batches of a group, its samples in each, and those of all ranks: none when no rank has another batch."""

    batches: list[Fetched]
    counts: list[int | None]
    totals: list[int | None]


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
        self._position = self._before = stream.place()  # before: from where the last batch can be fetched once more
        self._repeats: Fetched | None = None  # the last batch, in a pass with `join`

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
                yield self._group(group, [f.local for f in group], [f.total for f in group], last)
                group = ahead
        finally:
            self.close()

    def _joined(self, accumulate: int) -> Iterator[Group]:
        """The groups of all ranks together: each as long as the longest rank's, filled up with repeated batches of weight 0."""
        try:
            if self._again:
                (self._repeats,) = self._fetch(1)
            here = self._fetch_with_others(accumulate)
            if not here.totals and not self._resumed:
                self._nothing(False)
            while here.totals:
                place, ran_out = self._stream.place(), self._before
                ahead = self._fetch_with_others(accumulate)
                out = not any(ahead.counts)
                self._position = {**ran_out, "again": self._world} if out and self._repeats is not None else place
                if not ahead.totals:
                    self._over(0)
                yield self._group(*here, last=not ahead.totals)
                here = ahead
        finally:
            self.close()

    def _fetch_with_others(self, accumulate: int) -> _Joined:
        """Fetch a group, and learn how many samples the other ranks have in theirs. Collective."""
        mine: list[Fetched] = []
        while len(mine) < accumulate and not self._again:
            place = self._stream.place()
            one = self._fetch(1)
            if not one:
                break
            mine, self._repeats, self._before = mine + one, one[0], place
        counts = [1 if f.local is None else f.local for f in mine] + [0] * (accumulate - len(mine))
        *totals, without = self._join([*counts, int(self._repeats is None)])
        totals = totals[: totals.index(0)] if 0 in totals else totals
        if without and totals:
            raise DataError(
                f"{self._name}: {without} ranks have no batch at all, so they have none to repeat while the others go on "
                "(uneven='join'). Give every rank data, or use uneven='stop'."
            )
        if self._repeats is not None:
            mine += [self._repeats._replace(local=0)] * (len(totals) - len(mine))
        return _Joined(mine, counts[: len(totals)], totals)

    def _group(self, batches: list[Fetched], counts: list[int | None], totals: list[int | None], last: bool) -> Group:
        weights = None if None in totals else window_weights(counts, totals, self._world)
        shown = counts if self._stream.sized else [0 if n == 0 else None for n in counts]
        return Group(len(counts), weights, last, [f.batch for f in batches], None if all(n is None for n in shown) else shown)

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
