"""FSDP: a process a device, each with a part of every weight, gradient and optimizer state (torch's FSDP2, `fully_shard`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        state_dict_type: "full" checkpoints are plain files, put together and written by rank 0; "sharded" ones are folders, into which
            every rank writes its parts. Both load under every strategy.

    Raises:
        MisconfigurationException: for arguments of another kind.
    """

    name = "fsdp"
    distributed = True
    plain_afterwards = False
    waits_inside = True
    _sharded: Any = None
    _mesh: Any = None
    _gathered = False
    _syncs = True
    _of_a_run = ("_sharded", "_mesh", "_kind", "plain_afterwards")

    def __init__(
        self,
        shard_size: int | None = None,
        wrap: Any = None,
        reshard_after_forward: bool = True,
        mixed_precision: Any = None,
        cpu_offload: Any = False,
        find_unused_parameters: bool = False,
        state_dict_type: str = "full",
    ) -> None:
        if shard_size is not None and (isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1):
            raise MisconfigurationException(f"FSDPStrategy(shard_size={shard_size!r}) must be a number of ranks >= 1, or None for all.")
        if not isinstance(reshard_after_forward, bool):
            raise MisconfigurationException(f"FSDPStrategy(reshard_after_forward={reshard_after_forward!r}) must be True or False.")
        if state_dict_type not in ("full", "sharded"):
            raise MisconfigurationException(f"FSDPStrategy(state_dict_type={state_dict_type!r}) must be 'full' or 'sharded'.")
        many = isinstance(wrap, (list, tuple, set, frozenset)) and all(isinstance(one, type) for one in wrap)
        if wrap is not None and not callable(wrap) and not many:
            raise MisconfigurationException(f"FSDPStrategy(wrap={wrap!r}) must be module classes, a function of a module, () or None.")
        self.shard_size, self.wrap_policy = shard_size, tuple(wrap) if many else wrap
        self.reshard_after_forward, self.mixed_precision = reshard_after_forward, mixed_precision
        self.cpu_offload, self.find_unused_parameters = cpu_offload, find_unused_parameters
        self.state_dict_type = state_dict_type

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
            self.dist.limit(self._mesh.get_all_groups())
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
        if self._sharded is not None:
            _sharding().check_optimizers("strategy='fsdp'", "FSDP replaces parameters by their shards", self.module, optimizers)

    def step(self, name: str) -> Callable[..., Any]:
        return super().step(name) if self._sharded is None else _sharding().forward_method(self.module, name)

    def called_apart(self) -> Collection[torch.nn.Module]:
        return () if self._sharded is None else self._sharded.units

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

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Show the shards also where weights are held whole, and put these together anew afterwards. Collective."""
        if self._gathered:
            self._sharded.scatter()
        yield
        if self._gathered:
            with torch.inference_mode(False), torch.no_grad():  # training uses the same tensors again
                self._sharded.gather()

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        if last is not self._syncs and self._sharded is not None:
            self._syncs = last
            self.module.set_requires_gradient_sync(last)
        return _NULL

    def drop_step(self) -> None:
        if self._sharded is not None:
            self._sharded.drop_step()

    def sync_buffers(self) -> None:
        self.dist.broadcast_tensors(list(self.module.buffers()))

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the weights as plain tensors, whole on rank 0; the other ranks hold the same keys, without values. Collective."""
        if self._sharded is None:
            return super().module_state()
        on_rank_zero = _sharding().on_rank_zero
        return {key: on_rank_zero(value) for key, value in self.module_parts().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state in torch's plain format, whole on rank 0; the other ranks hold the same keys. Collective."""
        state = optimizer.state_dict()
        return state if self._sharded is None else tree_map_only(torch.Tensor, _sharding().on_rank_zero, state)

    @property
    def sharded(self) -> bool:
        """True in a run that writes sharded checkpoints; on one device nothing is sharded."""
        return self.state_dict_type == "sharded" and self._sharded is not None

    def module_parts(self) -> dict[str, Any]:
        state = self.module.state_dict()
        if self._gathered:  # state_dict went back to shards
            self._sharded.gather()
        return state

    def load_module(self, module: torch.nn.Module, state: dict[str, Any], strict: bool) -> Any:
        """Load plain weights, also into parts that `configure_model` sharded already."""
        if self._mesh is None:
            return super().load_module(module, state, strict)
        return _sharding().load_parts(module, state, strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a plain state, of which each rank takes its part.

        Raises:
            MisconfigurationException: for a tensor that is not cut as its parameter is.
        """
        if self._sharded is not None:
            state = _sharding().cut_states(optimizer, state, self.name)
        optimizer.load_state_dict(state)

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
            if not sharded.rescue(self.stuck):
                warnings.warn(
                    "The run failed on some ranks only, so the shards of its weights could not be put together: the module's parameters are "
                    "empty (device 'meta'). Load a checkpoint, or build the module anew.",
                    stacklevel=2,
                )
        self._mesh, self._gathered = None, False
        super().teardown()


def _sharding() -> Any:
    """The file that works with torch.distributed.fsdp, which takes a second to load: only runs that shard do."""
    from trainer.strategies import sharding

    return sharding
