"""Devices: from what a user asks for to an accelerator and indices, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer import idle
from trainer.accelerators import BUILT_IN, Accelerator, CUDAAccelerator, read_devices
from trainer.errors import MisconfigurationException, nearest
from trainer.launchers.environment import gpu_order

__all__ = ["NAMES", "Devices", "resolve"]

_GPUS = ("cuda", "mps")  # "gpu" is whichever this machine has
NAMES = ("auto", "cpu", "cuda", "gpu", "mps")


@dataclass(frozen=True)
class Devices:
    """The devices of one node, one process each: `indices[local_rank]` belongs to `local_rank`.

    For "cpu" the indices only count processes.
    """

    type: str
    indices: tuple[int, ...]
    accelerator: Accelerator = field(default=None, compare=False, repr=False)  # type: ignore[assignment]
    note: str = field(default="", compare=False, repr=False)
    """A line for the user, where devices were left out."""

    def __post_init__(self) -> None:
        if self.accelerator is None:
            object.__setattr__(self, "accelerator", BUILT_IN[self.type]())

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
                f"local rank {local_rank} has no device: {self.count} {self.accelerator} device(s) were asked for. "
                "Start as many processes on each node as the Trainer has devices."
            )
        return self.accelerator.device(self.indices[local_rank])


def resolve(
    accelerator: str | torch.device | Accelerator | Devices = "auto",
    devices: str | int | Sequence[int] = "auto",
    idle_first: bool = False,
) -> Devices:
    """Work out the accelerator and indices.

    Args:
        accelerator: "cpu", "cuda", "mps", "gpu" (cuda or mps), or "auto" (gpu where there is one, else cpu); a `torch.device`; an
            `Accelerator`; a finished `Devices`, returned as it is.
        devices: a number; a list of indices, also as text ("0,1"; "0," is index 0 and "1" is one device); -1 or "-1" for all that
            exist; "auto" for all (cpu: one). On cpu a number means that many processes.
        idle_first: on cuda, leave out those that others use where there is a choice: "auto" takes the idle ones (all, with a
            warning, where none is), a number as many as it says, idle ones first.

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
    kind = accelerator if isinstance(accelerator, Accelerator) else BUILT_IN[_type(accelerator)]()
    if not kind.is_available():
        raise MisconfigurationException(f"accelerator={kind.name!r} was asked for, but it finds no device on this machine.")
    indices = tuple(kind.parse_devices(devices))
    if not indices:
        raise MisconfigurationException(f"accelerator={kind.name!r}: devices={devices!r} gives no device.")
    note = ""
    if idle_first and isinstance(kind, CUDAAccelerator):
        indices, note = _idle_ones(read_devices(devices), indices, kind.auto_device_count())
    return Devices(kind.device_type, indices, kind, note)


def _idle_ones(wanted: int | list[int] | None, indices: tuple[int, ...], exist: int) -> tuple[tuple[int, ...], str]:
    """Choose among `exist` GPUs, where there is a choice and the use of each is known."""
    if isinstance(wanted, list) or exist == 1 or wanted in (-1, exist):
        return indices, ""
    gpus = idle.visible(idle.ask(), *gpu_order(), exist)
    if not gpus:
        return indices, ""
    own = [torch.cuda.memory_reserved(i) // 2**20 if torch.cuda.is_initialized() else 0 for i in range(exist)]
    chosen, note = idle.prefer(gpus, wanted, own)
    return tuple(chosen), note


def _type(name: Any) -> str:
    """Return the name of the built-in accelerator that `name` means, which must exist on this machine."""
    if name not in NAMES:
        raise MisconfigurationException(
            f"unknown accelerator {name!r}; choose one of {', '.join(NAMES)}, or give an Accelerator object.{nearest(str(name), NAMES)}"
        )
    present = [kind for kind in _GPUS if BUILT_IN[kind]().is_available()]
    if name == "auto":
        return (present or ["cpu"])[0]
    kind = (present or ["gpu"])[0] if name == "gpu" else name
    if kind != "cpu" and kind not in present:
        found = f"only {', '.join(present)} and cpu" if present else "only cpu"
        raise MisconfigurationException(f"accelerator={name!r} was asked for, but torch sees {found} on this machine.")
    return kind
