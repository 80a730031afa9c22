"""What one step of a rank does, seen from below: what it sends, how much it computes, and what it keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.planning.report import Transfer

__all__ = ["Saved", "Watch", "Where", "local", "size"]

_NAMES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather", "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced": "all_gather", "reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all", "shard_dim_alltoall": "all_to_all",
}  # fmt: skip
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_SILENT = ("wait_tensor", "barrier", "monitored_barrier")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(*things: Any) -> int:
    """Return the bytes of the tensors in `things`, of each its part on this rank."""
    tensors = (local(leaf) for leaf in tree_leaves(things) if isinstance(leaf, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


class Watch(TorchDispatchMode):
    """Notes every collective, with its bytes and the ranks it crosses, and counts floating-point operations by torch's own formulas.

    Args:
        names: the name of each process group's ranks (a dimension of a mesh), by torch's name for the group.
        held: returns the bytes of weights that are put together at the moment; asked at each collective.
    """

    def __init__(self, names: dict[str, str], held: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.names, self.held = names, held
        self.transfers: list[Transfer] = []
        self.flops = 0
        self.most_held = 0
        """The most bytes of whole weights and of messages that were there at once."""
        self.last: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operations on this rank's part, which come here, too
        self.last = func
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif getattr(func, "namespace", "") in _SPACES:
            self._note(packet.__name__, args, out)
        return out

    def _note(self, operation: str, args: Any, out: Any) -> None:
        operation = operation.strip("_")
        if operation in _SILENT:
            return
        message = max(size(args[0]), size(args[1]) if len(args) > 1 else 0, 0 if out is args[0] else size(out))
        group = next((found for found in map(_group_of, args) if found is not None), None)
        assert group is not None, f"{operation} without a group"
        self.send(operation, message, group)
        self.most_held = max(self.most_held, self.held() + size(args[:2]))

    def send(self, operation: str, message: int, group: Any) -> None:
        """Note a message of so many bytes that crosses the ranks of `group`."""
        name = group.group_name
        self.transfers.append(Transfer(_NAMES.get(operation, operation), message, self.names.get(name, name), group.size()))


def _group_of(argument: Any) -> Any:
    if isinstance(argument, str):
        try:
            return torch_dist.distributed_c10d._resolve_process_group(argument)
        except (RuntimeError, ValueError):  # another word: the kind of reduction
            return None
    if isinstance(argument, torch.ScriptObject):
        try:
            return torch_dist.ProcessGroup.unbox(argument)
        except (RuntimeError, TypeError):  # a ReduceOp
            return None
    return argument if isinstance(argument, torch_dist.ProcessGroup) else None


class Where:
    """Which of `parts` computes at the moment, in a forward pass."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts
        self.passed = False
        """True once a part has ended."""
        self.calls = [0] * len(parts)
        """How often each began."""
        self._inside: list[int] = []

    @property
    def now(self) -> int | None:
        """The index of the innermost; None outside of all."""
        return self._inside[-1] if self._inside else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context of a forward pass."""
        handles = []
        for i, part in enumerate(self.parts):
            handles.append(part.register_forward_pre_hook(lambda *_, i=i: self._enter(i)))
            handles.append(part.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, i: int) -> None:
        self._inside.append(i)
        self.calls[i] += 1

    def _leave(self) -> None:
        self._inside.pop()
        self.passed = True


class Saved:
    """The storages that autograd keeps from forward to backward, each counted once, for what `home` returns when it is kept first."""

    def __init__(self, home: Callable[[], Any]) -> None:
        self.home = home
        self._found: dict[int, tuple[torch.UntypedStorage, int, Any]] = {}

    def watching(self) -> Any:
        """The context of a forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        self._found.setdefault(storage._cdata, (storage, storage.nbytes(), self.home()))
        return tensor

    def bytes(self, but: list[torch.Tensor]) -> int:
        """Return what was saved beside the tensors `but`."""
        return sum(self.by_home(but).values())

    def by_home(self, but: list[torch.Tensor]) -> dict[Any, int]:
        """Return the same, by what `home` returned."""
        known = {local(t).untyped_storage()._cdata for t in but}
        found: dict[Any, int] = {}
        for key, (_, nbytes, home) in self._found.items():
            if key not in known:
                found[home] = found.get(home, 0) + nbytes
        return found
