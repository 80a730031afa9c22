"""Histograms of tensors of any size: counted where they are and in pieces, so that only a few numbers move."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Histogram", "extent", "histogram"]

_PIECE = 1 << 22
BINS = 64


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of `len(counts)` equal bins from `low` to `high`; their sum and sum of squares."""

    low: float
    high: float
    total: float
    squares: float
    counts: tuple[int, ...]

    @property
    def number(self) -> int:
        return sum(self.counts)

    @property
    def limits(self) -> list[float]:
        """The upper end of every bin."""
        width = (self.high - self.low) / len(self.counts)
        return [*(self.low + width * (i + 1) for i in range(len(self.counts) - 1)), self.high]

    def __add__(self, other: Histogram) -> Histogram:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(self.low, self.high, self.total + other.total, self.squares + other.squares, counts)


def extent(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest finite value; (inf, -inf) where there is none."""
    ends = [torch.stack(part.aminmax()).tolist() for part in _finite(values)]
    return min((low for low, _ in ends), default=math.inf), max((high for _, high in ends), default=-math.inf)


def histogram(values: Any, low: float | None = None, high: float | None = None) -> Histogram | None:
    """Count the finite ones of `values` (a tensor, an array, or nested lists) between `low` and `high`, by default all of them.

    None where there is none.
    """
    values = values if isinstance(values, torch.Tensor) else torch.as_tensor(values)
    if low is None or high is None:
        low, high = extent(values)
        if low > high:
            return None
    counts, total, squares = [0] * BINS, 0.0, 0.0
    scale = BINS / (high - low) if high > low else 0.0
    for part in _finite(values):
        places = ((part - low) * scale).to(torch.int32).clamp_(0, BINS - 1)
        found = torch.bincount(places, minlength=BINS)  # torch.histc is not deterministic on cuda
        counts = [a + b for a, b in zip(counts, found.tolist(), strict=True)]
        part = part.double()
        total += part.sum().item()
        squares += part.square().sum().item()
    return Histogram(low, high, total, squares, tuple(counts))


def _finite(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the finite values, piece by piece, as 32-bit or 64-bit numbers."""
    values = values.detach()
    values = values.coalesce().values() if values.is_sparse else values
    for part in values.reshape(-1).split(_PIECE):
        part = part.cpu() if part.device.type == "mps" else part  # which has no 64-bit numbers
        part = part if part.dtype in (torch.float32, torch.float64) else part.float()
        if part.numel() and not torch.stack(part.aminmax()).isfinite().all():  # cheaper than to look at each
            part = part[part.isfinite()]
        if part.numel():
            yield part
