"""Devices: from what a user asks for to a device type and indices, checked before anything starts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import MisconfigurationException, nearest

__all__ = ["Devices", "resolve"]

_TYPES = {"cpu": "cpu", "cuda": "cuda", "gpu": "", "mps": "mps"}  # gpu: whichever of cuda and mps this machine has
_NAMES = ["auto", *_TYPES]


@dataclass(frozen=True)
class Devices:
    """The devices of one node, one process each: `indices[local_rank]` belongs to `local_rank`.

    For "cpu" the indices only count processes.
    """

    type: str
    indices: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many devices, and so processes, on this node."""
        return len(self.indices)

    def device(self, local_rank: int) -> torch.device:
        """The device of the process `local_rank` of this node.

        Raises:
            MisconfigurationException: when there are more processes than devices.
        """
        if not 0 <= local_rank < self.count:
            raise MisconfigurationException(
                f"local rank {local_rank} has no device: {self.count} {self.type} device(s) were asked for. "
                "Start as many processes on each node as the Trainer has devices."
            )
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.indices[local_rank])


def resolve(accelerator: str | torch.device | Devices = "auto", devices: str | int | Sequence[int] = "auto") -> Devices:
    """Work out the device type and indices.

    Args:
        accelerator: "cpu", "cuda", "mps", "gpu" (cuda or mps), or "auto" (gpu where there is one, else cpu); a `torch.device`; a
            finished `Devices`, returned as it is.
        devices: a number; a list of indices, also as text ("0,1"; "0," is index 0 and "1" is one device); -1 or "-1" for all that
            exist; "auto" for all (cpu: one). On cpu a number means that many processes.

    Raises:
        MisconfigurationException: an unknown accelerator, one that this machine lacks, no devices, a negative number or index,
            duplicates, or devices that do not exist.
    """
    if isinstance(accelerator, Devices):
        return accelerator
    if isinstance(accelerator, torch.device):
        if accelerator.index is not None and devices == "auto" and accelerator.type != "cpu":
            devices = [accelerator.index]
        accelerator = accelerator.type
    kind = _type(accelerator)
    if kind == "cpu":
        return Devices(kind, _cpu_indices(_parse(devices)))
    return Devices(kind, _indices(kind, _parse(devices), _count(kind)))


def _type(name: Any) -> str:
    """Return the torch device type for an accelerator's name, which must exist on this machine."""
    if name not in _NAMES:
        raise MisconfigurationException(f"unknown accelerator {name!r}; choose one of {', '.join(_NAMES)}.{nearest(str(name), _NAMES)}")
    present = [kind for kind in ("cuda", "mps") if _count(kind)]
    if name == "auto":
        return (present or ["cpu"])[0]
    kind = _TYPES[name] or (present or ["gpu"])[0]
    if kind != "cpu" and kind not in present:
        found = f"only {', '.join(present)} and cpu" if present else "only cpu"
        raise MisconfigurationException(f"accelerator={name!r} was asked for, but torch sees {found} on this machine.")
    return kind


def _count(kind: str) -> int:
    """How many devices of a type exist; asks the type's own module, which does not start the device."""
    if kind == "cuda":
        return torch.cuda.device_count()
    return int(torch.backends.mps.is_available())


def _parse(devices: Any) -> int | list[int] | None:
    """Return a number, a list of indices, or None for "auto"."""
    try:
        if isinstance(devices, bool):
            raise TypeError
        if isinstance(devices, str):
            text = devices.strip()
            if text == "auto":
                return None
            return [int(part) for part in text.split(",") if part.strip()] if "," in text else int(text)
        if isinstance(devices, Sequence):
            if any(isinstance(index, bool) for index in devices):
                raise TypeError
            return [operator.index(index) for index in devices]
        return operator.index(devices)
    except (TypeError, ValueError):
        raise MisconfigurationException(
            f"devices={devices!r} is not understood; give a number, a list of indices, '0,1', -1 (all) or 'auto'."
        ) from None


def _cpu_indices(wanted: int | list[int] | None) -> tuple[int, ...]:
    if wanted is None:
        return (0,)
    if isinstance(wanted, list):
        _check_list(wanted, "cpu")
        return tuple(range(len(wanted)))
    if wanted < 1:
        raise MisconfigurationException(f"devices={wanted} on cpu is the number of processes; it must be at least 1.")
    return tuple(range(wanted))


def _indices(kind: str, wanted: int | list[int] | None, exist: int) -> tuple[int, ...]:
    if wanted is None or wanted == -1:
        return tuple(range(exist))
    if isinstance(wanted, list):
        _check_list(wanted, kind)
        missing = [index for index in wanted if index >= exist]
        if missing:
            raise MisconfigurationException(
                f"devices={wanted}: there is no {kind} device {missing[0]}; this machine has {exist} (0..{exist - 1})."
            )
        return tuple(wanted)
    if wanted < 1:
        raise MisconfigurationException(f"devices={wanted}: ask for at least 1 {kind} device, or -1 for all; for none, accelerator='cpu'.")
    if wanted > exist:
        raise MisconfigurationException(f"devices={wanted}: this machine has {exist} {kind} device(s).")
    return tuple(range(wanted))


def _check_list(wanted: list[int], kind: str) -> None:
    if not wanted:
        raise MisconfigurationException(f"devices=[] names no {kind} device; give at least one index.")
    if min(wanted) < 0:
        raise MisconfigurationException(f"devices={wanted}: index {min(wanted)} is negative.")
    twice = sorted({index for index in wanted if wanted.count(index) > 1})
    if twice:
        raise MisconfigurationException(f"devices={wanted} names {kind} device {twice[0]} twice; each process needs its own.")
