"""NaNGuard: ends a fit when a loss, gradient or weight is not finite, and says where that began."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException, TrainerError, nearest

__all__ = ["NaNGuard", "NonFiniteError"]

_KINDS = ("loss", "gradients", "weights")
_SHOWN = 5  # names in a message


class NonFiniteError(TrainerError, RuntimeError):
    """A loss, gradient or weight is NaN or infinite."""


class NaNGuard(Callback):
    """Looks at losses, gradients and weights of every n-th step; NaN or infinity in one of them ends the fit on all ranks.

    The error names the step, epoch and batches, which parameters, and where it began: the batch itself, the first layer whose output is not
    finite (with the rank), or loss and backward, where all outputs are finite. Gradients are looked at ahead of the update, so the weights
    are still those before the step then. A step that is checked costs two reads of the device and a small message between ranks; the others
    nothing. To find the very step in which it begins, check every one, from the last checkpoint on.

    Gradients are not checked in 16-mixed, where an overflow is usual, and such a step is left out. Layers are not watched in compiled runs.

    Args:
        check: "loss", "gradients", "weights", or several of them. Weights are also looked at ahead of the first step.
        every_n_steps: how often; None for the steps whose numbers are published (`log_every_n_steps`).
        find_layer: watch the outputs of layers in the steps that are checked.

    Raises:
        MisconfigurationException: for another kind, or a number of steps that is not positive; when a fit starts that publishes no steps,
            without `every_n_steps`.
        NonFiniteError: on all ranks, with the same message.
    """

    def __init__(
        self, check: str | Iterable[str] = _KINDS, every_n_steps: int | None = None, find_layer: bool = True
    ) -> None:
        self.check = (check,) if isinstance(check, str) else tuple(check)
        for kind in self.check:
            if kind not in _KINDS:
                raise MisconfigurationException(f"NaNGuard(check={check!r}) must be of {', '.join(map(repr, _KINDS))}.{nearest(kind, _KINDS)}")
        if not self.check:
            raise MisconfigurationException(f"NaNGuard(check={check!r}) would check nothing. Choose from {', '.join(map(repr, _KINDS))}.")
        if every_n_steps is not None and (isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise MisconfigurationException(f"NaNGuard(every_n_steps={every_n_steps!r}) must be a whole number >= 1, or None.")
        self.every_n_steps, self.find_layer = every_n_steps, find_layer
        self._outputs = _Outputs()
        self._batches: list[int] = []  # of the step that is being taken, if it is checked
        self._losses: list[torch.Tensor] = []
        self._due = False
        self._fine: int | None = None  # the last step that was checked

    # -- when ------------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.every_n_steps is None and not trainer.log_every_n_steps:
            raise MisconfigurationException("NaNGuard checks published steps, and log_every_n_steps=0 publishes none. Give it every_n_steps.")
        self._gradients = "gradients" in self.check and trainer.precision != "16-mixed"
        self._watches = self.find_layer and trainer.settings.compile is None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._fine, self._due = None, False
        if "weights" in self.check:
            self._judge(trainer, "weights", _weights(module))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        every = self.every_n_steps
        self._due = trainer.publishes_step if every is None else (trainer.global_step + 1) % every == 0
        if self._due:
            self._step = trainer.global_step
            self._batches.append(batch_idx)
            if self._watches:
                self._outputs.begin(module, batch_idx)
                self._outputs.note("the batch itself", batch)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._due and self._gradients:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None and id(p) in mine]
            self._judge(trainer, "gradients", named)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._due:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None:
            self._losses.append(loss.detach())
        if trainer.global_step == self._step:
            return
        named = [("the loss", loss) for loss in self._losses] if "loss" in self.check else []
        self._judge(trainer, "loss and weights", named + (_weights(module) if "weights" in self.check else []))
        self._fine = trainer.global_step
        self._forget()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._forget()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._forget()

    def _forget(self) -> None:
        self._outputs.end()
        self._batches, self._losses = [], []

    # -- judging ---------------------------------------------------------------------------------------------------------

    def _judge(self, trainer: Any, kind: str, named: list[tuple[str, torch.Tensor]]) -> None:
        """Raise on all ranks if a tensor of any rank is not finite. Collective."""
        bad = _not_finite(named)
        every = trainer.gather((bad, self._outputs.first_bad() if bad else None))
        if not any(names for names, _ in every):
            return
        begun = [f"{where}, on rank {rank}" for rank, (_, where) in enumerate(every) if where]
        rank, names = next((rank, names) for rank, (names, _) in enumerate(every) if names)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise NonFiniteError(f"{self._when(trainer, kind)}: {shown}, on rank {rank}. {self._story(kind, begun)}")

    def _when(self, trainer: Any, kind: str) -> str:
        what = {"gradients": "Gradients", "weights": "Weights"}.get(kind, "Loss or weights")
        if not self._batches:
            return f"{what} are not finite ahead of the first step (after step {trainer.global_step})"
        step = trainer.global_step + (kind == "gradients")
        return f"{what} are not finite in step {step} (epoch {trainer.current_epoch}, batch {', '.join(map(str, self._batches))})"

    def _story(self, kind: str, begun: list[str]) -> str:
        parts = []
        if begun:
            parts.append(f"It begins with {'; '.join(begun)}.")
        elif self._batches and self._watches:
            parts.append("The outputs of all layers are finite, so it arises in the loss, in backward or in the update; Trainer(detect_anomaly=True) names an operation.")
        if self._batches and self._fine is not None:
            parts.append(f"The step that was checked before, {self._fine}, was fine.")
        if kind == "gradients":
            parts.append("The weights are those before the step.")
        return " ".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": _Outputs(), "_losses": []}


class _Outputs:
    """Notes on the device whether what each layer returns is finite, in the order in which the layers return."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._notes: list[tuple[str, torch.Tensor]] = []
        self._batch = 0

    def begin(self, module: torch.nn.Module, batch_idx: int) -> None:
        self._batch = batch_idx
        if not self._handles:
            for name, layer in module.named_modules():
                if name:
                    text = f"the output of {name} ({type(layer).__name__})"
                    self._handles.append(layer.register_forward_hook(partial(self._returned, text)))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._notes = [], []

    def _returned(self, text: str, layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.note(text, output)

    def note(self, text: str, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                self._notes.append((f"{text} in batch {self._batch}", _part(value).isfinite().all()))

    def first_bad(self) -> str | None:
        return next((text for text, fine in self._notes if not fine), None)


def _weights(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in module.named_parameters() if not p.is_meta]  # meta: of other ranks


def _part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank, and a sparse gradient, holds."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _not_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors that hold a NaN or an infinity. Reads the device once where there is none."""
    parts = [(name, _part(tensor)) for name, tensor in named]
    if not parts or bool(get_total_norm([part for _, part in parts]).isfinite()):  # a sum of squares sees them all
        return []
    device = parts[0][1].device
    fine = torch.stack([part.isfinite().all().to(device) for _, part in parts]).tolist()  # squares of large numbers overflow, too
    return list(dict.fromkeys(name for (name, _), ok in zip(parts, fine, strict=True) if not ok))
