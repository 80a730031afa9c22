"""One rank of a job that does not exist, taken through one optimizer step by the strategy that would run it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from trainer.activation import checkpointed, chosen
from trainer.devices import resolve
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.loops.transfer import takes_index
from trainer.optim import parse_optimizers
from trainer.planning.buckets import Buckets
from trainer.planning.devices import Spread
from trainer.planning.fake import (
    StandIn,
    fake_batch,
    fake_module,
    fake_ranks,
    named,
    stay,
)
from trainer.planning.report import Memory, Transfer
from trainer.planning.watch import Saved, Watch, Where, size
from trainer.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelDDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from trainer.strategies.sharding import plan as blocks_of
from trainer.world import World

__all__ = ["Job", "Step", "check_strategy", "loss_of", "measure"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """What is planned, the same for all ranks. `batch` is one rank's, `accumulate` how many of them make a step.

    A rank is a process, which owns `devices` devices.
    """

    model: Any
    batch: Any
    strategy: Strategy
    world_size: int
    num_nodes: int
    precision: Any
    accumulate: int
    devices: int = 1

    def world(self, rank: int) -> World:
        """Return the place of a rank; nodes are filled one after the other."""
        each = self.world_size // self.num_nodes
        return World(rank, self.world_size, rank % each, each, rank // each, self.num_nodes)


@dataclass(frozen=True)
class Step:
    """What a step of one rank was seen to do. `kept`: the layers that are, or may be, checkpointed, and the bytes that each kept for backward.

    Of a rank with several devices, by device: `devices`, and `largest`, the most that one call of such a layer kept. `micro`: parts of a batch.
    """

    model: str
    memory: Memory
    transfers: tuple[Transfer, ...]
    flops: int
    kept: dict[str, int]
    mesh: dict[str, int]
    devices: tuple[Memory, ...] = ()
    largest: tuple[int, ...] = ()
    micro: int = 1


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy that cannot be planned.

    Raises:
        MisconfigurationException: saying which can.
    """
    kind = type(strategy)
    if kind in (SingleDeviceStrategy, FSDPStrategy, ModelParallelStrategy):
        return
    if kind in (DDPStrategy, ModelParallelDDPStrategy):
        if strategy.comm_hook is not None:
            raise MisconfigurationException(f"{kind.__name__}(comm_hook=...) cannot be planned: what a hook sends is its own affair. Plan without it.")
        return
    raise MisconfigurationException(
        f"strategy={strategy.name!r} cannot be planned. These can: single_device, ddp, fsdp (FSDPStrategy), "
        "ModelParallelStrategy, and model_parallel_ddp (ModelParallelDDPStrategy) with a stack."
    )


def measure(job: Job, rank: int, choice: Any) -> tuple[Step, Step | None]:
    """Take `rank` through one step as it is, and through one with activation checkpointing; return what each did.

    Args:
        choice: the layers to checkpoint, as for activation_checkpointing; None for the members of the outermost lists of layers. Where there
            are none there is no second step.

    Raises:
        MisconfigurationException: for a model that needs values, naming the operation; for what the strategy refuses.
    """
    with fake_ranks(rank, job.world_size):
        return _Rank(job, rank).steps(choice)


class _Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.mode = job, FakeTensorMode(allow_non_fake_inputs=True)
        self.module = fake_module(job.model, self.mode)
        self.strategy, self.dist = copy.deepcopy(job.strategy), Dist(job.world(rank))
        self.names = self._groups()
        self.name = type(self.module).__name__

    def _groups(self) -> dict[str, str]:
        """Make the strategy's mesh, with real numbers, and return the names of its groups."""
        job, strategy, dist = self.job, self.strategy, self.dist
        each = job.world_size // job.num_nodes * job.devices
        strategy.check(each, job.num_nodes)
        strategy.device(resolve("cpu", each), dist.world.local_rank)
        strategy.dist = dist
        strategy.connect(self.module, dist)
        mesh = getattr(strategy, "mesh", None) or strategy.device_mesh
        self.mesh = {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        if dist.alone:
            return {}
        found = {torch_dist.group.WORLD.group_name: "data"}
        return {**found, **{mesh.get_group(name).group_name: name for name in self.mesh}}

    @property
    def _sharded(self) -> Any:
        return getattr(self.strategy, "_sharded", None)

    def _held(self) -> int:
        return 0 if self._sharded is None else sum(t.untyped_storage().nbytes() for t in self._sharded.gathered)

    def _own(self) -> list[torch.Tensor]:
        """The tensors that are there anyway, which autograd only refers to."""
        return [*self.module.parameters(), *self.module.buffers(), *([] if self._sharded is None else self._sharded.gathered)]

    def steps(self, choice: Any) -> tuple[Step, Step | None]:
        module, job = self.module, self.job
        module.trainer = StandIn(self.strategy, job.precision, self.dist.world, job.accumulate)
        if not module.automatic_optimization:
            raise MisconfigurationException("A module with manual optimization cannot be planned: what its training_step does with optimizers is its own.")
        with self.mode:
            batch = job.precision.convert_input(fake_batch(job.batch, self.mode))
            with named(f"{self.name}.configure_model", None):
                module.configure_model()
            job.precision.convert_module(module)
            self._set_up()
            self.parts = self._blocks() if choice is None else chosen(module, choice)
            optimizers = self._optimizers()
            plain = self._step(batch, optimizers)
            if not self.parts:
                return plain, None
            module.zero_grad()
            undo = checkpointed(module, lambda name, _: name in self.parts)
            try:
                return plain, self._step(batch, optimizers)
            finally:
                undo()

    def _set_up(self) -> None:
        """Place the module. DDP's comparison of all ranks' shapes needs values, and there are no other ranks."""
        strategy = self.strategy
        if isinstance(strategy, DDPStrategy):
            strategy.ddp_kwargs = {**strategy.ddp_kwargs, "init_sync": False}
        elif isinstance(strategy, ModelParallelStrategy):
            strategy._reduce = partial(self._reduced, strategy._reduce)
        spreads = isinstance(strategy, ModelParallelDDPStrategy)
        if spreads:
            stay(self.module)
        strategy.setup(self.module, _CPU, self.dist)
        self.spread = Spread(strategy) if spreads else None

    def _reduced(self, reduce: Any, tensor: torch.Tensor, op: Any = torch_dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce; of the question which gradients there are, which is read on the host, the answer is what this rank has."""
        found = reduce(tensor, op)
        if op != torch_dist.ReduceOp.MAX:
            return found
        held = [p.grad is not None for p in self.module.parameters() if p.requires_grad and not p.is_meta]
        with unset_fake_temporarily():
            return torch.tensor(held, dtype=torch.int64)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        with named(f"{self.name}.configure_optimizers", None):
            optimizers, _ = parse_optimizers(self.module.configure_optimizers())
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise MisconfigurationException("LBFGS cannot be planned: how often it computes the loss depends on values.")
        self.strategy.check_optimizers(optimizers)
        return optimizers

    def _step(self, batch: Any, optimizers: list[torch.optim.Optimizer]) -> Step:
        """Take a step; the optimizers' states are made in the first one."""
        strategy, buckets, self.watch = self.strategy, Buckets(), Watch(self.names, self._held)
        strategy.wrap(training=True)  # DDP anew: it packs gradients again in its second step, for which it needs values
        ddp = getattr(strategy, "_ddp", None)
        if ddp is not None:
            buckets.watch(ddp)
        step, indexed = strategy.training_step, takes_index(self.module.training_step)
        if isinstance(strategy, ModelParallelStrategy):  # DTensor works out once how it cuts an operation, by trying it on whole tensors
            self._pass(step, indexed, batch, Watch({}))
            self.module.zero_grad()
        saved = self._pass(step, indexed, batch, self.watch)
        for message in buckets.sizes():
            self.watch.send("all_reduce", message, torch_dist.group.WORLD)
        with named("The optimizer's step", None):
            for optimizer in optimizers:
                if not optimizer.state:
                    optimizer.step()
        memory = self._memory(optimizers, saved, buckets)
        by_home = saved.by_home(self._own())
        kept = {name: sum(n for (_, part, _), n in by_home.items() if part == i) for i, name in enumerate(self.parts)}
        found = Step(self.name, memory, tuple(self.watch.transfers), self.watch.flops, kept, self.mesh)
        return found if self.spread is None else self._by_device(found, self.spread, optimizers, by_home)

    def _by_device(self, found: Step, spread: Spread, optimizers: list[torch.optim.Optimizer], kept: dict[Any, int]) -> Step:
        activations = {s: sum(n for (device, _, _), n in kept.items() if device == s) for s in range(spread.count)}
        devices = spread.memories(self.module, optimizers, activations, found.memory.communication)
        return replace(found, devices=devices, largest=spread.largest(kept), micro=spread.micro)

    def _pass(self, step: Any, indexed: bool, batch: Any, watch: Watch) -> Saved:
        job, strategy = self.job, self.strategy
        with watch, named(f"{self.name}.training_step", watch):
            for i in range(job.accumulate):
                last = i == job.accumulate - 1
                where = Where(list(self.parts.values()))
                saved = Saved(lambda where=where: self._place(where))
                devices = nullcontext() if self.spread is None else self.spread.watching(watch)
                with strategy.sync_when(last):
                    with where.watching(), devices, saved.watching(), job.precision.forward_context():
                        output = step(batch, i) if indexed else step(batch)
                    loss = loss_of(self.name, output)
                    if last and not self.dist.alone:
                        strategy.ask_ahead(lambda: 0)  # as the loop does: which ranks wish to stop
                    loss.backward()
                del output, loss
        return saved

    def _place(self, where: Where) -> tuple[int, int | None, int]:
        """The device that computes, which of the parts, and in which of its calls."""
        return 0 if self.spread is None else self.spread.now, where.now, 0 if where.now is None else where.calls[where.now]

    def _blocks(self) -> dict[str, torch.nn.Module]:
        wanted = {id(part) for part in blocks_of(self.module, None)}
        return {name: part for name, part in self.module.named_modules() if id(part) in wanted}

    def _memory(self, optimizers: list[torch.optim.Optimizer], saved: Saved, buckets: Any) -> Memory:
        module = self.module
        return Memory(
            parameters=size(list(module.parameters())),
            gradients=size([p.grad for p in module.parameters() if p.grad is not None]),
            optimizer=sum(size(list(optimizer.state.values())) for optimizer in optimizers),
            buffers=size(list(module.buffers())),
            activations=saved.bytes(self._own()),
            recomputed=0,
            communication=buckets.memory + (self.watch.most_held if self._sharded is not None else 0),
        )


def loss_of(name: str, output: Any) -> torch.Tensor:
    """Return the loss in what a training step returned.

    Raises:
        MisconfigurationException: where there is none.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        raise MisconfigurationException(f"{name}.training_step returned no loss, but a {type(output).__name__}.")
    return loss
