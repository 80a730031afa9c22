"""FSDP2 around a module, and off it again: which parts become units, whole values of sharded tensors, plain parameters.

torch.distributed.fsdp takes a second to load, so `fsdp.py` imports this file when a run needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential

from trainer.errors import MisconfigurationException
from trainer.strategies.dtensors import (
    check_optimizers,
    cut_states,
    drop_hooks,
    empty,
    is_sharded,
    load_parts,
    meet,
    on_rank_zero,
    plain_parameter,
    whole,
)

__all__ = [
    "ShardedModule", "check_optimizers", "cut_states", "forward_method", "is_sharded", "load_parts", "make_mesh", "on_rank_zero", "plan", "whole",
]  # fmt: skip

_CONTAINERS = (ModuleList, ModuleDict)


def make_mesh(kind: str, size: int, shard_size: int | None) -> DeviceMesh:
    """Return the mesh of all ranks: (size,), or (copies, shard_size) for hybrid sharding. Collective."""
    if shard_size is None or shard_size == size:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def forward_method(module: Module, name: str) -> Callable[..., Any]:
    """Return the method `name` with FSDP's own work before and after it. The module itself keeps its plain method."""
    before = vars(module).get(name)
    plain = getattr(module, name)
    register_fsdp_forward_method(module, name)
    routed = vars(module).pop(name)
    if before is not None:
        vars(module)[name] = before

    def call(*args: Any, **kwargs: Any) -> Any:
        return routed(*args, **kwargs)

    call.__wrapped__ = plain  # type: ignore[attr-defined]  # the loop asks for its arguments
    return call


# -- which parts are gathered together ------------------------------------------------------------------------------------


def plan(root: Module, wrap: Any) -> list[Module]:
    """Return the parts of `root` to shard on their own, inner ones first; the root takes what is left.

    Raises:
        MisconfigurationException: when `wrap` chooses nothing, or a container that is never called.
    """
    if wrap is None:
        chosen = list(_blocks(root))
    else:
        fits = wrap if callable(wrap) and not isinstance(wrap, type) else _of_classes(wrap)
        chosen = [m for m in root.modules() if m is not root and fits(m)]
        if not chosen and wrap != ():
            raise MisconfigurationException(f"FSDPStrategy(wrap={wrap!r}) fits no part of {type(root).__name__}. Give wrap=() to shard it whole.")
        for m in chosen:
            if isinstance(m, _CONTAINERS):
                raise MisconfigurationException(f"FSDPStrategy(wrap=...) chose a {type(m).__name__}, which is never called. Choose its layers.")
    wanted = {id(m) for m in chosen if any(True for _ in m.parameters()) and not _shares_outside(root, m)}
    return [m for m in reversed(list(root.modules())) if id(m) in wanted]


def _blocks(module: Module) -> Iterator[Module]:
    """The members of the outermost ModuleLists and Sequentials; a container in a container is looked into."""
    for child in module.children():
        if isinstance(module, (ModuleList, Sequential)) and not isinstance(child, (*_CONTAINERS, Sequential)):
            yield child
        else:
            yield from _blocks(child)


def _of_classes(wrap: Any) -> Callable[[Module], bool]:
    classes = (wrap,) if isinstance(wrap, type) else tuple(wrap)
    return lambda module: isinstance(module, classes)


def _shares_outside(root: Module, part: Module) -> bool:
    """True when a parameter of `part` is tied to one outside: both must lie in the same unit, so the part is left to its parent."""
    inside = set(part.modules())
    outside = {id(p) for m in root.modules() if m not in inside for p in m._parameters.values() if p is not None}
    return any(id(p) in outside for p in part.parameters())


# -- on and off -------------------------------------------------------------------------------------------------------------


class ShardedModule:
    """A module whose parameters are sharded in place. `restore` makes it the plain module that it was.

    Raises:
        MisconfigurationException: for parameters that cannot be sharded, and for those that the user sharded on another mesh.
    """

    def __init__(
        self, root: Module, mesh: DeviceMesh, wrap: Any, reshard: bool, mixed_precision: MixedPrecisionPolicy | None, offload: Any
    ) -> None:
        _check(root, mesh)
        self.root, self.mesh, self.reshard = root, mesh, reshard
        offload = CPUOffloadPolicy() if offload is True else offload or OffloadPolicy()
        self._options = {"mesh": mesh, "mp_policy": mixed_precision or MixedPrecisionPolicy(), "offload_policy": offload}
        self._parts = [] if self.units else plan(root, wrap)  # who shards layers in configure_model shards all he wants to
        self.homes = {(m, name): p.device for m in root.modules() for name, p in m._parameters.items() if p is not None}
        self.originals = {
            (m, name): p for m in root.modules() for name, p in m._parameters.items() if p is not None and not isinstance(p, DTensor)
        }
        self.buffers = {(m, name): b.device for m in root.modules() for name, b in m._buffers.items() if b is not None}

    @property
    def units(self) -> list[Any]:
        """Every FSDPModule in the module, the root last."""
        return [m for m in reversed(list(self.root.modules())) if isinstance(m, FSDPModule)]

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The whole weights of every part as torch keeps them, and whole gradients that wait for a later batch. Weights let go have no storage."""
        params = [p for unit in self.units for group in _groups(unit) for p in group.fsdp_params]
        found = [t for p in params for t in (getattr(p, "_unsharded_param", None), p.unsharded_accumulated_grad) if t is not None]
        return [t.to_local() if isinstance(t, DTensor) else t for t in found]

    def shard(self) -> None:
        """Cut the parameters, part by part: each is moved to the device when the one before it was let go. Collective."""
        for part in self._parts:
            fully_shard(part, reshard_after_forward=self.reshard, **self._options)
            self._free(part)
        if not isinstance(self.root, FSDPModule):
            fully_shard(self.root, reshard_after_forward=False, **self._options)
            self._free(self.root)

    def _free(self, part: Module) -> None:
        """Let go of the whole values; the parameters themselves are kept for `restore`."""
        for m in part.modules():
            for name, p in m._parameters.items():
                original = self.originals.get((m, name))
                if original is not None and isinstance(p, DTensor):
                    original.data = original.data.new_empty(0)

    def gather(self) -> None:
        """Hold all parameters whole until `scatter`: forward passes then need no other rank. Collective."""
        for unit in self.units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def scatter(self) -> None:
        """Go back to shards."""
        for unit in self.units:
            unit.set_reshard_after_forward(True, recurse=False)  # also a pass that an exception ended gives its values up
            unit.reshard()
            unit.set_reshard_after_forward(self.reshard and unit is not self.root, recurse=False)
            _forget_order(unit)

    def drop_step(self) -> None:
        """Forget a forward that no backward follows, and gradients of earlier batches that are not reduced yet: no optimizer sees those."""
        self.scatter()
        for unit in self.units:
            for group in _groups(unit):
                for p in group.fsdp_params:
                    p.unsharded_accumulated_grad = None
                    if hasattr(p, "_unsharded_param"):
                        p._unsharded_param.grad = None

    def equalize(self) -> None:
        """Give all copies of a shard, where the user made them with hybrid sharding, the values of the first. Collective."""
        if self.mesh.ndim == 2:
            group = self.mesh.get_group("replicate")
            for p in self.root.parameters():
                torch_dist.broadcast(p.detach().to_local(), group_src=0, group=group)

    def restore(self, value_of: Callable[[DTensor], torch.Tensor]) -> None:
        """Make parameters, classes and hooks plain again, each parameter with the value `value_of` gives. The objects are the old ones."""
        self.scatter()
        made: dict[int, Parameter] = {}
        for m in self.root.modules():
            for name, p in m._parameters.items():
                if isinstance(p, DTensor):
                    if id(p) not in made:
                        made[id(p)] = self._plain(m, name, p, value_of(p))
                    m._parameters[name] = made[id(p)]
            for name, device in ((n, d) for (owner, n), d in self.buffers.items() if owner is m):
                if m._buffers.get(name) is not None:
                    m._buffers[name] = m._buffers[name].to(device)
        for unit in self.units:
            _unwrap(unit)
        for m in self.root.modules():
            for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                m.__dict__.pop(name, None)
            drop_hooks(m, "torch.distributed.fsdp")

    def _plain(self, m: Module, name: str, sharded: DTensor, value: torch.Tensor) -> Parameter:
        home, original = self.homes.get((m, name)), self.originals.get((m, name))
        value = value if value.is_meta or home is None else value.to(home)
        return plain_parameter(original, sharded, value)

    def rescue(self, stuck: bool) -> bool:
        """Restore after a failure; False where shards could not be put together, and parameters are empty (device "meta")."""
        try:
            self.restore(self._from_peers(meet(stuck)))
        except (RuntimeError, ValueError):  # a rank is gone, or stuck in the work that this one left
            self.restore(empty)
            return False
        return True

    def _from_peers(self, group: Any) -> Callable[[DTensor], torch.Tensor]:
        """Return a function that puts a parameter together through `group`, a group of all ranks beside the mesh. Collective."""
        mine = torch_dist.get_rank()
        peers = next(row for row in self.mesh.mesh.reshape(-1, self.mesh.size(-1)).tolist() if mine in row)

        def value_of(sharded: DTensor) -> torch.Tensor:
            found: list[Any] = [None] * torch_dist.get_world_size()
            torch_dist.all_gather_object(found, sharded.detach().to_local().cpu(), group=group)
            return torch.cat([found[rank] for rank in peers], sharded.placements[-1].dim)

        return value_of


def _check(root: Module, mesh: DeviceMesh) -> None:
    scalars = [name for name, p in root.named_parameters() if p.ndim == 0]
    if scalars:
        raise MisconfigurationException(
            f"FSDP cannot shard a parameter without a dimension: {', '.join(scalars)}. Give it the shape (1,), or use strategy='ddp'."
        )
    for name, p in root.named_parameters():
        if isinstance(p, DTensor) and p.device_mesh != mesh:
            raise MisconfigurationException(
                f"{name} was sharded on another mesh than this strategy's. In configure_model use "
                "fully_shard(layer, mesh=self.trainer.strategy.mesh)."
            )


def _groups(unit: Any) -> list[Any]:
    """The parts of a unit in which torch keeps what it gathers at once."""
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # older torch has one or None
    return [group for group in groups if group is not None]


def _forget_order(unit: Any) -> None:
    """Drop the order of forward passes that no backward followed.

    The next backward would gather ahead by it, on the ranks that had such passes only: the others, which had no sample to evaluate, would not
    take part. torch has no function for it.
    """
    for group in _groups(unit):
        if group._post_forward_indices:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def _unwrap(unit: Any) -> None:
    """Undo what fully_shard did to the class and the dictionary of a module; torch has no function for it."""
    order = type(unit).__mro__
    unit.__class__ = order[order.index(FSDPModule) + 1]
    _module_state_mapping.pop(unit, None)
    for key in (STATE_KEY, REGISTRY_KEY):
        unit.__dict__.pop(key, None)
