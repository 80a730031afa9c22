"""ThroughputMonitor: batches, samples, items and floating-point operations a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(Callback):
    """Logs how fast batches are worked on, at the publish points of training and at the end of each validation, test and prediction.

    `train/time` (seconds, without validation), `train/batches` and `train/samples` (of this process) count from the start of the fit.
    From the second publish point on there are rates: `train/device/batches_per_sec`, `.../samples_per_sec`, with `length_fn`
    `.../items_per_sec`, and where the module has an attribute `flops_per_batch` (operations of forward and backward of one batch of one
    process) `.../flops_per_sec` and, with `available_flops`, `.../mfu`. Several processes add the same without `device/`, of all together.
    Only there is the device waited for. The numbers are rank 0's, and go to the loggers alone.

    Args:
        batch_size_fn: the number of samples in a batch.
        length_fn: the number of items (tokens, pixels) in a batch.
        window_size: rates are means over about so many batches: from the last publish point that far back, or the one before.
        separator: stands between the parts of a name.
        available_flops: what one device can do a second in the number format at hand.

    Raises:
        MisconfigurationException: a window below 1.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
    ) -> None:
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
            raise MisconfigurationException(f"ThroughputMonitor(window_size={window_size!r}) must be a whole number of batches >= 1.")
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.window_size, self.separator, self.available_flops = window_size, separator, available_flops
        self._meters: dict[str, _Meter] = {}
        self._step = 0

    # -- training ----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._meters["train"] = _Meter()
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count("train", batch)
        if trainer.global_step != self._step:  # the optimizer has stepped
            self._step = trainer.global_step
            if trainer.publishes_step:
                self._publish(trainer, module, "train")

    # -- passes without training -------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._meters["validate"] = _Meter(begin=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not trainer.sanity_checking:
            self._count("validate", batch)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._publish(trainer, module, "validate")
        if trainer.state.fn == "fit":
            self._meters["train"].start += perf_counter() - self._meters["validate"].start  # training stood still

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self._meters["test"] = _Meter(begin=True)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._count("test", batch)

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._publish(trainer, module, "test")

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self._meters["predict"] = _Meter(begin=True)

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._count("predict", batch)

    def on_predict_end(self, trainer: Any, module: Any) -> None:
        self._publish(trainer, module, "predict")

    # -- counting and dividing ---------------------------------------------------------------------------------------------

    def _count(self, stage: str, batch: Any) -> None:
        meter = self._meters[stage]
        meter.batches += 1
        meter.samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            meter.items += self.length_fn(batch)

    def _publish(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize(trainer.strategy.root_device)  # what was asked for must be done to count
        flops = getattr(module, "flops_per_batch", None) if stage == "train" else None
        meter = self._meters[stage]
        numbers, rates = meter.mark(flops, self.window_size)
        if self.length_fn is None:
            numbers.pop("lengths")
            rates.pop("items_per_sec", None)
        if flops is None:
            rates.pop("flops_per_sec", None)
        shares = trainer.data_shares
        for name, rate in rates.items():
            own = rate * shares / trainer.world_size if name == "flops_per_sec" else rate  # processes of one model share the work
            numbers[f"device{self.separator}{name}"] = own
            if trainer.world_size > 1:
                numbers[name] = rate * shares
            if name == "flops_per_sec" and self.available_flops:
                numbers[f"device{self.separator}mfu"] = own / self.available_flops
        trainer.log_metrics({f"{stage}{self.separator}{name}": value for name, value in numbers.items()}, loggers_only=True)


class _Meter:
    """What was counted since `start`, and marks of it at publish points. With `begin` the start is a mark."""

    def __init__(self, begin: bool = False) -> None:
        self.start = perf_counter()
        self.batches = self.samples = self.items = 0
        self.flops = 0.0
        self._marks: deque[tuple[float, int, int, int, float]] = deque([(0.0, 0, 0, 0, 0.0)] if begin else ())
        self._before = 0

    def mark(self, flops: float | None, window: int) -> tuple[dict[str, float], dict[str, float]]:
        """Set a mark; return the counts so far, and rates since the mark that lies `window` batches back, if there is one before."""
        self.flops += (flops or 0.0) * (self.batches - self._before)
        self._before = self.batches
        now = (perf_counter() - self.start, self.batches, self.samples, self.items, self.flops)
        while len(self._marks) > 1 and self.batches - self._marks[1][1] >= window:
            self._marks.popleft()
        rates: dict[str, float] = {}
        if self._marks and now[0] > self._marks[0][0]:
            seconds, *counts = (new - old for new, old in zip(now, self._marks[0], strict=True))
            rates = dict(zip(("batches_per_sec", "samples_per_sec", "items_per_sec", "flops_per_sec"), (n / seconds for n in counts), strict=True))
        self._marks.append(now)
        return {"time": now[0], "batches": self.batches, "samples": self.samples, "lengths": self.items}, rates
