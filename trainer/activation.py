"""Activation checkpointing: chosen layers keep their inputs only, and are computed again when backward needs what is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainer.errors import MisconfigurationException, nearest
from trainer.forwards import OwnForward, put_on

__all__ = ["checkpointed", "chosen", "keeps_statistics"]

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def checkpointed(root: torch.nn.Module, choice: Any) -> Callable[[], None]:
    """Checkpoint the activations of the layers that `choice` fits; return what undoes it.

    Raises:
        MisconfigurationException: when the choice fits no layer, or one that is never called.
    """
    return put_on(_CheckpointedForward(part) for part in chosen(root, choice).values())


def chosen(root: torch.nn.Module, choice: Any) -> dict[str, torch.nn.Module]:
    """Return the outermost layers that `choice` (classes, name patterns, or a function of name and layer) fits, by name.

    Raises:
        MisconfigurationException: when it fits none, with the names that are near; when it fits a list of layers.
    """
    found: dict[str, torch.nn.Module] = {}
    inside: set[int] = set()
    for name, part in root.named_modules():
        if name and id(part) not in inside and _fits(choice, name, part):
            if isinstance(part, _CONTAINERS):
                raise MisconfigurationException(
                    f"activation_checkpointing={choice!r} fits {name}, a {type(part).__name__}, which is never called. Choose its layers: "
                    f"'{name}.*'."
                )
            found[name] = part
            inside.update(id(m) for m in part.modules())
    if not found:
        raise MisconfigurationException(f"activation_checkpointing={_shown(choice)} fits no layer of {type(root).__name__}.{_near(root, choice)}")
    return found


def _fits(choice: Any, name: str, part: torch.nn.Module) -> bool:
    if not isinstance(choice, tuple):
        return bool(choice(name, part))
    return any(isinstance(part, one) if isinstance(one, type) else fnmatchcase(name, one) for one in choice)


def _shown(choice: Any) -> str:
    return repr([one.__name__ if isinstance(one, type) else one for one in choice]) if isinstance(choice, tuple) else repr(choice)


def _near(root: torch.nn.Module, choice: Any) -> str:
    names = [name for name, _ in root.named_modules() if name]
    kinds = sorted({type(part).__name__ for name, part in root.named_modules() if name})
    if not isinstance(choice, tuple):
        return f" Its layers: {', '.join(names[:10]) or 'none'}."
    hints = [nearest(one.__name__, kinds) if isinstance(one, type) else nearest(one, names) for one in choice]
    near = "".join(dict.fromkeys(hints))
    if any(isinstance(one, type) for one in choice):
        return f"{near} Its layers are of {', '.join(kinds[:10]) or 'no class'}."
    return f"{near} Its layers: {', '.join(names[:10]) or 'none'}."


def keeps_statistics(part: torch.nn.Module) -> bool:
    """True when a forward pass in train mode moves running statistics inside `part` (BatchNorm)."""
    return any(isinstance(m, _NormBase) and m.track_running_stats for m in part.modules())


class _CheckpointedForward(OwnForward):
    """A `forward` through torch.utils.checkpoint wherever gradients are computed. Random draws are repeated; statistics move once."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._statistics = keeps_statistics(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain()(*args, **kwargs)
        if self._statistics and not torch.compiler.is_compiling():  # in a graph they move once as it is
            kwargs["context_fn"] = self._contexts
        return checkpoint(self.plain(), *args, use_reentrant=False, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What the first and the second computation run in."""
        return nullcontext(), _statistics_kept(self.module)


@contextmanager
def _statistics_kept(part: torch.nn.Module) -> Iterator[None]:
    """Let running statistics move in copies: the layers hold what they held before when the block ends."""
    held = [(m, dict(m._buffers)) for m in part.modules() if isinstance(m, _NormBase)]
    for m, buffers in held:
        m._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for m, buffers in held:
            m._buffers.update(buffers)
