"""Model parallel: a process owns several devices, with the layers of one model spread over them; DDP between such processes."""

from __future__ import annotations

from typing import Any

import torch

from trainer.devices import Devices
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.stages import (
    Pipeline,
    balance,
    check_stack,
    layer_costs,
    move_rest,
    named_stack,
    stacks_of,
)

__all__ = ["ModelParallelDDPStrategy"]


class ModelParallelDDPStrategy(DDPStrategy):
    """One model over `devices_per_replica` devices of a process; several processes average their gradients with DDP.

    Layers are placed by the user, who finds the devices of the process in `self.trainer.strategy.devices` (in `configure_model` or
    `setup`). Or the strategy places an ordered stack: the module itself where it is an nn.Sequential, or the one named by `stack`.
    The stack is cut into one run of layers a device, so that the largest run is as small as can be, and what the module holds
    besides goes to the first device. Batches arrive on the first device; the output of a stack comes back to it.

    Args:
        devices_per_replica: devices of one process; None for all of the node, which makes it one process.
        stack: the name of the nn.Sequential ("net", "body.layers") to spread.
        micro_batches: parts into which a batch is cut on its way through the stack, so that the stages work at the same time.
        sample: an input of the stack, of the size of a training batch, from whose activations the stages are balanced; default the
            module's `example_input_array`; without either weights alone count.
        ddp_kwargs: arguments of DDPStrategy.

    Raises:
        MisconfigurationException: for numbers below 1.
    """

    name = "model_parallel_ddp"
    _stack: torch.nn.Sequential | None = None
    _of_a_run = ("_stack", "_homes", "_rest_home")

    def __init__(
        self,
        devices_per_replica: int | None = None,
        stack: str | None = None,
        micro_batches: int = 1,
        sample: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(**ddp_kwargs)
        numbers = {"devices_per_replica": 1 if devices_per_replica is None else devices_per_replica, "micro_batches": micro_batches}
        for argument, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MisconfigurationException(f"{argument}={value!r} must be a whole number >= 1.")
        if devices_per_replica is None:
            self.name = "model_parallel"
        self.devices_per_replica, self.stack, self.micro_batches, self.sample = devices_per_replica, stack, micro_batches, sample
        self.devices = [torch.device("cpu")] * (devices_per_replica or 1)
        """The devices of this process. Before a run, and in a caller whose run is in other processes, CPU ones."""

    # -- which processes and devices ---------------------------------------------------------------------------------------

    def processes(self, devices: int) -> int:
        return devices // (self.devices_per_replica or devices)

    def devices_for(self, processes: int) -> int | str:
        if self.devices_per_replica is not None:
            return processes * self.devices_per_replica
        if processes > 1:
            raise MisconfigurationException(
                f"strategy={self.name!r} is one process a node, but {processes} were started. Start one, or use 'model_parallel_ddp'."
            )
        return "auto"

    def check(self, devices: int, num_nodes: int) -> None:
        each = self.devices_per_replica or devices
        if devices % each:
            possible = ", ".join(str(each * n) for n in range(1, max(3, devices // each + 2)))
            raise MisconfigurationException(
                f"strategy={self.name!r} gives {each} devices to each process, and {devices} devices on a node do not divide into such "
                f"shares. Ask for devices={possible}, ..., or change devices_per_replica."
            )
        self.devices = [torch.device("cpu")] * each

    def device(self, devices: Devices, local_rank: int) -> torch.device:
        each = self.devices_per_replica or devices.count
        self.devices = [devices.device(local_rank * each + i) for i in range(each)]
        return self.devices[0]

    # -- placing -----------------------------------------------------------------------------------------------------------

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        """Spread the stack over the devices, or check that the user did; the module as a whole is never moved. Collective.

        Raises:
            MisconfigurationException: for a stack that cannot be spread, or a parameter on a device that is not this process's.
        """
        self.module, self.root_device, self.dist = module, device, dist
        stack = self._find_stack(module)
        if stack is None:
            self._check_placed(module)
        else:
            self._spread(stack)
        dist.broadcast_tensors([*module.parameters(), *module.buffers()])

    def _find_stack(self, module: torch.nn.Module) -> torch.nn.Sequential | None:
        if self.stack is None:
            if isinstance(module, torch.nn.Sequential):
                return self._check_stack(module, "The module")
            if self.micro_batches > 1:
                raise MisconfigurationException(
                    f"micro_batches={self.micro_batches} needs a stack of layers to send them through: name the nn.Sequential, "
                    f"ModelParallelDDPStrategy(stack=...){stacks_of(module)}."
                )
            return None
        return self._check_stack(named_stack(module, self.stack), f"stack={self.stack!r}")

    def _check_stack(self, stack: torch.nn.Module, what: str) -> torch.nn.Sequential:
        advice = "Place other layers yourself, on the devices in self.trainer.strategy.devices."
        stack = check_stack(stack, what, len(self.devices), "devices", advice)
        synced = [name for name, part in stack.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
        if synced and self.micro_batches > 1:
            raise MisconfigurationException(
                f"{what}: layer {synced[0]!r} is a SyncBatchNorm, in which the ranks would wait for each other with every micro-batch, of which a "
                "rank with fewer samples has fewer. Use micro_batches=1, or BatchNorm."
            )
        return stack

    def _check_placed(self, module: torch.nn.Module) -> None:
        for name, p in module.named_parameters():
            if p.device not in self.devices:
                raise MisconfigurationException(
                    f"{name} is on {p.device}, but this process owns {', '.join(map(str, self.devices))}. Place every layer on "
                    "self.trainer.strategy.devices (in configure_model or setup), or name an nn.Sequential as stack=... to have it placed"
                    f"{stacks_of(module)}."
                )

    def _spread(self, stack: torch.nn.Sequential) -> None:
        module, example = self.module, getattr(self.module, "example_input_array", None)
        root, sample = (stack, self.sample) if self.sample is not None else (module, example)
        ends = balance(layer_costs(stack, root, sample), len(self.devices))
        stage_of = [s for s, (first, end) in enumerate(zip([0, *ends], ends, strict=False)) for _ in range(first, end)]
        self._check_sharing(stack, stage_of)
        self._homes = [_home(layer) for layer in stack]
        inside = {id(t) for t in (*stack.parameters(), *stack.buffers())}
        outside = (t.device for t in (*module.parameters(), *module.buffers()) if id(t) not in inside)
        self._rest_home = next(outside, torch.device("cpu"))
        self._stack = stack
        for layer, s in zip(stack, stage_of, strict=True):
            layer.to(self.devices[s])
        move_rest(module, stack, self.devices[0])
        stack.forward = Pipeline(stack, ends, self.devices, self.micro_batches)

    def _check_sharing(self, stack: torch.nn.Sequential, stage_of: list[int]) -> None:
        """A tensor can be on one device only, so the layers that share it must be in one stage."""
        owner: dict[int, int] = {}
        for layer, s in zip(stack, stage_of, strict=True):
            for t in (*layer.parameters(), *layer.buffers()):
                if owner.setdefault(id(t), s) != s:
                    raise MisconfigurationException(_shared(self.module, t))
        prefix = next(name for name, part in self.module.named_modules() if part is stack)
        for name, t in self.module.named_parameters(remove_duplicate=False):
            if prefix and not name.startswith(prefix + ".") and owner.get(id(t), 0) != 0:
                raise MisconfigurationException(_shared(self.module, t))

    def called_apart(self) -> list[torch.nn.Module]:
        """Return the layers of the stack: micro-batches pass them one after the other, on several devices at once."""
        return [] if self._stack is None else list(self._stack)

    def device_ids(self) -> None:
        return None  # DDP then leaves inputs and parameters where they are

    def teardown(self) -> None:
        """Take the pipeline off the stack; what the strategy moved goes back to where it came from."""
        stack, module = self.__dict__.pop("_stack", None), self.__dict__.get("module")
        if stack is not None:
            del stack.forward
            for layer, home in zip(stack, self.__dict__.pop("_homes"), strict=True):
                if home is not None:
                    layer.to(home)
            move_rest(module, stack, self.__dict__.pop("_rest_home"))
        self.devices = [torch.device("cpu")] * len(self.devices)
        super().teardown()


def _home(layer: torch.nn.Module) -> torch.device | None:
    return next((t.device for t in (*layer.parameters(), *layer.buffers())), None)


def _shared(module: torch.nn.Module, tensor: torch.Tensor) -> str:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = " and ".join(name for name, t in named if t is tensor)
    return (
        f"{names} are one tensor, but the layers that use it come to different devices. Use fewer devices a process, or place the layers "
        "yourself."
    )
