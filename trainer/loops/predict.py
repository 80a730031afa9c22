"""Prediction: what `predict_step` returns for every batch, in data set order, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.loops.evaluate import modes_kept, outputs

__all__ = ["predict"]


def predict(run: Any) -> list[Any] | None:
    """Return the predictions: a list over batches, or a list of such lists where there are several loaders. Collective."""
    run.strategy.wrap(training=False)
    hooks = run.hooks
    run.loaders.sources("predict")  # one that cannot work is refused ahead of the hooks
    keep = run.job.return_predictions
    found: list[list[Any]] = []
    with run.strategy.evaluating(), modes_kept(run.module), torch.inference_mode(run.settings.inference_mode), torch.no_grad():
        hooks.call("on_predict_model_eval")
        hooks.call("on_predict_start")
        sources = run.loaders.sources("predict")  # a hook may have changed the batch size
        hooks.call("on_predict_epoch_start")
        for index, source in enumerate(sources):
            given = outputs(run, "predict", source, index, len(sources) > 1)
            mine = [tree_map_only(torch.Tensor, _to_host, output) for output in given if keep]
            if keep:
                found.append(_in_order(run.dist.gather(None if run.records is False else mine)))
        hooks.call("on_predict_epoch_end")
        hooks.call("on_predict_end")
    hooks.call("on_predict_model_train")
    if not keep:
        return None
    return found[0] if len(found) == 1 else found


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy, so that no accelerator memory is held and no batch is kept alive by a view of it."""
    with torch.inference_mode(False):  # a tensor made in inference mode could never be trained on
        return tensor.detach().cpu().clone()


def _in_order(by_rank: list[list[Any] | None]) -> list[Any]:
    """Interleave: batch j of the whole data set was predicted by the share j modulo their number; None is of a rank that only helped."""
    by_share = [outputs for outputs in by_rank if outputs is not None]
    longest = max(map(len, by_share))
    return [outputs[i] for i in range(longest) for outputs in by_share if i < len(outputs)]
