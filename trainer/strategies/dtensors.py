"""Tensors of which each rank holds a part (DTensor): whole values, parts of plain tensors, and modules made plain again.

torch.distributed.tensor takes half a second to load, so strategies import this file when a run needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, distribute_tensor, rand
from torch.nn import Module, Parameter

from trainer.errors import MisconfigurationException

__all__ = [
    "DistributedModule", "check_cut", "check_optimizers", "cut_states", "drop_hooks", "empty", "is_cut", "is_sharded", "keep_streams", "load_parts", "local",
    "meet", "on_rank_zero", "plain_groups", "plain_parameter", "settle", "step_singly", "whole",
]  # fmt: skip

_PATIENCE = timedelta(seconds=3)  # how long ranks of a failed run wait for each other, to bring their weights together


def is_sharded(value: Any) -> bool:
    """True for a tensor of which this rank holds a part."""
    return isinstance(value, DTensor)


def is_cut(value: Any) -> bool:
    """True for a tensor of which other ranks hold other parts; False for what is whole here, also as a DTensor."""
    return isinstance(value, DTensor) and any(not isinstance(place, Replicate) for place in value.placements)


def whole(value: Any) -> Any:
    """Return a sharded tensor in one piece, on the device of its mesh; anything else as it is. Collective."""
    if not isinstance(value, DTensor):
        return value
    kind = value.device_mesh.device_type
    value = value.detach()
    return (value if value.device.type == kind else value.to(kind)).full_tensor()


def on_rank_zero(value: Any) -> Any:
    """Return a sharded tensor in one piece on the CPU of rank 0, and without values elsewhere; anything else as it is. Collective."""
    if not isinstance(value, DTensor):
        return value
    value = whole(value)
    return value.cpu() if torch_dist.get_rank() == 0 else value.to("meta")


def local(value: torch.Tensor) -> torch.Tensor:
    """Return the part that lies on this rank, sharing its memory."""
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value.detach()


def like(plain: torch.Tensor, sharded: DTensor) -> DTensor:
    """Return this rank's part of a tensor that every rank holds in one piece, cut as `sharded` is."""
    mesh = sharded.device_mesh
    found = distribute_tensor(plain.to(mesh.device_type), mesh, sharded.placements, src_data_rank=None)
    return found if found.device == sharded.device else found.to(sharded.device)


def load_parts(module: Module, state: dict[str, Any], strict: bool) -> Any:
    """Load plain weights into a module of which some are cut already: each rank takes its part."""
    own = module.state_dict()
    state.update({key: like(value, own[key]) for key, value in state.items() if isinstance(own.get(key), DTensor)})
    return module.load_state_dict(state, strict=strict)


def check_optimizers(strategy: str, cuts: str, module: Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that would not see the parts, or need all weights at once; `cuts` says who replaced parameters by what.

    Raises:
        MisconfigurationException: naming the reason.
    """
    own = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(f"{strategy} cannot run LBFGS, which needs all weights in one vector. Use strategy='ddp'.")
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise MisconfigurationException(
                f"{type(optimizer).__name__} holds parameters that are not the module's. {cuts}: take them from self.parameters() inside "
                "configure_optimizers, not from a list made earlier."
            )


def cut_states(optimizer: torch.optim.Optimizer, state: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a plain optimizer state with the tensors cut as the parameters of `optimizer` are.

    Raises:
        MisconfigurationException: for a tensor that has not its sharded parameter's shape; `name` is the strategy's.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {**state, "state": {i: _cut(params[i], i, values, name) for i, values in state["state"].items()}}


def _cut(param: Any, index: int, values: dict[str, Any], strategy: str) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim and isinstance(param, DTensor):
            if value.shape != param.shape:
                raise MisconfigurationException(
                    f"The optimizer state {name!r} of parameter {index} has the shape {tuple(value.shape)}, its parameter {tuple(param.shape)}: "
                    f"strategy={strategy!r} can load only what has its parameter's shape. Resume with strategy='ddp'."
                )
            value = like(value, param)
        found[name] = value
    return found


def check_cut(module: Module, mesh: DeviceMesh) -> None:
    """Make sure that layers of `module` were cut, on `mesh`, the one of tensor parallelism.

    Raises:
        MisconfigurationException: saying what to call.
    """
    cut = [(name, t) for name, t in module.named_parameters() if isinstance(t, DTensor)]
    call = "parallelize_module(layer, self.device_mesh['tensor_parallel'], plan)"
    for name, t in cut:
        if t.device_mesh != mesh:
            raise MisconfigurationException(
                f"{name} was cut on another mesh than the one of tensor parallelism. In configure_model use {call}; fully_shard does not go with "
                "ModelParallelStrategy, whose data groups hold whole copies: use strategy='fsdp' for it."
            )
    if mesh.size() > 1 and not cut:
        raise MisconfigurationException(
            f"tensor_parallel_size={mesh.size()}, but no layer of {type(module).__name__} was cut: all ranks of a group would do the same work. "
            f"Call {call} in configure_model, or use tensor_parallel_size=1."
        )


def step_singly(optimizer: torch.optim.Optimizer) -> None:
    """Where a group mixes cut and whole parameters, torch's steps over lists would fail: let it step them one by one.

    Raises:
        MisconfigurationException: for a fused optimizer, which has no such step.
    """
    for group in _mixed(optimizer):
        if group.get("fused"):
            raise MisconfigurationException(
                f"{type(optimizer).__name__}(fused=True) cannot step cut and whole parameters together. Give each kind a parameter group of its own, "
                "or leave fused out."
            )
        if "foreach" in group:
            group["foreach"] = False


def plain_groups(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of `optimizer` without what `step_singly` set: elsewhere its groups may step as lists."""
    state, mixed = optimizer.state_dict(), {id(group) for group in _mixed(optimizer)}
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):  # `saved` is a copy
        if id(group) in mixed and "foreach" in saved:
            saved["foreach"] = None
    return state


def _mixed(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if len({isinstance(p, DTensor) for p in group["params"]}) > 1]


def keep_streams(mesh: DeviceMesh, device: torch.device) -> None:
    """Let torch begin with random operations on cut tensors, for which it gives all ranks rank 0's state, and take that back. Collective."""
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        rand(1, device_mesh=mesh)


def settle(param: Parameter) -> None:
    """Bring the gradient of a sharded parameter to the parameter's own layout; torch may leave parts of a sum. Collective."""
    if isinstance(param, DTensor) and param.grad is not None and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)


# -- after a failure, and plain again -------------------------------------------------------------------------------------------


def meet(stuck: bool) -> Any:
    """Return a group in which the ranks of a failed run, which may stand anywhere, bring their weights together; it times out. Collective.

    Where a rank is stuck nobody is waited for (RuntimeError): the account of the stall must reach the caller before that rank is ended.
    """
    if stuck:
        raise RuntimeError("a rank is stuck")
    return torch_dist.new_group(backend="gloo", timeout=_PATIENCE)


def empty(sharded: DTensor) -> torch.Tensor:
    """Return what stands for a value that could not be put together."""
    return torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")


def plain_parameter(original: Parameter | None, sharded: DTensor, value: torch.Tensor) -> Parameter:
    """Return a plain parameter with `value` in the place of a sharded one: the object that was there before, where there was one."""
    if original is None or value.is_meta:
        return Parameter(value, requires_grad=sharded.requires_grad)
    original.grad, original.data = None, value
    return original.requires_grad_(sharded.requires_grad)


# -- a module with such parameters ---------------------------------------------------------------------------


class DistributedModule:
    """Remembers the plain parameters of a module; after DTensors have taken their places, `restore` puts them back, on `home`."""

    def __init__(self, root: Module, home: torch.device) -> None:
        self.root, self.home = root, home
        self._originals = {(m, name): p for m in root.modules() for name, p in m._parameters.items() if p is not None}

    def tensors(self) -> Iterator[tuple[Module, dict[str, Any], str, DTensor]]:
        """Yield (layer, its table, name, tensor) for every sharded parameter and buffer, in the module's order."""
        for m in self.root.modules():
            for table in (m._parameters, m._buffers):
                for name, t in list(table.items()):
                    if isinstance(t, DTensor):
                        yield m, table, name, t

    def check_ties(self) -> None:
        """Make sure that what was one parameter under two names still is.

        Raises:
            MisconfigurationException: naming the two.
        """
        first: dict[int, tuple[str, Any]] = {}
        for path, m in self.root.named_modules():
            for name, now in m._parameters.items():
                original = self._originals.get((m, name))
                key = f"{path}.{name}" if path else name
                if original is not None and first.setdefault(id(original), (key, now))[1] is not now:
                    other = first[id(original)][0]
                    raise MisconfigurationException(
                        f"{other} and {key} were one tensor, of which parallelize_module made two. Tie them again after it in configure_model "
                        "(one layer's weight = the other's), cut in the same way."
                    )

    def free(self) -> None:
        """Let go of the whole values; the parameters themselves are kept for `restore`."""
        for m, _, name, _ in self.tensors():
            if (m, name) in self._originals:
                self._originals[m, name].data = self._originals[m, name].data.new_empty(0)

    def restore(self, value_of: Callable[[DTensor], torch.Tensor] = whole) -> None:
        """Make parameters, buffers and hooks plain, each tensor with the value that `value_of` gives."""
        made: dict[int, Any] = {}
        for m, table, name, t in self.tensors():
            if id(t) not in made:
                value = value_of(t)
                value = value if value.is_meta else value.to(self.home)  # one by one: the device may not hold all of them whole
                original = self._originals.get((m, name))
                made[id(t)] = (t, plain_parameter(original, t, value) if table is m._parameters else value)  # `t` is kept: its id stays its own
            table[name] = made[id(t)][1]
        for m in self.root.modules():
            m.__dict__.pop("_distribute_module_applied", None)
            drop_hooks(m, "torch.distributed.tensor")

    def rescue(self, stuck: bool) -> bool:
        """Restore after a failure; False where parts could not be put together, which are then empty (device "meta")."""
        found = [t for *_, t in self.tensors()]
        if not found:
            self.restore()
            return True
        try:
            group = meet(stuck)
            parts: list[Any] = [None] * torch_dist.get_world_size()
            torch_dist.all_gather_object(parts, [local(t).cpu() for t in found], group=group)
        except (RuntimeError, ValueError):  # a rank is gone, or stuck in the work that this one left
            self.restore(empty)
            return False
        place = {id(t): i for i, t in enumerate(found)}
        self.restore(lambda t: _joined(t, [parts[rank][place[id(t)]] for rank in t.device_mesh.mesh.tolist()]))
        return True


def _joined(tensor: DTensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the whole value of a tensor on a mesh of one dimension, from the parts of its ranks in order."""
    return torch.cat(parts, tensor.placements[0].dim) if is_cut(tensor) else parts[0]


def drop_hooks(module: Module, package: str) -> None:
    """Take off the hooks that functions of `package` put on `module`; torch has no function for it."""
    tables = [v for name, v in vars(module).items() if isinstance(v, dict) and "_hooks" in name]
    ours = [key for table in tables for key, hook in table.items() if str(getattr(hook, "__module__", "")).startswith(package)]
    for table in tables:
        for key in ours:
            table.pop(key, None)
