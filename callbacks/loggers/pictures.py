"""Images as one picture that can be written."""

from __future__ import annotations

import math
from typing import Any

import torch

from callbacks.errors import MisconfigurationException

__all__ = ["picture"]

_SMALLEST = 64  # pixels of an image's shorter side; smaller ones are enlarged


def picture(key: str, images: Any) -> torch.Tensor:
    """Return one image, or a grid of several, as bytes of 3 x height x width.

    Args:
        key: its name, for messages.
        images: a tensor or array of C x H x W or N x C x H x W with 1 or 3 channels, or a list of the former of one size. Bytes, or numbers
            in [0, 1]; where others occur, all are brought there by one shift and scale. Pictures smaller than 64 pixels are enlarged.

    Raises:
        MisconfigurationException: for other shapes, saying which was found.
    """
    from torchvision.utils import make_grid  # slow to load

    if isinstance(images, (list, tuple)):
        images = torch.stack([torch.as_tensor(image).detach().cpu() for image in images])
    batch = torch.as_tensor(images).detach().cpu()
    batch = batch[None] if batch.ndim == 3 else batch
    if batch.ndim != 4 or batch.shape[1] not in (1, 3) or not batch.numel():
        raise MisconfigurationException(
            f"log_image({key!r}): images are C x H x W or N x C x H x W with 1 or 3 channels; the shape here is {tuple(torch.as_tensor(images).shape)}."
        )
    batch = batch.float() / 255 if batch.dtype == torch.uint8 else batch.float().nan_to_num()
    low, high = batch.min(), batch.max()
    if low < 0 or high > 1:
        batch = (batch - low) / (high - low if high > low else 1.0)
    factor = math.ceil(_SMALLEST / min(batch.shape[2:]))
    batch = batch.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    grid = make_grid(batch, nrow=math.ceil(math.sqrt(len(batch))), pad_value=1.0) if len(batch) > 1 else batch[0].expand(3, -1, -1)
    return (grid * 255).round().to(torch.uint8)
