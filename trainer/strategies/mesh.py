"""A mesh of ranks, one process a device: data parallel x pipeline parallel x tensor parallel, with torch's DeviceMesh and DTensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from trainer.devices import Devices
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.metric_objects import is_metric
from trainer.optim import grads_of
from trainer.strategies.averaging import average, gradients_of
from trainer.strategies.base import Closing, Strategy
from trainer.strategies.layout import DIMS, check_size, check_stages, place, settle
from trainer.strategies.pipeline import Stages
from trainer.world import World

__all__ = ["ModelParallelStrategy"]

_NULL = nullcontext()


class ModelParallelStrategy(Strategy):
    """One model over several processes, and several such groups of processes that share the data out.

    The ranks form a mesh with the dimensions "data_parallel", "pipeline_parallel" and "tensor_parallel", in this order: ranks that
    compute one layer together are neighbours. In `configure_model` the user cuts layers with torch's `parallelize_module` on
    `self.device_mesh["tensor_parallel"]`. Or the strategy cuts a stack of layers into stages, through which a batch travels in parts.

    Args:
        data_parallel_size: how many groups of ranks read different samples; "auto" for the number of nodes, with a pipeline for the
            ranks divided by its stages.
        tensor_parallel_size: how many ranks compute each layer together; "auto" for the devices of a node, 1 with a pipeline.
        pipeline_parallel_size: how many stages the stack is cut into.
        stack: the name of the nn.Sequential that is cut; None where the module is one.
        micro_batches: the most parts that a training batch is cut into on its way through the stages; None for one a stage.
        schedule: "1F1B" or "GPipe": the order in which stages work on the parts, torch.distributed.pipelining's.
        save_distributed_checkpoint: True makes checkpoints folders, to which every rank writes its parts; False plain files of rank 0.

    Raises:
        MisconfigurationException: for sizes that are no whole numbers >= 1; for what a pipeline needs without one, and what does not go
            with it.
    """

    name = "mesh"
    distributed = True
    plain_afterwards = False
    waits_inside = True
    drive: Any = None
    """What trains through the stages of `pipeline`."""
    _tensors: Any = None
    _last: AbstractContextManager[Any] = _NULL
    _optimizers: Any = ()
    _of_a_run = ("device_mesh", "pipeline", "drive", "_tensors", "_last", "_metrics", "_home", "_kind", "_optimizers")

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        pipeline_parallel_size: int = 1,
        stack: str | None = None,
        micro_batches: int | None = None,
        schedule: str = "1F1B",
        save_distributed_checkpoint: bool = False,
    ) -> None:
        if save_distributed_checkpoint and pipeline_parallel_size != 1:
            raise MisconfigurationException(
                "save_distributed_checkpoint=True writes the parts of cut layers; stages of a pipeline are put together by rank 0. Leave it out."
            )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        check_size("data_parallel_size", data_parallel_size, auto=True)
        check_size("tensor_parallel_size", tensor_parallel_size, auto=True)
        check_size("pipeline_parallel_size", pipeline_parallel_size, auto=False)
        self.data_parallel_size, self.tensor_parallel_size = data_parallel_size, tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.stack, self.micro_batches, self.schedule = stack, micro_batches, schedule
        check_stages(pipeline_parallel_size, tensor_parallel_size, stack, micro_batches, schedule)
        if pipeline_parallel_size > 1:
            _schedule().check_schedule(schedule)
        self.sizes = (1, 1, 1)
        """The ranks along each dimension of the mesh; known once a Trainer has been made with this strategy."""

    # -- which processes, devices and samples --------------------------------------------------------------------------------

    def check(self, devices: int, num_nodes: int) -> None:
        """Settle the sizes of the mesh.

        Raises:
            MisconfigurationException: when they do not multiply to the number of ranks.
        """
        self.sizes = settle(self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size, devices, num_nodes)

    def device(self, devices: Devices, local_rank: int) -> torch.device:
        self._kind = devices.device(local_rank)
        if self._kind.type == "mps":
            raise MisconfigurationException("ModelParallelStrategy works on cpu and cuda; on mps use one device without a strategy.")
        return self._kind

    def data_place(self, world: World) -> tuple[int, int]:
        return place(world.rank, self.sizes)[0], self.sizes[0]

    def stream(self, world: World) -> int:
        """Ranks that compute one layer together draw alike; stages and data groups do not."""
        return world.rank // self.sizes[2]

    def records(self, world: World) -> bool:
        """One rank of each model group counts: the first of its last stage, where the loss is."""
        _, stage, tensor = place(world.rank, self.sizes)
        return tensor == 0 and stage == self.sizes[1] - 1

    # -- placing and wrapping ----------------------------------------------------------------------------------------------

    def connect(self, module: torch.nn.Module, dist: Dist) -> Callable[[], None]:
        """Make the mesh, and give all ranks rank 0's weights, of which `configure_model` takes parts. Collective."""
        if self._kind.type == "cuda":
            torch.cuda.set_device(self._kind)
        self.device_mesh = init_device_mesh(self._kind.type, self.sizes, mesh_dim_names=DIMS)
        dist.limit(self.device_mesh.get_all_groups())
        dist.broadcast_tensors([t for t in (*module.parameters(), *module.buffers()) if not t.is_meta])
        self._home = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        if self._kind.type != "cpu":
            _dtensors().keep_streams(self.device_mesh, self._kind)
        self._tensors = _dtensors().DistributedModule(module, self._home)
        return self._disconnect

    def _disconnect(self) -> None:
        self.teardown()
        self.device_mesh = None

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        """Move what is not cut to the device, and give each rank its part of rank 0's weights. Collective.

        Raises:
            MisconfigurationException: when nothing was cut, or on another mesh; when tied parameters no longer are.
        """
        _dtensors().check_cut(module, self.device_mesh["tensor_parallel"])
        self._tensors.check_ties()
        if self.sizes[1] > 1:
            self.module, self.root_device, self.dist = module, device, dist
            self.pipeline = Stages(module, self.stack, self._group("pipeline_parallel"), device, self.micro_batches)
            self.pipeline.cut()
        else:
            super().setup(module, device, dist)
            self._previous_device = self._home
        self._tensors.free()
        self._equalize([*module.parameters(), *module.buffers()])
        self._metrics: list[Any] = []
        for part in module.modules():
            if is_metric(part):
                self.adopt(part)

    def adopt(self, metric: Any) -> None:
        if getattr(metric, "process_group", self) is None:  # torchmetrics: all ranks, of which several saw the same samples
            metric.process_group = self._group("data_parallel")
            self._metrics.append(metric)

    def called_apart(self) -> Collection[torch.nn.Module] | None:
        """Return the stack and its layers: the layers are computed apart from the step that calls the stack. Cut layers are not compiled."""
        if self.sizes[2] > 1:
            return None
        return () if self.pipeline is None else (self.pipeline.stack, *self.pipeline.stack)

    def _group(self, dim: str) -> Any:
        return self.device_mesh.get_group(dim)

    def _equalize(self, tensors: list[torch.Tensor]) -> None:
        """Give data groups the values of the first, and within a group all ranks those of the first where nothing is cut. Collective."""
        dtensors = _dtensors()
        for t in tensors:
            if t.is_meta:  # of another stage
                continue
            if not dtensors.is_cut(t):
                torch_dist.broadcast(dtensors.local(t), group_src=0, group=self._group("tensor_parallel"))
            torch_dist.broadcast(dtensors.local(t), group_src=0, group=self._group("data_parallel"))

    def wrap(self, training: bool) -> None:
        super().wrap(training)
        for optimizer in self._optimizers if training else ():  # parameters may have been added since
            _dtensors().step_singly(optimizer)
        if self.pipeline is not None and training:
            self.drive = _schedule().Drive(self.pipeline, self.schedule)
        self._last = Closing(self.sync_gradients) if training and self.module.automatic_optimization else _NULL

    def check_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that would not see the parts, or need all weights at once.

        Raises:
            MisconfigurationException: naming the reason.
        """
        if self.pipeline is None and getattr(self.module.trainer.precision_plugin, "scaler", None) is not None:
            raise MisconfigurationException("ModelParallelStrategy cannot scale losses (16-mixed). Use precision='bf16-mixed'.")
        dtensors = _dtensors()
        dtensors.check_optimizers("ModelParallelStrategy", "parallelize_module replaces parameters by their parts", self.module, optimizers)
        self._optimizers = optimizers

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        return self._last if last else _NULL

    def sync_gradients(self) -> None:
        """Average the gradients over the data groups, each rank its parts. One that some groups lack counts as zero there. Collective."""
        if self.pipeline is not None:
            self.pipeline.add_up()
        params = [p for p in self.module.parameters() if p.requires_grad and not p.is_meta]
        for p in params:
            _dtensors().settle(p)
        if self.sizes[0] > 1:
            grads = gradients_of(params, lambda flags: self._reduce(flags, torch_dist.ReduceOp.MAX))
            average([_dtensors().local(g) for g in grads], self._reduce, self.sizes[0])

    def _reduce(self, tensor: torch.Tensor, op: Any = torch_dist.ReduceOp.SUM) -> torch.Tensor:
        torch_dist.all_reduce(tensor, op=op, group=self._group("data_parallel"))
        return tensor

    def sync_buffers(self) -> None:
        if self.pipeline is not None:
            self.pipeline.share_buffers()
        self._equalize(list(self.module.buffers()))

    def clip(self, optimizer: torch.optim.Optimizer, value: float | None, algorithm: str | None) -> None:
        dtensors, grads = _dtensors(), grads_of(optimizer)
        parts = [dtensors.local(g) for g in grads]
        if not value or (algorithm == "value" and not parts):
            return
        if algorithm == "value":
            torch._foreach_clamp_min_(parts, -value)
            torch._foreach_clamp_max_(parts, value)
            return
        if self.pipeline is not None:
            total = self.pipeline.total(self._squares([dtensors.local(p.grad) for p in self.pipeline.counted(optimizer)]))
        else:
            cut = [dtensors.is_cut(g) for g in grads]
            squares = [self._squares([p for p, c in zip(parts, cut, strict=True) if c is which]) for which in (True, False)]
            torch_dist.all_reduce(squares[0], group=self._group("tensor_parallel"))
            total = squares[0] + squares[1]
        if parts:
            torch._foreach_mul_(parts, (value / (total.sqrt() + 1e-6)).clamp(max=1.0))

    def _squares(self, grads: list[torch.Tensor]) -> torch.Tensor:
        norms = torch._foreach_norm(grads) if grads else ()
        return torch.stack([torch.zeros((), device=self.root_device), *(n.square() for n in norms)]).sum()

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """Return the weights as plain tensors, whole on rank 0; the other ranks hold the same keys. Collective."""
        state = self.module.state_dict()
        if self.pipeline is not None:
            state = self.pipeline.module_state(state, self._saves())
        on_rank_zero = _dtensors().on_rank_zero
        return {key: on_rank_zero(value) for key, value in state.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state in torch's plain format, whole on rank 0; the other ranks hold the same keys. Collective."""
        state = _dtensors().plain_groups(optimizer)
        if self.pipeline is not None:
            state = self.pipeline.optimizer_state(optimizer, state, self._saves())
        return tree_map_only(torch.Tensor, _dtensors().on_rank_zero, state)

    @property
    def sharded(self) -> bool:
        """True in a run that writes folders; where nothing can be cut there are no parts."""
        return self.save_distributed_checkpoint and self._tensors is not None and self.sizes[2] > 1

    def optimizer_parts(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return _dtensors().plain_groups(optimizer)

    def _saves(self) -> bool:
        """True for the pipeline that rank 0 is in."""
        return place(self.dist.world.rank, self.sizes)[0] == 0

    def load_module(self, module: torch.nn.Module, state: dict[str, Any], strict: bool) -> Any:
        """Load plain weights, each rank its part; the module is not cut into stages yet."""
        return _dtensors().load_parts(module, state, strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a plain state, of which each rank takes its part.

        Raises:
            MisconfigurationException: for a tensor that is not cut as its parameter is.
        """
        if self.pipeline is not None:
            state = self.pipeline.own_state(optimizer, state)
        optimizer.load_state_dict(_dtensors().cut_states(optimizer, state, self.name))
        _dtensors().step_singly(optimizer)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Put the whole weights back into the caller's module, on every rank. Collective."""
        if self.pipeline is not None:
            self.pipeline.restore()
        self._tensors.restore()

    def teardown(self) -> None:
        """Make the module plain. After a failed run its weights come together if all ranks failed; else they are empty, on "meta"."""
        for name in ("_last", "drive", "_optimizers"):
            self.__dict__.pop(name, None)
        pipeline = self.__dict__.pop("pipeline", None)
        if pipeline is not None:
            pipeline.release()
        for metric in self.__dict__.pop("_metrics", []):
            metric.process_group = None
        tensors, self._tensors = self._tensors, None
        if tensors is not None and not tensors.rescue(self.stuck):
            self.__dict__.pop("_previous_device", None)  # what is empty cannot be moved
            warnings.warn(
                "The run failed on some ranks only, so the parts of its weights could not be put together: the parameters that were cut are "
                "empty (device 'meta'). Load a checkpoint, or build the module anew.",
                stacklevel=2,
            )
        super().teardown()


def _dtensors() -> Any:
    """The file that works with torch.distributed.tensor, which takes half a second to load: only runs on a mesh do."""
    from trainer.strategies import dtensors

    return dtensors


def _schedule() -> Any:
    """The file that works with torch.distributed.pipelining, for the same reason."""
    from trainer.strategies import schedule

    return schedule
