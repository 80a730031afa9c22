"""The precision plug-ins. Each owns the number format of weights and inputs, the autocast, and the loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.errors import MisconfigurationException, nearest

__all__ = ["MixedPrecision", "Precision", "TruePrecision", "canonical"]

_NAMES = {
    "64-true": "64-true", "64": "64-true", "double": "64-true",
    "32-true": "32-true", "32": "32-true", "float": "32-true",
    "16-true": "16-true", "half": "16-true",
    "bf16-true": "bf16-true",
    "16-mixed": "16-mixed", "16": "16-mixed",
    "bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed",
}  # fmt: skip
_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


def canonical(name: str | int | None) -> str:
    """Return the full name ("32-true", "bf16-mixed", ...) of a precision as users write it (16, "bf16", None, ...).

    Raises:
        MisconfigurationException: for a name that is none, with the nearest one.
    """
    text = "32-true" if name is None else str(name).lower()
    if text not in _NAMES:
        raise MisconfigurationException(
            f"precision={name!r} is unknown.{nearest(text, _NAMES)} Choose one of {', '.join(sorted(set(_NAMES.values())))}."
        )
    return _NAMES[text]


class Precision:
    """32-bit weights and arithmetic; the base of all precision plug-ins."""

    precision: str = "32-true"
    scaler: torch.amp.GradScaler | None = None

    def convert_module(self, module: torch.nn.Module) -> None:
        """Bring the parameters and buffers into their format, in place."""

    def convert_input(self, batch: Any) -> Any:
        """Bring the floating-point tensors of a batch into the format that the module expects."""
        return batch

    converts_input: bool = False

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context in which a step function of the module runs."""
        return _NULL

    def init_context(self) -> AbstractContextManager[Any]:
        """The context in which a module should be constructed to come out in its format."""
        return _NULL

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run backward from."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of `optimizer` back to their true size."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step, unless the gradients overflowed."""
        return optimizer.step() if closure is None else optimizer.step(closure)

    def update(self) -> None:
        """Adapt the loss scale, once a step after every optimizer was offered one; nothing happens where none was."""

    stepped: bool = False
    """True from an optimizer's step to the `update` that follows."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""


_NULL = nullcontext()


class TruePrecision(Precision):
    """Weights, inputs and arithmetic all in one format: "64-true", "16-true" or "bf16-true"."""

    converts_input = True

    def __init__(self, precision: str) -> None:
        self.precision = canonical(precision)
        if self.precision not in _DTYPES:
            raise MisconfigurationException(f"TruePrecision takes one of {', '.join(_DTYPES)}, got {precision!r}.")
        self.dtype = _DTYPES[self.precision]

    def convert_module(self, module: torch.nn.Module) -> None:
        module.to(self.dtype)

    def convert_input(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, self._convert, batch)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """New tensors that the step makes without a dtype are in the format of the weights."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    init_context = forward_context


class MixedPrecision(Precision):
    """32-bit weights, forward pass in "bf16-mixed" or "16-mixed" through autocast; the latter scales the loss.

    Args:
        precision: "bf16-mixed" or "16-mixed".
        device: the type of device that computes ("cpu", "cuda", ...).
        scaler: a GradScaler of your own for "16-mixed" (for another initial scale, say).

    Raises:
        MisconfigurationException: for another precision, or a scaler with "bf16-mixed", which needs none.
    """

    def __init__(self, precision: str, device: str = "cpu", scaler: torch.amp.GradScaler | None = None) -> None:
        self.precision = canonical(precision)
        if self.precision not in ("16-mixed", "bf16-mixed"):
            raise MisconfigurationException(f"MixedPrecision takes '16-mixed' or 'bf16-mixed', got {precision!r}.")
        if self.precision == "bf16-mixed" and scaler is not None:
            raise MisconfigurationException("precision='bf16-mixed' needs no scaler; leave it out or use '16-mixed'.")
        self.device = torch.device(device).type
        self.dtype = torch.float16 if self.precision == "16-mixed" else torch.bfloat16
        if self.precision == "16-mixed":
            self.scaler = torch.amp.GradScaler(self.device) if scaler is None else scaler
        self._unscaled: set[int] = set()  # the optimizers whose gradients are at their true size

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.dtype)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if self.scaler is None:
            return super().step(optimizer, closure)
        self.stepped = True
        return self.scaler.step(optimizer)

    def update(self) -> None:
        if self.scaler is not None and (self.stepped or self._unscaled):
            self.scaler.update()
            self._unscaled.clear()
            self.stepped = False

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
