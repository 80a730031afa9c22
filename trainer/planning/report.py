"""What a plan says: bytes of memory, messages, arithmetic; as a table and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["Memory", "Plan", "Transfer", "readable"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, or on one of its devices. All of it is there at once when a forward pass ends: gradients of the step before are dropped after it.

    `activations` is what autograd saved. `recomputed` is what backward makes again of the largest checkpointed layer. `communication` is
    what strategies hold beside: DDP's buckets; with FSDP the most of whole weights and messages at a time.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    recomputed: int
    communication: int

    @property
    def state(self) -> int:
        """What is there between two steps: parameters, gradients, optimizer and buffers."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Transfer:
    """A message, or a copy to another device of the rank: `bytes` of the whole tensor (all-gather: of what comes out; reduce-scatter: of what goes in), across `ranks` ranks."""

    operation: str
    bytes: int
    dimension: str
    ranks: int

    @property
    def wire(self) -> float:
        """The bytes that a rank sends at least, as a ring of ranks does.

        The factors are those of NVIDIA's nccl-tests, doc/PERFORMANCE.md ("bus bandwidth"): 2(n-1)/n of the tensor for an all-reduce,
        (n-1)/n for an all-gather, a reduce-scatter or an all-to-all, and 1 for a broadcast, a message to one rank and a copy. What is received
        from one rank comes while others are sent.
        """
        n = self.ranks
        factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_to_all": (n - 1) / n}
        return self.bytes * factors.get(self.operation, 0 if self.operation == "recv" or n == 1 else 1)


@dataclass(frozen=True)
class Plan:
    """One optimizer step of one rank, as planned. Bytes are bytes, `flops` floating-point operations, times seconds.

    `checkpointed` and `flops_checkpointed` are those with activation checkpointing of the layers `layers`; None where there are none to choose.
    `bandwidth` is in bytes a second, of one rank in one direction: a number, or one for each dimension.

    `devices` has the memory of each device where a rank has several, `devices_checkpointed` the same with activation checkpointing; `memory` is
    then their sum. `micro_batches` are the parts of a batch on its way through devices or stages.
    """

    model: str
    strategy: str
    world_size: int
    mesh: dict[str, int]
    rank: int
    precision: str
    memory: Memory
    checkpointed: Memory | None
    layers: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    transfers_checkpointed: tuple[Transfer, ...] | None
    flops: int
    flops_checkpointed: int | None
    bandwidth: float | dict[str, float] | None = None
    devices: tuple[Memory, ...] = ()
    devices_checkpointed: tuple[Memory, ...] | None = None
    micro_batches: int = 1

    def fullest(self, checkpointed: bool = False) -> Memory | None:
        """Return the memory of the device of this rank that needs most; None without such a column."""
        devices = self.devices_checkpointed if checkpointed else self.devices
        if devices:
            return max(devices, key=lambda memory: memory.total)
        return self.checkpointed if checkpointed else self.memory

    @property
    def batches(self) -> int:
        """How many batches go through the model at once on all ranks."""
        return self.mesh.get("data_parallel", self.world_size)

    def flops_in_line(self, checkpointed: bool = False) -> float:
        """Return the operations of a step that follow one another at least. M parts of a batch pass S stages in no fewer than M + S - 1 steps.

        The stages are a rank's devices, or ranks of a pipeline (Huang et al. 2019, GPipe: a bubble of (S - 1) / (M + S - 1)).
        """
        flops = (self.flops_checkpointed if checkpointed else self.flops) or 0
        here, parts = max(1, len(self.devices)), self.micro_batches
        stages = max(here, self.mesh.get("pipeline_parallel", 1))
        return flops / here * (parts + stages - 1) / parts

    def communicated(self, checkpointed: bool = False) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (operation, dimension) -> (messages, bytes) of a step."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for t in self._transfers(checkpointed):
            count, total = found.get((t.operation, t.dimension), (0, 0))
            found[t.operation, t.dimension] = count + 1, total + t.bytes
        return found

    def _transfers(self, checkpointed: bool) -> tuple[Transfer, ...]:
        found = self.transfers_checkpointed if checkpointed else self.transfers
        return found or ()

    def seconds(self, checkpointed: bool = False) -> float | None:
        """Return how long the messages of a step take at least, one after the other at the bandwidth given; None without one."""
        if self.bandwidth is None:
            return None
        return sum(t.wire / _bandwidth(self.bandwidth, t.dimension) for t in self._transfers(checkpointed))

    # -- out -----------------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {n}" for name, n in self.mesh.items())
        lines = [f"{self.model}, strategy {self.strategy}, {self.world_size} rank(s){f' ({mesh})' if mesh else ''}, precision {self.precision}"]
        columns = [self.memory] + ([self.checkpointed] if self.checkpointed else [])
        lines.append(_row(f"memory of rank {self.rank}", "as it is", *(["checkpointed"] if self.checkpointed else [])))
        for f in fields(Memory):
            lines.append(_row(f"  {f.name}", *(readable(getattr(m, f.name)) for m in columns)))
        lines.append(_row("  total", *(readable(m.total) for m in columns)))
        for s, device in enumerate(self.devices):
            both = [device] + ([self.devices_checkpointed[s]] if self.devices_checkpointed else [])
            lines.append(_row(f"  of it state of device {s}", *(readable(m.state) for m in both)))
            lines.append(_row(f"  of it all of device {s}", *(readable(m.total) for m in both)))
        flops = [self.flops] + ([self.flops_checkpointed] if self.flops_checkpointed is not None else [])
        lines.append(_row("arithmetic of a step", *(readable(n, "FLOP") for n in flops)))
        sent = [self.communicated()] + ([self.communicated(True)] if self.checkpointed else [])
        lines.append("messages of a step" + ("" if any(sent) else ": none"))
        for operation, dimension in dict.fromkeys(key for found in sent for key in found):
            texts = [f"{n} x, {readable(b)}" for n, b in (found.get((operation, dimension), (0, 0)) for found in sent)]
            lines.append(_row(f"  {operation} over {dimension}", *texts))
        if self.bandwidth is not None:
            times = [self.seconds()] + ([self.seconds(True)] if self.checkpointed else [])
            lines.append(_row("  time, at least", *(f"{1000 * (t or 0):.3g} ms" for t in times)))
        if self.layers:
            lines.append(f"checkpointed: {_shown(self.layers)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, as they stand in the JSON file."""
        found = asdict(self)
        for name in ("memory", "checkpointed"):
            if found[name] is not None:
                found[name]["total"] = getattr(self, name).total
        for name in ("devices", "devices_checkpointed"):
            for values, memory in zip(found[name] or (), getattr(self, name) or (), strict=True):
                values["total"] = memory.total
        found["seconds"] = self.seconds()
        found["seconds_checkpointed"] = self.seconds(True) if self.checkpointed else None
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def _bandwidth(given: float | Mapping[str, float], dimension: str) -> float:
    return given[dimension] if isinstance(given, Mapping) else given


def _row(label: str, *cells: str) -> str:
    return f"{label:<34}" + "".join(f"{cell:>20}" for cell in cells)


def _shown(layers: tuple[str, ...]) -> str:
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def readable(number: float, unit: str = "B") -> str:
    """Return a number with four digits and a prefix of thousands: 12.35 GB."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000 or prefix == "P":
            return f"{number:.0f} {unit}" if not prefix else f"{number:.4g} {prefix}{unit}"
        number /= 1000
    raise AssertionError
