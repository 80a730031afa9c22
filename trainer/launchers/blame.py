"""Which part of a task keeps it from being pickled: looked for only once it is known that there is one."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["culprit"]

_DEEPEST = 12  # parts within parts; further in, the name of the way there helps nobody


def culprit(value: Any, fails: Callable[[Any], bool]) -> str:
    """Return the way from `value` to the innermost part that `fails`, as one would write it in Python; "" for `value` itself."""
    path, seen = "", {id(value)}
    for _ in range(_DEEPEST):
        for name, part in _parts(value):
            if id(part) not in seen and fails(part):
                seen.add(id(part))
                path, value = path + name, part
                break
        else:
            break
    return path.removeprefix(".")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `value` holds and pickle would visit, each with how one gets there."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"{'.' if name.isidentifier() else ''}{name}", cell.cell_contents
    else:
        state = value.__getstate__() if hasattr(value, "__getstate__") else getattr(value, "__dict__", None)
        for part in state if isinstance(state, tuple) else (state,):  # with slots: (attributes, slots)
            if isinstance(part, dict):
                yield from _attributes(part)


def _attributes(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield attributes, public ones first; the parts of a torch module under their own names."""
    modules = state.get("_modules")
    for name in sorted(state, key=lambda name: str(name).startswith("_")):
        if name != "_modules" or not isinstance(modules, dict):
            yield f".{name}", state[name]
    if isinstance(modules, dict):
        yield from ((f".{name}", part) for name, part in modules.items())
