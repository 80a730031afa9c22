"""DP: one process, several devices. Each step runs on a replica a device, with its part of the batch, and one loss comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from trainer.devices import Devices
from trainer.dist import Dist
from trainer.errors import MisconfigurationException
from trainer.strategies import replicas
from trainer.strategies.base import Strategy

__all__ = ["DataParallelStrategy"]


class DataParallelStrategy(Strategy):
    """Data parallel in one process, with torch's replicate, scatter and parallel_apply.

    `training_step` runs on every replica with its part of the batch; the losses are averaged by the parts' sizes on the first device,
    so that gradients are those of the whole batch. Attributes that a step sets on `self` end with the replica. Evaluation runs on
    the first device, with the module itself. On the CPU the replicas are threads over the same parameters.

    Args:
        device_ids: which of the trainer's devices, the first of them holding the module; default all.
        concurrent: on the CPU, run the replicas at once. They take turns otherwise, so that draws from torch's generator (dropout) do
            not depend on timing.

    Raises:
        MisconfigurationException: for `device_ids` that are empty, negative or not unique.
    """

    name = "dp"

    def __init__(self, device_ids: Sequence[int] | None = None, concurrent: bool = False) -> None:
        self.device_ids = None if device_ids is None else tuple(device_ids)
        self.concurrent = concurrent
        ids = self.device_ids
        if ids is not None and (not ids or len(set(ids)) < len(ids) or any(type(i) is not int or i < 0 for i in ids)):
            raise MisconfigurationException(f"device_ids={device_ids!r} must be one or more indices of devices, each once.")
        self._devices: list[torch.device] = []

    def check(self, devices: int, num_nodes: int) -> None:
        """Refuse several nodes, and more `device_ids` than devices.

        Raises:
            MisconfigurationException: saying what to ask for.
        """
        if num_nodes > 1:
            raise MisconfigurationException(
                f"strategy='dp' is one process on one machine, but num_nodes={num_nodes} are asked for. Use strategy='ddp'."
            )
        if self.device_ids is not None and len(self.device_ids) > devices:
            raise MisconfigurationException(
                f"DataParallelStrategy(device_ids={list(self.device_ids)}) names more than the trainer's {devices} device(s). "
                f"Ask for devices={list(self.device_ids)}."
            )

    def device(self, devices: Devices, local_rank: int) -> torch.device:
        """Return the first device: batches arrive there. The others are remembered.

        Raises:
            MisconfigurationException: for `device_ids` that are not among the trainer's devices.
        """
        ids = devices.indices if self.device_ids is None else self.device_ids
        missing = [i for i in ids if i not in devices.indices]
        if missing:
            raise MisconfigurationException(
                f"DataParallelStrategy(device_ids={list(ids)}): {devices.type} device {missing[0]} is not among the trainer's devices "
                f"{list(devices.indices)}. Ask for devices={list(ids)}."
            )
        self._devices = [devices.device(devices.indices.index(i)) for i in ids]
        return self._devices[0]

    def setup(self, module: torch.nn.Module, device: torch.device, dist: Dist) -> None:
        super().setup(module, device, dist)
        self._told: set[str] = set()  # what was warned of in this run

    def wrap(self, training: bool) -> None:
        """Set `training_step`.

        Raises:
            MisconfigurationException: on several devices, for manual optimization, and for layers compiled by torch.compile: both
                call the module itself, not its replica.
        """
        super().wrap(training)
        if not training or len(self._devices) == 1:
            return
        if not self.module.automatic_optimization:
            raise MisconfigurationException(
                "Manual optimization cannot run under strategy='dp': each replica would run backward and step the optimizers by itself. "
                "Use strategy='ddp', or devices=1."
            )
        for path, part in self.module.named_modules():
            if getattr(part, "_compiled_call_impl", None) is not None or "_orig_mod" in part._modules:
                raise MisconfigurationException(
                    f"{path or 'The module'} is compiled, and strategy='dp' cannot make replicas of what torch.compile made. Leave it "
                    "uncompiled, or use strategy='ddp'."
                )
        self.training_step = self._step

    def called_apart(self) -> Collection[torch.nn.Module] | None:
        return None if len(self._devices) > 1 else ()

    def _step(self, batch: Any, *rest: Any) -> Any:
        """Run `training_step` on as many replicas as the batch has parts, and join what they return."""
        parts, sizes = replicas.split(batch, self._devices)
        if len(parts) == 1:
            if sizes[0] == 0:
                self._tell(f"strategy='dp' found no tensor with samples in a batch ({type(batch).__name__}), so one device computes it.")
            return self.module.training_step(batch, *rest)
        devices, recorder = self._devices[: len(parts)], self.module.trainer._live("training_step").recorder
        copies = replicas.copies(self.module, devices)
        before = replicas.snapshot(copies[0])  # one replica is enough: all run the same code
        calls = [replicas.Call(copy, (part, *rest), recorder, devices[0].type) for copy, part in zip(copies, parts, strict=True)]
        replicas.run(calls, devices, self.concurrent)
        for name in replicas.lost(before):
            self._tell(
                f"training_step set self.{name} on a replica, which strategy='dp' drops after the step. Return it in the step's dict "
                "(on_train_batch_end gets a list over the replicas), log it, or use strategy='ddp'."
            )
        samples = recorder.samples
        for call, part, size in zip(calls, parts, sizes, strict=True):
            recorder.replay(call.logged, part, size)
        recorder.start_batch(batch, samples)
        return replicas.join([call.output for call in calls], sizes, devices[0])

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.module.trainer.warn(message)
