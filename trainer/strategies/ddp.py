"""DDP: a process a device, each with all the weights; gradients are averaged while backward runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.strategies.base import Strategy

__all__ = ["DDPStrategy"]

_NULL = nullcontext()


class _Router(torch.nn.Module):
    """What DDP wraps: its `forward` is the module's training step, so that DDP's own hooks run around it."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)


class _Complete:
    """The context of a forward and backward that ends with all gradients averaged; says which were left out."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self.strategy = strategy

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.strategy.check_reduced()


class DDPStrategy(Strategy):
    """Data parallel over processes, with torch's DistributedDataParallel.

    Args:
        find_unused_parameters: allow parameters that take no part in a loss (slower: the graph is walked each step).
        comm_hook: a DDP communication hook, `hook(state, bucket) -> Future`, to compress what is sent.
        comm_state: the first argument of that hook.
        ddp_kwargs: other arguments of DistributedDataParallel (gradient_as_bucket_view, static_graph, bucket_cap_mb, ...).
    """

    name = "ddp"
    distributed = True
    _ddp: DistributedDataParallel | None = None
    _complete: AbstractContextManager[Any] = _NULL

    def __init__(
        self,
        find_unused_parameters: bool = False,
        comm_hook: Callable[..., Any] | None = None,
        comm_state: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook, self.comm_state, self.ddp_kwargs = comm_hook, comm_state, ddp_kwargs

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        super().setup(module, device, dist)
        dist.broadcast_tensors([*module.parameters(), *module.buffers()])

    def wrap(self, training: bool) -> None:
        self.training_step = self.module.training_step
        trainable = any(p.requires_grad for p in self.module.parameters())
        if not training or self.dist.alone or not trainable or not self.module.automatic_optimization:
            return
        self._names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        ids = None if self.root_device.type == "cpu" else [self.root_device]
        self._ddp = DistributedDataParallel(
            _Router(self.module), device_ids=ids, find_unused_parameters=self.find_unused_parameters, **self.ddp_kwargs
        )
        if self.comm_hook is not None:
            self._ddp.register_comm_hook(self.comm_state, self.comm_hook)
        self.training_step, self._complete = self._ddp, _Complete(self)

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        return self._complete if last or self._ddp is None else self._ddp.no_sync()

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, one flat vector a dtype. A gradient that some ranks lack counts as zero there."""
        if self.dist.alone:
            return
        params = [p for p in self.module.parameters() if p.requires_grad]
        held = torch.tensor([p.grad is not None for p in params], dtype=torch.int64)
        held = self.dist.maximum(held).tolist()
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for p, anyone in zip(params, held, strict=True):
            if anyone:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                by_kind.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
        for grads in by_kind.values():
            flat = self.dist.sum(torch.cat([g.reshape(-1) for g in grads])).div_(self.dist.world.world_size)
            pieces = flat.split([g.numel() for g in grads])
            torch._foreach_copy_(grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)])

    def sync_buffers(self) -> None:
        self.dist.broadcast_tensors(list(self.module.buffers()))

    def check_reduced(self) -> None:
        """Make sure that backward averaged every gradient. DDP alone says so one step later, after an update that differs by rank.

        Raises:
            MisconfigurationException: naming the parameters that took no part in the loss.
        """
        try:
            self._ddp.reducer._check_reducer_finalized()  # what DDP's method of this name does; costs below a microsecond
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            idle = [self._names[int(index)] for index in found[1].split()]
            shown = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
            raise MisconfigurationException(
                f"These parameters took no part in the loss: {shown}. With strategy='ddp' every parameter must, in the last batch of every step. "
                "Remove or freeze them (requires_grad_(False)), or use strategy='ddp_find_unused_parameters_true' "
                "(DDPStrategy(find_unused_parameters=True))."
            ) from None

    def teardown(self) -> None:
        self._ddp = None
        self.__dict__.pop("_complete", None)
        super().teardown()
