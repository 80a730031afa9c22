"""The devices of one process, over which a strategy has spread a stack of layers: what is on each, and what is copied between them.

A plan has one device, so the strategy spreads the stack in its own way over as many names of that one, and its own pipeline calls the layers.
Where the pipeline goes from device to device the value is copied here, as it is between two devices, and what is kept there counts for the device
whose layer is computing. What is outside of the stack is on the first device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.errors import MisconfigurationException
from trainer.planning.report import Memory, Transfer
from trainer.planning.watch import Watch, Where, size

__all__ = ["Spread"]


class Spread:
    """The stack of a ModelParallelDDPStrategy that has been set up.

    Raises:
        MisconfigurationException: where there is no stack: layers that the module places by itself all come to the one device of a plan.
    """

    def __init__(self, strategy: Any) -> None:
        stack = strategy._stack
        if stack is None:
            raise MisconfigurationException(
                f"strategy={strategy.name!r} can be planned with a stack that it spreads, ModelParallelDDPStrategy(stack=...); where a module "
                "places its layers itself is not seen in a plan."
            )
        stages = stack.forward.stages
        self.layers, self.count = list(stack), len(stages)
        self.stage_of = [s for s, (first, end, _) in enumerate(stages) for _ in range(first, end)]
        self._home = {id(t): s for layer, s in zip(stack, self.stage_of, strict=True) for t in (*layer.parameters(), *layer.buffers())}
        self._watch: Watch | None = None
        for first, _, _ in stages[1:]:
            self.layers[first].register_forward_pre_hook(lambda _, args: self._copied(args))
        if self.count > 1:  # the output comes back to the first device
            self.layers[-1].register_forward_hook(lambda _, args, output: self._copied(output))
        self._where = Where(self.layers)

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """The context of the forward pass of a batch. Copies are given to `watch`, those of its backward pass, too."""
        self._watch, self._where = watch, Where(self.layers)
        with self._where.watching():
            yield

    @property
    def now(self) -> int:
        """The device that computes at the moment, in a forward pass."""
        return 0 if self._where.now is None else self.stage_of[self._where.now]

    @property
    def micro(self) -> int:
        """The parts into which the last batch was cut."""
        return self._where.calls[0]

    def _copied(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, self._copy, value)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to another device; the gradient comes back the same way."""
        found = tensor.clone()
        self._note(tensor)
        if found.requires_grad:
            found.register_hook(self._note)
        return found

    def _note(self, tensor: torch.Tensor) -> None:
        assert self._watch is not None
        self._watch.transfers.append(Transfer("copy", size(tensor), "device", self.count))

    # -- memory --------------------------------------------------------------------------------------------------------------

    def memories(self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], activations: dict[int, int], messages: int) -> tuple[Memory, ...]:
        """Return what each device holds.

        Args:
            activations: bytes by device.
            messages: bytes of DDP's buckets; each gradient's part is on its device, and what is with them besides on the first.
        """
        params, buffers, states = self._by_device(module.parameters()), self._by_device(module.buffers()), [0] * self.count
        for optimizer in optimizers:
            for p, state in optimizer.state.items():
                states[self._device(p)] += size(list(state.values()))
        found = []
        trained = [size([p for p in own if p.requires_grad]) for own in params]
        for s in range(self.count):
            packed = trained[s] if messages else 0
            found.append(
                Memory(
                    parameters=size(params[s]),
                    gradients=size([p.grad for p in params[s] if p.grad is not None]),
                    optimizer=states[s],
                    buffers=size(buffers[s]),
                    activations=activations.get(s, 0),
                    recomputed=0,
                    communication=packed + (max(0, messages - sum(trained)) if s == 0 else 0),
                )
            )
        return tuple(found)

    def _device(self, tensor: torch.Tensor) -> int:
        return self._home.get(id(tensor), 0)

    def _by_device(self, tensors: Iterator[torch.Tensor]) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[] for _ in range(self.count)]
        for t in tensors:
            found[self._device(t)].append(t)
        return found

    def largest(self, kept: dict[Any, int]) -> tuple[int, ...]:
        """Return by device the most that one call of a checkpointed layer keeps, which backward has there again. `kept`: by (device, layer, call)."""
        return tuple(max((n for (s, part, _), n in kept.items() if s == device and part is not None), default=0) for device in range(self.count))
