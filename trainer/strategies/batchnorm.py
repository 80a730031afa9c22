"""BatchNorm layers that take their statistics over all ranks, for one run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import MisconfigurationException

__all__ = ["SYNC_BATCHNORM_DEVICES", "synced_batchnorm"]

SYNC_BATCHNORM_DEVICES = ("cuda", "xpu")


def synced_batchnorm(module: torch.nn.Module) -> Callable[[], None]:
    """Turn the BatchNorm layers of `module` into SyncBatchNorm; return what turns them back.

    The layers stay the same objects, with their weights, buffers and hooks; only their class changes. So nothing that refers to
    them goes astray, and the keys of a state dict are the same.

    Raises:
        MisconfigurationException: for a layer with a `forward` of its own, which SyncBatchNorm's would replace.
    """
    layers = [(name, m) for name, m in module.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, torch.nn.SyncBatchNorm)]
    for name, layer in layers:
        if type(layer).forward is not _BatchNorm.forward:
            raise MisconfigurationException(
                f"sync_batchnorm=True: {name} is a {type(layer).__name__} with a forward of its own, which SyncBatchNorm would replace. "
                "Use torch's BatchNorm layers, or leave sync_batchnorm out."
            )
    before = [(layer, type(layer)) for _, layer in layers]
    for _, layer in layers:
        layer.__class__ = torch.nn.SyncBatchNorm
        layer.process_group = None  # all ranks

    def restore() -> None:
        for layer, kind in before:
            layer.__class__ = kind
            layer.__dict__.pop("process_group", None)

    return restore
