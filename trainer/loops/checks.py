"""Checks that need a first look at the data or at the first training step, all ahead of the first update."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from trainer.errors import MisconfigurationException, nearest
from trainer.hooks import CALLBACK_HOOKS, overrides
from trainer.module import TrainModule

__all__ = ["check_monitors"]

_MAY_LOG_LATER = (
    "on_train_batch_end", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "on_train_epoch_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start",
    "on_validation_batch_end",
)  # fmt: skip


def check_monitors(run: Any) -> None:
    """Refuse a monitor that nothing logs, as soon as that is certain.

    Certain means: the first training step and the validation batches of the sanity check have logged other names, no hook is
    overridden in which the name could still appear, and the module's code does not hold the name (in a branch not yet taken).
    Otherwise the owner of the monitor checks when it needs the number.

    Raises:
        MisconfigurationException: with the names that exist and the nearest one.
    """
    wanted = {m: type(c).__name__ for c in run.callbacks if isinstance(m := getattr(c, "monitor", None), str)}
    wanted |= {c.monitor: type(c.scheduler).__name__ for c in run.schedulers if c.monitor}
    known = {"epoch", "step", *run.known_names, *run.trainer.results.callback_metrics}
    for key, entry in run.collector.entries.items():
        known |= {key, f"{key}_step", f"{key}_epoch"} if entry.on_step and entry.on_epoch else {key}
    for monitor, owner in wanted.items():
        if monitor in known or _may_come_later(run) or _written_in(run, monitor):
            continue
        raise MisconfigurationException(
            f"{owner}(monitor={monitor!r}): nothing logs that name.{nearest(monitor, known)} Logged are: "
            f"{', '.join(sorted(known)) or 'no names at all'}."
        )


def _may_come_later(run: Any) -> bool:
    unseen = run.loaders.has("validate") and not run.sanity_checked
    late = any(overrides(run.module, TrainModule, name) for name in _MAY_LOG_LATER if not _seen(run, name))
    foreign = any(
        c.publishes or not type(c).__module__.startswith("callbacks.") or not CALLBACK_HOOKS.isdisjoint(vars(c)) for c in run.callbacks
    )
    return unseen or late or foreign


def _seen(run: Any, name: str) -> bool:
    """Validation hooks ran in the sanity check already."""
    return name.startswith("on_validation") and run.sanity_checked


def _written_in(run: Any, name: str) -> bool:
    """True when a method of the user's class that will run, or of one it inherits from, holds the name as a literal."""
    cls = type(run.module)
    own = cls.__mro__[: cls.__mro__.index(TrainModule)]
    silent = ("__init__", "configure_", "test", "predict", "on_test", "on_predict")
    silent += () if run.validates else ("validation_", "on_validation_")
    functions = [f for klass in own for f in vars(klass).values() if isinstance(f, FunctionType)]
    codes = [f.__code__ for f in functions if not f.__name__.startswith(silent)]
    literals: set[Any] = set()
    while codes:
        constants = codes.pop().co_consts
        literals.update(c for c in constants if isinstance(c, str))
        literals.update(part for c in constants if isinstance(c, tuple) for part in c)
        codes += [c for c in constants if isinstance(c, CodeType)]
    return not literals.isdisjoint({name, name.removesuffix("_epoch"), name.removesuffix("_step")})
