"""What is in a checkpoint: a flat, ordered table of plain values under Lightning's key names, and ours beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.checkpoint import io
from trainer.checkpoint.keys import plain_keys, strip_prefixes
from trainer.errors import CheckpointError, TrainerError
from trainer.progress import Progress

__all__ = ["DATA_HPARAMS", "FORMAT", "HPARAMS", "assemble", "callback_keys", "progress_of", "restore_module", "restore_training"]

FORMAT = 1
"""The number of this layout. A file with a higher one was written by a newer version and is refused."""

HPARAMS = "hyper_parameters"
DATA_HPARAMS = "datamodule_hyper_parameters"


def assemble(
    *,
    module_state: Mapping[str, Any],
    progress: Progress,
    hparams: Mapping[str, Any],
    data_hparams: Mapping[str, Any],
    optimizer_states: Sequence[Any] = (),
    schedulers: Sequence[Any] = (),
    callbacks: Mapping[str, Any] | None = None,
    precision: Any = None,
    data: Any = None,
    ranks: Sequence[Any] = (),
    seed: int | None = None,
    weights_only: bool = False,
) -> dict[str, Any]:
    """Return the table of one checkpoint. With `weights_only` it holds weights, counters and hyper-parameters alone."""
    table: dict[str, Any] = {
        "format": FORMAT,
        "epoch": progress.epoch,
        "global_step": progress.step,
        "state_dict": plain_keys(module_state),
        HPARAMS: dict(hparams),
        DATA_HPARAMS: dict(data_hparams),
    }
    if not weights_only:
        table["progress"] = progress.state_dict()
        table["optimizer_states"] = list(optimizer_states)
        table["lr_schedulers"] = [scheduler.state_dict() for scheduler in schedulers]
        states = {key: callback.state_dict() for key, callback in (callbacks or {}).items()}
        table["callbacks"] = {key: state for key, state in states.items() if state}
        table["precision"] = precision.state_dict() if precision is not None else {}
        table["data"] = data
        table["ranks"] = list(ranks)
        table["seed"] = seed
    return table


def finish(table: dict[str, Any]) -> dict[str, Any]:
    """Bring a table into the form that is written, after hooks changed it.

    Raises:
        CheckpointError: naming the key of the first value that is neither a tensor nor plain.
    """
    table = io.plain(table)
    io.check_plain(table)
    return table


def check_format(table: Mapping[str, Any], path: Any) -> None:
    """Refuse what is no checkpoint of ours or Lightning's, or was written by a newer version.

    Raises:
        CheckpointError: naming the file.
    """
    if "state_dict" not in table:
        raise CheckpointError(f"{path} holds no 'state_dict' (keys: {', '.join(map(str, table)) or 'none'}); it is no checkpoint.")
    if table.get("format", FORMAT) > FORMAT:
        raise CheckpointError(
            f"{path} has format {table['format']}; this version reads formats up to {FORMAT}. Update the package."
        )


def progress_of(table: Mapping[str, Any]) -> Progress:
    """Return the counters of a checkpoint; in a file of others that has but a few the epoch counts as ended."""
    progress = Progress()
    if "progress" in table:
        progress.load_state_dict(table["progress"])
    else:
        progress.step, progress.epoch = int(table.get("global_step", 0)), int(table.get("epoch", 0))
        progress.epoch_ended = progress.step > 0
    return progress


def restore_module(
    module: torch.nn.Module, table: Mapping[str, Any], strict: bool = True, load: Callable[..., Any] | None = None
) -> None:
    """Load the weights of a checkpoint, whatever wrapper its keys name, through `load(module, weights, strict=)`."""
    weights = strip_prefixes(table["state_dict"], module.state_dict())
    if load is None:
        module.load_state_dict(weights, strict=strict)
    else:
        load(module, weights, strict=strict)


def callback_keys(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return state key -> callback; a key used twice gets a number, in the callbacks' order."""
    keys: dict[str, Any] = {}
    for callback in callbacks:
        key, n = callback.state_key, 1
        while key in keys:
            n += 1
            key = f"{callback.state_key}#{n}"
        keys[key] = callback
    return keys


def restore_callbacks(callbacks: Sequence[Any], table: Mapping[str, Any]) -> list[str]:
    """Give each callback the state that was saved under its key; return the keys of states that nobody took."""
    saved = table.get("callbacks") or {}
    keys = callback_keys(callbacks)
    for key, callback in keys.items():
        if key in saved:
            callback.load_state_dict(saved[key])
    return [key for key in saved if key not in keys]


def restore_training(
    table: Mapping[str, Any], load_optimizers: Sequence[Callable[[Any], None]], schedulers: Sequence[Any], precision: Any
) -> None:
    """Load the states of optimizers (each through a function that takes its state), schedulers and precision.

    Raises:
        CheckpointError: when the file holds weights alone, another number of optimizers or schedulers, or an optimizer of other
            parameters.
    """
    if "optimizer_states" not in table:
        raise CheckpointError(
            "This checkpoint holds weights alone, so training cannot be resumed from it exactly. Save with weights_only=False "
            "(ModelCheckpoint(save_weights_only=False)), or load the weights with load_from_checkpoint and start a new fit."
        )
    for word, loads, states in (
        ("optimizer", load_optimizers, table["optimizer_states"]),
        ("scheduler", [scheduler.load_state_dict for scheduler in schedulers], table.get("lr_schedulers", [])),
    ):
        if len(loads) != len(states):
            raise CheckpointError(f"configure_optimizers made {len(loads)} {word}(s), but the checkpoint holds {len(states)}.")
        for number, (load, state) in enumerate(zip(loads, states, strict=True)):
            try:
                load(state)
            except TrainerError:  # a strategy's own, which says what to do
                raise
            except ValueError as error:  # of the optimizer, which knows no file
                raise CheckpointError(
                    f"The checkpoint's {word} {number} is not the one that configure_optimizers made: {error}. To train other parameters, "
                    "load the weights with load_from_checkpoint(path, strict=False) and start a new fit."
                ) from error
    precision.load_state_dict(table.get("precision") or {})
