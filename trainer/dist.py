"""The collectives of one run. A process that is alone calls the same methods, and they cost nothing.

Control messages (flags, objects, metric sums) travel on the CPU, so no rank waits for its device to exchange them.
"""

from __future__ import annotations

import atexit
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as torch_dist

from trainer.errors import MisconfigurationException
from trainer.world import World

__all__ = ["Dist"]

_FAREWELL = torch.zeros(1, dtype=torch.int64)


@cache
def _pause_at_exit() -> None:
    """Give gloo's threads, which outlive every group, a moment before the interpreter is torn down.

    One that lets its last tensor go during that aborts a process that had ended well ("terminate called without an active
    exception").
    """
    atexit.register(time.sleep, 0.25)


@cache
def _meeting_point(init_method: str, rank: int, world_size: int) -> torch_dist.Store:
    """Return the store in which the ranks find each other, one for the life of the process.

    Kept, because rank 0 may hold its server: closed with a run, it would be gone under a rank that starts the next one.

    Raises:
        MisconfigurationException: when rank 0 finds its port taken.
    """
    try:
        return next(iter(torch_dist.rendezvous(init_method, rank, world_size)))[0]
    except torch_dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise MisconfigurationException(
            f"The port at which the ranks are to meet ({init_method}) is taken by another program. Set MASTER_PORT to a free one, the same on "
            f"all ranks (Slurm keeps one free with srun --resv-ports). torch says: {error}"
        ) from None


def _number_of_group(store: torch_dist.Store, rank: int, world_size: int) -> int:
    """Return a number that the ranks' coming group has for itself. Collective.

    The addresses that a group leaves in the store would mislead the next one, so each gets names of its own. Rank 0 counts; what the
    others read may be the number of a group before, also of ranks that died while they joined it (torchelastic starts new ones, in another
    number, that find the same store). So each shows a word that nobody else has, and goes on only when rank 0 has seen it.
    """
    if rank == 0:
        number = store.add("trainer/groups", 1)
        for other in range(1, world_size):
            word = store.get(f"trainer/group/{number}/joins/{other}").decode()
            store.set(f"trainer/group/{number}/seen/{word}", "")
        return number
    word, shown, pause = uuid.uuid4().hex, 0, 0.001
    deadline = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        number = store.add("trainer/groups", 0)
        if number != shown:
            store.set(f"trainer/group/{number}/joins/{rank}", word)
            shown = number
        if store.check([f"trainer/group/{number}/seen/{word}"]):
            return number
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    raise torch_dist.DistStoreError(f"rank {rank} waited {store.timeout.total_seconds():g} s for rank 0 to open the process group")


class Dist:
    """Opens the process group of a run, speaks through it, and closes it again."""

    def __init__(self, world: World, device_type: str = "cpu", timeout: timedelta | None = None) -> None:
        self.world = world
        self.device_type = device_type
        self.timeout = timeout
        self._owns_group = False
        self._number = 0  # which of the groups that this process has joined

    @property
    def alone(self) -> bool:
        """True when there is no other rank."""
        return self.world.world_size == 1

    def open(self) -> None:
        """Join the other ranks, however late they start. Collective. A process group that the user's program opened is used and left open.

        Raises:
            MisconfigurationException: when an open process group has another size than this run.
        """
        if self.alone:
            return
        if torch_dist.is_initialized():
            size = torch_dist.get_world_size()
            if size != self.world.world_size:
                raise MisconfigurationException(
                    f"A process group of {size} ranks is open, but this run has {self.world.world_size}. Close it first "
                    "(torch.distributed.destroy_process_group()), or ask for as many devices as it has ranks."
                )
            return
        own = torch_dist.Backend.default_device_backend_map.get(self.device_type, "gloo")
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{self.device_type}:{own}"
        rank, world_size = self.world.rank, self.world.world_size
        store = _meeting_point(str(self.world.init_method), rank, world_size)
        self._number = _number_of_group(store, rank, world_size)
        store = torch_dist.PrefixStore(f"trainer/group/{self._number}", store)
        torch_dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        self._owns_group = True
        self.limit([torch_dist.group.WORLD])  # only now: who joins waits for processes that still start
        _pause_at_exit()

    def line(self, name: str) -> torch_dist.Store | None:
        """Return a connection to the group's store for another thread, with keys under `name`; None where there is no server."""
        if self.alone:
            return None
        store = torch_dist.distributed_c10d._get_default_store()
        while isinstance(store, torch_dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, torch_dist.TCPStore):
            return None
        own = torch_dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        return torch_dist.PrefixStore(f"trainer/{name}/{self._number}", own)

    def job_store(self) -> torch_dist.Store:
        """Return the store of who started the ranks, which outlives them. For ranks that read where to meet from the environment."""
        return torch_dist.PrefixStore("trainer/job", _meeting_point(str(self.world.init_method), self.world.rank, self.world.world_size))

    def close(self) -> None:
        """Leave the group, if this object opened it."""
        if self._owns_group:
            self._owns_group = False
            torch_dist.destroy_process_group()

    def farewell(self) -> None:
        """Wait for all ranks before leaving, so that none closes what another still reads from. Collective.

        Its tensor outlives the run: what a thread of gloo lets go last is then nothing that Python has to free.
        """
        if self._owns_group:
            torch_dist.all_reduce(_FAREWELL)

    def limit(self, groups: Iterable[torch_dist.ProcessGroup]) -> None:
        """Give groups the run's time-out; torch makes them with a limit of its own, of 10 or 30 minutes."""
        if self.timeout is not None:
            set_timeout = getattr(torch_dist, "set_timeout", None) or torch_dist.distributed_c10d._set_pg_timeout  # the name in older torch
            for group in groups:
                set_timeout(self.timeout, group)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if not self.alone:
            torch_dist.all_reduce(torch.zeros(1, dtype=torch.int64))

    @contextmanager
    def first_on_node(self) -> Iterator[bool]:
        """Yield True on the first rank of each node; the others wait, without a time limit, until it has left. Collective.

        A download may outlast any collective's time-out, so the waiting uses a group of its own with a limit of a year.
        """
        first = self.world.local_rank == 0
        if self.alone:
            yield True
            return
        group = torch_dist.new_group(backend="gloo", timeout=timedelta(days=365))
        try:
            yield first
            torch_dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=group)
        finally:
            torch_dist.destroy_process_group(group)

    def agree(self, flag: bool) -> bool:
        """Return True on every rank when any rank says True. Collective."""
        return bool(self.union(int(flag)))

    def union(self, bits: int) -> int:
        """Return on every rank the bits that any rank has set (up to 62 of them). Collective."""
        if self.alone:
            return bits
        return self.union_ahead(bits)()

    def union_ahead(self, bits: int) -> Callable[[], int]:
        """Begin a `union`, which goes on beside other work; return the function that waits for it. Collective. Not for a process alone."""
        found = torch.tensor([bits], dtype=torch.int64)
        work = torch_dist.all_reduce(found, op=torch_dist.ReduceOp.BOR, async_op=True)

        def result() -> int:
            work.wait()
            return int(found.item())

        return result

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable object on every rank. Collective."""
        if self.alone:
            return obj
        box = [obj]
        torch_dist.broadcast_object_list(box, src=src, device=torch.device("cpu"))
        return box[0]

    def gather(self, obj: Any) -> list[Any]:
        """Return every rank's picklable object, in rank order, on every rank. Collective."""
        if self.alone:
            return [obj]
        found: list[Any] = [None] * self.world.world_size
        torch_dist.all_gather_object(found, obj)
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over the ranks, in place. Collective."""
        if not self.alone:
            torch_dist.all_reduce(tensor)
        return tensor

    def sum_numbers(self, numbers: list[int]) -> list[int]:
        """Return the sums of whole numbers over the ranks, one by one. Collective."""
        return self.sum(torch.tensor(numbers, dtype=torch.int64)).tolist()

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the element-wise maximum over the ranks, in place. Collective."""
        if not self.alone:
            torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
        return tensor

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` with rank 0's values, in place. Collective."""
        if self.alone:
            return
        with torch.no_grad():
            for tensor in tensors:
                torch_dist.broadcast(tensor.data, src=0)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        """Stack `tensor` (same shape on all ranks) over the ranks: shape (world_size, *tensor.shape). Collective.

        With `sync_grads` gradients flow back to this rank's own part; each rank's gradient is the sum over all ranks'
        losses, as for a single process that saw the whole stack.
        """
        if self.alone:
            return tensor
        tensor = tensor.contiguous()
        if sync_grads and torch.is_grad_enabled():
            return _GatherWithGrad.apply(tensor, self.world.rank)
        found = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        torch_dist.all_gather(found, tensor.detach())
        return torch.stack(found)


class _GatherWithGrad(torch.autograd.Function):
    """all_gather whose backward sums the gradient over ranks and returns this rank's slice."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        found = [torch.empty_like(tensor) for _ in range(torch_dist.get_world_size())]
        torch_dist.all_gather(found, tensor)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand the same tensor to others
        torch_dist.all_reduce(grad)
        return grad[ctx.rank], None
