"""Accelerators: what a kind of device is to the trainer, and the three kinds that come with it: cpu, cuda and mps."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from trainer.errors import MisconfigurationException

__all__ = ["BUILT_IN", "Accelerator", "CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "read_devices"]


class Accelerator(ABC):
    """A kind of device. Subclass it for devices that torch knows and this package does not.

    An object holds settings only: it is pickled with the Trainer on its way to new processes. How ranks with such devices talk is
    torch's business: the backend that is registered for `device_type` (`torch.distributed.Backend.register_backend`), else gloo.
    """

    name: str = ""
    """What it is called in messages."""
    device_type: str = ""
    """The `type` of its torch devices; decides what autocast computes in."""

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such a device. Must not start one: the process may yet be forked."""

    @abstractmethod
    def auto_device_count(self) -> int:
        """Return how many devices this machine has, which is what devices="auto" takes. Must not start one."""

    def parse_devices(self, devices: Any) -> Sequence[int]:
        """Return the indices that `Trainer(devices=)` means, one a process.

        Raises:
            MisconfigurationException: for what cannot be read, or does not exist.
        """
        return _existing(self.name, read_devices(devices), self.auto_device_count())

    def device(self, index: int) -> torch.device:
        """Return the torch device of an index."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, index)

    def setup_device(self, device: torch.device) -> None:
        """Make `device` this process's own, at the start of a run, ahead of everything that touches it."""

    def teardown(self) -> None:
        """Undo `setup_device`, at the end of a run."""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return what can be said about the use of a device, by name; numbers only."""
        return {}

    def __str__(self) -> str:
        return self.name


class CPUAccelerator(Accelerator):
    """The processor. Its "devices" are processes, as many as one likes."""

    name = device_type = "cpu"

    def is_available(self) -> bool:
        return True

    def auto_device_count(self) -> int:
        return 1

    def parse_devices(self, devices: Any) -> Sequence[int]:
        wanted = read_devices(devices)
        if wanted is None:
            return [0]
        if isinstance(wanted, list):
            _check_list(wanted, "cpu")
            return range(len(wanted))
        if wanted < 1:
            raise MisconfigurationException(f"devices={wanted} on cpu is the number of processes; it must be at least 1.")
        return range(wanted)

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the load of the machine: processes that compute or wait to, over the last minute."""
        return {"cpu_load": os.getloadavg()[0]}


class CUDAAccelerator(Accelerator):
    """NVIDIA GPUs (and AMD's, with a torch made for them)."""

    name = device_type = "cuda"
    _before: int | None = None

    def is_available(self) -> bool:
        return self.auto_device_count() > 0

    def auto_device_count(self) -> int:
        return torch.cuda.device_count()

    def setup_device(self, device: torch.device) -> None:
        """Make `device` torch's current one, so that "cuda" without a number means it, too."""
        self._before = torch.cuda.current_device()
        torch.cuda.set_device(device)

    def teardown(self) -> None:
        if self._before is not None:
            torch.cuda.set_device(self._before)
            self._before = None

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return the figures of torch's memory allocator (bytes and counts)."""
        return torch.cuda.memory_stats(device)


class MPSAccelerator(Accelerator):
    """The GPU of an Apple machine."""

    name = device_type = "mps"

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def auto_device_count(self) -> int:
        return int(self.is_available())

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        return {"allocated_bytes": float(torch.mps.current_allocated_memory()), "driver_bytes": float(torch.mps.driver_allocated_memory())}


BUILT_IN: dict[str, type[Accelerator]] = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}


def read_devices(devices: Any) -> int | list[int] | None:
    """Return a number, a list of indices, or None for "auto".

    Raises:
        MisconfigurationException: for anything else.
    """
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


def _existing(kind: str, wanted: int | list[int] | None, exist: int) -> Sequence[int]:
    if wanted is None or wanted == -1:
        return range(exist)
    if isinstance(wanted, list):
        _check_list(wanted, kind)
        missing = [index for index in wanted if index >= exist]
        if missing:
            raise MisconfigurationException(
                f"devices={wanted}: there is no {kind} device {missing[0]}; this machine has {exist} (0..{exist - 1})."
            )
        return wanted
    if wanted < 1:
        raise MisconfigurationException(f"devices={wanted}: ask for at least 1 {kind} device, or -1 for all; for none, accelerator='cpu'.")
    if wanted > exist:
        raise MisconfigurationException(f"devices={wanted}: this machine has {exist} {kind} device(s).")
    return range(wanted)


def _check_list(wanted: list[int], kind: str) -> None:
    if not wanted:
        raise MisconfigurationException(f"devices=[] names no {kind} device; give at least one index.")
    if min(wanted) < 0:
        raise MisconfigurationException(f"devices={wanted}: index {min(wanted)} is negative.")
    twice = sorted({index for index in wanted if wanted.count(index) > 1})
    if twice:
        raise MisconfigurationException(f"devices={wanted} names {kind} device {twice[0]} twice; each process needs its own.")
