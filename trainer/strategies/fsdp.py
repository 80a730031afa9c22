"""FSDP: a process a device, each with a part of every weight, gradient and optimizer state (torch's FSDP2, `fully_shard`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.utils._pytree import tree_map_only

from trainer.devices import Devices
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.strategies.base import Strategy

__all__ = ["FSDPStrategy"]

_NULL = nullcontext()
_PATIENCE = timedelta(seconds=3)  # how long ranks of a failed run wait for each other, to bring their weights together


class FSDPStrategy(Strategy):
    """Fully sharded data parallel over processes, with torch's FSDP2. On one device nothing is sharded.

    Args:
        shard_size: over how many ranks weights are cut, a divisor of their number; None for all. A smaller number (the ranks of a node)
            keeps `ranks / shard_size` copies, between which gradients are averaged: hybrid sharding.
        wrap: which parts of the module are gathered on their own: None for each member of its outermost ModuleLists and
            Sequentials; a module class or several; a function of a module; () for none. The rest belongs to the module itself.
        reshard_after_forward: give a part's weights up between forward and backward (less memory, one more gather).
        mixed_precision: torch's MixedPrecisionPolicy; None leaves number formats to the trainer's `precision`.
        cpu_offload: keep the shards on the host; True, or torch's OffloadPolicy.
        find_unused_parameters: ranks may use different parameters in a step; those that a rank leaves out count as zero gradients.

    Raises:
        MisconfigurationException: for arguments of another kind.
    """

    name = "fsdp"
    distributed = True
    plain_afterwards = False
    _sharded: Any = None
    _mesh: Any = None
    _gathered = False
    _syncs = True

    def __init__(
        self,
        shard_size: int | None = None,
        wrap: Any = None,
        reshard_after_forward: bool = True,
        mixed_precision: Any = None,
        cpu_offload: Any = False,
        find_unused_parameters: bool = False,
    ) -> None:
        if shard_size is not None and (isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1):
            raise MisconfigurationException(f"FSDPStrategy(shard_size={shard_size!r}) must be a number of ranks >= 1, or None for all.")
        if not isinstance(reshard_after_forward, bool):
            raise MisconfigurationException(f"FSDPStrategy(reshard_after_forward={reshard_after_forward!r}) must be True or False.")
        many = isinstance(wrap, (list, tuple, set, frozenset)) and all(isinstance(one, type) for one in wrap)
        if wrap is not None and not callable(wrap) and not many:
            raise MisconfigurationException(f"FSDPStrategy(wrap={wrap!r}) must be module classes, a function of a module, () or None.")
        self.shard_size, self.wrap_policy = shard_size, tuple(wrap) if many else wrap
        self.reshard_after_forward, self.mixed_precision = reshard_after_forward, mixed_precision
        self.cpu_offload, self.find_unused_parameters = cpu_offload, find_unused_parameters

    # -- processes and devices ---------------------------------------------------------------------------------------------

    def check(self, devices: int, num_nodes: int) -> None:
        ranks = devices * num_nodes
        if self.shard_size is not None and ranks % self.shard_size:
            raise MisconfigurationException(
                f"FSDPStrategy(shard_size={self.shard_size}) does not divide the {ranks} ranks. Choose a divisor, or None to shard over all."
            )

    def device(self, devices: Devices, local_rank: int) -> torch.device:
        device = devices.device(local_rank)
        if device.type == "mps":
            raise MisconfigurationException("strategy='fsdp' works on cpu and cuda; on mps use one device without a strategy.")
        if device.type == "cpu" and self.cpu_offload:
            raise MisconfigurationException("FSDPStrategy(cpu_offload=...): the device is the CPU already; leave it out.")
        self._kind, self._mesh = device, None
        return device

    @property
    def mesh(self) -> Any:
        """The DeviceMesh to shard on in `configure_model` (`fully_shard(layer, mesh=self.trainer.strategy.mesh)`). Collective.

        Its dimensions are ("shard",), or ("replicate", "shard") for hybrid sharding. None on one device and outside a run.
        """
        if self._mesh is None and torch_dist.is_initialized() and torch_dist.get_world_size() > 1:
            if self._kind.type == "cuda":
                torch.cuda.set_device(self._kind)  # fully_shard takes the current device
            self._mesh = _sharding().make_mesh(self._kind.type, torch_dist.get_world_size(), self.shard_size)
        return self._mesh

    # -- placing and wrapping ----------------------------------------------------------------------------------------------

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        """Give every rank its shards of rank 0's weights. Collective.

        A part is moved to the device and cut before the next one is moved, so the device never holds the whole module.

        Raises:
            MisconfigurationException: for a module, or a `wrap`, that FSDP cannot work with.
        """
        self.plain_afterwards = dist.alone
        if dist.alone:
            super().setup(module, device, dist)
            return
        self.module, self.root_device, self.dist = module, device, dist
        sharding = _sharding()
        plain = [p for p in module.parameters() if not sharding.is_sharded(p)]
        user_made = len(plain) < sum(1 for _ in module.parameters())
        dist.broadcast_tensors([*plain, *module.buffers()])
        self._sharded = sharding.ShardedModule(
            module, self.mesh, self.wrap_policy, self.reshard_after_forward, self.mixed_precision, self.cpu_offload
        )
        self._syncs, self._gathered = True, False
        try:
            self._sharded.shard()
            if user_made:
                self._sharded.equalize()
            self._allow_unused(module)
        except BaseException:
            self.teardown()  # the run has not noted yet that there is something to undo
            raise

    def _allow_unused(self, module: Any) -> None:
        if not self.find_unused_parameters:
            return
        if not hasattr(module, "set_reduce_scatter_unused_params"):
            raise MisconfigurationException(
                f"FSDPStrategy(find_unused_parameters=True) needs a newer torch than {torch.__version__}; use strategy='ddp'."
            )
        module.set_reduce_scatter_unused_params(True)

    def wrap(self, training: bool) -> None:
        """Set `training_step`, with FSDP's work around it.

        Raises:
            MisconfigurationException: for manual optimization, whose backward ends inside the forward that FSDP sees.
        """
        if self._sharded is None:
            super().wrap(training)
            return
        if training and not self.module.automatic_optimization:
            raise MisconfigurationException(
                "strategy='fsdp' cannot do manual optimization: FSDP reduces gradients after training_step has returned. Use strategy='ddp', or "
                "return the loss."
            )
        self.training_step = _sharding().forward_method(self.module, "training_step")

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that would not see the shards, or need all weights at once.

        Raises:
            MisconfigurationException: naming the reason.
        """
        if self._sharded is None:
            return
        own = {id(p) for p in self.module.parameters()}
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise MisconfigurationException("strategy='fsdp' cannot run LBFGS, which needs all weights in one vector. Use strategy='ddp'.")
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise MisconfigurationException(
                    f"{type(optimizer).__name__} holds parameters that are not the module's. FSDP replaces parameters by their shards: take them "
                    "from self.parameters() inside configure_optimizers, not from a list made earlier."
                )

    def step(self, name: str) -> Callable[..., Any]:
        return super().step(name) if self._sharded is None else _sharding().forward_method(self.module, name)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold the weights whole: ranks may then have different numbers of batches, and none waits for another. Collective."""
        if self._sharded is None:
            yield
            return
        self._gathered = True
        self._sharded.gather()
        try:
            yield
        finally:
            self._gathered = False
            self._sharded.scatter()

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if last is not self._syncs and self._sharded is not None:
            self._syncs = last
            self.module.set_requires_gradient_sync(last)
        return _NULL

    def sync_buffers(self) -> None:
        self.dist.broadcast_tensors(list(self.module.buffers()))

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the weights as plain tensors, whole on rank 0; the other ranks hold the same keys, without values. Collective."""
        if self._sharded is None:
            return super().module_state()
        state = self.module.state_dict()
        state = {key: self._on_rank_zero(value) for key, value in state.items()}
        if self._gathered:  # state_dict went back to shards
            self._sharded.gather()
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state in torch's plain format, whole on rank 0; the other ranks hold the same keys. Collective."""
        return optimizer.state_dict() if self._sharded is None else tree_map_only(torch.Tensor, self._on_rank_zero, optimizer.state_dict())

    def _on_rank_zero(self, value: Any) -> Any:
        if not _sharding().is_sharded(value):
            return value
        value = _sharding().whole(value)
        return value.cpu() if self.dist.world.rank == 0 else value.to("meta")

    def load_module(self, module: torch.nn.Module, state: dict[str, Any], strict: bool) -> Any:
        """Load plain weights, also into parts that `configure_model` sharded already."""
        if self._mesh is not None:
            own = module.state_dict()
            cut = [key for key in state if _sharding().is_sharded(own.get(key))]
            state.update({key: _sharding().like(state[key], own[key]) for key in cut})
        return module.load_state_dict(state, strict=strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a plain state, of which each rank takes its part.

        Raises:
            MisconfigurationException: for a tensor that is not cut as its parameter is.
        """
        if self._sharded is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            state = {**state, "state": {i: self._part(params[i], i, values) for i, values in state["state"].items()}}
        optimizer.load_state_dict(state)

    def _part(self, param: Any, index: int, values: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                if value.shape != param.shape:
                    raise MisconfigurationException(
                        f"The optimizer state {name!r} of parameter {index} has the shape {tuple(value.shape)}, its parameter {tuple(param.shape)}: "
                        "strategy='fsdp' can load only what has its parameter's shape. Resume with strategy='ddp'."
                    )
                value = _sharding().like(value, param)
            found[name] = value
        return found

    # -- the end -----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Put the whole weights back into the caller's module, on every rank. Collective."""
        if self._sharded is not None:
            sharded, self._sharded = self._sharded, None
            sharded.restore(_sharding().whole)

    def teardown(self) -> None:
        """Make the module plain. After a failed run its weights come together if all ranks failed; else they are empty, on "meta"."""
        if self._sharded is not None:
            sharded, self._sharded = self._sharded, None
            _rescue(sharded)
        self._mesh, self._gathered = None, False
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k not in ("_sharded", "_mesh", "_kind", "plain_afterwards")}


def _rescue(sharded: Any) -> None:
    """Restore a module after a failure. The ranks may stand anywhere, so they meet in a group of their own, which times out."""
    try:
        group = torch_dist.new_group(backend="gloo", timeout=_PATIENCE)
        value_of = sharded.from_peers(group)
        sharded.restore(value_of)
    except (RuntimeError, ValueError):  # a rank is gone, or stuck in the work that this one left
        sharded.restore(lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
        warnings.warn(
            "The run failed on some ranks only, so the shards of its weights could not be put together: the module's parameters are "
            "empty (device 'meta'). Load a checkpoint, or build the module anew.",
            stacklevel=2,
        )


def _sharding() -> Any:
    """The file that works with torch.distributed.fsdp, which takes a second to load: only runs that shard do."""
    from trainer.strategies import sharding

    return sharding
