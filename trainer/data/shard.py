"""How an order falls into batches, and batches onto ranks: arithmetic only.

Training: the ranks together take `world * batch` entries at a time, as one process with that batch size would, and rank r
of them every world-th from the r-th on. So two ranks with batches of 2 make the steps of one rank with batches of 4, and
all ranks have the same number of batches. Evaluation: whole batches in turn, nothing repeated, nothing left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Cut", "window_weights"]


@dataclass(frozen=True)
class Cut:
    """One pass of one rank over entries [start, end) of an order.

    `batch` is the number of entries a batch of one rank holds. Everything is O(1), so a pass may start anywhere.
    """

    start: int
    end: int
    batch: int
    rank: int
    world: int
    train: bool

    @property
    def round(self) -> int:
        """Entries that all ranks together use for one batch each."""
        return self.batch * self.world

    @property
    def batches(self) -> int:
        """How many batches this rank has in the pass."""
        entries = max(self.end - self.start, 0)
        if self.train:
            return -(-entries // self.round)
        whole = -(-entries // self.batch)
        return max(-(-(whole - self.rank) // self.world), 0)

    @property
    def short(self) -> bool:
        """True when the pass ends in an incomplete round (training)."""
        return max(self.end - self.start, 0) % self.round != 0

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first, stop, step) into the order for every batch of this rank."""
        start, end, size = self.start, self.end, self.batch
        if not self.train:
            for first in range(start + self.rank * size, end, self.round):
                yield first, min(first + size, end), 1
            return
        for first in range(start, end, self.round):
            stop = min(first + self.round, end)
            mine = first + self.rank
            if mine < stop:
                yield mine, stop, self.world
            else:  # nothing left for this rank: it computes on an entry of the others, with weight 0
                yield first, first + 1, 1

    def used(self, done: int) -> int:
        """Return how many entries from the order's beginning are used after `done` batches of every rank."""
        return min(self.start + done * self.round, max(self.end, self.start))

    def local(self, index: int) -> int:
        """Return how many entries of training batch `index` are this rank's own (0: a repeated one)."""
        total = self.total(index)
        return max(-(-(total - self.rank) // self.world), 0)

    def total(self, index: int) -> int:
        """Return how many entries all ranks together have in training batch `index`."""
        first = self.start + index * self.round
        return max(min(first + self.round, self.end) - first, 0)


def window_weights(locals_: list[int], totals: list[int], world: int) -> list[float] | None:
    """Return the weight of each mean loss of one optimizer step, or None for 1/len each.

    With n_i of this rank's samples in batch i and N_i on all `world` ranks, the weights n_i * world / sum(N) make the
    average of the ranks' weighted sums the mean over all sum(N) samples:
    sum_r (1/world) sum_i n_ri * world / sum(N) * mean_ri  =  (sum of all samples' losses) / sum(N).
    """
    size = len(locals_)
    every = sum(totals)
    if every == 0 or all(n * world * size == every for n in locals_):
        return None
    return [n * world / every for n in locals_]
