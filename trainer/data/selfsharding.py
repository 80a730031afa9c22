"""Who cuts data for ranks and workers: found out by reading the names in the code of a user's class.

There is no protocol by which a data set or sampler says that it gives each rank its own part. Those that do have to ask for the
rank or the worker somewhere, so the code that asks is taken as the answer. `shard=False` (`use_distributed_sampler=False`) says
it outright.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

__all__ = ["ranked_sampler", "shards_itself"]

_RANK_WORDS = frozenset({"get_rank", "get_world_size", "get_node_local_rank", "RANK", "WORLD_SIZE", "LOCAL_RANK"})
_WORKER_WORDS = frozenset({"get_worker_info"})


def ranked_sampler(sampler: Any) -> bool:
    """True for a sampler (or the one inside a batch sampler) that gives this rank its own part: a DistributedSampler or alike."""
    parts = [part for part in (sampler, getattr(sampler, "sampler", None)) if part is not None]
    alike = any(isinstance(p, DistributedSampler) or (hasattr(p, "rank") and hasattr(p, "num_replicas")) for p in parts)
    return alike or any(shards_itself(p)[0] for p in parts)


def shards_itself(thing: Any, *functions: Callable | None) -> tuple[bool, bool]:
    """Return (by rank, by worker): whether the code of `thing`'s class, of data sets it holds or of `functions` asks who it is."""
    words = set()
    for function in functions:
        words |= _words(function, 3)
    todo, seen = [thing], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for base in type(one).__mro__:
            if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing", "abc", "collections"):
                for member in vars(base).values():
                    words |= _words(member, 3)
        if isinstance(one, types.GeneratorType):
            words |= _code_words(one.gi_code)
        held = getattr(one, "__dict__", {}).values()
        todo += [h for h in held if isinstance(h, (IterableDataset, types.GeneratorType)) or hasattr(type(h), "__next__")]
    return bool(words & _RANK_WORDS), bool(words & _WORKER_WORDS)


def _words(member: Any, depth: int) -> set[str]:
    """Return the names and string constants in a function's code and in the plain functions it calls, `depth` levels down."""
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if not isinstance(member, types.FunctionType) or member.__module__.partition(".")[0] == "torch":
        return set()
    words = _code_words(member.__code__)
    if depth > 0:
        for name in list(words):
            called = member.__globals__.get(name)
            if isinstance(called, types.FunctionType) and called is not member:
                words |= _words(called, depth - 1)
    return words


def _code_words(code: types.CodeType) -> set[str]:
    words = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            words.add(constant)
        elif isinstance(constant, types.CodeType):
            words |= _code_words(constant)
    return words
