"""State-dict keys of wrapped models: what DistributedDataParallel, DataParallel and torch.compile put into them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["plain_keys", "strip_prefixes"]

_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel and DataParallel; torch.compile
_ATTRIBUTE = "model."  # a module that only holds the network often calls it so


def strip_prefixes(state_dict: Mapping[str, Any], own_keys: Iterable[str]) -> dict[str, Any]:
    """Return `state_dict` with its keys matched to a module's `own_keys`, wherever only wrapper names differ.

    Files written from a wrapped model carry `module.` (DDP, DataParallel) or `_orig_mod.` (torch.compile) in their keys.
    They are taken out, or put in, where that and nothing else makes a key of the module; other keys stay as they are. So is `model.`,
    where all keys carry it and none fits with it.
    """
    own = set(own_keys)
    names = {key: key for key in state_dict}
    if names and not own & set(names) and all(key.startswith(_ATTRIBUTE) for key in names):  # the attribute of somebody's module
        inner = {key: key.removeprefix(_ATTRIBUTE) for key in names}
        if {_unwrapped(key) for key in own} & {_unwrapped(key) for key in inner.values()}:
            names = inner
    for prefix in _common_prefixes(names):
        if all(key.startswith(prefix) for key in own):
            break
        names = {key: name.removeprefix(prefix) for key, name in names.items()}
    bare = Counter(_unwrapped(key) for key in own)
    match = {_unwrapped(key): key for key in own if bare[_unwrapped(key)] == 1}
    names = {key: name if name in own else match.get(_unwrapped(name), name) for key, name in names.items()}
    if len(set(names.values())) < len(names):  # two keys would become one: nothing is better than a loss
        names = {key: key for key in state_dict}
    renamed = OrderedDict((names[key], value) for key, value in state_dict.items())
    versions = getattr(state_dict, "_metadata", None)  # by layer name; load_state_dict reads the version of the format there
    if versions is not None:
        layers = {key.rpartition(".")[0]: name.rpartition(".")[0] for key, name in names.items()}
        renamed._metadata = {layers.get(layer, layer): version for layer, version in versions.items()}
    return renamed


def plain_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state_dict` without the names that torch.compile puts into the keys of compiled layers."""
    return {key.replace("_orig_mod.", ""): value for key, value in state_dict.items()}


def _common_prefixes(keys: Iterable[str]) -> list[str]:
    """The wrapper prefixes that every key starts with, outermost first: module._orig_mod.x -> [module., _orig_mod.]."""
    heads = [key.split(".")[:-1] for key in keys]
    prefixes = []
    for parts in zip(*heads):
        if len(set(parts)) > 1 or parts[0] not in _WRAPPERS:
            break
        prefixes.append(f"{parts[0]}.")
    return prefixes


def _unwrapped(key: str) -> str:
    *layers, name = key.split(".")
    return ".".join([*(layer for layer in layers if layer not in _WRAPPERS), name])
