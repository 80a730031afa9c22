"""A module and a batch without values, a rank of a job that does not exist, and the errors of what cannot run so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from trainer.errors import MisconfigurationException
from trainer.module import TrainModule

__all__ = ["StandIn", "fake_batch", "fake_module", "fake_ranks", "named", "stay"]

if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):  # older torch knows collectives of fake tensors when asked
    import torch.distributed._tools.fake_collectives

_CPU = torch.device("cpu")


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of a process group whose other ranks do not exist: collectives return at once, with whatever they were given.

    Raises:
        MisconfigurationException: where this process has joined other ranks already.
    """
    if torch_dist.is_initialized():
        raise MisconfigurationException(
            "A plan needs torch's process group for itself, but this process has joined one already. Plan ahead of the run, in a process of its own."
        )
    if world_size == 1:
        yield
        return
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def fake_module(model: TrainModule | Callable[[], TrainModule], mode: FakeTensorMode) -> TrainModule:
    """Return a copy of `model` without values, or what the function `model` makes, without the memory for it.

    Raises:
        MisconfigurationException: for what is no TrainModule, nor makes one; for a module that cannot be copied.
    """
    if not isinstance(model, torch.nn.Module) and callable(model):
        with mode, named(getattr(model, "__qualname__", type(model).__name__), None):
            model = model()
    elif isinstance(model, torch.nn.Module):
        model = _copy(model, mode)
    if not isinstance(model, TrainModule):
        raise MisconfigurationException(f"plan(model=...) must be a TrainModule or a function that makes one, got a {type(model).__name__}.")
    vars(model)["to"] = partial(_to, model)
    return model


def stay(module: torch.nn.Module) -> None:
    """Keep every part of `module` where it is, also when a strategy moves it by itself."""
    for part in module.modules():
        vars(part)["to"] = partial(_to, part)


def _to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """What `module.to` does in a plan: there is one device, and torch's own way to another number format needs tensors that nothing refers to."""
    _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is None:
        return module
    made: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, t in table.items():
                if t is not None and t.is_floating_point():
                    if id(t) not in made:
                        value = t.detach().to(dtype)
                        made[id(t)] = torch.nn.Parameter(value, t.requires_grad) if isinstance(t, torch.nn.Parameter) else value
                    table[name] = made[id(t)]
    return module


def _copy(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    lazy = [name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)]
    if lazy:
        raise MisconfigurationException(f"{lazy[0]} has no shape yet (a lazy layer). Call the model once with a batch, then plan.")
    with mode:
        memo: dict[int, Any] = {id(t): _empty(t) for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise MisconfigurationException(
            f"{type(model).__name__} cannot be copied without its values: {error}. Give plan() a function that makes it: "
            f"plan(lambda: {type(model).__name__}(...), ...)."
        ) from error


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind on the CPU, in the fake mode that is on."""
    found: torch.Tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    if isinstance(tensor, torch.nn.Parameter):
        found = torch.nn.Parameter(found, tensor.requires_grad)
    found.__dict__.update(tensor.__dict__)
    return found


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """Return `batch` with tensors that have no values."""
    with mode:
        return tree_map_only(torch.Tensor, _empty, batch)


class StandIn(SimpleNamespace):
    """What a planned module sees as its trainer: numbers of the beginning of a run; what is logged is let go."""

    def __init__(self, strategy: Any, precision: Any, world: Any, accumulate: int) -> None:
        super().__init__(
            strategy=strategy, precision_plugin=precision, precision=precision.precision, global_rank=world.rank, local_rank=world.local_rank,
            node_rank=world.node_rank, num_nodes=world.num_nodes, world_size=world.world_size, is_global_zero=world.rank == 0, global_step=0, current_epoch=0, max_epochs=1,
            max_steps=-1, estimated_stepping_batches=1000, num_training_batches=1000, accumulate_grad_batches=accumulate, training=True, validating=False,
            testing=False, predicting=False, sanity_checking=False, should_stop=False, logger=None, loggers=[], callbacks=[], callback_metrics={},
            logged_metrics={}, optimizers=[], lr_scheduler_configs=[], datamodule=None, num_devices=world.local_world_size,
        )  # fmt: skip

    def _record(self, *_: Any) -> None:
        pass

    def print(self, *_: Any, **__: Any) -> None:
        """Say nothing."""

    def __getattr__(self, name: str) -> Any:
        raise MisconfigurationException(f"self.trainer.{name} is not there while a run is planned. Leave it out where self.trainer.max_steps is -1.")


@contextmanager
def named(owner: str, watch: Any) -> Iterator[None]:
    """Turn what goes wrong on tensors without values into an error that names the operation.

    Args:
        owner: what is being run.
        watch: has the operation that was reached last, as `last`; None where nobody watched.

    Raises:
        MisconfigurationException: for everything that is not one already.
    """
    try:
        yield
    except MisconfigurationException:
        raise
    except Exception as error:  # whatever the user's code, or torch, raises
        func = getattr(error, "func", None)
        if func is not None:
            raise MisconfigurationException(
                f"{owner} cannot be planned: the operation {func} needs the values of tensors, and a plan has their shapes alone. Shapes, branches "
                "and printed numbers must not depend on values (no .item(), no masks as indices)."
            ) from error
        last = getattr(watch, "last", None)
        place = f" at the operation {last}" if last is not None else ""
        raise MisconfigurationException(f"{owner} cannot be planned: it failed on tensors without values{place}: {error!r}") from error
