"""The methods of `Trainer` that modules and callbacks call, most of them inside a run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer import outcome
from trainer.checkpoint import state
from trainer.errors import MisconfigurationException
from trainer.face import Face
from trainer.record import misplaced
from trainer.strategies import DDPStrategy, SingleDeviceStrategy

__all__ = ["Calls"]


class _NoInit(TorchFunctionMode):
    """Functions of torch.nn.init leave their tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class Calls(Face):
    """What may be asked of a trainer; its properties are in `Face`."""

    _ended: Any
    _module: Any
    checkpoint_io: Any
    precision_plugin: Any
    strategy: Any
    _makes_processes: Any

    def save_checkpoint(
        self, path: str | os.PathLike[str] | None = None, weights_only: bool | None = False, storage_options: Any = None, *, filepath: Any = None
    ) -> None:
        """Write a checkpoint from which a resume continues exactly here, whole or not at all. Collective.

        In a hook (or step) between the first batch of an optimizer step and the boundary after it, it is written at that boundary, when
        validation and epoch numbers that belong to the step are there as well. After a fit it is the checkpoint of its end; only where
        the fit ran in processes of its own, whose optimizers ended with them, it holds weights, counters and hyper-parameters alone.

        Args:
            path: where to.
            weights_only: leave out all but weights, counters and hyper-parameters.
            filepath: Lightning's name for `path`.

        Raises:
            MisconfigurationException: before any run; without a path; for `storage_options`.
            CheckpointError: when it cannot be written, or holds what cannot be loaded safely; naming the path or the key.
        """
        if storage_options is not None:
            raise MisconfigurationException("save_checkpoint(storage_options=...): give a checkpoint I/O plug-in that knows them (plugins=).")
        path, weights_only = filepath if path is None else path, bool(weights_only)
        if path is None:
            raise MisconfigurationException("trainer.save_checkpoint(path) needs a path.")
        if self._run is not None:
            self._run.save_checkpoint(path, weights_only)
            return
        if self._module is None:
            raise MisconfigurationException("trainer.save_checkpoint: there is no model yet; fit, validate, test or predict first.")
        if self.is_global_zero:
            if self._ended is not None and self._ended.module is self._module:
                table = state.finish(self._ended.final_checkpoint(weights_only))
            else:
                if self.results.fn == "fit" and not weights_only:
                    self.warn(f"{path} holds weights and counters alone: the optimizer ended with the run. For resuming use ModelCheckpoint.")
                table = outcome.weights_table(self)
            self.checkpoint_io.save_checkpoint(table, path)
            if hasattr(self.checkpoint_io, "wait"):  # no run would wait for it
                self.checkpoint_io.wait()

    def write_checkpoint(self, steps: Any, weights_only: bool = False, background: bool = False, ended: Any = None) -> None:
        """Save inside a run, as `save_checkpoint` does, to several paths and in the background; see `writing.py`. Collective.

        Args:
            steps: paths to write to, and what rank 0 calls between (to move a link, to remove files): each once all before it are done.
            weights_only: leave out all but weights, counters and hyper-parameters.
            background: take a copy and return; the next save, or the end of the run, waits for it and raises its error.
            ended: called with the number of steps that were done, on every rank, before an error is raised.

        Raises:
            MisconfigurationException: outside of a run.
        """
        self._live("write_checkpoint").write_checkpoint(steps, weights_only, background, ended)

    def finish_saves(self) -> None:
        """Wait until all that is saved in the background is on the disk. Collective.

        Raises:
            Exception: on every rank, that with which the writing ended; a CheckpointError of ours names the path.
        """
        if self._run is not None:
            self._run.finish_saves()

    def at_boundary(self, fulfil: Any) -> None:
        """Ask that `fulfil(trainer)` be called at the coming boundary, after the step's numbers were published. Ask on all ranks.

        Raises:
            MisconfigurationException: outside of a run.
        """
        self._live("at_boundary").requests.append(fulfil)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank. Collective."""
        return obj if self._run is None else self._run.dist.broadcast(obj, src)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self._run is not None:
            self._run.dist.barrier()

    def agree(self, flag: bool) -> bool:
        """Return True on every rank when any rank says True. Collective."""
        return flag if self._run is None else self._run.dist.agree(flag)

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank, on every rank. Collective."""
        return [obj] if self._run is None else self._run.dist.gather(obj)

    def rewrap(self) -> None:
        """Say, in `on_train_epoch_start` and on all ranks, that other parameters are trained from here on (requires_grad has changed).

        Raises:
            MisconfigurationException: outside of a run.
        """
        self._live("rewrap").rewrap = True

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, loggers_only: bool = False) -> None:
        """Publish a callback's numbers: to the loggers on rank 0, and into `callback_metrics` and `logged_metrics`.

        Numbers that differ from rank to rank are for `loggers_only`: what `callback_metrics` holds is the same on all.

        Raises:
            MisconfigurationException: outside of a run.
        """
        run = self._live("log_metrics")
        if loggers_only:
            run.to_loggers(dict(metrics), "train", step)
            return
        values = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        self.results.callback_metrics.update(values)
        self.results.logged_metrics.update(values)
        self.results.metric_steps.update(dict.fromkeys(values, self.global_step))
        run.to_loggers(dict(metrics), "train", step)

    def seed_everything(self, seed: int) -> None:
        """Make `seed` the one seed of the run: model streams a rank, data order, augmentation. Before loaders are made.

        Raises:
            MisconfigurationException: outside of a run.
        """
        self._live("seed_everything").reseed(seed)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above a progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback if self._run is not None else None
            (print if bar is None else bar.print)(*args, **kwargs)

    def warn(self, message: str) -> None:
        """Issue a warning on rank 0 only, as of the line outside of this package that led to it."""
        if self.is_global_zero:
            frame, level = sys._getframe(1), 2
            while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("trainer", "callbacks", "torch"):
                frame, level = frame.f_back, level + 1
            warnings.warn(message, stacklevel=level)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context in which a module is constructed right away in its final number format, and on its device where this process has one.

        Args:
            empty_init: leave out torch's own initialisation of layers, for weights that are going to be loaded.
        """
        placed = type(self.strategy) in (SingleDeviceStrategy, DDPStrategy) and not self._makes_processes()
        device = self.strategy.device(self.settings.devices, self._world.local_rank) if placed else torch.device("cpu")
        with nullcontext() if device.type == "cpu" else device, _NoInit() if empty_init else nullcontext(), self.precision_plugin.init_context():
            yield

    def _live(self, name: str) -> Any:
        if self._run is None:
            raise MisconfigurationException(f"trainer.{name} works inside a run only.")
        return self._run

    # -- what TrainModule calls ------------------------------------------------------------------------------------------------

    @property
    def _step_optimizers(self) -> list[Any]:
        return self._live("optimizers").step_optimizers

    def _record(self, *args: Any) -> None:
        recorder = self._live("log").recorder
        if recorder is None:
            raise misplaced(args[1], "configure_callbacks")
        if not (recorder.held and recorder.hold(args)):
            recorder.add(*args)

    def _manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._live("manual_backward").manual_backward(loss, *args, **kwargs)

    def _clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        self._live("clip_gradients").clip_gradients(optimizer, value, algorithm)

    def _all_gather(self, tensor: torch.Tensor, sync_grads: bool) -> torch.Tensor:
        run = self._live("all_gather")
        run.whole_validation = True
        return run.dist.all_gather(tensor, sync_grads)
