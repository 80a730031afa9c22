"""What a program does that means something else here, or does not exist: told with the place and with what to write."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst

from callbacks import Callback
from trainer import config
from trainer.datamodule import DataModule
from trainer.errors import MisconfigurationException, nearest
from trainer.migrate import names
from trainer.migrate.idioms import class_in, limit_of
from trainer.migrate.source import Finding, Source
from trainer.module import TrainModule
from trainer.precision.plugins import canonical
from trainer.removed import (
    REMOVED,
    REMOVED_ARGUMENTS,
    REMOVED_ATTRIBUTES,
    REMOVED_EXPORTS,
    REMOVED_HOOKS,
    REMOVED_STRATEGY_ARGUMENTS,
)
from trainer.trainer import Trainer

__all__ = ["advise"]

_BASES: dict[str, type] = {"TrainModule": TrainModule, "DataModule": DataModule}
_REDUCTIONS = {"avg", *(f"{torch}{name}" for torch in ("", "torch.") for name in ("mean", "sum", "min", "max"))}
_COUNTS_STEPS = ("global_step", "max_steps", "min_steps", "every_n_train_steps", "log_every_n_steps", "val_check_interval")


def advise(source: Source) -> list[Finding]:
    """Return what to look at in a program, apart from names."""
    checks = (_trainers, _objects, _classes, _attributes, _calls, _strings, _manual)
    return [finding for check in checks for finding in check(source)]


# -- Trainer(...) ----------------------------------------------------------------------------------------------------------


def _trainers(source: Source) -> Iterator[Finding]:
    known = inspect.signature(Trainer.__init__).parameters
    for call in source.calls:
        path = source.lightning(call.func)
        if path is None or path[-1] != "Trainer" or path[0] == "fabric":
            continue
        given: dict[str, cst.BaseExpression] = {}
        for argument in call.args:
            if argument.keyword is None and not argument.star:
                yield Finding(source.start(argument), "Trainer takes keyword arguments only: give this one its name.")
            elif argument.keyword is not None:
                given[argument.keyword.value] = argument.value
                if argument.keyword.value not in known:
                    yield Finding(source.start(argument), _no_argument(argument.keyword.value, list(known)))
        for name, check in (("strategy", _strategy), ("precision", canonical), ("accelerator", _accelerator)):
            if isinstance(value := _literal(given.get(name)), str):
                try:
                    check(value)
                except MisconfigurationException as error:
                    yield Finding(source.start(given[name]), str(error))
        yield from _interval(source, given)


def _no_argument(name: str, known: list[str], owner: str = "Trainer", removed: dict[str, str] = REMOVED) -> str:
    instead = f" Use {removed[name]}." if name in removed else nearest(name, known)
    return f"{owner} has no argument {name!r}.{instead}"


def _objects(source: Source) -> Iterator[Finding]:
    """Arguments of callbacks, strategies and the rest that their counterparts do not have."""
    for call in source.calls:
        path = source.lightning(call.func)
        target = names.find(path) if path and not names.is_module(path) else None
        counterpart = names.counterpart(target) if target is not None else None
        if target is None or counterpart is None or counterpart is Trainer:
            continue
        try:
            known = inspect.signature(counterpart).parameters
        except (TypeError, ValueError):  # built-in
            continue
        removed = REMOVED_STRATEGY_ARGUMENTS if target.name.endswith("Strategy") else {}
        takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for argument in call.args:
            name = argument.keyword.value if argument.keyword is not None else ""
            if name and name not in known and (name in removed or not takes_all):
                yield Finding(source.start(argument), _no_argument(name, list(known), target.name, removed))
            elif not name and not argument.star and not known:
                yield Finding(source.start(argument), f"{target.name} takes no arguments.")


def _strategy(name: str) -> None:
    if name.startswith("deepspeed"):
        raise MisconfigurationException(f"strategy={name!r}: DeepSpeed is not supported. Use strategy='fsdp', or trainer.FSDPStrategy(...).")
    config.make_strategy(name, 2)


def _accelerator(name: str) -> None:
    if name in ("tpu", "xla", "ipu", "hpu"):
        raise MisconfigurationException(f"accelerator={name!r} is not supported: there are 'cpu', 'cuda' and 'mps'.")


def _interval(source: Source, given: dict[str, cst.BaseExpression]) -> Iterator[Finding]:
    """The one argument whose unit differs: batches in Lightning, optimizer steps here."""
    interval, window = given.get("val_check_interval"), given.get("accumulate_grad_batches")
    if interval is None or window is None:
        return
    n, k = _literal(interval, "?"), _literal(window, "?")
    if n is None or isinstance(n, float) or k in (1, None):
        return
    text = "val_check_interval counts optimizer steps, not batches: with accumulate_grad_batches "
    if isinstance(n, int) and isinstance(k, int):
        same = f"write {n // k} to validate as often as before" if n % k == 0 else f"{n} batches are no whole number of steps of {k} batches"
        text += f"{k}, {n} steps are {n * k} batches; {same}."
    else:
        text += "batches to a step, divide by it."
    yield Finding(source.start(interval), text)


# -- classes ---------------------------------------------------------------------------------------------------------------


def _classes(source: Source) -> Iterator[Finding]:
    known: dict[str, type] = {}
    for found in source.classes:
        bases = [known.get(source.code(base.value)) or _base(source.lightning(base.value)) for base in found.bases]
        base = next((b for b in bases if b is not None), None)
        if base is None:
            continue
        known[found.name.value] = base
        for part in found.body.body:
            if isinstance(part, cst.FunctionDef):
                yield from _method(source, part, base)


def _base(path: tuple[str, ...] | None) -> type | None:
    target = names.find(path) if path and not names.is_module(path) else None
    if target is None:
        return None
    if target.module == "callbacks" and (path or ("",))[0] != "loggers":
        return Callback
    return _BASES.get(target.name)


def _method(source: Source, method: cst.FunctionDef, base: type) -> Iterator[Finding]:
    name = method.name.value
    ours = getattr(base, name, None)
    places = [p for p in (*method.params.posonly_params, *method.params.params) if p.default is None]
    if name in REMOVED_HOOKS and ours is None:
        yield Finding(source.start(method.name), f"{name} is never called: use {REMOVED_HOOKS[name]}.")
    elif name.startswith("on_") and ours is None:
        hooks = [hook for hook in dir(base) if hook.startswith("on_")]
        yield Finding(source.start(method.name), f"{name} is no hook.{nearest(name, hooks)}")
    elif callable(ours) and not name.startswith("__") and _is_ours(ours):
        takes, wanted = list(inspect.signature(ours).parameters)[1:], [place.name.value for place in places[1:]]
        if len(wanted) > len(takes) or "dataloader_iter" in wanted:
            more = "".join(f" {one}: {REMOVED_ARGUMENTS[one]}." for one in wanted if one in REMOVED_ARGUMENTS)
            yield Finding(source.start(method.name), f"{name} takes ({', '.join(wanted)}), and is called with ({', '.join(takes)}).{more}")


def _is_ours(function: Callable[..., Any]) -> bool:
    return getattr(function, "__module__", "").partition(".")[0] in ("trainer", "callbacks")


def _manual(source: Source) -> Iterator[Finding]:
    """Steps are counted otherwise in manual optimization: told where the program counts them."""
    if not any(word in source.text for word in _COUNTS_STEPS):
        return
    for node in source.attributes:
        assigned = source.parents.get(node)
        if node.attr.value == "automatic_optimization" and isinstance(assigned, cst.AssignTarget):
            text = "In manual optimization global_step (max_steps, every_n_train_steps, ...) counts calls of training_step, not of optimizer.step()."
            yield Finding(source.start(node), text, by_hand=False)


# -- attributes, calls, strings --------------------------------------------------------------------------------------------


def _attributes(source: Source) -> Iterator[Finding]:
    for node in source.attributes:
        owner, name = source.code(node.value).rpartition(".")[2], node.attr.value
        if owner not in ("trainer", "Trainer"):
            continue
        if name in REMOVED_ATTRIBUTES and limit_of(source, node) is None:
            yield Finding(source.start(node), f"{owner}.{name} does not exist: use {REMOVED_ATTRIBUTES[name]}.")
        elif name.startswith("_") and not name.startswith("__") and not _is_file(source, node):
            yield Finding(source.start(node), f"{owner}.{name} is internal to Lightning and does not exist here.")


def _is_file(source: Source, node: cst.Attribute) -> bool:
    """True for a module of Lightning, whose name says trainer (pl.trainer._...)."""
    return source.lightning(node) is not None


def _calls(source: Source) -> Iterator[Finding]:
    for call in source.calls:
        if not isinstance(call.func, cst.Attribute):
            continue
        name, given = call.func.attr.value, {a.keyword.value: a for a in call.args if a.keyword is not None}
        if name in REMOVED_EXPORTS:
            yield Finding(source.start(call.func), f"TrainModule has no {name}: use {REMOVED_EXPORTS[name]}.")
        if name not in ("log", "log_dict") or not isinstance(call.func.value, cst.Name) or call.func.value.value not in ("self", "pl_module"):
            continue
        reduce = given.get("reduce_fx")
        if reduce is not None and _literal(reduce.value, source.code(reduce.value)) not in _REDUCTIONS:
            yield Finding(source.start(reduce), "reduce_fx is 'mean', 'sum', 'min' or 'max' here, no function.")
        if "sync_dist_group" in given:
            yield Finding(source.start(given["sync_dist_group"]), "There are no groups of ranks: leave sync_dist_group out.")


def _strings(source: Source) -> Iterator[Finding]:
    for node in source.strings:
        text = node.evaluated_value
        if not isinstance(text, str) or node in source.docstrings or class_in(source, node) is not None:
            continue
        if "lightning_logs" in text:
            yield Finding(source.start(node), 'The default folder is "runs" (runs/version_N/checkpoints), not "lightning_logs".')
        elif any(root in text for root in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")) and node not in source.annotations:
            yield Finding(source.start(node), f"{node.value} names Lightning; a string is not changed.")


def _literal(node: cst.BaseExpression | None, otherwise: Any = None) -> Any:
    """The value of a number or string as written."""
    if node is None:
        return None
    try:
        return ast.literal_eval(cst.Module([]).code_for_node(node))
    except (ValueError, SyntaxError):
        return otherwise
