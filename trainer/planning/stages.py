"""Pipelines, and the devices of one process: a step of each stage of a stack of layers.

Stages wait for each other, and there are no others here. So the whole step of one micro-batch is computed in one process, cut where the
stages meet, and what a stage does with it is counted for that stage. How often, and how much is kept at a time, follows from the schedule:

    1F1B    stage s of S holds at most min(M, S - s) of M micro-batches: it begins backward when its first one comes back
            (PipeDream-Flush; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2)
    GPipe   every stage holds all M
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.activation import checkpointed, chosen
from trainer.errors import MisconfigurationException
from trainer.loops.parts import cut, samples_in
from trainer.loops.transfer import takes_index
from trainer.optim import parse_optimizers
from trainer.planning.fake import StandIn, fake_batch, fake_module, named
from trainer.planning.ranks import Job, Step, loss_of
from trainer.planning.report import Memory, Transfer
from trainer.planning.watch import Saved, Watch, Where, size
from trainer.strategies.layout import DIMS
from trainer.strategies.spots import spots_of
from trainer.strategies.stages import balance, check_stack, layer_costs, named_stack

__all__ = ["measure_pipeline"]

_HEADER, _LOSS, _WISH = 14 * 8, (2 * 8, 2 * 8), 8  # bytes: what comes next, the last stage's loss, which ranks wish to stop


def measure_pipeline(job: Job, choice: Any, checkpoint: bool) -> list[Step]:
    """Return a step of each stage of a ModelParallelStrategy with a pipeline, in the first of its data groups.

    Raises:
        MisconfigurationException: for a stack that cannot be cut into the stages; for a model that needs values.
    """
    strategy = copy.deepcopy(job.strategy)
    strategy.check(job.world_size // job.num_nodes, job.num_nodes)
    return _Pipeline(job, strategy).steps(choice, checkpoint)


class _Pipeline:
    def __init__(self, job: Job, strategy: Any) -> None:
        self.job, self.strategy, self.count = job, strategy, strategy.pipeline_parallel_size
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.module = fake_module(job.model, self.mode)
        self.name = type(self.module).__name__
        if not self.module.automatic_optimization:
            raise MisconfigurationException("A pipeline does not go with manual optimization.")
        self.watch = Watch({})

    def steps(self, choice: Any, checkpoint: bool) -> list[Step]:
        module, job = self.module, self.job
        module.trainer = StandIn(self.strategy, job.precision, job.world(0), job.accumulate)
        with self.mode:
            with named(f"{self.name}.configure_model", None):
                module.configure_model()
            job.precision.convert_module(module)
            self._cut()
            layers = dict(module.named_modules())
            self.parts = {n: m for n, m in layers.items() if any(m is layer for layer in self.stack)} if choice is None else chosen(module, choice)
            undo = checkpointed(module, lambda name, _: name in self.parts) if checkpoint else lambda: None
            with named(f"{self.name}.configure_optimizers", None):
                optimizers, _ = parse_optimizers(module.configure_optimizers())
            batch = job.precision.convert_input(fake_batch(job.batch, self.mode))
            try:
                self._compute(batch)
                with named("The optimizer's step", None):
                    for optimizer in optimizers:
                        optimizer.step()
            finally:
                undo()
        return [self._step(stage, optimizers) for stage in range(self.count)]

    def _cut(self) -> None:
        """Share the stack out as trainer.strategies.pipeline does."""
        module, name = self.module, self.strategy.stack
        if name is None and not isinstance(module, torch.nn.Sequential):
            raise MisconfigurationException("A pipeline needs a stack of layers: ModelParallelStrategy(stack=...) names the nn.Sequential.")
        stack = module if name is None else named_stack(module, name)
        self.stack = check_stack(stack, f"stack={name!r}", self.count, "stages", "Put the layers that are one after the other into one.")
        ends = balance(layer_costs(self.stack, module, getattr(module, "example_input_array", None)), self.count)
        self.runs = [list(self.stack)[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        self.stage_of = [s for s, layers in enumerate(self.runs) for _ in layers]
        self.spots = spots_of(module, self.stack, self.stage_of)

    # -- one micro-batch -----------------------------------------------------------------------------------------------------

    def _compute(self, batch: Any) -> None:
        """Run one micro-batch through all stages, and back; note by stage what it kept and how much was computed."""
        samples, wanted = samples_in(batch), self.strategy.micro_batches or self.count
        self.micro = next((n for n in range(min(wanted, samples or 1), 0, -1) if (samples or 1) % n == 0), 1)
        part = batch if self.micro == 1 else cut(batch, [(samples or 1) // self.micro] * self.micro)[0]
        where = Where(list(self.stack))
        inside = Where(list(self.parts.values()))
        self.flops = [0] * self.count
        saved = Saved(lambda: (self._stage(where), inside.now))
        step = self.module.training_step
        with self.watch, named(f"{self.name}.training_step", self.watch), self._borders(where) as borders:
            with where.watching(), inside.watching(), saved.watching(), self.job.precision.forward_context():
                loss = loss_of(self.name, step(part, 0) if takes_index(step) else step(part))
            self._count(self.count - 1)
            loss.backward()
            self._count(self.count - 1)
            for stage in reversed(range(self.count - 1)):
                sent, received = borders[stage]
                sent.backward(received.grad)
                self._count(stage)
        self.messages = [size(sent) for sent, _ in borders]
        own = [*self.module.parameters(), *self.module.buffers()]
        by_home = saved.by_home(own)
        self.kept = [sum(n for (s, _), n in by_home.items() if s == stage) for stage in range(self.count)]
        self.layers = {name: sum(n for (_, i), n in by_home.items() if i == k) for k, name in enumerate(self.parts)}

    def _stage(self, where: Where) -> int:
        if where.now is not None:
            return self.stage_of[where.now]
        return self.count - 1 if where.passed else 0

    def _count(self, stage: int) -> None:
        self.flops[stage] += self.watch.flops
        self.watch.flops = 0

    @contextmanager
    def _borders(self, where: Where) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Cut the graph ahead of each stage but the first: what it gets is another tensor, as if it came from another rank."""
        borders: list[tuple[torch.Tensor, torch.Tensor]] = []

        def receive(stage: int, args: Any) -> Any:
            self._count(stage - 1)
            (value,) = args
            received = value.detach().clone().requires_grad_()
            borders.append((value, received))
            return (received,)

        handles = [self.runs[s][0].register_forward_pre_hook(lambda _, args, s=s: receive(s, args)) for s in range(1, self.count)]
        try:
            yield borders
        finally:
            for handle in handles:
                handle.remove()

    # -- one stage of it -----------------------------------------------------------------------------------------------------

    def _step(self, stage: int, optimizers: list[torch.optim.Optimizer]) -> Step:
        owned = [spot.tensor for spot in self.spots if spot.owner in (None, stage)]
        params = [t for t in owned if isinstance(t, torch.nn.Parameter)]
        states = [optimizer.state.get(p, {}) for optimizer in optimizers for p in params]
        waiting = self.micro if self.micro < self.count or self.strategy.schedule.lower() == "gpipe" else min(self.micro, self.count - stage)
        here, there = self._ends(stage)
        memory = Memory(
            parameters=size(params),
            gradients=size([p.grad for p in params if p.grad is not None]),
            optimizer=size(states),
            buffers=size([t for t in owned if not isinstance(t, torch.nn.Parameter)]),
            activations=waiting * self.kept[stage],
            recomputed=0,
            communication=self.micro * (here + there),  # torch's stages have a buffer for each message of a step
        )
        mesh = dict(zip(DIMS, self.strategy.sizes, strict=True))
        layers = {name: n for name, n in self.layers.items() if self._home(name) == stage}
        return Step(self.name, memory, tuple(self._transfers(stage, params)), self.job.accumulate * self.micro * self.flops[stage], layers, mesh, micro=self.micro)

    def _home(self, name: str) -> int | None:
        """The stage of a layer that may be checkpointed."""
        part = self.parts[name]
        return next((s for layer, s in zip(self.stack, self.stage_of, strict=True) if any(part is m for m in layer.modules())), 0)

    def _ends(self, stage: int) -> tuple[int, int]:
        """The bytes of a micro-batch that comes from the stage before, and of one that goes to the next."""
        return (self.messages[stage - 1] if stage else 0), (self.messages[stage] if stage < self.count - 1 else 0)

    def _transfers(self, stage: int, params: list[torch.nn.Parameter]) -> Iterator[Transfer]:
        """The messages of a step: those between stages, gradients of what several stages hold, then the average over data groups."""
        data, stages, _ = self.strategy.sizes
        here, there = self._ends(stage)
        line = DIMS[1]
        for _ in range(self.job.accumulate):
            yield Transfer("broadcast", _HEADER, line, stages)
            for _ in range(self.micro):
                if here:
                    yield Transfer("recv", here, line, stages)
                    yield Transfer("send", here, line, stages)
                if there:
                    yield Transfer("send", there, line, stages)
                    yield Transfer("recv", there, line, stages)
            yield Transfer("broadcast", _LOSS[0], line, stages)
            yield Transfer("broadcast", _LOSS[1], line, stages)
        trained = [p for p in params if p.requires_grad]
        common = {id(spot.tensor) for spot in self.spots if spot.owner is None}
        yield from _average([p for p in trained if id(p) in common], line, stages)
        if data > 1:
            yield from _average(trained, DIMS[0], data)
        yield Transfer("all_reduce", _WISH, "data", data * stages)


def _average(params: list[torch.nn.Parameter], dimension: str, ranks: int) -> Iterator[Transfer]:
    """What trainer.strategies.averaging sends: which gradients there are, then one flat vector for each number format."""
    yield Transfer("all_reduce", 8 * len(params), dimension, ranks)
    by_dtype: dict[torch.dtype, int] = {}
    for p in params:
        if p.grad is not None:
            by_dtype[p.dtype] = by_dtype.get(p.dtype, 0) + size(p.grad)
    for nbytes in by_dtype.values():
        yield Transfer("all_reduce", nbytes, dimension, ranks)
