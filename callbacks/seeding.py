"""SeedEverything: one seed for all that is random in a run."""

from __future__ import annotations

from typing import Any

from callbacks.callback import Callback
from callbacks.errors import MisconfigurationException

__all__ = ["SeedEverything"]


class SeedEverything(Callback):
    """Seeds a run at its start, so that it repeats itself to the bit.

    Everything random follows from the one seed. The model's stream is `seed` itself on rank 0 and derived from (seed, rank)
    elsewhere; the order of the data from (seed, epoch); what a data set draws from (seed, epoch, sample), so it does not depend
    on the number of workers or on where a run was resumed. Checkpoints keep the random state of every rank. Same as
    `Trainer(seed=...)`.

    Args:
        seed: 0 <= seed < 2**32.

    Raises:
        MisconfigurationException: when the seed is out of range.
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise MisconfigurationException(f"SeedEverything(seed={seed!r}): the seed must be a whole number in [0, 2**32).")
        self.seed = seed

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        trainer.seed_everything(self.seed)
