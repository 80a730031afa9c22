"""`plan`: what a run will need, worked out before there are machines for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.arguments import activation_checkpointing as layers_of
from trainer.config import make_precision, make_strategy
from trainer.errors import MisconfigurationException
from trainer.planning.ranks import Job, Step, check_strategy, measure
from trainer.planning.report import Plan
from trainer.planning.stages import measure_pipeline
from trainer.strategies import FSDPStrategy, ModelParallelDDPStrategy, Strategy

__all__ = ["plan"]


def plan(
    model: Any,
    batch: Any,
    strategy: Strategy | str = "auto",
    world_size: int = 1,
    num_nodes: int = 1,
    precision: Any = "32-true",
    accumulate_grad_batches: int = 1,
    activation_checkpointing: Any = None,
    bandwidth: float | Mapping[str, float] | None = None,
    rank: int | None = None,
) -> Plan:
    """Work out what one rank of a run will hold, send and compute in an optimizer step. It takes one CPU and next to no memory.

    The run's own code is run, by the strategy itself, on tensors that have shapes but no values, in a process group whose other ranks do not
    exist: `configure_model`, `configure_optimizers`, `training_step`, backward, and the optimizer's step. Kernels are the CPU's, so what
    GPU kernels keep for backward may differ a little.

    Args:
        model: a TrainModule, which is left as it is (on the device "meta" it needs no memory), or a function that makes one.
        batch: what a rank is given as a batch; of its tensors only shape and dtype count.
        strategy: a name or a Strategy, as for `Trainer`.
        world_size: how many devices, on `num_nodes` nodes; each is a rank, but with `model_parallel_ddp` several belong to one.
        precision: as for `Trainer`.
        accumulate_grad_batches: batches of a step.
        activation_checkpointing: the layers of the plan's second column, as for `Trainer`; None for the members of the module's outermost
            lists of layers.
        bandwidth: bytes a second that a rank sends; a number, or one for each dimension of the mesh by its name.
        rank: which rank; None for one that needs most: of a pipeline the first of a stage, elsewhere rank 0.

    Raises:
        MisconfigurationException: for sizes that do not divide, naming them; for a model that needs values, naming the operation; for a
            strategy that cannot be planned.
    """
    for name, number in {"world_size": world_size, "num_nodes": num_nodes, "accumulate_grad_batches": accumulate_grad_batches}.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise MisconfigurationException(f"plan({name}={number!r}) must be a whole number >= 1.")
    if world_size % num_nodes:
        raise MisconfigurationException(f"plan: world_size={world_size} does not divide by num_nodes={num_nodes}. Every node has the same number of ranks.")
    strategy = make_strategy(strategy, world_size)
    check_strategy(strategy)
    devices = _devices_of_a_rank(strategy, world_size // num_nodes, num_nodes)
    ranks = world_size // devices
    if rank is not None and not 0 <= rank < ranks:
        raise MisconfigurationException(f"plan(rank={rank}) must be one of the ranks 0 to {ranks - 1}.")
    precision = make_precision(precision, "cpu")
    if precision.scaler is not None:
        precision.scaler = None  # a number or two; to look for overflow it would need values
    job = Job(model, batch, strategy, ranks, num_nodes, precision, accumulate_grad_batches, devices)
    choice = layers_of(activation_checkpointing)
    rank, plain, second = _measured(job, rank, choice)
    found = _plan(job, rank, plain, second, bandwidth)
    _check_bandwidth(found)
    return found


def _devices_of_a_rank(strategy: Strategy, each: int, num_nodes: int) -> int:
    """Return how many of the `each` devices of a node are one rank's."""
    if not isinstance(strategy, ModelParallelDDPStrategy):
        return 1
    copy.copy(strategy).check(each, num_nodes)
    return each // strategy.processes(each)


def _measured(job: Job, rank: int | None, choice: Any) -> tuple[int, Step, Step | None]:
    """Return the rank, or one that needs most, with its steps: as it is, and with activation checkpointing."""
    if getattr(job.strategy, "pipeline_parallel_size", 1) == 1:
        return rank or 0, *measure(job, rank or 0, choice)
    plain, second = measure_pipeline(job, choice, False), measure_pipeline(job, choice, True)
    stage = max(range(len(plain)), key=lambda s: plain[s].memory.total) if rank is None else rank % len(plain)
    return stage if rank is None else rank, plain[stage], second[stage] if plain[stage].kept else None


def _plan(job: Job, rank: int, plain: Step, second: Step | None, bandwidth: Any) -> Plan:
    name = job.strategy.name
    if isinstance(job.strategy, FSDPStrategy) and job.strategy.shard_size is not None:
        name = f"{name}, shard_size={job.strategy.shard_size}"
    if plain.devices:
        name = f"{name}, {len(plain.devices)} devices each"
    return Plan(
        model=plain.model,
        strategy=name,
        world_size=job.world_size,
        mesh=plain.mesh,
        rank=rank,
        precision=job.precision.precision,
        memory=plain.memory,
        checkpointed=None if second is None else replace(second.memory, recomputed=sum(plain.largest) if plain.devices else max(plain.kept.values())),
        layers=tuple(plain.kept),
        transfers=plain.transfers,
        transfers_checkpointed=None if second is None else second.transfers,
        flops=plain.flops,
        flops_checkpointed=None if second is None else second.flops,
        bandwidth=dict(bandwidth) if isinstance(bandwidth, Mapping) else bandwidth,
        devices=plain.devices,
        devices_checkpointed=None if second is None else tuple(replace(m, recomputed=n) for m, n in zip(second.devices, plain.largest, strict=True)),
        micro_batches=plain.micro,
    )


def _check_bandwidth(found: Plan) -> None:
    if isinstance(found.bandwidth, Mapping):
        used = {t.dimension for t in (*found.transfers, *(found.transfers_checkpointed or ()))}
        lacking = sorted(used - set(found.bandwidth))
        if lacking:
            raise MisconfigurationException(f"plan(bandwidth=...) has no number for {lacking[0]!r}; messages cross {', '.join(sorted(used))}.")
