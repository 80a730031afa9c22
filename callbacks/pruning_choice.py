"""What ModelPruning is asked for: the method of torch.nn.utils.prune, the amount, and the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn import Module, Parameter
from torch.nn.utils import prune

from callbacks.errors import MisconfigurationException, nearest

__all__ = ["check_amount", "check_names", "method", "pairs"]

Pairs = Sequence[tuple[Module, str]]

NAMES = ("weight", "bias")

_METHODS = {
    "ln_structured": (prune.LnStructured, prune.ln_structured),
    "l1_unstructured": (prune.L1Unstructured, prune.l1_unstructured),
    "random_structured": (prune.RandomStructured, prune.random_structured),
    "random_unstructured": (prune.RandomUnstructured, prune.random_unstructured),
}


def method(wanted: Any, together: bool, dim: int | None, norm: int | None) -> tuple[Any, Callable[[Pairs, Any], None]]:
    """Return torch's class or function, and `f(pairs, amount)` that prunes with it, all parameters `together` or each by itself.

    Raises:
        MisconfigurationException: for what is no method, and one that needs other arguments.
    """
    if isinstance(wanted, str) and wanted.lower() in _METHODS:
        found, function = _METHODS[wanted.lower()]
    elif isinstance(wanted, type) and issubclass(wanted, prune.BasePruningMethod):
        found = function = wanted
        if not together:
            raise MisconfigurationException(f"ModelPruning({wanted.__name__}): a class needs use_global_unstructured=True.")
    else:
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={wanted!r}): expected one of {', '.join(_METHODS)}, or a class (no object of it) of the kind "
            f"torch.nn.utils.prune.BasePruningMethod.{nearest(str(wanted), _METHODS)}"
        )
    if together:
        if found.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(f"ModelPruning({wanted!r}) prunes slices of each parameter: set use_global_unstructured=False.")
        return found, partial(_prune_together, found)
    options = {"dim": (dim, "pruning_dim"), "n": (norm, "pruning_norm")}
    options = {name: options[name] for name in inspect.signature(function).parameters if name in options}
    for value, argument in options.values():
        if value is None:
            raise MisconfigurationException(f"ModelPruning({wanted!r}) needs {argument}.")
    return function, partial(_prune_each, function, {name: value for name, (value, _) in options.items()})


def _prune_together(found: Any, layers: Pairs, amount: Any) -> None:
    takes = inspect.signature(found).parameters
    prune.global_unstructured(layers, found, **({"amount": amount} if "amount" in takes else {}))


def _prune_each(function: Any, options: dict[str, Any], layers: Pairs, amount: Any) -> None:
    for layer, name in layers:
        function(layer, name, amount=amount, **options)


def check_amount(amount: Any) -> Any:
    """Return the amount if it is one.

    Raises:
        MisconfigurationException: otherwise.
    """
    whole = isinstance(amount, int) and not isinstance(amount, bool)
    if not (whole and amount >= 0) and not (isinstance(amount, float) and 0.0 <= amount <= 1.0):
        raise MisconfigurationException(
            f"ModelPruning(amount={amount!r}): expected a part from 0.0 to 1.0, a whole number of values, or a function of the epoch that returns one."
        )
    return amount


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if all are "weight" or "bias".

    Raises:
        MisconfigurationException: otherwise.
    """
    if not set(names) <= set(NAMES):
        raise MisconfigurationException(
            f"ModelPruning(parameter_names={list(names)!r}): expected 'weight', 'bias' or both; others are given as parameters_to_prune=[(layer, name)]."
        )
    return tuple(names)


def pairs(module: Module, parameters_to_prune: Pairs = (), parameter_names: Sequence[str] = NAMES) -> Pairs:
    """Return pairs (layer, name of a parameter): those given, or all of the module's layers with these names.

    Raises:
        MisconfigurationException: for what is no such pair, and for layers and parameters that the module does not have.
    """
    uncalled = [module, *(layer.out_proj for layer in module.modules() if isinstance(layer, nn.MultiheadAttention))]  # their parents read the weights
    if not parameters_to_prune:
        layers = [m for m in module.modules() if all(m is not one for one in uncalled) and not isinstance(m, nn.Sequential | nn.ModuleList | nn.ModuleDict)]
        return [(layer, name) for name in parameter_names for layer in layers if isinstance(getattr(layer, name, None), Parameter)]
    for pair in parameters_to_prune:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], Module) and isinstance(pair[1], str)):
            raise MisconfigurationException(f"ModelPruning(parameters_to_prune=...): {pair!r} is no pair (layer, name of its parameter).")
        layer, name = pair
        if all(layer is not own for own in module.modules()):
            raise MisconfigurationException(f"ModelPruning(parameters_to_prune=...): {layer!r} is no layer of the module that is trained.")
        if not isinstance(getattr(layer, name, None), Parameter):
            raise MisconfigurationException(f"ModelPruning(parameters_to_prune=...): {layer!r} has no parameter {name!r}.")
        if any(layer is one for one in uncalled):
            raise MisconfigurationException(
                f"ModelPruning(parameters_to_prune=...): {name!r} of {type(layer).__name__} cannot be pruned: masks work when a layer is called, which this is not."
            )
    return parameters_to_prune
