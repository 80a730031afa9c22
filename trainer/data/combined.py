"""Several loaders as one: `CombinedLoader`, usable alone, and the `Source` a run makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from trainer.data.epoch import Epoch
from trainer.data.open_epoch import Fetched, OpenEpoch, Stream, rest
from trainer.data.source import Source, Spec, declared_length, resolve_limit
from trainer.errors import DataError, MisconfigurationException, nearest

__all__ = ["CombinedLoader", "CombinedSource", "flatten", "unflatten"]

MODES = ("min_size", "max_size", "max_size_cycle", "sequential")
_OUT: Any = object()


def holds_iterables(tree: Any) -> bool:
    """True for dicts, and for lists and tuples of iterables; a list of tensors or numbers is itself one iterable of batches."""
    if isinstance(tree, list | tuple):
        return any(hasattr(type(part), "__iter__") and not isinstance(part, torch.Tensor | str | bytes) for part in tree)
    return isinstance(tree, dict)


def flatten(tree: Any) -> list[Any]:
    """Return the iterables in nested lists, tuples and dicts, in order."""
    if not holds_iterables(tree):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in flatten(part)]


def unflatten(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return nested containers shaped like `tree`, with its iterables replaced, in order, by `leaves`."""
    if not holds_iterables(tree):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: unflatten(part, leaves) for key, part in tree.items()}
    parts = [unflatten(part, leaves) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


class CombinedLoader:
    """Iterate over several iterables at once; gives (batch, batch_idx, dataloader_idx).

    Args:
        iterables: a list, tuple or dict of iterables, nested as you like. A batch has the same shape, with one batch of each
            iterable at its place.
        mode: "min_size" ends with the shortest; "max_size" goes on to the longest, with None for those that have ended;
            "max_size_cycle" begins those anew until the longest ends; "sequential" takes one iterable after the other (a batch is then
            one iterable's batch, and dataloader_idx says whose).

    Raises:
        MisconfigurationException: when `mode` is none of these or there is no iterable.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise MisconfigurationException(f"CombinedLoader has no mode {mode!r}; the modes are {', '.join(MODES)}.{nearest(mode, MODES)}")
        self._iterables, self._mode = iterables, mode
        self._flattened = flatten(iterables)
        if isinstance(iterables, list | tuple | dict) and not iterables:
            raise MisconfigurationException("CombinedLoader needs at least one iterable.")
        self._limits: list[int | float | None] | None = None
        self._walk: Iterator[Any] | None = None

    @property
    def iterables(self) -> Any:
        """The iterables in the containers they came in."""
        return self._iterables

    @property
    def mode(self) -> str:
        """How the iterables are combined."""
        return self._mode

    @property
    def flattened(self) -> list[Any]:
        """The iterables as a flat list; may be set to a list of the same length.

        Raises:
            MisconfigurationException: when the new list has another length.
        """
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        if len(flattened) != len(self._flattened):
            raise MisconfigurationException(f"There are {len(self._flattened)} iterables, so {len(flattened)} cannot take their place.")
        self._iterables = unflatten(self._iterables, iter(flattened))
        self._flattened = list(flattened)

    @property
    def limits(self) -> list[int | float | None] | None:
        """How many batches (or what fraction) of each iterable are used; set one number for all, or a list.

        Raises:
            MisconfigurationException: when a list has another length than there are iterables.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float | None] | None) -> None:
        if isinstance(limits, int | float):
            limits = [limits] * len(self._flattened)
        if limits is not None and len(limits) != len(self._flattened):
            raise MisconfigurationException(f"There are {len(self._flattened)} iterables, but {len(limits)} limits.")
        self._limits = limits

    def _limit(self, index: int) -> tuple[int | None, int | None]:
        """Return (length, limit) of one iterable in batches, None for unknown and for none."""
        length = declared_length(self._flattened[index])
        return length, resolve_limit(self._limits[index] if self._limits else None, length, f"iterable {index}")

    def _lengths(self) -> list[int | None]:
        pairs = map(self._limit, range(len(self._flattened)))
        return [length if length is None or limit is None else min(length, limit) for length, limit in pairs]

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: when an iterable has no length.
        """
        length = combined_length(self._lengths(), self._mode)
        if length is None:
            raise TypeError("An iterable of this CombinedLoader has no length, so it has none either.")
        return length

    def _opened(self, index: int) -> Iterator[Any]:
        _, limit = self._limit(index)
        iterator = iter(self._flattened[index])
        return iterator if limit is None else islice(iterator, limit)

    def __iter__(self) -> CombinedLoader:
        if self._mode == "sequential":
            self._walk = ((b, i, k) for k in range(len(self._flattened)) for i, b in enumerate(self._opened(k)))
        else:
            turns = [Turn(lambda _, k=k: self._opened(k)) for k in range(len(self._flattened))]
            steps = enumerate(together(turns, self._mode))
            self._walk = ((unflatten(self._iterables, iter(leaves)), i, 0) for i, leaves in steps)
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._walk is None:
            iter(self)
        return next(self._walk)

    def reset(self) -> None:
        """Forget the iteration under way."""
        self._walk = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_walk": None}


def combined_length(lengths: list[int | None], mode: str) -> int | None:
    """Return how many batches iterables of these lengths give together, or None when one is unknown."""
    if any(n is None for n in lengths):
        return None
    return {"min_size": min, "sequential": sum}.get(mode, max)(lengths)


class Turn:
    """One of several iterables read in step. `cycle` counts how often it has been used up."""

    def __init__(self, open_: Callable[[int], Iterator[Any]], cycle: int = 0, ended: bool = False) -> None:
        self._open, self.cycle, self.ended = open_, cycle, ended
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """Return the next item or `_OUT`."""
        if self._iterator is None:
            self._iterator = iter(()) if self.ended else self._open(self.cycle)
        return next(self._iterator, _OUT)

    def again(self) -> Any:
        """Begin anew and return the first item.

        Raises:
            DataError: when it gives nothing a second time.
        """
        self.cycle += 1
        self._iterator, self.ended = None, False
        item = self.next()
        if item is _OUT:
            raise DataError("A loader in max_size_cycle gave no batch when it was begun anew; a generator can be iterated only once.")
        return item


def together(turns: list[Turn], mode: str) -> Iterator[list[Any]]:
    """Yield lists of one item of each, as `mode` says (not for "sequential")."""
    while True:
        row = []
        for turn in turns:
            item = turn.next()
            if item is _OUT:
                if mode == "min_size":
                    return
                turn.ended = True
                if all(t.ended or t.cycle for t in turns):
                    return
                item = None if mode == "max_size" else turn.again()
            row.append(item)
        yield row


class CombinedStream(Stream):
    """One pass over the sources of a CombinedLoader, in step."""

    sized = False

    def __init__(self, source: CombinedSource, epoch: int, position: dict[str, Any]) -> None:
        self._source, self._epoch = source, epoch
        saved = position.get("loaders") or [{} for _ in source.sources]
        self._passes: list[Epoch] = []
        self._turns: list[Turn] = []
        for index, at in enumerate(saved):
            cycle, ended = at.get("cycle", 0), at.get("ended", False)
            self._passes.append(source.sources[index].epoch(epoch, at.get("at"), cycle))
            self._turns.append(Turn(self._opener(index, cycle), cycle, ended))
        self._rows = together(self._turns, source.loader.mode)
        self._done = int(position.get("batches", 0))

    def _opener(self, index: int, first: int) -> Callable[[int], Iterator[Any]]:
        def open_(cycle: int) -> Iterator[Any]:
            if cycle != first:
                self._passes[index] = self._source.sources[index].epoch(self._epoch, None, cycle)
            return self._passes[index].batches()

        return open_

    def __next__(self) -> Fetched:
        row = next(self._rows)
        self._done += 1
        return Fetched(unflatten(self._source.loader.iterables, iter(row)), None, None)

    def place(self) -> dict[str, Any]:
        pairs = zip(self._turns, self._passes, strict=True)
        loaders = [{"cycle": t.cycle, "ended": t.ended, "at": p.position} for t, p in pairs]
        return {"loaders": loaders, "batches": self._done}

    def close(self) -> None:
        self._rows = iter(())
        for one in self._passes:
            one.close()


class CombinedSource(Source):
    """The sources of a CombinedLoader's iterables. Each is cut over the ranks on its own; a group's batches weigh the same."""

    ordered = True  # each of the sources sees to it

    def __init__(self, loader: CombinedLoader, spec: Spec, name: str, sources: list[Source]) -> None:
        super().__init__(spec, name)
        if loader.mode == "sequential":
            raise MisconfigurationException(
                f"{name}: mode='sequential' gives one loader after the other, which training cannot step through; for validation prepare "
                "the loaders one by one (trainer.data.loaders_of)."
            )
        self.loader, self.sources = loader, sources
        whole = combined_length([s.num_batches for s in sources], loader.mode)
        hint = combined_length([s.hint for s in sources], loader.mode)
        self._limit = resolve_limit(spec.limit, hint, name)
        self.num_batches, self.hint = (n if n is None or self._limit is None else min(n, self._limit) for n in (whole, hint))

    def _epoch(self, epoch: int, position: dict[str, Any], prefix: str) -> Epoch:
        if position and len(position.get("loaders", ())) != len(self.sources):
            raise DataError(f"The saved data position {position!r} is not one of {self.name} with {len(self.sources)} loaders.")
        exact, done = self.num_batches is not None, int(position.get("batches", 0))
        return OpenEpoch(
            CombinedStream(self, epoch, position),
            world=self.spec.world,
            limit=rest(self.num_batches if exact else self._limit, done),
            remaining=max(self.num_batches - done, 0) if exact else None,
            agree=None if exact else self.spec.agree,
            **({} if exact else self._joining(position)),
            resumed=bool(position),
            name=self.name,
        )

    def close(self) -> None:
        super().close()
        for source in self.sources:
            source.close()
