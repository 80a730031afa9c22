"""Freezing and unfreezing layers, and giving an optimizer those that are trained from now on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch.nn import Module, ModuleDict, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

__all__ = ["filter_on_optimizer", "filter_params", "flatten_modules", "freeze", "freeze_module", "make_trainable", "unfreeze_and_add_param_group"]


def flatten_modules(modules: Module | Iterable[Any]) -> list[Module]:
    """Return the modules inside that hold parameters themselves or have no children, also of nested lists."""
    if isinstance(modules, ModuleDict):
        modules = modules.values()
    if isinstance(modules, Iterable):
        found = [inner for one in modules for inner in flatten_modules(one)]
    else:
        found = list(modules.modules())
    return list(dict.fromkeys(m for m in found if m._parameters or not any(m.children())))


def filter_params(modules: Module | Iterable[Any], train_bn: bool = True, requires_grad: bool = True) -> Iterator[Parameter]:
    """Yield the parameters that are trainable (or, with `requires_grad=False`, frozen); without BatchNorm's if not `train_bn`."""
    for module in flatten_modules(modules):
        if train_bn or not isinstance(module, _BatchNorm):
            yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)


def make_trainable(modules: Module | Iterable[Any]) -> None:
    """Unfreeze all parameters, and let BatchNorm layers follow their statistics again."""
    for module in flatten_modules(modules):
        _set(module, True)


def freeze_module(module: Module) -> None:
    """Freeze the parameters that the module holds itself; a BatchNorm layer keeps its statistics as they are."""
    _set(module, False)


def freeze(modules: Module | Iterable[Any], train_bn: bool = True) -> None:
    """Freeze all parameters, but with `train_bn` not those of BatchNorm layers."""
    for module in flatten_modules(modules):
        _set(module, train_bn and isinstance(module, _BatchNorm))


def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that the optimizer does not have yet; warn of the others."""
    known, given = _ids(optimizer), list(params)
    new = [p for p in given if id(p) not in known]
    if len(new) < len(given):
        warnings.warn(
            f"{len(given) - len(new)} of the parameters are in the optimizer already, with the learning rate of their group. Give it in "
            "configure_optimizers only those that are trained at first: (p for p in self.parameters() if p.requires_grad).",
            stacklevel=3,
        )
    return new


def unfreeze_and_add_param_group(
    modules: Module | Iterable[Any], optimizer: Optimizer, lr: float | None = None, initial_denom_lr: float = 10.0, train_bn: bool = True
) -> None:
    """Unfreeze modules and give their parameters to the optimizer, as a group of their own.

    Args:
        lr: its learning rate; None for that of the first group divided by `initial_denom_lr`.
        train_bn: also the parameters of BatchNorm layers.
    """
    idle = {id(p) for p in filter_params(modules, train_bn, requires_grad=False)}
    known = _ids(optimizer)
    make_trainable(modules)
    params = filter_on_optimizer(optimizer, (p for p in filter_params(modules, train_bn) if id(p) in idle or id(p) not in known))
    if params:
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        optimizer.add_param_group({"params": params, "lr": rate})


def batchnorms(module: Module) -> list[tuple[str, Module]]:
    """Return the BatchNorm layers of a module with their names."""
    return [(path, layer) for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)]


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _set(module: Module, trained: bool) -> None:
    if isinstance(module, _BatchNorm):
        module.track_running_stats = trained
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trained
