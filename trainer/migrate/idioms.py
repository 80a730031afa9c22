"""Ways of writing that programs for Lightning share, and that are written otherwise here."""

from __future__ import annotations

import libcst as cst

from trainer.migrate import names
from trainer.migrate.source import Edit, Finding, Source

__all__ = ["class_in", "idioms", "limit_of"]

_LIMITS = ("max_epochs", "max_steps", "current_epoch", "global_step")
_CLASS_KEYS = ("class_path", "_target_")


def idioms(source: Source) -> tuple[list[Edit], list[Finding]]:
    """Return the edits of all of them, and what could not be changed."""
    edits, findings = _toggles(source)
    return [*edits, *_limits(source), *_classes(source)], findings


def _toggles(source: Source) -> tuple[list[Edit], list[Finding]]:
    """Turn `with optimizer.toggle_model():` in a method into `with self.toggled_optimizer(optimizer):`."""
    edits, findings = [], []
    for call in source.calls:
        func = call.func
        if not (isinstance(func, cst.Attribute) and func.attr.value == "toggle_model"):
            continue
        owner = _first_parameter(source, call)
        syncs = [source.code(argument.value) for argument in call.args] in ([], ["True"])  # sync_grad, its default
        if owner and syncs and isinstance(func.value, (cst.Name, cst.Attribute)):
            edits.append(Edit(source.start(call), source.end(call), f"{owner}.toggled_optimizer({source.code(func.value)})"))
        else:
            findings.append(Finding(source.start(call), "toggle_model does not exist: write `with self.toggled_optimizer(optimizer):`."))
    return edits, findings


def _first_parameter(source: Source, node: cst.CSTNode) -> str | None:
    """The name of `self` in the method that a node is in."""
    up: cst.CSTNode | None = node
    while up is not None and not isinstance(up, (cst.FunctionDef, cst.Lambda)):
        up = source.parents.get(up)
    if not isinstance(up, cst.FunctionDef) or not up.params.params:
        return None
    outside = source.parents[source.parents[up]]
    return up.params.params[0].name.value if isinstance(outside, cst.ClassDef) else None


def _limits(source: Source) -> list[Edit]:
    """Turn `trainer.fit_loop.max_epochs` into `trainer.max_epochs`."""
    found = [(node, limit) for node in source.attributes if (limit := limit_of(source, node)) is not None]
    return [Edit(source.end(loop.value), source.end(limit.value), "") for loop, limit in found]


def limit_of(source: Source, loop: cst.Attribute) -> cst.Attribute | None:
    """Return the `trainer.fit_loop.max_epochs` that `trainer.fit_loop` is in; None where something else of the loop is asked for."""
    if loop.attr.value != "fit_loop" or source.code(loop.value).rpartition(".")[2] != "trainer":
        return None
    up = source.parents[loop]
    if isinstance(up, cst.Attribute) and up.attr.value == "epoch_loop":
        up = source.parents[up]
    return up if isinstance(up, cst.Attribute) and up.attr.value in _LIMITS else None


def _classes(source: Source) -> list[Edit]:
    """Rename the class in `{"class_path": "pytorch_lightning.callbacks.Timer"}`."""
    edits = []
    for node in source.strings:
        target, skip = class_in(source, node), len(node.prefix) + len(node.quote)
        if target is not None:
            edits.append(Edit(source.start(node) + skip, source.end(node) - len(node.quote), str(target)))
    return edits


def class_in(source: Source, node: cst.SimpleString) -> names.Target | None:
    """Return the counterpart of the class that the string names as the value of "class_path"."""
    up, text = source.parents.get(node), node.evaluated_value
    if not (isinstance(up, cst.DictElement) and up.value is node and isinstance(up.key, cst.SimpleString) and isinstance(text, str)):
        return None
    path = names.below_root(text) if up.key.evaluated_value in _CLASS_KEYS else None
    return names.find(path) if path and names.object_of(path) == path and not names.is_module(path) else None
