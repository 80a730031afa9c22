"""Which data sets cannot draw random numbers, so that seeding around every sample may be left out.

Only what can be shown counts: plain containers, and classes whose `__getitem__` calls nothing and only indexes attributes that
are plain containers of numbers or strings, like `return self.x[i], self.y[i]`.
"""

from __future__ import annotations

import dis
import types
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

__all__ = ["never_draws"]

_CONTAINERS = (list, tuple, range, torch.Tensor, TensorDataset)
_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.Tensor)
# Operations that call no code of a user's when they meet plain values. An operation that is not listed (a call, a global, a new
# Python version's own) proves nothing, and the data set is then seeded as any other.
_HARMLESS = frozenset(
    "RESUME NOP CACHE EXTENDED_ARG LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_CONST "
    "LOAD_SMALL_INT LOAD_ATTR STORE_FAST BINARY_SUBSCR BINARY_SLICE BINARY_OP BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_SLICE "
    "BUILD_CONST_KEY_MAP RETURN_VALUE RETURN_CONST BINARY_ADD BINARY_SUBTRACT BINARY_MULTIPLY BINARY_TRUE_DIVIDE "
    "BINARY_FLOOR_DIVIDE UNPACK_SEQUENCE".split()
)


def never_draws(dataset: Any) -> bool:
    """True when reading `dataset[i]` provably uses no random generator."""
    kind = type(dataset)
    if kind is Subset:
        return never_draws(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(never_draws, dataset.datasets))
    if kind in (list, tuple):
        return all(type(value) in _SCALARS or type(value) in (list, tuple, dict) for value in dataset)
    return kind in _CONTAINERS or _only_indexes(dataset)


def _only_indexes(dataset: Any) -> bool:
    """True when `__getitem__` is a plain function that indexes plain attributes of the instance and calls nothing."""
    kind = type(dataset)
    getter, many = getattr(kind, "__getitem__", None), getattr(kind, "__getitems__", None)
    if type(getter) is not types.FunctionType or many is not None or _looks_up(kind):
        return False
    code = getter.__code__
    if code.co_cellvars or code.co_freevars or code.co_flags & 0x20:  # closures and generators
        return False
    if any(step.opname not in _HARMLESS for step in dis.get_instructions(code)):
        return False
    values = getattr(dataset, "__dict__", {})
    return all(name in values and not hasattr(kind, name) and _plain(values[name]) for name in code.co_names)


def _looks_up(kind: type) -> bool:
    """True when reading an attribute may run code of the class (torch's own Dataset has such hooks, which are harmless)."""
    hook = getattr(kind, "__getattr__", None)
    foreign = hook is not None and not getattr(hook, "__module__", "").startswith("torch.")
    return foreign or kind.__getattribute__ is not object.__getattribute__


def _plain(value: Any) -> bool:
    """True for numbers, strings, tensors, numeric arrays, and lists, tuples and dicts of numbers, strings and tensors."""
    kind = type(value)
    if kind in _SCALARS or kind is range:
        return True
    if kind is dict:
        return all(type(v) in _SCALARS for v in value.values())
    if kind in (list, tuple):
        return all(type(v) in _SCALARS for v in value)
    return kind.__module__ == "numpy" and kind.__name__ in ("ndarray", "memmap") and value.dtype.kind in "biufcSU"
