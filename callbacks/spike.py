"""SpikeDetection: end a fit whose loss jumps, and note which batches it was."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, TrainerError
from callbacks.monitor import check_mode

__all__ = ["SpikeDetection", "TrainingSpikeException"]


class TrainingSpikeException(TrainerError, RuntimeError):
    """The loss of a batch was far from those before it."""


class SpikeDetection(Callback):
    """Compares the loss of each batch with the mean of the last ones; a spike ends the fit on all ranks.

    A loss that is worse than the one before is a spike when it differs from the mean by at least `atol` and by at least `rtol` times the
    mean (a limit that is None is not asked). The losses are read at publish points and at the end of an epoch, all since the last at once, so with a larger
    `log_every_n_steps` a spike is found later, though in the same batch. Each rank looks at its own;
    checkpoints keep rank 0's mean, with which all ranks go on.

    The batch and the one before it are written to `exclude_batches_path`, a JSON list of {"epoch", "batch"}, as either may be to blame.

    Args:
        mode: "min" if lower losses are better, else "max".
        window: over how many losses the mean goes.
        warmup: how many batches of the fit are let pass before the first one is judged.
        atol, rtol: see above.
        exclude_batches_path: a .json file, or a folder for "skip_batches.json"; None for the trainer's root folder.
        finite_only: an infinite loss or NaN is a spike; otherwise it is passed over.

    Attributes:
        bad_batches: what was written.

    Raises:
        MisconfigurationException: an unknown mode, a window below 1, a negative warmup.
        TrainingSpikeException: on all ranks, at the publish point after a spike.
    """

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        check_mode(type(self).__name__, mode)
        if window < 1 or warmup < 0:
            raise MisconfigurationException(f"SpikeDetection(window={window}, warmup={warmup}): expected window >= 1 and warmup >= 0.")
        self.mode, self.window, self.warmup, self.atol, self.rtol, self.finite_only = mode, window, warmup, atol, rtol, finite_only
        self.exclude_batches_path = exclude_batches_path
        self.bad_batches: list[dict[str, int]] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._seen = 0
        self._pending: list[tuple[int, int, Any]] = []  # (epoch, batch, loss) since the last publish point

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:  # a new training; a checkpoint is read after this
            self._recent.clear()
            self._pending.clear()
            self._seen = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None:
            self._pending.append((trainer.current_epoch, batch_idx, loss.detach().reshape(()).clone()))
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if trainer.publishes_step:
            self._judge(trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._judge(trainer)

    def _judge(self, trainer: Any) -> None:
        """Look at the losses since the last publish point. Collective."""
        spike = next(((epoch, index, loss) for epoch, index, loss in self._read() if self._is_spike(loss)), None)
        self._pending = []
        found = [(rank, one) for rank, one in enumerate(trainer.gather(spike)) if one is not None]
        if not found:
            return
        rank, (epoch, index, loss) = found[0]
        self.bad_batches += [{"epoch": epoch, "batch": number} for number in (index - 1, index) if number >= 0]
        if trainer.is_global_zero:
            path = self._path(trainer)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump(self.bad_batches, file, indent=4)
        raise TrainingSpikeException(
            f"The loss {loss:.6g} of batch {index} in epoch {epoch} on rank {rank} is far from the mean {self._mean():.6g} of those before it. Resume "
            "from a checkpoint ahead of it, with a lower learning rate or without the batch."
        )

    def _read(self) -> list[tuple[int, int, float]]:
        """Bring the losses that wait to the host, with one transfer."""
        waiting = [loss for _, _, loss in self._pending if isinstance(loss, torch.Tensor)]  # the others came from a checkpoint
        numbers = iter(torch.stack(waiting).tolist() if waiting else ())
        return [(epoch, index, next(numbers) if isinstance(loss, torch.Tensor) else loss) for epoch, index, loss in self._pending]

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else math.nan

    def _is_spike(self, loss: float) -> bool:
        """Judge one loss, and take it into the mean if it is none."""
        judged, self._seen = self._seen >= self.warmup and len(self._recent) > 0, self._seen + 1
        if not math.isfinite(loss):
            return self.finite_only and self._seen > self.warmup
        if judged:
            difference, mean = loss - self._recent[-1], self._mean()
            worse = difference > 0 if self.mode == "min" else difference < 0
            far = abs(loss - mean)
            if worse and (self.atol is None or far >= abs(self.atol)) and (self.rtol is None or far >= abs(self.rtol * mean)):
                return True
        self._recent.append(loss)
        return False

    def _path(self, trainer: Any) -> str:
        path = os.fspath(self.exclude_batches_path or trainer.default_root_dir)
        return os.path.abspath(path if path.endswith(".json") else os.path.join(path, "skip_batches.json"))

    def state_dict(self) -> dict[str, Any]:
        return {
            "recent": list(self._recent), "seen": self._seen, "bad_batches": self.bad_batches, "pending": [list(one) for one in self._read()]
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "recent" not in state_dict:  # of Lightning, whose mean is a metric object
            return
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._seen, self.bad_batches = state_dict["seen"], list(state_dict["bad_batches"])
        self._pending = [tuple(one) for one in state_dict["pending"]]
