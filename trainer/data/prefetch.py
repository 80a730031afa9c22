"""Copying the next batch to an accelerator while the current one is computed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["DevicePrefetcher"]

_OUT: Any = object()


class DevicePrefetcher:
    """Iterate over batches on `device`; on cuda the next one is copied on a side stream meanwhile.

    Args:
        iterator: the batches, on the host; pinned memory (`pin_memory=True`) lets the copy run beside the computation.
        to_device: moves one batch, non-blocking; called under the side stream on cuda.
        device: where to. On anything but cuda this is a plain map.
    """

    def __init__(self, iterator: Iterable[Any], to_device: Callable[[Any], Any], device: torch.device) -> None:
        self._source, self._move, self._device = iterator, to_device, torch.device(device)

    def __iter__(self) -> Iterator[Any]:
        if self._device.type != "cuda":
            return map(self._move, self._source)
        return self._ahead()

    def _ahead(self) -> Iterator[Any]:
        side = torch.cuda.Stream(self._device)
        source = iter(self._source)
        ready = self._copy(source, side)
        while ready is not _OUT:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(side)
            hold(ready, current)
            batch, ready = ready, self._copy(source, side)
            yield batch

    def _copy(self, source: Iterator[Any], side: torch.cuda.Stream) -> Any:
        batch = next(source, _OUT)
        if batch is _OUT:
            return _OUT
        with torch.cuda.stream(side):
            return self._move(batch)


def hold(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses the batch's tensors, which another stream made: their memory waits for it."""
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif isinstance(batch, dict):
        for part in batch.values():
            hold(part, stream)
    elif isinstance(batch, list | tuple):
        for part in batch:
            hold(part, stream)
    elif hasattr(batch, "record_stream"):
        batch.record_stream(stream)
