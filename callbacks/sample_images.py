"""SampleImages: what the model gets to see, or makes, as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["SampleImages"]

_STAGES = {"train": "samples/train", "validate": "samples/val"}


class SampleImages(Callback):
    """Shows a grid of images from an epoch's first training batch, and from the first batch of a validation, in every logger that can.

    Names are `samples/train` and `samples/val`. Rank 0 shows its own batch; the other ranks do nothing, nor does anybody in the sanity check,
    except to find out whether there are images.

    Args:
        num_images: at most so many of a batch.
        every_n_epochs: only in every so many epochs.
        stages: "train", "validate", or both.
        images: called with (batch, outputs of the step) for a tensor of N x C x H x W with 1 or 3 channels. Default: the first such tensor in the
            batch.

    Raises:
        MisconfigurationException: an argument that cannot be; at the first batch, when there are no images in it.
    """

    def __init__(
        self,
        num_images: int = 16,
        every_n_epochs: int = 1,
        stages: str | tuple[str, ...] | list[str] = ("train", "validate"),
        images: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> None:
        for name, value in (("num_images", num_images), ("every_n_epochs", every_n_epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise MisconfigurationException(f"SampleImages({name}={value!r}) must be a whole number >= 1.")
        self.stages = (stages,) if isinstance(stages, str) else tuple(stages)
        if not self.stages or not set(self.stages) <= _STAGES.keys():
            raise MisconfigurationException(f"SampleImages(stages={stages!r}): expected 'train', 'validate' or both.")
        self.num_images, self.every_n_epochs, self.images = num_images, every_n_epochs, images

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._show(trainer, "train", batch, outputs)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 0 and dataloader_idx == 0:
            self._show(trainer, "validate", batch, outputs)

    def _show(self, trainer: Any, stage: str, batch: Any, outputs: Any) -> None:
        if stage not in self.stages or not trainer.is_global_zero or trainer.current_epoch % self.every_n_epochs:
            return
        found = _first_images(batch) if self.images is None else self.images(batch, outputs)
        if not _are_images(found):
            what = "there is none in the batch" if self.images is None else f"images= gave {_shape(found)}"
            raise MisconfigurationException(
                f"SampleImages needs a tensor of N x C x H x W with 1 or 3 channels; {what}. Give images=, a function of (batch, outputs)."
            )
        if not trainer.sanity_checking:
            for logger in trainer.loggers:
                logger.log_image(_STAGES[stage], found[: self.num_images])


def _first_images(batch: Any) -> torch.Tensor | None:
    """Return the first tensor of images in nested containers."""
    if _are_images(batch):
        return batch
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for found in map(_first_images, inner) if found is not None), None)


def _are_images(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] in (1, 3) and value.numel() > 0


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
