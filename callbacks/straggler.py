"""StragglerMonitor: which rank the others wait for, and why."""

from __future__ import annotations

from statistics import mean, median
from time import perf_counter
from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["StragglerMonitor"]


class StragglerMonitor(Callback):
    """Measures on every rank how long it waits for data and computes, and names the rank that is slower than the others.

    Ranks that train together take the same time for a step, because they wait for each other in backward. What tells them apart is the
    time ahead of that: `data_wait`, from the end of a batch to the start of the next one (validation left out), and `forward`, from there
    to backward. Both are the host's; while an accelerator works behind its queue, forward is the time to launch it. Iterable data sets
    are fetched in step on all ranks, so a slow one shows on all.

    At publish points, the only ones where ranks meet for this, the means over the steps since the last are logged, in seconds a step:
    `straggler/step_time`, `straggler/data_wait` and `straggler/forward` of the slowest rank, and with several ranks
    `straggler/slowest_rank` and `straggler/skew`: its data_wait + forward, divided by the median of the others'.

    Args:
        threshold: rank 0 warns, once for each rank, when the skew is above this.
        per_rank: log `straggler/data_wait/rank_<r>` and `straggler/forward/rank_<r>` as well.

    Attributes:
        times: of the last publish point, by rank: (step_time, data_wait, forward).

    Raises:
        MisconfigurationException: a threshold that is not above 1.
    """

    publishes = True

    def __init__(self, threshold: float = 1.5, per_rank: bool = False) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 1:
            raise MisconfigurationException(f"StragglerMonitor(threshold={threshold!r}) must be a number above 1.")
        self.threshold, self.per_rank = threshold, per_rank
        self.times: list[tuple[float, float, float]] = []
        self._named: set[int] = set()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._named.clear()
        self._step = trainer.global_step
        self._reset()

    def _reset(self) -> None:
        self._steps, self._total, self._wait, self._forward = 0, 0.0, 0.0, 0.0
        self._mark: float | None = None  # where the wait for a batch began
        self._began: float | None = None  # where the forward did

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._mark = perf_counter()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._mark = perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        now = perf_counter()
        if self._mark is not None:
            self._wait += now - self._mark
            self._total += now - self._mark
        self._mark = self._began = now

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if self._began is not None:  # the first backward of the batch
            self._forward += perf_counter() - self._began
            self._began = None

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = perf_counter()
        self._total += now - self._mark if self._mark is not None else 0.0
        self._mark = now
        if trainer.global_step == self._step:
            return
        self._steps += trainer.global_step - self._step
        self._step = trainer.global_step
        if trainer.publishes_step:
            mine = tuple(seconds / self._steps for seconds in (self._total, self._wait, self._forward))
            self.times = [tuple(times) for times in trainer.gather(mine)]
            self._publish(trainer)
            self._reset()
            self._mark = perf_counter()  # the ranks have just met

    def _publish(self, trainer: Any) -> None:
        own = [wait + forward for _, wait, forward in self.times]
        slowest = max(range(len(own)), key=own.__getitem__)
        _, wait, forward = self.times[slowest]
        numbers = {"step_time": mean(step for step, _, _ in self.times), "data_wait": wait, "forward": forward}
        if len(own) > 1:
            others = median(own[:slowest] + own[slowest + 1 :])
            numbers["slowest_rank"] = float(slowest)
            numbers["skew"] = skew = own[slowest] / others if others else 1.0
            if skew > self.threshold and slowest not in self._named:
                self._named.add(slowest)
                reason = "waits for data" if wait - median(w for _, w, _ in self.times) > forward - median(f for _, _, f in self.times) else "computes"
                trainer.warn(
                    f"Rank {slowest} is the slow one in step {trainer.global_step}: {own[slowest]:.3g} s a step ahead of backward (data "
                    f"{wait:.3g}, forward {forward:.3g}), the others {others:.3g}. It {reason} longer, and all ranks wait for it."
                )
        if self.per_rank:
            for rank, (_, wait, forward) in enumerate(self.times):
                numbers[f"data_wait/rank_{rank}"], numbers[f"forward/rank_{rank}"] = wait, forward
        trainer.log_metrics({f"straggler/{name}": value for name, value in numbers.items()})
