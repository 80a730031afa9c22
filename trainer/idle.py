"""Which GPUs nobody else uses, asked of nvidia-smi: the process that asks gets no CUDA context, and can still be forked."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Gpu", "ask", "prefer", "visible"]

_QUERY = ["nvidia-smi", "--query-gpu=uuid,name,memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
_PATIENCE_S = 20  # a machine with many GPUs whose driver sleeps between uses takes seconds
_IN_USE_MIB = 1024  # a desktop and the driver itself take less
_IN_USE_PERCENT = 10
_CONTEXT_MIB = 600  # what a process takes on a GPU beside its tensors


@dataclass(frozen=True)
class Gpu:
    """The use of one GPU by all processes."""

    uuid: str
    model: str
    used_mib: int
    busy_percent: int

    def in_use(self, own_mib: int = 0) -> bool:
        """Return whether others use it, where this process holds `own_mib` of it."""
        if own_mib:
            return self.used_mib - own_mib - _CONTEXT_MIB > _IN_USE_MIB  # how busy it is may be our own doing
        return self.used_mib > _IN_USE_MIB or self.busy_percent >= _IN_USE_PERCENT


def ask() -> list[Gpu]:
    """Return all GPUs of the machine in the order of their slots; none where nvidia-smi is missing or does not know."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_PATIENCE_S, check=True).stdout
        rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
        return [Gpu(uuid, model, int(used), int(busy) if busy.isdigit() else 0) for uuid, model, used, busy in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def visible(gpus: list[Gpu], listed: str | None, by_slot: bool, count: int) -> list[Gpu]:
    """Return the GPUs in the order in which torch counts them; none where that cannot be told.

    Args:
        gpus: all of the machine, in the order of slots.
        listed: CUDA_VISIBLE_DEVICES, numbers or (beginnings of) UUIDs.
        by_slot: CUDA counts in the order of slots, and not the fastest first.
        count: how many torch sees.
    """
    names = [str(number) for number in range(len(gpus))] if listed is None else [name.strip() for name in listed.split(",")]
    found: list[Gpu] = []
    for name in names:
        alike = [gpus[int(name)]] if name.isdigit() and int(name) < len(gpus) else [g for g in gpus if name and g.uuid.startswith(name)]
        if len(alike) != 1:
            break  # CUDA, too, stops at the first that it does not know
        found += alike
    one_model = len({gpu.model for gpu in gpus}) == 1
    numbered = any(name.isdigit() for name in names)
    return found if len(found) == count and (by_slot or one_model or not numbered) else []


def prefer(gpus: list[Gpu], wanted: int | None, own_mib: Sequence[int]) -> tuple[list[int], str]:
    """Return the indices of `wanted` GPUs (None: all that are idle, or all), idle ones first, and a line that says what was left out.

    Warns where one that others use has to be taken.
    """
    used = [i for i, gpu in enumerate(gpus) if gpu.in_use(own_mib[i])]
    idle = [i for i in range(len(gpus)) if i not in used]
    by_use = idle + sorted(used, key=lambda i: gpus[i].used_mib)
    taken = sorted(by_use[: wanted or len(idle) or len(gpus)])
    asked = "devices='auto'" if wanted is None else f"devices={wanted}"
    shared = [i for i in taken if i in used]
    if shared:
        warnings.warn(f"{asked}: others use cuda device(s) {_listed(shared)} ({_use(gpus, shared)}).", stacklevel=2)
    skipped = [i for i in used if i not in taken and (wanted is None or i < taken[-1])]
    if not skipped:
        return taken, ""
    return taken, f"{asked} takes cuda device(s) {_listed(taken)}; others use {_listed(skipped)} ({_use(gpus, skipped)})."


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _use(gpus: list[Gpu], indices: list[int]) -> str:
    return "; ".join(f"{gpus[i].used_mib} MiB, {gpus[i].busy_percent} % busy" for i in indices)
