"""A pass over the training data that trains nothing, for layers that keep statistics of what they see (BatchNorm)."""

from __future__ import annotations

from typing import Any

import torch

from trainer.loops.evaluate import step_caller
from trainer.loops.transfer import copy_ahead, receive
from trainer.metric_objects import copies, metrics_of, put_back
from trainer.seed import isolate_rng

__all__ = ["training_pass"]


def training_pass(run: Any) -> None:
    """Compute `training_step` on every batch of the epoch that would come next, each sample once, without gradients. Collective.

    What it logs is not kept, random streams and metric objects do not move, hooks are not called.
    """
    (source,) = run.loaders.sources("train")
    epoch = source.epoch(run.progress.epoch + run.progress.epoch_ended)
    copy_ahead(run, epoch)
    step = step_caller(run.strategy.step("training_step"), False, 0)
    metrics = copies(metrics_of(run.module))
    recorder, current = run.recorder, run.hooks.current
    recorder.muted, run.hooks.current = True, "training_step"
    try:
        with run.strategy.evaluating(), isolate_rng(), torch.no_grad():
            for index, group in enumerate(epoch.groups(1)):
                for batch in group.batches:
                    repeated = group.counts is not None and group.counts[0] == 0  # a sample again, to keep step with other ranks
                    if repeated and not run.settings.sync_batchnorm:
                        continue
                    batch = receive(run, batch)
                    with run.precision.forward_context():
                        step(batch, index)
    finally:
        recorder.muted, run.hooks.current = False, current
        put_back(metrics)
