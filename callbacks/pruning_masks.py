"""Masks of torch.nn.utils.prune on the layers of a module: finding them, putting them on and taking them off again.

A pruned layer holds `weight_orig` (the very Parameter that `weight` was, so optimizers do not notice), the buffer `weight_mask`, and a hook
that sets `weight` to their product ahead of each forward. Here parameters keep their place among those of the layer, since optimizer
states are kept by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.utils import prune

__all__ = ["freshen", "masks", "named_parameters", "order_kept", "plain_state", "pruned", "put_on", "take_off", "values_behind"]

_ORIG, _MASK = "_orig", "_mask"


def pruned(module: Module) -> Iterator[tuple[str, Module, str]]:
    """Yield (name in the module, layer, name in the layer) of every pruned parameter."""
    for path, layer in module.named_modules():
        for buffer in list(layer._buffers):
            name = buffer.removesuffix(_MASK)
            if name != buffer and name + _ORIG in layer._parameters:
                yield f"{path}.{name}".lstrip("."), layer, name


def masks(module: Module) -> dict[str, torch.Tensor]:
    """Return what is kept (True) of each pruned parameter, on the CPU."""
    return {path: getattr(layer, name + _MASK).bool().cpu() for path, layer, name in pruned(module)}


def values_behind(module: Module) -> dict[str, torch.Tensor]:
    """Return the values that the masks hide, as one vector a parameter, on the CPU. Optimizers that look at whole tensors still see them."""
    return {path: getattr(layer, name + _ORIG).detach()[getattr(layer, name + _MASK) == 0].cpu() for path, layer, name in pruned(module)}


def named_parameters(module: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters with the names that they have without masks."""
    known = {path + _ORIG: path for path, _, _ in pruned(module)}
    return ((known.get(name, name), parameter) for name, parameter in module.named_parameters())


def put_on(layer: Module, name: str, mask: torch.Tensor) -> None:
    """Prune the parameter `name` of a layer that is not pruned yet by this mask."""
    with order_kept(layer), torch.no_grad():
        prune.custom_from_mask(layer, name, mask.to(getattr(layer, name).device))


def take_off(module: Module, permanent: bool) -> None:
    """Make pruned parameters plain ones again; with `permanent` they are zero where the mask was, else they hold what was behind it."""
    for _, layer, name in list(pruned(module)):
        values = getattr(layer, name + _ORIG).detach().clone()
        with order_kept(layer), torch.no_grad():
            prune.remove(layer, name)
            if not permanent:
                getattr(layer, name).copy_(values)


def freshen(module: Module) -> dict[str, torch.Tensor]:
    """Set pruned weights to what the next forward will make of them; return those tensors. Ones without a graph can be copied and pickled."""
    with torch.no_grad():
        for _, layer, name in pruned(module):
            mask = getattr(layer, name + _MASK)
            setattr(layer, name, mask.to(getattr(layer, name + _ORIG).dtype) * getattr(layer, name + _ORIG))
    return {path: getattr(layer, name) for path, layer, name in pruned(module)}


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each pair `weight_orig`, `weight_mask` is one pruned `weight`."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if key.endswith(_MASK) and key.removesuffix(_MASK) + _ORIG in state:
            continue
        mask = state.get(key.removesuffix(_ORIG) + _MASK) if key.endswith(_ORIG) else None
        plain[key if mask is None else key.removesuffix(_ORIG)] = value if mask is None else mask.to(value.dtype) * value
    return plain


@contextmanager
def order_kept(*layers: Module) -> Iterator[None]:
    """The context in which parameters of layers are replaced by others, `weight` by `weight_orig` or back, which then take their places."""
    before = [{name.removesuffix(_ORIG): place for place, name in enumerate(layer._parameters)} for layer in layers]
    try:
        yield
    finally:
        for layer, places in zip(layers, before, strict=True):
            items = sorted(layer._parameters.items(), key=lambda item: places[item[0].removesuffix(_ORIG)])
            layer._parameters.clear()
            layer._parameters.update(items)
