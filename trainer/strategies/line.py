"""What the ranks of one pipeline say to each other: tensors whose kind the receiver does not know, sums, objects.

All calls but `send`, `receive` and `object_to_first` are made by all ranks of the pipeline at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist

from trainer.errors import MisconfigurationException

__all__ = ["Line", "one_tensor", "read_header"]

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DIMS = 12
_HEADER = _DIMS + 2  # dtype, number of dimensions, shape
_CPU = torch.device("cpu")


class Line:
    """The ranks of `group`, one after the other, and this one among them, with its tensors on `device`. Headers travel on the CPU."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.index, self.last = torch_dist.get_rank(group), torch_dist.get_world_size(group) - 1

    # -- tensors -------------------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor to one rank."""
        torch_dist.send(_header_of(tensor), group=self.group, group_dst=to)
        torch_dist.send(tensor, group=self.group, group_dst=to)

    def receive(self, source: int) -> torch.Tensor:
        """Return what `source` sends."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        torch_dist.recv(header, group=self.group, group_src=source)
        found = self._empty(header)
        torch_dist.recv(found, group=self.group, group_src=source)
        return found

    def announce(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        """Return a description of the tensor of the rank `source`; `read_header` reads it."""
        header = torch.empty(_HEADER, dtype=torch.int64) if tensor is None else _header_of(tensor)
        return self.broadcast(header, source)

    def from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last rank's tensor."""
        header = self.announce(tensor, self.last)
        return self.broadcast(tensor if self.index == self.last else self._empty(header), self.last)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite `tensor` with the rank `source`'s; return it."""
        torch_dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over the ranks, in place."""
        torch_dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the element-wise maximum over the ranks, in place."""
        torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX, group=self.group)
        return tensor

    def _empty(self, header: torch.Tensor) -> torch.Tensor:
        shape, dtype = read_header(header)
        return torch.empty(shape, dtype=dtype, device=self.device)

    # -- numbers and objects -------------------------------------------------------------------------------------------------

    def told_by_last(self, loss: torch.Tensor | None = None, count: Any = None, news: Any = None) -> tuple[torch.Tensor, Any, Any]:
        """Return what the last rank gives: a loss, a count or None, and anything that can be pickled. Nothing waits for the device."""
        there = self.broadcast(torch.tensor([count is not None, news is not None], dtype=torch.int64), self.last)
        counts, tells = there.tolist()
        numbers = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.index == self.last:
            numbers[0] = loss
            numbers[1] = count if counts else 0
        self.broadcast(numbers, self.last)
        box = [news]
        if tells:
            torch_dist.broadcast_object_list(box, group=self.group, group_src=self.last, device=_CPU)
        return numbers[0], numbers[1] if counts else None, box[0]

    def object_to_first(self, thing: Any, source: int) -> Any:
        """Return on the first rank what `source` gives; called by these two."""
        box = [thing]
        if self.index == source:
            torch_dist.send_object_list(box, group=self.group, group_dst=0, device=_CPU)
        else:
            torch_dist.recv_object_list(box, group=self.group, group_src=source, device=_CPU)
        return box[0]


def one_tensor(value: Any, verb: str) -> torch.Tensor:
    """Return `value` if it is a tensor that can travel between stages.

    Raises:
        MisconfigurationException: for anything else.
    """
    if not isinstance(value, torch.Tensor) or value.ndim > _DIMS or value.dtype not in _DTYPES:
        got = f"a tensor of {value.ndim} dimensions and {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise MisconfigurationException(
            f"A stage of the pipeline {verb} {got}; between stages goes one plain tensor. Put what the layers share into it, or into their "
            "attributes."
        )
    return value


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def read_header(header: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return (shape, dtype) of what a header describes."""
    kind, ndim, *shape = header.tolist()
    return tuple(shape[:ndim]), _DTYPES[kind]
