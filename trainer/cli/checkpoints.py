"""What a checkpoint knows of the command line: the arguments of the model, also those that are objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer.checkpoint import find, io, state
from trainer.errors import CheckpointError
from trainer.hparams import CLASS_PATH, add_hparams

__all__ = ["remember", "saved_arguments"]


def remember(owner: Any, configured: dict[str, Any]) -> None:
    """Put the configuration of arguments that no file can hold into the owner's hyper-parameters, in the place of the objects.

    Args:
        owner: a module or data module; without hyper-parameters nothing happens.
        configured: its arguments, or "class_path" and "init_args".
    """
    named = "class_path" in configured
    arguments = {**(configured.get("init_args") or {}), **(configured.get("dict_kwargs") or {})} if named else configured
    objects = [name for name, value in owner.hparams.items() if name in arguments and not _is_plain(value)]
    if not owner.hparams or not (objects or named):
        return
    cls = type(owner)
    path = configured["class_path"] if named else f"{cls.__module__}.{cls.__qualname__}"
    add_hparams(owner, {CLASS_PATH: path, **{name: arguments[name] for name in objects}})


def _is_plain(value: Any) -> bool:
    try:
        io.check_plain(io.plain(value))
    except CheckpointError:
        return False
    return True


def saved_arguments(path: str | os.PathLike[str] | None, weights_only: bool) -> dict[str, Any]:
    """Return the hyper-parameters of a checkpoint; of None, none.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    found = find.resolve(path, (), ())
    if found is None:
        return {}
    file = Path(found, io.TABLE) if os.path.isdir(found) else found
    return dict(io.load(file, weights_only=weights_only).get(state.HPARAMS, {}))
