"""What is in a checkpoint, as text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import checksum, io
from trainer.checkpoint.files import damage
from trainer.checkpoint.unpickled import Tensor, outline
from trainer.errors import CheckpointError

__all__ = ["describe"]

_SHOWN = 70  # characters of a value
_DEEPEST = 100  # levels of containers within each other that are looked into
_TOLD = {
    "state_dict", "optimizer_states", "lr_schedulers", "callbacks", "hyper_parameters", "datamodule_hyper_parameters", "parts", "format", "epoch",
    "global_step", "seed", "ranks", "pytorch-lightning_version",
}  # fmt: skip


def describe(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return (text, whether the file is whole). Nothing that the file holds is run.

    Raises:
        CheckpointError: there is no such file, or it is no checkpoint; the message names it.
    """
    path = Path(path)
    if not os.path.lexists(path):
        raise CheckpointError(f"There is no {path}.")
    trouble = damage(path)
    if trouble is not None:
        return f"{path}\n  checksum    DAMAGED: {trouble}", False
    file = path / io.TABLE if path.is_dir() else path
    table = outline(file)
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(table).__name__}, not a dictionary.")
    has_checksum = checksum.has_checksum(file)
    lines = [str(path), *_head(path, table, has_checksum), *_parts(table)]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines), True  # a file must not steer the terminal


def _head(path: Path, table: Mapping[Any, Any], has_checksum: bool) -> Iterator[str]:
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    facts = {
        "kind": _kind(table),
        "checksum": "ok" if has_checksum else "none: another program wrote the file",
        "size": _size(sum(file.stat().st_size for file in files)) + (f" in {len(files)} files" if path.is_dir() else ""),
        "global_step": table.get("global_step"),
        "epoch": table.get("epoch"),
        "seed": table.get("seed"),
        "ranks": len(table["ranks"]) if table.get("ranks") else None,
    }
    yield from (f"  {name:<11} {value}" for name, value in facts.items() if value is not None)


def _kind(table: Mapping[Any, Any]) -> str:
    if "format" in table:
        resumable = "optimizer_states" in table
        return f"checkpoint, format {table['format']}" + ("" if resumable else ", weights only (cannot be resumed from)")
    if "pytorch-lightning_version" in table:
        return f"checkpoint by Lightning {table['pytorch-lightning_version']}"
    return "dictionary written by torch.save"


def _parts(table: Mapping[Any, Any]) -> Iterator[str]:
    for title, key in (("hyper-parameters", "hyper_parameters"), ("hyper-parameters of the data module", "datamodule_hyper_parameters")):
        if table.get(key):
            yield from ("", title, *_items(table[key]))
    weights = dict(_tensors(table["state_dict"] if "state_dict" in table else table))
    if weights:
        yield from ("", f"weights: {_sum(weights)}", *_rows(weights))
    for number, state in enumerate(table.get("optimizer_states") or []):
        groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
        rates = ", ".join(str(group.get("lr")) for group in groups if isinstance(group, Mapping))
        yield from ("", f"optimizer {number}: {_sum(dict(_tensors(state)))}; lr {rates}")
    for number, state in enumerate(table.get("lr_schedulers") or []):
        yield f"scheduler {number}: {_value(state)}"
    if table.get("callbacks"):
        yield from ("", "callbacks", *_items(table["callbacks"]))
    rest = {key: value for key, value in table.items() if key not in _TOLD and "state_dict" in table}
    if rest:
        yield from ("", "besides", *_items(rest))


def _items(value: Any) -> list[str]:
    return [f"  {name}: {_value(item)}" for name, item in value.items()] if isinstance(value, Mapping) else [f"  {_value(value)}"]


def _tensors(value: Any, name: str = "", depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in containers, each container once: one may hold itself, or thousands of times the same one."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen and depth < _DEEPEST:
        seen.add(id(value))
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in inner:
            yield from _tensors(item, f"{name}.{key}" if name else str(key), depth + 1, seen)


def _rows(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    cells = [(name, "x".join(map(str, t.shape)) or "number", t.dtype, _size(t.bytes)) for name, t in tensors.items()]
    wide = [max(len(row[i]) for row in cells) for i in range(4)]
    yield from (f"  {row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]:<{wide[2]}}  {row[3]:>{wide[3]}}" for row in cells)


def _sum(tensors: Mapping[str, Tensor]) -> str:
    found = tensors.values()
    return f"{len(tensors)} tensors, {sum(t.numbers for t in found):,} numbers, {_size(sum(t.bytes for t in found))}"


def _value(value: Any, depth: int = 0) -> str:
    if isinstance(value, Tensor):
        return f"tensor {'x'.join(map(str, value.shape)) or 'of one number'} {value.dtype}"
    if isinstance(value, (Mapping, list, tuple)) and depth == _DEEPEST:
        text = "..."
    elif isinstance(value, Mapping):
        text = "{" + _joined(f"{key}: {_value(item, depth + 1)}" for key, item in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + _joined(_value(item, depth + 1) for item in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."


def _joined(texts: Iterator[str]) -> str:
    """Join as many as are shown, and ask for no more."""
    text = ""
    for item in texts:
        text += f", {item}" if text else item
        if len(text) >= _SHOWN:
            break
    return text


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
