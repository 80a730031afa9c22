"""The attribute that a search is about: of the module, the data module, or the hyper-parameters of either."""

from __future__ import annotations

from numbers import Real
from typing import Any

from trainer.errors import MisconfigurationException, nearest

__all__ = ["check_attribute", "set_attribute"]


def check_attribute(names: tuple[str, ...], module: Any, datamodule: Any, advice: str) -> str:
    """Return the first of `names` that can be set.

    Raises:
        MisconfigurationException: none can; the message names what looks like it, and says `advice`.
    """
    for name in names:
        if _holders(name, module, datamodule):
            return name
    owners = [type(owner).__name__ for owner in (module, datamodule) if owner is not None]
    numbers = {name for owner in (module, datamodule) if owner is not None for name in _numbers(owner)}
    hints = "".join(dict.fromkeys(nearest(name, numbers) for name in names))
    raise MisconfigurationException(
        f"{' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} no attribute {' or '.join(map(repr, names))} that could be set, and no such "
        f"hyper-parameter.{hints} {advice}"
    )


def set_attribute(name: str, module: Any, datamodule: Any, value: Any) -> None:
    """Set it wherever it is."""
    for holder in _holders(name, module, datamodule):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)


def _holders(name: str, module: Any, datamodule: Any) -> list[Any]:
    found: list[Any] = []
    for owner in (module, datamodule):
        if owner is None:
            continue
        kind = getattr(type(owner), name, None)
        if hasattr(owner, name) and not callable(kind) and not (isinstance(kind, property) and kind.fset is None):
            found.append(owner)
        if name in owner.hparams:
            found.append(owner.hparams)
    return found


def _numbers(owner: Any) -> list[str]:
    names = {**vars(owner), **owner.hparams}
    return [str(name) for name, value in names.items() if isinstance(value, Real) and not isinstance(value, bool) and not str(name).startswith("_")]
