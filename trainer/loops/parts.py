"""Cutting a batch into parts along its samples, and telling an error of memory from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["cut", "is_out_of_memory", "samples_in"]

_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")  # cuda, mps; the CPU's allocators; cuBLAS


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's OutOfMemoryError, and for a RuntimeError whose text says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)
    )


def samples_in(batch: Any) -> int | None:
    """Return the number of samples: dimension 0 of the tensors in `batch`; None where they differ or there are none."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into parts of `sizes` samples, which together are what `samples_in` counts.

    Tensors may lie in nested lists, tuples and dicts. A list without tensors that has an entry a sample (names, say) is cut as well;
    what is neither is in every part, and so is a tensor without dimensions.
    """
    count = sum(sizes)
    leaves, spec = tree_flatten(batch, is_leaf=lambda node: _is_column(node, count))
    pieces = [_cut(leaf, sizes, count) for leaf in leaves]
    return [tree_unflatten([piece[i] for piece in pieces], spec) for i in range(len(sizes))]


def _is_column(node: Any, count: int) -> bool:
    return type(node) in (list, tuple) and len(node) == count and not any(isinstance(x, torch.Tensor) for x in tree_leaves(list(node)))


def _cut(leaf: Any, sizes: Sequence[int], count: int) -> Sequence[Any]:
    if isinstance(leaf, torch.Tensor):
        return leaf.split(list(sizes)) if leaf.ndim else [leaf] * len(sizes)
    if not _is_column(leaf, count):
        return [leaf] * len(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [leaf[start : start + size] for start, size in zip(starts, sizes, strict=True)]
