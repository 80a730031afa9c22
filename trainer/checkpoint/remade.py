"""Modules and data modules made again from a checkpoint: `load_from_checkpoint`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import files, foreign, state
from trainer.checkpoint.keys import strip_prefixes
from trainer.hparams import class_only, made_again, read_hparams

__all__ = ["DataFromCheckpoint", "ModuleFromCheckpoint"]


class ModuleFromCheckpoint:
    """A part of `TrainModule`."""

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = "cpu",
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = True,
        **overrides: Any,
    ) -> Any:
        """Return a new module with the weights, and constructed with the hyper-parameters, of a checkpoint file.

        Args:
            checkpoint_path: the file.
            map_location: where tensors go, as in `torch.load`, and the module with them; None for where they were.
            hparams_file: a YAML or JSON-like file of hyper-parameters that replaces those in the checkpoint.
            strict: refuse missing and unexpected keys; default the module's `strict_loading`.
            weights_only: load only tensors and plain values (safe for files of strangers).
            overrides: arguments of `__init__` that replace the saved ones. Saved ones that it does not take are left out.

        Raises:
            CheckpointError: when the file is missing, damaged or unsafe.
            RuntimeError: when keys do not match and `strict` holds.
            TypeError: called on an object.
        """
        table = foreign.adopt(files.load(checkpoint_path, map_location=map_location, weights_only=weights_only is not False))
        state.check_format(table, checkpoint_path)
        saved = read_hparams(hparams_file) if hparams_file is not None else table.get(state.HPARAMS, {})
        saved = foreign.named_hparams(table, saved, inspect.signature(cls.__init__).parameters)
        module = made_again(cls, saved, overrides)
        module.on_load_checkpoint(table)
        module.configure_model()
        strict = module.strict_loading if strict is None else strict
        weights = strip_prefixes(table["state_dict"], module.state_dict())
        module.load_state_dict(weights, strict=strict)
        place = next((t.device for t in weights.values() if isinstance(t, torch.Tensor)), None)
        return module if place is None or place.type == "cpu" else module.to(place)


class DataFromCheckpoint:
    """A part of `DataModule`."""

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = "cpu",
        hparams_file: str | Path | None = None,
        weights_only: bool | None = True,
        **overrides: Any,
    ) -> Any:
        """Return a data module constructed with the hyper-parameters, and given the state, that a checkpoint holds for it.

        Args:
            hparams_file: a YAML file of hyper-parameters that replaces those in the checkpoint.
            overrides: arguments of `__init__` that replace the saved ones.

        Raises:
            CheckpointError: when the file is missing, damaged or unsafe.
            TypeError: called on an object.
        """
        table = files.load(checkpoint_path, map_location=map_location, weights_only=weights_only is not False)
        saved = read_hparams(hparams_file) if hparams_file is not None else table.get(state.DATA_HPARAMS, {})
        module = made_again(cls, saved, overrides)
        if table.get(cls.__qualname__):
            module.load_state_dict(table[cls.__qualname__])
        return module
