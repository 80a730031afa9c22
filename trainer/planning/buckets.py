"""The messages into which DDP packs gradients, found without sending any."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist

from trainer.planning.watch import size

__all__ = ["Buckets"]


class Buckets:
    """The messages into which DDP packs gradients.

    From the second step on DDP packs them in the order in which they came in the first, which torch does between ranks, with values. So
    that order is noted here, and given to the same function of torch.
    """

    def __init__(self) -> None:
        self.ddp: Any = None
        self.memory = 0
        self._first: list[int] = []
        self._order: list[torch.Tensor] = []

    def watch(self, ddp: Any) -> None:
        """Take the place of DDP's reduction; note the gradients in their order."""
        self.ddp = ddp
        ddp.register_comm_hook(None, lambda _, bucket: self._keep(bucket))  # torch looks at the annotations of a function
        for p in ddp.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._order.append)

    def _keep(self, bucket: Any) -> Any:
        self._first.append(size(bucket.buffer()))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def sizes(self) -> list[int]:
        """Return the bytes of each message."""
        ddp = self.ddp
        if ddp is None:
            return []
        found = self._first
        if ddp.static_graph or not ddp.find_unused_parameters:
            cap = ddp.bucket_bytes_cap
            order = list(dict.fromkeys(self._order))
            first = torch_dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else cap
            groups, _ = torch_dist._compute_bucket_assignment_by_size(order, [first, cap], [])
            found = [size([order[i] for i in group]) for group in groups]
        self.memory = 0 if ddp.gradient_as_bucket_view else sum(found)
        return found
