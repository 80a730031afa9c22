"""The hooks of a module, and the methods that give loaders: what they do where nobody overrides them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["MODULE_HOOKS", "LoaderMethods", "ModuleHooks", "move_to"]


class ModuleHooks:
    """The hooks of a module. All are optional; the order is on the page docs/loop.md."""

    # fmt: off
    def prepare_data(self) -> None: """Download and write files: called on one process of each node; set no state here."""
    def setup(self, stage: str) -> None: """On every rank before loaders and optimizers are made; `stage` is "fit", "validate", ..."""
    def teardown(self, stage: str) -> None: """The last hook of a run."""
    def on_fit_start(self) -> None: """The module is on its device and optimizers exist."""
    def on_fit_end(self) -> None: """Training is over."""
    def on_train_start(self) -> None: """Before the first epoch."""
    def on_train_end(self) -> None: """After the last epoch."""
    def on_train_epoch_start(self) -> None: """Before the first batch of an epoch."""
    def on_train_epoch_end(self) -> None: """After an epoch and its validation."""
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: """Before a batch; return -1 to skip the rest of the epoch."""
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: """After a batch."""
    def on_validation_start(self) -> None: """Before validation."""
    def on_validation_end(self) -> None: """After validation; its numbers are published."""
    def on_validation_epoch_start(self) -> None: """Before the first validation batch."""
    def on_validation_epoch_end(self) -> None: """After the last validation batch; the last place to log."""
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """Before a validation batch."""
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """After it."""
    def on_validation_model_eval(self) -> None: """Put the module into eval mode (default: `self.eval()`)."""; self.eval()  # type: ignore[attr-defined]
    def on_validation_model_train(self) -> None: """Validation is over; the mode of every sub-module was put back already."""
    def on_validation_model_zero_grad(self) -> None: """Before validation inside a fit: frees the gradients' memory."""; self.zero_grad()  # type: ignore[attr-defined]
    def on_test_start(self) -> None: """Before testing."""
    def on_test_end(self) -> None: """After testing."""
    def on_test_epoch_start(self) -> None: """Before the first test batch."""
    def on_test_epoch_end(self) -> None: """After the last test batch."""
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """Before a test batch."""
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """After it."""
    def on_test_model_eval(self) -> None: """Put the module into eval mode (default: `self.eval()`)."""; self.eval()  # type: ignore[attr-defined]
    def on_test_model_train(self) -> None: """Testing is over; modes were put back already."""
    def on_predict_start(self) -> None: """Before prediction."""
    def on_predict_end(self) -> None: """After prediction."""
    def on_predict_epoch_start(self) -> None: """Before the first prediction batch."""
    def on_predict_epoch_end(self) -> None: """After the last prediction batch."""
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """Before a prediction batch."""
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: """After it."""
    def on_predict_model_eval(self) -> None: """Put the module into eval mode (default: `self.eval()`)."""; self.eval()  # type: ignore[attr-defined]
    def on_predict_model_train(self) -> None: """Prediction is over; modes were put back already."""
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any: """Change a batch before it goes to the device."""; return batch
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any: """Change a batch on the device."""; return batch
    def on_before_zero_grad(self, optimizer: Any) -> None: """Before gradients are set to None."""
    def on_before_backward(self, loss: torch.Tensor) -> None: """Before backward; the loss is already weighted."""
    def on_after_backward(self) -> None: """After every backward; gradients may be scaled (16-mixed)."""
    def on_before_optimizer_step(self, optimizer: Any) -> None: """Gradients are complete and unscaled, not yet clipped."""
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: """Add to the table that is about to be written."""
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: """Read from a table that was just loaded."""
    def on_exception(self, exception: BaseException) -> None: """A run is about to end with `exception`."""
    # fmt: on

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch; override for batches that are not made of tensors and containers."""
        return move_to(batch, device)


class LoaderMethods:
    """Where the loaders of a run come from, unless they are passed: the same names in modules and data modules."""

    def train_dataloader(self) -> Any:
        """Return the training loader (or a list or dict of them)."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of them."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of them."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the loader of prediction inputs, or a list of them."""
        raise NotImplementedError


MODULE_HOOKS = frozenset(n for n in vars(ModuleHooks) if not n.startswith("_"))


def move_to(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors (and other objects with a `to` method) on `device`; pinned memory copies in the background."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    return tree_map_only(object, lambda x: x.to(device, non_blocking=True) if _movable(x) else x, batch)


def _movable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (hasattr(x, "to") and callable(x.to) and not isinstance(x, torch.nn.Module))
