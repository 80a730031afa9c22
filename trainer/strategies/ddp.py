"""DDP: a process a device, each with all the weights; gradients are averaged while backward runs."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from trainer.dist import Dist
from trainer.errors import MisconfigurationException, nearest
from trainer.removed import REMOVED_STRATEGY_ARGUMENTS
from trainer.strategies.averaging import average, gradients_of
from trainer.strategies.base import Closing, Strategy
from trainer.strategies.rider import Rider

__all__ = ["DDPStrategy"]

_NULL = nullcontext()


class _Router(torch.nn.Module):
    """What DDP wraps: its `forward` is the module's training step, so that DDP's own hooks run around it."""

    def __init__(self, module: torch.nn.Module, step: Callable[..., Any], rider: Rider | None) -> None:
        super().__init__()
        self.module, self.step, self.rider = module, step, rider  # in this order: DDP numbers the module's parameters first

    def forward(self, *args: Any) -> Any:
        output = self.step(*args)
        return output if self.rider is None else self.rider.board(output)


class DDPStrategy(Strategy):
    """Data parallel over processes, with torch's DistributedDataParallel.

    Args:
        find_unused_parameters: allow parameters that take no part in a loss (slower: the graph is walked each step).
        comm_hook: a DDP communication hook, `hook(state, bucket) -> Future`, to compress what is sent.
        comm_state: the first argument of that hook.
        ddp_kwargs: other arguments of DistributedDataParallel (gradient_as_bucket_view, static_graph, bucket_cap_mb, ...).

    Raises:
        MisconfigurationException: for an argument that neither has.

    `local` is True while each rank steps on its own gradients (post-local SGD; `GradientSync(average_every=)` sets it).
    """

    name = "ddp"
    distributed = True
    local: bool = False
    _ddp: DistributedDataParallel | None = None
    _last: AbstractContextManager[Any] = _NULL
    _rider: Rider | None = None
    _of_a_run = ("_ddp", "_last", "_rider")

    def __init__(
        self,
        find_unused_parameters: bool = False,
        comm_hook: Callable[..., Any] | None = None,
        comm_state: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        for name in ddp_kwargs:
            if name not in known:
                instead = f" Use {REMOVED_STRATEGY_ARGUMENTS[name]}." if name in REMOVED_STRATEGY_ARGUMENTS else nearest(name, known)
                raise MisconfigurationException(f"{type(self).__name__} has no argument {name!r}, nor has DistributedDataParallel.{instead}")
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook, self.comm_state, self.ddp_kwargs = comm_hook, comm_state, ddp_kwargs

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        super().setup(module, device, dist)
        dist.broadcast_tensors([*module.parameters(), *module.buffers()])

    def wrap(self, training: bool) -> None:
        super().wrap(training)
        if self._ddp is not None:  # other parameters are trained from here on
            self._ddp = self._rider = None
            self.__dict__.pop("_last", None)
            gc.collect()  # its reducer goes, and with it what it hung onto the parameters
            for kept in ("error_dict", "p_memory_dict", "q_memory_dict"):  # what PowerSGD has of each bucket; the buckets are others now
                getattr(self.comm_state, kept, {}).clear()
        trainable = any(p.requires_grad for p in self.module.parameters())
        if not training or self.dist.alone or not trainable or not self.module.automatic_optimization:
            return
        if self.late_sync:
            if self.comm_hook is not None:
                raise MisconfigurationException("recover_oom=True averages gradients after backward, without a comm_hook. Leave one of them out.")
            return
        self._names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self._rider = self._new_rider()
        self._ddp = DistributedDataParallel(
            _Router(self.module, self.training_step, self._rider),
            device_ids=self.device_ids(),
            find_unused_parameters=self.find_unused_parameters,
            **self.ddp_kwargs,
        )
        if self.comm_hook is not None:
            self._ddp.register_comm_hook(self.comm_state, self.comm_hook)
        self.training_step, self._last = self._ddp, Closing(self.check_reduced)

    def device_ids(self) -> list[torch.device] | None:
        """Return the device to which DDP moves what it is called with; None to leave everything where it is."""
        return None if self.root_device.type == "cpu" else [self.root_device]

    def _new_rider(self) -> Rider | None:
        """None where wishes travel apart: reading them would wait for an accelerator, or a hook changes what is sent."""
        dtype = self._trainable()[0].dtype
        apart = self.root_device.type != "cpu" or self.comm_hook is not None or "mixed_precision" in self.ddp_kwargs
        return None if apart or not dtype.is_floating_point else Rider(dtype)

    def ask_ahead(self, wishes: Callable[[], int]) -> Callable[[], int]:
        if self._rider is None or self.local:
            return super().ask_ahead(wishes)
        self._rider.ask(wishes)
        return partial(self._answer, wishes)

    def _answer(self, wishes: Callable[[], int]) -> int:
        found = self._rider.answer()
        return self.dist.union(wishes()) if found is None else found

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if self._ddp is None or (last and not self.local):
            return self._last
        if self._ddp.static_graph:
            raise MisconfigurationException(
                "static_graph=True: torch's DDP cannot leave out the reduction of a batch of a static graph, which accumulation and "
                "average_every need. Use accumulate_grad_batches=1, or DDPStrategy(static_graph=False)."
            )
        return self._ddp.no_sync()

    def drop_step(self) -> None:
        if self._ddp is not None:
            self._ddp.reducer._reset_state()  # it still waits for that backward, and would take the next one for it
            self._ddp._has_rebuilt_buckets = False  # as torch does beside that call

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, one flat vector a dtype. A gradient that some ranks lack counts as zero there."""
        if self.dist.alone or self.local:
            return
        self._average(gradients_of(self._trainable(), self.dist.maximum))

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _average(self, tensors: list[torch.Tensor]) -> None:
        average(tensors, self.dist.sum, self.dist.world.world_size)

    def sync_buffers(self) -> None:
        self.dist.broadcast_tensors(list(self.module.buffers()))

    # -- ranks that step on their own between averages (post-local SGD) -------------------------------------------------------

    def average(self) -> None:
        """Put the mean of the ranks' weights in the place of each rank's, and rank 0's buffers. Collective."""
        if not self.dist.alone:
            self._average([p.detach() for p in self._trainable()])
            self.sync_buffers()

    def sync_module(self) -> None:
        if self.local:
            self.average()
            self.local = False
        self.sync_buffers()

    @contextmanager
    def _mean_for_now(self) -> Iterator[None]:
        params = [p.detach() for p in self._trainable()]
        kept = [p.clone() for p in params]
        self.average()
        self.local = False
        try:
            yield
        finally:
            self.local = True
            torch._foreach_copy_(params, kept)

    def averaged(self) -> AbstractContextManager[Any]:
        """Within it the weights are the mean over ranks; afterwards each rank has its own back: looking changes nothing. Collective."""
        return self._mean_for_now() if self.local and not self.dist.alone else _NULL

    def module_state(self) -> dict[str, Any]:
        if not self.local or self.dist.alone:
            return self.module.state_dict()
        with self.averaged():
            return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.module.state_dict().items()}

    def rank_state(self, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any] | None:
        if not self.local or self.dist.alone:
            return None
        weights = {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}
        state = {"weights": weights, "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, state)

    def load_rank_state(self, state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> None:
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in state["weights"].items():
                own[name].copy_(tensor)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

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
                "Remove or freeze them (requires_grad_(False), and trainer.rewrap() if a fit is running), or use "
                "strategy='ddp_find_unused_parameters_true' (DDPStrategy(find_unused_parameters=True))."
            ) from None

    def teardown(self) -> None:
        self._ddp = self._rider = None
        self.local = False
        self.__dict__.pop("_last", None)
        super().teardown()
