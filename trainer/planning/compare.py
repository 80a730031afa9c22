"""`compare_plans`: which strategies fit into a memory, in which order, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import MisconfigurationException
from trainer.planning.planner import plan
from trainer.planning.report import Plan, readable
from trainer.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelDDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)

__all__ = ["Choice", "Comparison", "compare_plans"]


@dataclass(frozen=True)
class Choice:
    """One strategy: whether it `fits`, with activation checkpointing or without, the `reason`, and its plan; None where it cannot be planned."""

    strategy: str
    fits: bool
    checkpointed: bool
    reason: str
    plan: Plan | None

    @property
    def total(self) -> int | None:
        """Bytes of the variant that was chosen, on the device that needs most."""
        if self.plan is None:
            return None
        memory = self.plan.fullest(self.checkpointed)
        return None if memory is None else memory.total

    def seconds(self, speed: float | None) -> float | None:
        """Return how long a step takes at least, if messages and arithmetic do not overlap; None without a bandwidth and a speed."""
        if self.plan is None:
            return None
        sending = self.plan.seconds(self.checkpointed)
        if speed is None:
            return sending
        return (sending or 0.0) + self.plan.flops_in_line(self.checkpointed) / speed


@dataclass(frozen=True)
class Comparison:
    """The choices, best first: those that fit by the time that a batch takes, then those that do not by memory. Times are seconds, of a step."""

    memory: int
    speed: float | None
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice | None:
        """The first that fits; None where none does."""
        return next((choice for choice in self.choices if choice.fits), None)

    def __str__(self) -> str:
        lines = [f"{'':3}{'strategy':<28}{'memory':>12}{'step, at least':>17}  reason"]
        for i, choice in enumerate(self.choices):
            seconds, total = choice.seconds(self.speed), choice.total
            mark = f"{i + 1}." if choice.fits else "-"
            time = "" if seconds is None else f"{1000 * seconds:.4g} ms"
            lines.append(f"{mark:3}{choice.strategy:<28}{'' if total is None else readable(total):>12}{time:>17}  {choice.reason}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, as they stand in the JSON file."""
        choices = [
            {"strategy": c.strategy, "fits": c.fits, "checkpointed": c.checkpointed, "reason": c.reason, "total": c.total,
             "seconds": c.seconds(self.speed), "plan": None if c.plan is None else c.plan.to_dict()}
            for c in self.choices
        ]  # fmt: skip
        return {"memory": self.memory, "speed": self.speed, "choices": choices}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison, with all plans, to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def compare_plans(
    model: Any,
    batch: Any,
    world_size: int,
    memory: float | str,
    strategies: Sequence[Strategy | str] | None = None,
    num_nodes: int = 1,
    bandwidth: float | Mapping[str, float] | None = None,
    speed: float | None = None,
    stack: str | None = None,
    **settings: Any,
) -> Comparison:
    """Plan a run with several strategies, and put those first that fit into `memory` and take the least time.

    A step of some strategies takes fewer batches than there are devices, since several work on one. So it is the time of a step by the number of
    batches in it that counts.

    Args:
        model, batch, world_size, num_nodes, bandwidth, settings: as for `plan`. A bandwidth by dimension needs "data", "shard" and "replicate",
            and with a stack "device", for copies between the devices of a rank.
        memory: of a device, in bytes or as "80GB" (thousands) or "80GiB". Leave room: kernels need memory of their own, and allocators waste some.
        strategies: names or Strategy objects; default ddp, fsdp, fsdp with a copy of the weights on every node where there are several, and a
            single device where there is one rank.
        stack: the name of an nn.Sequential that can be spread over several devices of one process: `model_parallel_ddp` is compared as well, with
            each number of devices that divides those of a node, and as many micro-batches.
        speed: floating-point operations a second that a device really does; without it the time of messages alone counts.

    Raises:
        MisconfigurationException: for a memory that is none; for a model that cannot be planned at all.
    """
    limit = _bytes(memory)
    choices = []
    each = world_size // num_nodes
    spread = [] if stack is None else [ModelParallelDDPStrategy(n, stack, micro_batches=n) for n in range(2, each + 1) if each % n == 0]
    for strategy in [*(_usual(world_size, num_nodes) if strategies is None else strategies), *spread]:
        name = strategy if isinstance(strategy, str) else _name(strategy)
        try:
            found = plan(model, batch, strategy, world_size, num_nodes, bandwidth=bandwidth, **settings)
        except MisconfigurationException as error:
            if error.__cause__ is not None:  # the model cannot be planned, whatever the strategy
                raise
            choices.append(Choice(name, False, False, f"not possible: {error}", None))
            continue
        choices.append(_judged(name, found, limit, world_size))

    def order(choice: Choice) -> tuple[Any, ...]:
        if not choice.fits:
            return (1, choice.total is None, choice.total or 0)
        return (0, choice.checkpointed and speed is None, (choice.seconds(speed) or 0.0) / choice.plan.batches, choice.total)

    return Comparison(limit, speed, tuple(sorted(choices, key=order)))


def _usual(world_size: int, num_nodes: int) -> list[Strategy]:
    if world_size == 1:
        return [SingleDeviceStrategy()]
    each = world_size // num_nodes
    hybrid = [FSDPStrategy(shard_size=each)] if 1 < each < world_size and world_size % num_nodes == 0 else []
    return [DDPStrategy(), FSDPStrategy(), *hybrid]


def _name(strategy: Strategy) -> str:
    if isinstance(strategy, ModelParallelDDPStrategy) and strategy.devices_per_replica is not None:
        return f"{strategy.name}, {strategy.devices_per_replica} devices"
    shard_size = getattr(strategy, "shard_size", None)
    return strategy.name if shard_size is None else f"{strategy.name}, shard_size={shard_size}"


def _judged(name: str, found: Plan, limit: int, devices: int) -> Choice:
    plain, second = found.fullest(), found.fullest(True)
    fewer = f"; a step takes {found.batches} batches" if found.batches < devices else ""
    if plain.total <= limit:
        return Choice(name, True, False, f"fits, {readable(limit - plain.total)} to spare{fewer}", found)
    if second is not None and second.total <= limit:
        return Choice(name, True, True, f"fits with activation checkpointing ({readable(plain.total)} without){fewer}", found)
    least = plain if second is None or plain.total <= second.total else second
    if least.state > limit:
        reason = f"weights, gradients and optimizer alone are {readable(least.state)}"
    elif least.state + least.communication > limit:
        reason = f"with buffers of messages the weights, gradients and optimizer are {readable(least.state + least.communication)}"
    else:
        reason = f"activations are {readable(least.activations + least.recomputed)}: take fewer samples a batch"
    return Choice(name, False, least is second, f"does not fit: {reason}", found)


_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}, **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}}


def _bytes(memory: float | str) -> int:
    text = str(memory).strip()
    number = text.rstrip("BKMGTikmgtb ")
    unit = text[len(number) :].strip()
    by_name = {name.lower(): factor for name, factor in _UNITS.items()}
    try:
        found = float(number) * by_name[unit.lower()]
    except (KeyError, ValueError):
        found = 0
    if not found > 0:
        raise MisconfigurationException(f"memory={memory!r} must be a number of bytes, or a text as '80GB' or '80GiB'.")
    return int(found)
