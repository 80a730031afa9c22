"""The strategy's contract, and the strategy of one process on one device.

A strategy places and wraps the module and decides when gradients are synchronised. It makes no optimizer, opens no process
group and touches no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer.devices import Devices
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.optim import clip
from trainer.world import World

__all__ = ["Closing", "SingleDeviceStrategy", "Strategy"]

_NULL = nullcontext()


class Closing:
    """The context of the forward and backward that end a step; `action` completes it, unless they failed."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.action()


class Strategy:
    """Base of all strategies. A run calls `setup` once; afterwards `training_step` is what the loop calls.

    Args are settings only: a strategy object can be pickled before a run and used again after it.
    """

    name: str = ""
    distributed: bool = False
    """True when the devices are shared out over several processes."""
    start_method: str = "new"
    """How processes of this machine are made: "new" ones, by "fork", or by fork where that works ("notebook")."""
    plain_afterwards: bool = True
    """True when module and optimizers are plain ones after a run, from which a checkpoint can still be made."""

    sharded: bool = False
    """True when a checkpoint is a folder to which every rank writes its parts of `module_parts` and `optimizer_parts`."""

    waits_inside: bool = False
    """True when ranks wait for each other inside forward and backward, for more than the reduction of gradients."""
    stuck: bool = False
    """True when a run has failed since a rank hangs: then `teardown` waits for nobody."""
    late_sync: bool = False
    """True in a run whose gradients are averaged by `sync_gradients`, once a step, and not while backward runs."""

    pipeline: Any = None
    """What spreads a stack of layers over ranks, in a run whose batches travel through them in parts."""

    module: Any = None
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Makes the compiled version of a step function, in a run whose whole steps are compiled."""
    dist: Dist
    root_device: torch.device = torch.device("cpu")
    training_step: Callable[..., Any]
    device_mesh: Any = None
    """torch's DeviceMesh of the ranks, while a run has one; where it is None, `configure_model` has nothing to cut."""
    _of_a_run: tuple[str, ...] = ("module", "dist", "training_step", "compiler", "_previous_device")
    """Attributes that a run sets, and that no pickle carries. A subclass lists those of its own; the lists add up."""

    # -- which processes, devices and samples, known before a run ---------------------------------------------------------

    def processes(self, devices: int) -> int:
        """Return how many processes share this node's `devices`."""
        return devices if self.distributed else 1

    def devices_for(self, processes: int) -> int | str:
        """Return what devices="auto" means where so many processes of a node exist already: a number, or "auto" for all there are.

        Raises:
            MisconfigurationException: where so many processes cannot be used.
        """
        return processes

    def check(self, devices: int, num_nodes: int) -> None:
        """Refuse numbers of devices and nodes that the strategy cannot use.

        Raises:
            MisconfigurationException: saying what to ask for.
        """
        if not self.distributed and devices * num_nodes > 1:
            raise MisconfigurationException(
                f"strategy={self.name!r} uses one device, but {devices * num_nodes} are asked for. Use strategy='ddp', or devices=1."
            )

    def device(self, devices: Devices, local_rank: int) -> torch.device:
        """Return the device on which batches arrive in the process `local_rank` of a node."""
        return devices.device(local_rank)

    def data_place(self, world: World) -> tuple[int, int]:
        """Return (which, of how many) shares of the data this process takes. Processes that hold parts of one model share one."""
        return world.rank, world.world_size

    def stream(self, world: World) -> int:
        """Return which stream of random numbers this process draws from; ranks that compute the same thing share one. Rank 0's is 0."""
        return self.data_place(world)[0]

    def records(self, world: World) -> bool:
        """True when what this process logs and predicts counts: on one process for each share of the data."""
        return True

    # -- placing and wrapping ----------------------------------------------------------------------------------------------

    def connect(self, module: torch.nn.Module, dist: Dist) -> Callable[[], None]:
        """Make what `configure_model` may ask for, once the ranks are joined; return what takes it back. Collective."""
        return lambda: None

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        """Move the module to `device`. Collective."""
        self.module, self.root_device, self.dist = module, device, dist
        self._previous_device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
        module.to(device)

    def wrap(self, training: bool) -> None:
        """Set `training_step` to what computes a loss, after optimizers exist. Collective."""
        self.training_step = self.method("training_step")

    def step(self, name: str) -> Callable[..., Any]:
        """Return `validation_step`, `test_step` or `predict_step` as evaluation calls it."""
        return self.method(name)

    def method(self, name: str) -> Callable[..., Any]:
        """Return a step function of the bare module, compiled where the run compiles whole steps."""
        found = getattr(self.module, name)
        return found if self.compiler is None else self.compiler(found)

    def called_apart(self) -> Collection[torch.nn.Module] | None:
        """Return the layers around whose calls the strategy works, which must not lie inside of a compiled graph; known after `setup`.

        None forbids compiled code.
        """
        return ()

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that cannot work here; called ahead of `wrap`."""

    def evaluating(self) -> AbstractContextManager[Any]:
        """The context of a validation, test or prediction, in which ranks need not keep step. Collective."""
        return self.averaged()

    def adopt(self, metric: Any) -> None:
        """Let a metric object put together only what ranks with different samples saw; called where `records` is not True everywhere."""

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one forward and backward; ranks reduce gradients only where `last` is True."""
        return _NULL

    def drop_step(self) -> None:
        """Forget the step at hand, whose last forward is followed by no backward. On all ranks alike."""

    def ask_ahead(self, wishes: Callable[[], int]) -> Callable[[], int]:
        """Send what this rank wishes (bits, asked at once or in the backward that follows) beside backward. Collective.

        Returns:
            the function that gives the bits that any rank has.
        """
        return self.dist.union_ahead(wishes())

    def sync_gradients(self) -> None:
        """Average all gradients over ranks, for backward passes that no wrapper saw (manual optimization). Collective."""

    def sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers, so that validation and checkpoints see one set. Collective."""

    def sync_module(self) -> None:
        """Make the module the same on all ranks, for good: training is over. Collective."""
        self.sync_buffers()

    def editing(self) -> AbstractContextManager[Any]:
        """The context in which parameters are those the optimizer sees, to be changed in place; forward passes then see it. Collective."""
        return _NULL

    def averaged(self) -> AbstractContextManager[Any]:
        """The context in which every rank sees the same weights, of ranks that step on their own between averages. Collective."""
        return _NULL

    def clip(self, optimizer: torch.optim.Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of `optimizer` by the norm of the whole model's, or each element. Collective."""
        clip(optimizer, value, algorithm)

    # -- what user code asks of a strategy during a run ---------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; `name` is accepted as in Lightning. Collective. Outside of a run nobody waits."""
        if (dist := self.__dict__.get("dist")) is not None:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable object on every rank. Collective. Outside of a run the object itself."""
        dist = self.__dict__.get("dist")
        return obj if dist is None else dist.broadcast(obj, src)

    def reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        """Return the "mean" or the "sum" of the ranks' tensors on every rank; `group` is accepted as in Lightning. Collective.

        Raises:
            MisconfigurationException: for another operation.
        """
        if str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise MisconfigurationException(f"strategy.reduce(reduce_op={reduce_op!r}) must be 'mean' or 'sum'.")
        dist = self.__dict__.get("dist")
        if dist is None or dist.alone:
            return tensor
        total = dist.sum(tensor.clone())
        return total if str(reduce_op).lower() == "sum" else total / dist.world.world_size

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stack the ranks' tensors of one shape, as `TrainModule.all_gather` does. Collective."""
        dist = self.__dict__.get("dist")
        return tensor if dist is None else dist.all_gather(tensor, sync_grads)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the bare module's weights, whole on rank 0; keys never carry a wrapper's prefix. Collective."""
        return self.module.state_dict()

    def load_module(self, module: torch.nn.Module, state: dict[str, Any], strict: bool) -> Any:
        """Load plain weights into the module, after `configure_model` and ahead of `setup`. Collective."""
        return module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state in torch's plain format, whole on rank 0. Collective."""
        return optimizer.state_dict()

    def module_parts(self) -> dict[str, Any]:
        """Return the weights with sharded ones as DTensors, of which every rank has its part. Only where `sharded`. Collective."""
        return self.module.state_dict()

    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state in torch's plain format, sharded values as DTensors. Only where `sharded`. Collective."""
        return optimizer.state_dict()

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` returned, under this or another strategy. Collective."""
        optimizer.load_state_dict(state)

    def rank_state(self, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any] | None:
        """Return what differs from rank to rank of weights and optimizers, on the CPU; None where nothing does."""
        return None

    def load_rank_state(self, state: dict[str, Any], optimizers: list[torch.optim.Optimizer]) -> None:
        """Put back what `rank_state` of this rank returned, after everything else of a checkpoint is in place."""

    def finish(self) -> None:
        """Bring parts of the module together at the end of a run that went well, ahead of `teardown`. Collective."""

    def teardown(self) -> None:
        """Take the wrapper off. Weights go back to where they came from, which leaves no accelerator memory behind."""
        self.__dict__.pop("training_step", None)
        module, device = self.__dict__.pop("module", None), self.__dict__.pop("_previous_device", None)
        self.__dict__.pop("dist", None)
        self.__dict__.pop("compiler", None)
        if module is not None and device is not None:
            module.to(device)

    def __getstate__(self) -> dict[str, Any]:
        dropped = {name for cls in type(self).__mro__ for name in vars(cls).get("_of_a_run", ())}
        return {k: v for k, v in self.__dict__.items() if k not in dropped}


class SingleDeviceStrategy(Strategy):
    """One process, one device: `training_step` is the module's own."""

    name = "single_device"
