"""The data of a run: which samples a rank sees, in which order, from which position, and what they draw.

`prepare` makes a `Source` of any loader; `Source.epoch` one pass; its `groups` are the batches of one optimizer step each.
"""

from __future__ import annotations

from trainer.data.combined import CombinedLoader
from trainer.data.epoch import Epoch, Group
from trainer.data.prefetch import DevicePrefetcher
from trainer.data.prepare import loaders_of, prepare
from trainer.data.source import Source

__all__ = ["CombinedLoader", "DevicePrefetcher", "Epoch", "Group", "Source", "loaders_of", "prepare"]
