"""Wrong use that can be seen before anything starts: no process, no file, no rendezvous."""

from __future__ import annotations

import dis
import inspect
from typing import Any

import torch

from trainer.checkpoint import io, state
from trainer.datamodule import DataModule
from trainer.errors import MisconfigurationException
from trainer.hooks import check_datamodule, check_module, overrides
from trainer.module import TrainModule

__all__ = ["check_job"]

_STEP = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADER = {
    "fit": ("train", "train_dataloader", "train_dataloaders"),
    "validate": ("validate", "val_dataloader", "dataloaders"),
    "test": ("test", "test_dataloader", "dataloaders"),
    "predict": ("predict", "predict_dataloader", "dataloaders"),
}


def check_job(job: Any, saves: bool) -> None:
    """Refuse a call that cannot work. `saves` says that checkpoints are going to be written.

    Raises:
        MisconfigurationException: saying what is missing and where to put it.
    """
    module, fn = job.module, job.fn
    if module is None:
        raise MisconfigurationException(f"trainer.{fn}() without a model works after a run only; pass the model.")
    if not isinstance(module, TrainModule):
        if isinstance(getattr(module, "_orig_mod", None), TrainModule):
            raise MisconfigurationException("torch.compile(module) hides the TrainModule; call module.compile() in its place, and pass module.")
        if any(isinstance(given, TrainModule) for given in (*job.loaders.values(), job.datamodule)):
            raise MisconfigurationException(f"trainer.{fn} takes the module first, then the data: trainer.{fn}(module, loader).")
        raise MisconfigurationException(f"trainer.{fn} takes a TrainModule; got {_kind(module)}.{_moving(module)}")
    if job.datamodule is not None and not isinstance(job.datamodule, DataModule):
        raise MisconfigurationException(f"datamodule must be a DataModule; got {_kind(job.datamodule)}.")
    check_module(module)
    if job.datamodule is not None:
        check_datamodule(job.datamodule)
    _needs_methods(module, fn)
    _needs_loader(job)
    if fn == "fit":
        _matching_validation(job)
        if saves:
            _plain_hparams(job)


def _kind(given: Any) -> str:
    """Name what was given in the place of something else; a class is no object of it."""
    if isinstance(given, type):
        return f"the class {given.__qualname__}, not an object of it: write {given.__name__}(...)"
    return f"{type(given).__module__}.{type(given).__qualname__}"


def _moving(given: Any) -> str:
    """What to do with an object of Lightning's."""
    ours = [base for base in type(given).__mro__ if base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")]
    return f" It is Lightning's {ours[0].__name__}: import from trainer and callbacks instead (docs/migrating.md)." if ours else ""


def _returns_nothing(function: Any) -> bool:
    """True for a function written in Python that has no `return` with a value, is no generator and does not only raise."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    lines = list(dis.get_instructions(code))
    ends = [(before, line) for before, line in zip([None, *lines], lines, strict=False) if line.opname.startswith("RETURN_")]
    nothing = [line.argval is None if line.opname == "RETURN_CONST" else before.opname == "LOAD_CONST" and before.argval is None for before, line in ends]
    return bool(nothing) and all(nothing)


def _plain_hparams(job: Any) -> None:
    """The first save would refuse them as well, after the first epoch."""
    table = {state.HPARAMS: dict(job.module.hparams)}
    if job.datamodule is not None:
        table[state.DATA_HPARAMS] = dict(job.datamodule.hparams)
    io.check_plain(io.plain(table))


def _needs_methods(module: TrainModule, fn: str) -> None:
    name = type(module).__qualname__
    if fn in _STEP and not overrides(module, TrainModule, _STEP[fn]):
        raise MisconfigurationException(f"trainer.{fn} needs {name}.{_STEP[fn]}(self, batch, batch_idx); define it.")
    if fn == "predict" and not overrides(module, TrainModule, "predict_step") and not overrides(module, torch.nn.Module, "forward"):
        raise MisconfigurationException(f"trainer.predict needs {name}.predict_step(self, batch, batch_idx), or {name}.forward(self, batch).")
    if fn == "fit" and not overrides(module, TrainModule, "configure_optimizers"):
        raise MisconfigurationException(
            f"trainer.fit needs {name}.configure_optimizers(self); return an optimizer, for example torch.optim.SGD("
            "self.parameters(), lr=0.1), or None for a module that only runs."
        )
    trains = fn == "fit" and module.automatic_optimization and not _returns_nothing(module.configure_optimizers)
    if trains and _returns_nothing(module.training_step):
        raise MisconfigurationException(
            f"{name}.training_step returns nothing, so there is no loss to train on. Return the loss; or, to call self.manual_backward "
            "yourself, set self.automatic_optimization = False."
        )


def _needs_loader(job: Any) -> None:
    stage, hook, argument = _LOADER[job.fn]
    if job.loaders.get(stage) is not None or overrides(job.module, TrainModule, hook):
        return
    if job.datamodule is not None and overrides(job.datamodule, DataModule, hook):
        return
    raise MisconfigurationException(
        f"There is no {stage} loader: define {hook} in {type(job.module).__qualname__} or in a DataModule, or pass {argument}=."
    )


def _matching_validation(job: Any) -> None:
    has_step = overrides(job.module, TrainModule, "validation_step")
    if job.loaders.get("validate") is not None and not has_step:
        raise MisconfigurationException(
            f"val_dataloaders= is given, but {type(job.module).__qualname__} has no validation_step; define it or leave them out."
        )
