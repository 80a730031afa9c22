"""Copies of a state on the host, taken in one go, so that training may change the original while they are written."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

__all__ = ["Snapshots"]


class Snapshots:
    """Takes copies of a state, each into the memory of the one before, which must be done with by then."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, bool], torch.UntypedStorage] = {}  # by place in the state, size and kind

    def take(self, state: Any) -> Any:
        """Return `state` (plain containers and tensors) with copies of all tensors, on the CPU; what shared memory shares it again.

        Copies from an accelerator go to pinned memory, all at once, and are waited for together.
        """
        copying = _Copying(self._kept)
        copy = copying.of(state)
        self._kept = copying.used
        for device in copying.devices:
            torch.accelerator.synchronize(device)
        return copy


class _Copying:
    def __init__(self, kept: dict[tuple[int, int, bool], torch.UntypedStorage]) -> None:
        self._kept = kept
        self.used: dict[tuple[int, int, bool], torch.UntypedStorage] = {}
        self.devices: set[torch.device] = set()
        self._copies: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (list, tuple, set):
            return kind(self.of(item) for item in value)
        if isinstance(value, dict):
            copy = kind()
            if kind is OrderedDict:
                copy.__dict__.update(vars(value))
            for key, item in value.items():  # not `update`: a Counter's would count the pairs
                copy[key] = self.of(item)
            return copy
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor.detach().clone().cpu()
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._storage(tensor.untyped_storage()), tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.nn.Parameter(copy, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else copy

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        known = self._copies.get(storage._cdata)
        if known is not None:
            return known
        pinned = storage.device.type == "cuda"
        key = (len(self._copies), storage.nbytes(), pinned)
        copy = self._kept.get(key)
        if copy is None:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        copy.copy_(storage, non_blocking=pinned)
        if storage.device.type != "cpu":
            self.devices.add(storage.device)
        self.used[key] = self._copies[storage._cdata] = copy
        return copy
