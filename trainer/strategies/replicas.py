"""Replicas of a module inside one process: parts of a batch, copies of the module, a thread each, and one output from many."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any

import torch
from torch.nn.parallel import parallel_apply, replicate, scatter
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainer.errors import MisconfigurationException
from trainer.forwards import OwnForward
from trainer.module_hooks import move_to

__all__ = ["Call", "copies", "join", "lost", "run", "snapshot", "split"]


# -- in ----------------------------------------------------------------------------------------------------------------------


def split(batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
    """Cut the tensors of a batch along dimension 0, as `tensor.chunk` does; return the parts on their devices, and their sizes.

    Tensors may lie in nested lists, tuples and dicts. What is no tensor, or a tensor without dimensions, is in every part. There are
    fewer parts than devices where there are fewer samples; a batch that cannot be cut is one part, of size 0 if it holds no tensor.

    Raises:
        MisconfigurationException: when tensors differ in their number of samples.
    """
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        return [batch], [0]
    size = len(tensors[0])
    for tensor in tensors:
        if len(tensor) != size:
            raise MisconfigurationException(
                f"strategy='dp' cuts a batch along dimension 0, but its tensors of shape {tuple(tensors[0].shape)} and "
                f"{tuple(tensor.shape)} differ there. Give every tensor one entry a sample (constants can be attributes of the module), or "
                "use strategy='ddp'."
            )
    if size < 2:
        return [batch], [size]
    pieces = [_cut(leaf, devices) for leaf in leaves]
    parts = [tree_unflatten(list(mine), spec) for mine in zip(*pieces, strict=False)]  # as many as tensors have pieces
    return parts, [len(piece) for piece in tensors[0].chunk(len(devices))]


def _cut(leaf: Any, devices: Sequence[torch.device]) -> Sequence[Any]:
    """One leaf of a batch, for each device."""
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(devices)
    if not leaf.ndim:
        return [leaf.to(device) for device in devices]
    return leaf.chunk(len(devices)) if devices[0].type == "cpu" else scatter(leaf, devices)


def copies(module: torch.nn.Module, devices: Sequence[torch.device]) -> list[torch.nn.Module]:
    """Return a replica for each device. Gradients of all reach the module's parameters; buffers are shared with the first alone.

    On accelerators these are torch's replicas. On the CPU they are shallow copies of the module tree that hold the parameters
    themselves, and copies of the buffers, so that buffers behave as they do between devices.
    """
    if devices[0].type == "cpu":
        found = [_shallow(module, first=i == 0) for i in range(len(devices))]
    else:
        found = _between_devices(module, devices)
    for replica in found:
        for part in replica.modules():
            forward = vars(part).get("forward")
            if isinstance(forward, OwnForward):
                part.forward = forward.rebound(part)  # type: ignore[method-assign]
    return found


def _between_devices(module: torch.nn.Module, devices: Sequence[torch.device]) -> list[torch.nn.Module]:
    found = replicate(module, devices)
    for replica in found:
        for part in replica.modules():
            part._parameters = dict(part._former_parameters)  # for `self.parameters()` and `self.device`, which torch leaves empty
    return found


def _shallow(module: torch.nn.Module, first: bool) -> torch.nn.Module:
    buffers = {id(b): b if first else b.clone() if b.requires_grad else b.detach().clone() for b in module.buffers()}
    found = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        copy = found[id(part)]
        copy._parameters = part._parameters.copy()
        copy._modules = {name: None if child is None else found[id(child)] for name, child in part._modules.items()}
        copy._buffers = {name: None if buffer is None else buffers[id(buffer)] for name, buffer in part._buffers.items()}
    return found[id(module)]


# -- threads -----------------------------------------------------------------------------------------------------------------


class Call:
    """The training step of one replica, run in a thread with the caller's grad and autocast modes; what came of it is kept here."""

    def __init__(self, replica: Any, args: tuple[Any, ...], recorder: Any, device_type: str) -> None:
        self.replica, self.args, self.recorder = replica, args, recorder
        self.output: Any = None
        self.error: BaseException | None = None
        self.logged: list[Any] = []
        self._grad = torch.is_grad_enabled()
        self._autocast = {t: (torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in {"cpu", device_type}}

    def __call__(self) -> None:
        thread = threading.get_ident()
        self.recorder.held[thread] = self.logged
        try:
            with ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(self._grad))
                for kind, (dtype, enabled) in self._autocast.items():  # no cache: what shares a cast would depend on timing
                    modes.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                self.output = self.replica.training_step(*self.args)
        except BaseException as error:  # raised again in the thread of the loop
            self.error = error
        finally:
            del self.recorder.held[thread]


def run(calls: Sequence[Call], devices: Sequence[torch.device], together: bool) -> None:
    """Run every call in a thread of its own: on accelerators at once, on the CPU one after the other unless `together`.

    Raises:
        the exception of the first replica that failed, with its traceback and a note of the replica.
    """
    if devices[0].type != "cpu":
        parallel_apply(calls, [()] * len(calls), devices=devices)  # type: ignore[arg-type]
    else:
        threads = [threading.Thread(target=call, name=f"dp-replica-{i}", daemon=True) for i, call in enumerate(calls)]
        for thread, call in zip(threads, calls, strict=True):
            thread.start()
            if not together:
                thread.join()
                if call.error is not None:
                    break
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for i, call in enumerate(calls):
        error, call.error = call.error, None
        if error is not None:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"(raised in replica {i} of {len(calls)}, on {devices[i]})")
            raise error


# -- out ---------------------------------------------------------------------------------------------------------------------


def join(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return what `training_step` would have returned for the whole batch: the mean of the losses, weighted by samples or counts.

    Replicas that returned None take no part. Other entries of a dict become lists over the replicas. An output that is none of
    what a training step may return is handed on as it is: the loop says what is wrong with it.

    Raises:
        MisconfigurationException: when some replicas gave a count and others did not.
    """
    kept = [(output, size) for output, size in zip(outputs, sizes, strict=True) if output is not None]
    if not kept:
        return None
    losses = [output.get("loss") if isinstance(output, dict) else output for output, _ in kept]
    counts = [output.get("count") if isinstance(output, dict) else None for output, _ in kept]
    learns = any(isinstance(loss, torch.Tensor) and loss.requires_grad for loss in losses)
    for (output, _), loss, count in zip(kept, losses, counts, strict=True):
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (learns and not loss.requires_grad) or not _is_count(count):
            return output
    losses = [loss.to(device) for loss in losses]
    total: Any = None
    if all(count is None for count in counts):
        samples = sum(size for _, size in kept)
        weights: list[Any] = [size / samples for _, size in kept]
    elif any(count is None for count in counts):
        raise MisconfigurationException("training_step gave a 'count' on some replicas and not on others; give it always or never.")
    else:
        counts = [count.to(device) if isinstance(count, torch.Tensor) else count for count in counts]
        total = sum(counts)
        weights = _shares(counts, total, losses[0])
    parts = [loss * weight for loss, weight in zip(losses, weights, strict=True) if isinstance(weight, torch.Tensor) or weight]
    loss = sum(parts[1:], parts[0]) if parts else losses[0] * 0.0
    if not any(isinstance(output, dict) for output, _ in kept):
        return loss
    dicts = [output for output, _ in kept if isinstance(output, dict)]
    names = [name for name in dict.fromkeys(name for output in dicts for name in output) if name not in ("loss", "count")]
    extra = {name: [move_to(output[name], device) for output in dicts if name in output] for name in names}
    return {"loss": loss, **extra} if total is None else {"loss": loss, "count": total, **extra}


def _is_count(count: Any) -> bool:
    return count is None or isinstance(count, Real) or (isinstance(count, torch.Tensor) and count.numel() == 1)


def _shares(counts: list[Any], total: Any, like: torch.Tensor) -> list[Any]:
    """Each count's part of the total, 0 where nothing was counted; numbers stay numbers, so that an empty part can be left out."""
    if not isinstance(total, torch.Tensor):
        return [count / total if total else 0.0 for count in counts]
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    whole = torch.where(total == 0, 1, total).to(wide)
    return [(torch.as_tensor(count, device=like.device).to(wide) / whole).to(like.dtype).reshape(()) for count in counts]


# -- what a step wrote into its replica ----------------------------------------------------------------------------------------


def snapshot(replica: torch.nn.Module) -> list[tuple[str, torch.nn.Module, dict[str, Any]]]:
    """Return what every module of a replica holds, for `lost`."""
    return [(path, part, {**part.__dict__, **part._buffers}) for path, part in replica.named_modules()]


def lost(before: list[tuple[str, torch.nn.Module, dict[str, Any]]]) -> Iterator[str]:
    """Yield the names of attributes and buffers that were set on the replica since `snapshot`: they end with it.

    What layers do to themselves in every forward is no loss: tensors of the graph (weight norm), private names of torch's classes (LSTM).
    """
    for path, part, held in before:
        torchs = type(part).__module__.startswith("torch.")
        for name, value in {**part.__dict__, **part._buffers}.items():
            if held.get(name, before) is value or (path and isinstance(value, torch.Tensor) and value.grad_fn is not None):
                continue
            if not (torchs and name.startswith("_")):
                yield f"{path}.{name}" if path else name
