"""What a run in other processes gives back to the caller's objects: weights, metrics, and the state of callbacks and loggers."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import cloudpickle
import torch

from trainer.checkpoint import io, state
from trainer.errors import CheckpointError

__all__ = ["apply", "collect", "weights_table"]

_TORCHS_OWN = frozenset(vars(torch.nn.Module()))


def collect(trainer: Any, job: Any, value: Any, callbacks: list[Any]) -> dict[str, Any]:
    """Return, on rank 0 after the run, everything that the caller's objects shall take over.

    Args:
        callbacks: those of the trainer when the run began; the module may have added some, or replaced them.
    """
    places = {id(callback): place for place, callback in enumerate(callbacks)}
    return {
        "value": value,
        "results": trainer.results,
        "weights": {key: tensor.detach().cpu() for key, tensor in job.module.state_dict().items() if isinstance(tensor, torch.Tensor)},
        "module": _plain_attributes(job.module),
        "datamodule": _plain_attributes(job.datamodule) if job.datamodule is not None else {},
        "callbacks": [_picklable_attributes(callback) for callback in (*callbacks, *trainer.loggers, trainer.profiler)],
        "order": [places[id(c)] if id(c) in places else (type(c), _picklable_attributes(c)) for c in trainer.callbacks],
    }


def apply(trainer: Any, job: Any, outcome: dict[str, Any]) -> Any:
    """Put what `collect` returned into the caller's objects; return the value of the run."""
    trainer.results = outcome["results"]
    for callback in trainer.callbacks:
        if hasattr(callback, "reshape"):  # what the ranks made of layers, this process has to make of its own
            callback.reshape(job.module, outcome["weights"])
    _load_weights(trainer, job.module, outcome["weights"])
    _take_over(job.module, outcome["module"])
    if job.datamodule is not None:
        _take_over(job.datamodule, outcome["datamodule"])
    for callback, attributes in zip((*trainer.callbacks, *trainer.loggers, trainer.profiler), outcome["callbacks"], strict=True):
        _take_over(callback, attributes)
    given = list(trainer.callbacks)
    trainer.callbacks[:] = [given[one] if isinstance(one, int) else _made(*one) for one in outcome["order"]]
    return outcome["value"]


def _load_weights(trainer: Any, module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy the weights in; parameters stay the same objects, in the format that the run left them in."""
    own = module.state_dict(keep_vars=True)
    if not weights.keys() <= own.keys() and hasattr(module, "configure_model"):
        module.trainer = trainer  # it may ask for it, as it could in the ranks
        try:
            module.configure_model()  # the layers that the ranks made in it
        except (AttributeError, TypeError):  # it made them, and took the ranks' mesh, None here, to cut them
            pass
        finally:
            module.__dict__.pop("_trainer", None)
        own = module.state_dict(keep_vars=True)
        if lacking := weights.keys() - own.keys():
            trainer.warn(
                f"configure_model made no {', '.join(sorted(lacking)[:5])} in the calling process, where there is no mesh, so these trained "
                "weights are not in the module. Make layers first and cut them afterwards, or load a checkpoint."
            )
    with torch.no_grad():
        for key, tensor in weights.items():
            mine = own.get(key)
            if not isinstance(mine, torch.Tensor):
                continue
            if mine.shape == tensor.shape and mine.dtype == tensor.dtype:
                mine.data.copy_(tensor)
            else:
                mine.data = tensor.to(mine.device)


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """Attributes, and hyper-parameters, that are plain values or containers of them (counters, histories): not tensors, data sets or layers."""
    found = _plain({name: value for name, value in vars(owner).items() if name not in _TORCHS_OWN and not isinstance(value, torch.Tensor)})
    if "_hparams" in vars(owner):
        found["_hparams"] = _plain(owner.hparams)
    return found


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            io.check_plain(value)
        except CheckpointError:
            continue
        found[name] = value
    return found


def _picklable_attributes(owner: Any) -> dict[str, Any]:
    state = owner.__getstate__() if hasattr(owner, "__getstate__") else vars(owner)
    found = {}
    for name, value in (state if isinstance(state, dict) else vars(owner)).items():
        if isinstance(value, FunctionType):  # its copy would work on copies of what it closes over
            continue
        try:
            cloudpickle.dumps(value)
        except Exception:  # a handle of the process that ends; whatever it raises, it stays there
            continue
        found[name] = value
    return found


def _made(cls: type, attributes: dict[str, Any]) -> Any:
    """Return a callback that the module's `configure_callbacks` made in the ranks."""
    callback = cls.__new__(cls)
    vars(callback).update(attributes)
    return callback


def _take_over(owner: Any, attributes: dict[str, Any]) -> None:
    """Set attributes; lists and dicts are filled in place, so that other names for them see the new content."""
    for name, new in attributes.items():
        old = vars(owner).get(name)
        if type(old) is list and type(new) is list:
            old[:] = new
        elif type(old) is dict and type(new) is dict:
            old.clear()
            old.update(new)
        elif name == "_hparams":
            owner.hparams.update(new)  # those that are not plain stay what they are
        else:
            vars(owner)[name] = new


def weights_table(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint of a trainer whose run is over: weights, counters and hyper-parameters."""
    table = state.assemble(
        module_state=trainer.model.state_dict(),
        progress=trainer.results.progress,
        hparams=trainer.model.hparams,
        data_hparams=trainer.datamodule.hparams if trainer.datamodule is not None else {},
        weights_only=True,
    )
    trainer.model.on_save_checkpoint(table)
    return state.finish(table)
