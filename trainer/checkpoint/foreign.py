"""Files of others: what a checkpoint of Lightning 2.x, or a bare state dict, is in our terms."""

from __future__ import annotations

from typing import Any

import torch

from trainer.progress import Progress

__all__ = ["adopt", "is_lightning", "named_hparams"]

_STEPS = "epoch_loop.automatic_optimization.optim_progress"  # Lightning 2's name; a file of Lightning 1 counts as one of an epoch's end
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin")  # where Lightning's precision plug-ins keep the loss scale


def is_lightning(table: dict[str, Any]) -> bool:
    """True for a table that Lightning wrote."""
    return "pytorch-lightning_version" in table and "format" not in table


def adopt(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with what ours hold under names of ours: counters, data position and loss scale; ours come back as they are.

    A file of weights alone (`torch.save(model.state_dict(), path)`) becomes a table with them as its "state_dict".
    """
    if "state_dict" not in table and table and all(isinstance(value, torch.Tensor) for value in table.values()):
        return {"state_dict": table}
    if is_lightning(table) and "progress" not in table and _STEPS in table.get("loops", {}).get("fit_loop", {}):
        progress = _progress(table)
        inside = progress.batch and not progress.epoch_ended
        table["progress"] = progress.state_dict()
        table["data"] = {"rank_batches": progress.batch} if inside else None
        table["precision"] = next((table[name] for name in _SCALERS if name in table), {})
    return table


def named_hparams(table: dict[str, Any], saved: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Return the arguments of `__init__` that Lightning saved: it names the one that took them all as a dict, where there was one."""
    name = table.get("hparams_name") if is_lightning(table) else None
    return {name: saved} if name in arguments and name != "kwargs" else saved


def _progress(table: dict[str, Any]) -> Progress:
    """Read Lightning's counters. "ready" counts what was begun, "processed" and "completed" what a hook that saves has behind it."""
    loops = table["loops"]["fit_loop"]
    epochs, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
    steps = loops[_STEPS]["optimizer"]["step"]
    done = batches["current"]["ready"]
    progress = Progress(
        step=int(table["global_step"]),
        epoch=max(epochs["ready"] - 1, 0),
        step_in_epoch=steps["current"]["completed"],
        batch=done,
        # The last batch of an epoch is followed by nothing that Lightning would take up again.
        epoch_ended=bool(done) and (batches["is_last_batch"] or epochs["processed"] >= epochs["ready"]),
    )
    if loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"]:  # Lightning counts every optimizer's steps
        progress.step, progress.step_in_epoch = batches["total"]["ready"], done
    return progress
