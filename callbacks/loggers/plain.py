"""Hyper-parameters as text: nested values flattened for tables, and a YAML writer for plain values (so that PyYAML is no requirement)."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

_SAFE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_YAML_WORDS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}


def as_dict(params: Any) -> dict[str, Any]:
    """Return `params` (a mapping, a namespace or None) as a dict with string keys."""
    if params is None:
        return {}
    items = params if isinstance(params, Mapping) else vars(params)
    return {str(key): value for key, value in items.items()}


def flatten(params: Any, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested mappings as one dict with "outer/inner" keys; what is no bool, number or string becomes its str()."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in as_dict(params).items():
        if isinstance(value, Mapping) or type(value).__name__ == "Namespace":
            flat.update(flatten(value, f"{prefix}{key}/"))
        elif isinstance(value, bool | int | float | str):
            flat[prefix + key] = value
        else:
            flat[prefix + key] = str(value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value)
    return flat


def to_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Return block-style YAML. Mappings nest, lists are written in one line, objects as their str() in quotes."""
    lines = []
    for key, item in as_dict(value).items():
        name = key if _SAFE_KEY.fullmatch(key) and key.lower() not in _YAML_WORDS else json.dumps(key, ensure_ascii=False)
        if isinstance(item, Mapping) and item:
            lines.append(f"{indent}{name}:\n{to_yaml(item, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {_inline(item)}\n")
    return "".join(lines)


def _inline(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _number(float(value))
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k), ensure_ascii=False)}: {_inline(v)}" for k, v in value.items()) + "}"
    return json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else str(value), ensure_ascii=False)


def _number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 takes "1e-05" for a string; a number needs the point
    return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text
