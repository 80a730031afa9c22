"""Where the parameters and buffers of a module are, which stages of its stack use them, and putting other values in their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter, Sequential

__all__ = ["Spot", "spots_of"]


class Spot:
    """A parameter or buffer by the places that hold it. A buffer may be another object in each step; a parameter stays the same one."""

    def __init__(self, home: torch.device) -> None:
        self.home = home
        self._places: list[tuple[dict[str, Any], str]] = []
        self._users: set[int | None] = set()

    def add(self, table: dict[str, Any], name: str, stage: int | None) -> None:
        """Note a place, in a layer of `stage`, or outside of the stack."""
        self._places.append((table, name))
        self._users.add(stage)

    @property
    def owner(self) -> int | None:
        """The stage that alone uses it; None where several do, or the module outside of the stack."""
        return next(iter(self._users)) if len(self._users) == 1 else None

    @property
    def tensor(self) -> torch.Tensor:
        table, name = self._places[0]
        return table[name]

    def move(self, device: torch.device) -> None:
        """Bring it to `device`."""
        if self.tensor.device != device:
            self.tensor.data = self.tensor.data.to(device)

    def put(self, value: torch.Tensor) -> None:
        """Put `value` in its place, whatever devices they are on. The object stays; its gradient does not."""
        old = self.tensor
        new = Parameter(value, old.requires_grad) if isinstance(old, Parameter) else value.detach()
        new.__dict__.update(old.__dict__)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:  # somebody holds on to it, by a weak reference for example
            for table, name in self._places:
                table[name] = new


def spots_of(module: Module, stack: Sequential, stage_of: Sequence[int]) -> list[Spot]:
    """Return the spots of a module, in an order that is the same on all ranks. `stage_of` has the stage of each layer of the stack."""
    found: dict[int, Spot] = {}

    def add(part: Module, stage: int | None) -> None:
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), Spot(tensor.device)).add(table, name, stage)

    for layer, stage in zip(stack, stage_of, strict=True):
        for part in layer.modules():
            add(part, stage)
    for part in _outside(module, stack):
        add(part, None)
    return list(found.values())


def _outside(module: Module, stack: Module) -> Iterator[Module]:
    """What of the module is reached by another way than through the layers of the stack."""
    yield module
    if module is not stack:
        for child in module.children():
            yield from _outside(child, stack)
