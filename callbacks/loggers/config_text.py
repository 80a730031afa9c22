"""A run's configuration as markdown, to be read beside its curves."""

from __future__ import annotations

import platform
from typing import Any

import torch

from callbacks.loggers.plain import to_yaml

__all__ = ["describe"]

_LONGEST = 20_000  # characters of a model's repr


def describe(trainer: Any, module: Any, hparams: dict[str, Any]) -> dict[str, str]:
    """Return name -> markdown: the trainer's settings, the hyper-parameters (where there are any) and the model."""
    rows = {
        "strategy": getattr(getattr(trainer, "strategy", None), "name", None),
        "precision": getattr(trainer, "precision", None),
        "processes": trainer.world_size,
        "callbacks": ", ".join(type(callback).__name__ for callback in trainer.callbacks),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **(vars(trainer.settings) if hasattr(trainer, "settings") else {}),
    }
    texts = {"trainer": _table(rows)}
    if hparams:
        texts["hyper_parameters"] = _block(to_yaml(hparams))
    if module is not None:
        count = sum(p.numel() for p in module.parameters())
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        text = repr(module)
        text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
        texts["model"] = f"{count:,} parameters, {trained:,} of them trained.\n\n{_block(text)}"
    return texts


def _table(rows: dict[str, Any]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _block(text: str) -> str:
    """Indented, as code: a fence could be closed by the text itself."""
    return "".join(f"    {line}\n" for line in text.splitlines())
