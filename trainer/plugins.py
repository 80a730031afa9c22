"""Plug-ins: objects that installed packages offer by name, as entry points. Looked up only for names that are not built in."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from trainer.errors import MisconfigurationException, nearest

__all__ = ["make"]


def make(
    group: str, argument: str, name: str, kind: type | tuple[type, ...], built_in: Iterable[str] = (), instead: Mapping[str, str] | None = None
) -> Any:
    """Return what the plug-in `name` of the entry-point group `trainer.<group>` makes: the result of calling the entry, an object of `kind`.

    Args:
        group: "strategies", "accelerators", "loggers", "checkpoint_io" or "callbacks".
        argument: what the user wrote, for messages: "strategy", ...
        built_in: names that are not to be looked for here. A plug-in of such a name is passed over, with a warning.
        instead: what to use in the place of a name that Lightning had, where no plug-in offers it.

    Raises:
        MisconfigurationException: nobody offers the name, several packages do, or the one that does cannot be loaded or makes something else.
    """
    built_in = list(built_in)
    found = list(metadata.entry_points(group=f"trainer.{group}"))
    for entry in found:
        if entry.name in built_in:
            warnings.warn(f"{_package(entry)} offers {argument}={entry.name!r}, a name that is built in; its own is not used.", stacklevel=2)
    mine = list({entry.value: entry for entry in found if entry.name == name}.values())  # a path listed twice gives an entry twice
    if not mine and instead and name in instead:
        raise MisconfigurationException(f"{argument}={name!r} is not here: use {instead[name]}.")
    if not mine:
        offered = sorted({entry.name for entry in found} - set(built_in))
        names = ", ".join([*built_in, *(f"{other} (plug-in)" for other in offered)])
        raise MisconfigurationException(
            f"{argument}={name!r} is unknown.{nearest(name, [*built_in, *offered])} Choose one of {names or 'none: no plug-in is installed'}, "
            "or give an object."
        )
    if len(mine) > 1:
        raise MisconfigurationException(f"{argument}={name!r} is offered by {' and by '.join(map(_package, mine))}; uninstall one, or give an object.")
    try:
        made = mine[0].load()()
    except Exception as error:
        raise MisconfigurationException(f"{argument}={name!r} of {_package(mine[0])} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, kind):
        wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise MisconfigurationException(f"{argument}={name!r} of {_package(mine[0])} made a {type(made).__name__}, not a {wanted}.")
    return made


def _package(entry: metadata.EntryPoint) -> str:
    origin = f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package"
    return f"{origin} ({entry.value})"
