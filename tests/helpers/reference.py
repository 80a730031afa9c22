"""The training loop a user would write by hand, which the trainer's results are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["train_by_hand"]


def train_by_hand(
    module: torch.nn.Module, batches: Sequence[torch.Tensor], steps: int, accumulate: int = 1, clip: float | None = None
) -> torch.nn.Module:
    """Train `module` for `steps` optimizer steps on `batches`, epoch after epoch, on one process; return it.

    Each step uses `accumulate` batches (the last of an epoch what is left) and descends the mean loss over all their samples.
    """
    optimizer = module.configure_optimizers()
    while steps > 0:
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            samples = sum(len(batch) for batch in window)
            optimizer.zero_grad()
            for batch in window:
                loss = module.loss(batch) * (len(batch) / samples)
                loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            steps -= 1
            if steps == 0:
                break
    return module
