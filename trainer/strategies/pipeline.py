"""A stack of layers cut into stages, one a rank: whose weights are where, forward passes outside of training, and bringing all together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module, Parameter, Sequential

from trainer.errors import MisconfigurationException
from trainer.strategies.averaging import average, gradients_of
from trainer.strategies.line import Line, one_tensor
from trainer.strategies.spots import spots_of
from trainer.strategies.stages import (
    balance,
    check_stack,
    layer_costs,
    named_stack,
    stacks_of,
)

__all__ = ["Stages"]


class Stages:
    """The layers of `stack` in one run a rank of `group`; a rank holds the weights of its own run, the others' are empty (device "meta").

    A tensor that only layers of one stage use belongs to that stage. All others, in the module outside of the stack and in layers of
    several stages, are on every rank, and their gradients are added up over the group.

    Outside of training a call of the stack passes the activations on from rank to rank, and gives the last one's output on all of them.

    Args:
        module: the whole module, in which the stack is.
        name: of the stack in it; None where the module itself is the stack.
        group: the ranks of this pipeline.
        device: of this rank.
        micro_batches: the most parts that a training batch is cut into; None for one a stage.

    Raises:
        MisconfigurationException: for a stack that cannot be cut so.
    """

    def __init__(self, module: Module, name: str | None, group: Any, device: torch.device, micro_batches: int | None = None) -> None:
        self.module, self.device, self.line = module, device, Line(group, device)
        self.index, self.last, self.count = self.line.index, self.line.last, self.line.last + 1
        self.micro_batches = micro_batches or self.count
        self.stack = stack = self._find(name)
        ends = balance(layer_costs(stack, module, getattr(module, "example_input_array", None)), self.count)
        self.runs = [list(stack)[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        self.stage_of = [s for s, layers in enumerate(self.runs) for _ in layers]
        self._first_writes = _writes_first(self.runs[self.index][0])
        self.spots = spots_of(module, stack, self.stage_of)
        self.owner: dict[int, int] = {}  # id of a parameter -> the stage that alone uses it; once cut
        self.on_call: Callable[[Any], Any] | None = None  # what a call of the stack does while a training step runs

    def _find(self, name: str | None) -> Sequential:
        module = self.module
        if name is None and not isinstance(module, Sequential):
            raise MisconfigurationException(
                f"pipeline_parallel_size={self.count} needs a stack of layers to cut into stages: name the nn.Sequential, "
                f"ModelParallelStrategy(stack=...){stacks_of(module)}."
            )
        stack, what = (module, "The module") if name is None else (named_stack(module, name), f"stack={name!r}")
        synced = [path for path, part in module.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
        if synced:
            raise MisconfigurationException(
                f"{synced[0]} is a SyncBatchNorm, in which all ranks would wait for each other, but the stages of a pipeline compute at "
                "different times. Use BatchNorm without sync_batchnorm=True, or layers that need no statistics of a batch."
            )
        return check_stack(stack, what, self.count, "stages", "Put the layers that are one after the other into one.")

    # -- cutting, and putting together -------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Empty the layers of the other stages and move everything else to the device. The parameters stay the same objects."""
        for spot in self.spots:
            if spot.owner in (None, self.index):
                spot.move(self.device)
            else:
                spot.put(torch.empty_like(spot.tensor, device="meta"))
        self.owner = {id(spot.tensor): spot.owner for spot in self.spots if spot.owner is not None}
        self.stack.forward = self  # type: ignore[method-assign]

    def restore(self) -> None:
        """Fill the empty layers with the values of the ranks that hold them. Collective over the pipeline."""
        for spot in self.spots:
            if spot.owner is None:
                continue
            tensor, mine = spot.tensor.detach(), spot.owner == self.index
            value = tensor.contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            self.line.broadcast(value, spot.owner)
            if not mine:
                spot.put(value.to(spot.home))

    def release(self) -> None:
        """Take the pipeline off the stack and bring what is here back to where it came from. Layers that `restore` did not fill stay empty."""
        self.stack.__dict__.pop("forward", None)
        for spot in self.spots:
            if not spot.tensor.is_meta:
                spot.move(spot.home)
        if any(spot.tensor.is_meta and spot.home.type != "meta" for spot in self.spots):
            warnings.warn(
                "The run failed, so the stages of the pipeline could not be put together: the layers of other ranks are empty (device "
                "'meta'). Load a checkpoint, or build the module anew.",
                stacklevel=2,
            )

    # -- a forward pass outside of training --------------------------------------------------------------------------------

    def __call__(self, value: Any) -> Any:
        """What the stack's `forward` does: in a training step what that step says, else a pass through all stages. Collective.

        Raises:
            MisconfigurationException: where gradients would be needed; for an input that is not one tensor.
        """
        if self.on_call is not None:
            return self.on_call(value)
        if torch.is_grad_enabled():
            raise MisconfigurationException(
                "Outside of training_step a stack that is cut into pipeline stages computes without gradients, on all ranks at once. "
                "Call it under torch.no_grad()."
            )
        line = self.line
        if line.index > 0:
            value = line.receive(line.index - 1)
        value = self.compute(value)
        if line.index < line.last:
            line.send(value, line.index + 1)
        return line.from_last(value)

    def compute(self, value: Any) -> torch.Tensor:
        """Run this rank's layers.

        Raises:
            MisconfigurationException: when something else than one tensor goes in or comes out.
        """
        one_tensor(value, "was given")
        if self._first_writes and value.requires_grad and value.is_leaf:  # into what came from another rank, which is a leaf here
            value = value.clone()
        for layer in self.runs[self.index]:
            value = layer(value)
        return one_tensor(value, "made").contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise MisconfigurationException(
            "A module whose stack is cut into pipeline stages cannot be copied during the run: each rank holds a part of it."
        )

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def add_up(self) -> None:
        """Add the gradients of what is on every rank over the pipeline, so that the copies stay equal. Collective over the pipeline."""
        shared = [p for p in self.module.parameters() if id(p) not in self.owner and p.requires_grad]
        average(gradients_of(shared, self.line.maximum), self.line.sum, 1)

    def share_buffers(self) -> None:
        """Give all stages the last one's buffers of what is on every rank: it runs a training step to the end. Collective over the pipeline."""
        for spot in self.spots:
            if spot.owner is None and not isinstance(spot.tensor, Parameter):
                self.line.broadcast(spot.tensor.data, self.last)

    def counted(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters with a gradient that this rank counts in a sum over the pipeline: each is counted on one rank."""
        return [p for p in _params(optimizer) if p.grad is not None and (self.index == 0 or id(p) in self.owner)]

    def total(self, number: torch.Tensor) -> torch.Tensor:
        """Return the sum of a number over the stages, the same to the bit on all of them. Collective over the pipeline."""
        return self.line.sum(number.double())

    def spread_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Where one stage's gradients overflowed, make those of all do so: all skip the step, or none. Collective over the pipeline."""
        grads = [p.grad for p in _params(optimizer) if p.grad is not None]
        found = torch.zeros((), device=self.device)
        for dtype in {grad.dtype for grad in grads}:  # a function that only looks, when the scale is 1
            alike = [grad for grad in grads if grad.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, torch.ones((), device=self.device))
        self.line.maximum(found)
        if grads:
            grads[0].add_(torch.where(found > 0, torch.inf, 0.0).to(grads[0].dtype))

    # -- checkpoints: values of all stages on the first --------------------------------------------------------------------

    def module_state(self, state: dict[str, Any], collect: bool) -> dict[str, Any]:
        """Return the module's state; with `collect` it is whole on the first stage. Elsewhere other stages' values are empty.

        Collective over a pipeline that collects.
        """
        prefix = next(name for name, part in self.module.named_modules() if part is self.stack)
        start = f"{prefix}." if prefix else ""
        stages = {f"{start}{name}.": s for (name, _), s in zip(self.stack.named_children(), self.stage_of, strict=True)}
        owners = [next((s for begin, s in stages.items() if key.startswith(begin)), 0) for key in state]
        return {key: self._collected(value, s) if collect else value for (key, value), s in zip(state.items(), owners, strict=True)}

    def optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any], collect: bool) -> dict[str, Any]:
        """Return the optimizer's state, numbered as on one device; see `module_state`."""
        values = {}
        for i, param in enumerate(_params(optimizer)):
            mine, owner = state["state"].get(i), self.owner.get(id(param), 0)
            mine = self._collected(mine, owner) if collect else mine
            if mine is not None:
                values[i] = mine
        return {**state, "state": values}

    def own_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of a whole optimizer state for the parameters that this rank holds."""
        held = {i for i, param in enumerate(_params(optimizer)) if not param.is_meta}
        return {**state, "state": {i: value for i, value in state["state"].items() if i in held}}

    def _collected(self, value: Any, owner: int) -> Any:
        """Bring the value of the stage `owner` to the first one."""
        if owner == 0 or self.index not in (0, owner):
            return value
        found = self.line.object_to_first(_to_host(value) if self.index == owner else None, owner)
        return value if self.index == owner else found


def _writes_first(layer: Module) -> bool:
    """True for a layer that begins by changing its input in place, as ReLU(inplace=True) does."""
    first = next(part for part in layer.modules() if not any(True for _ in part.children()))
    return bool(getattr(first, "inplace", False))


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _to_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_host(one) for key, one in value.items()}
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
